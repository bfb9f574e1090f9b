"""``scaler.step`` was called for an optimizer that had no gradient at all.

What it does
------------
Looks for ``scaler.step`` calls that raised while none of the optimizer's parameters had a gradient.

Why it matters
--------------
The scaler raises "No inf checks were recorded for this optimizer" and the run ends. Without a scaler the same step would
do nothing, silently.

What the evidence looks like
----------------------------
An event ``scaler_step_failed`` whose detail counts 0 gradients, with the optimizer and the micro-step.

Fix
---
Step an optimizer only in iterations that gave its parameters gradients, or repair the path from its parameters to the
loss (a ``detach``, a ``no_grad``, frozen parameters).

References
----------
Haochen-Wang409/HPM#10, nerfstudio-project/nerfstudio#1919.
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
    """Steps of a scaler that raised for want of gradients."""
    need_scaler(view)
    events = [
        e
        for e in failures(view, "scaler_step_failed")
        if e["detail"].get("gradients") == 0 and e["detail"].get("stage") != "STEPPED"
    ]
    if events:
        first = events[0]
        count = first["detail"].get("parameters")
        yield finding(
            RULE.code,
            RULE.name,
            "error",
            f"scaler.step was called for {where(first)} while none of its {count} parameters had a gradient: it raised "
            f"({first['detail'].get('error', '')[:90]}); step it only when its parameters took part in the loss",
            optimizer=first["optimizer"],
            micro_steps=[e["micro_step"] for e in events][:50],
            observed=0,
            expected=count,
        )
        return
    for event in failures(view, "scaler_update_failed"):
        yield finding(
            RULE.code,
            RULE.name,
            "error",
            f"scaler.update() raised at micro-step {event['micro_step']} ({event['detail'].get('error', '')[:90]}): no "
            "optimizer had been stepped or unscaled through the scaler since the update before; call update() only then",
            micro_steps=[event["micro_step"]],
            observed=0,
            expected="one step at least",
        )
        return


RULE = Rule("SCL405", "scaler-no-inf-checks", "error", judge)
