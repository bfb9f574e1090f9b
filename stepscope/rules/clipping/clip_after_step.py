"""Gradients were clipped after the step that used them.

What it does
------------
Looks for clips that come when nothing waits for a step: between the step and the clearing of the gradients, or before
the first backward. A clip written by hand is seen in the norm of the gradients when they are cleared, if it differs from
the norm that the step used and is the same at many steps.

Why it matters
--------------
The step has already used the whole gradient. The clip changes numbers that nobody reads again, so training runs without
a limit although the code has one.

What the evidence looks like
----------------------------
`clip_late` counts such calls, `clip_calls` has no others, and `grad_norm_clipped`, the norm that the step used, exceeds
the limit.

Fix
---
Clip after the window's last backward (and after ``scaler.unscale_``), before ``optimizer.step()``.

Known false alarms
------------------
A clip with ``max_norm=inf`` after the step only measures and is not reported, nor is one that also covers gradients of
another optimizer which still wait.

References
----------
awslabs/graphstorm#1366, VGraphRNN/VGRNN#4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.rules.accumulation.windows import merged
from stepscope.rules.base import Rule
from stepscope.rules.clipping.gradients import executed, hand_limit
from stepscope.rules.view import Rows, View, finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding, Severity


def judge(view: View) -> Iterator[Finding]:
    """Steps whose only clip came too late."""
    yield from merged([f for rows in view.stepping for f in (_seen(rows) or _by_hand(rows),) if f is not None])


def _seen(rows: Rows) -> Finding | None:
    limit = np.where(np.isfinite(rows["clip_max_norm"]), rows["clip_max_norm"], rows["clip_value"])
    late = (rows["clip_late"] > 0) & (rows["clip_late"] == rows["clip_calls"]) & np.isfinite(limit)
    wrong = late & executed(rows)
    if not wrong.any():
        return None
    used = rows["grad_norm_clipped"]
    over = wrong & (used > limit)
    at = int(np.flatnonzero(over if over.any() else wrong)[0])
    what = f"{int(over.sum())} of them" if over.any() else "none of them so far"
    severity: Severity = "error" if over.any() or np.isfinite(rows["clip_value"][at]) else "warning"
    return finding(
        RULE.code,
        RULE.name,
        severity,
        f"{int(wrong.sum())} steps ran before their clip to {float(limit[at]):g}: {what} used a gradient above the limit "
        f"(norm {float(used[at]):.4g}); clip between backward and step",
        rows,
        wrong,
        observed=float(used[at]),
        expected=min(float(limit[at]), float(used[at])),
        columns=["grad_norm_clipped", "clip_max_norm", "clip_late"],
    )


def _by_hand(rows: Rows) -> Finding | None:
    """Gradients of different norm were brought to one norm after the step and before they were cleared."""
    used = rows["grad_norm_clipped"]
    limit, bound = hand_limit(rows["cleared_norm"], used, executed(rows) & (rows["clip_calls"] == 0.0))
    if not bound.any():
        return None
    at = int(np.flatnonzero(bound)[0])
    return finding(
        RULE.code,
        RULE.name,
        "error",
        f"{int(bound.sum())} steps used a gradient of norm up to {float(used[bound].max()):.4g}, which was limited to "
        f"{limit:.4g} only afterwards; clip between backward and step",
        rows,
        bound,
        observed=float(used[at]),
        expected=limit,
        columns=["grad_norm_clipped", "cleared_norm"],
    )


RULE = Rule("CLP302", "clip-after-step", "error", judge, needs=("clip_calls",))
