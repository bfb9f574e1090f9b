"""``scaler.update()`` was not called between two steps.

What it does
------------
Looks for a call that the scaler refused because the optimizer had been stepped since the last ``update``.

Why it matters
--------------
The scaler keeps per-optimizer state from ``unscale_`` to ``update``. Without ``update`` the second ``step`` raises, and
the scale would never adapt.

What the evidence looks like
----------------------------
An event ``scaler_step_failed`` or ``unscale_failed`` with stage ``STEPPED``, and `update_calls` 0 on the row before.

Fix
---
Call ``scaler.update()`` once per iteration, after the steps of all optimizers, also when a step was skipped.

References
----------
Azure/MS-AMP#45.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.rules.base import Rule
from stepscope.rules.scaler.evidence import failures, need_scaler, where
from stepscope.rules.view import View, finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding


def judge(view: View) -> Iterator[Finding]:
    """Calls that found the optimizer already stepped."""
    need_scaler(view)
    events = [e for e in failures(view) if e["detail"].get("stage") == "STEPPED"]
    if not events:
        return
    first = events[0]
    call = "scaler.step" if first["event"] == "scaler_step_failed" else "scaler.unscale_"
    updates = sum(float(rows["update_calls"].sum()) for rows in view.stepping)
    yield finding(
        RULE.code,
        RULE.name,
        "error",
        f"{call} raised for {where(first)} because update() had not been called since its last step ({int(updates)} updates "
        "were seen in all); call scaler.update() once per iteration, after all steps",
        optimizer=first["optimizer"],
        micro_steps=[e["micro_step"] for e in events][:50],
        observed=int(updates),
        expected="one update per iteration",
        columns=["update_calls", "loss_scale_after"],
    )


RULE = Rule("SCL409", "scaler-update-missing", "error", judge)
