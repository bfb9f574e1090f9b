"""A clip found a norm that is not finite, and the step ran all the same.

What it does
------------
Looks for steps that were executed after a clip whose norm was NaN or infinite, and whose gradient was bad because of it:
it holds NaN or infinite elements, or it is all zero because the norm overflowed.

Why it matters
--------------
Clipping does not protect from such gradients, it spreads them. An infinite norm multiplies finite entries by zero and
makes NaN of infinite ones; a NaN norm makes every entry NaN. One such step ruins the weights and the optimizer's state.

What the evidence looks like
----------------------------
`clip_nonfinite` is true, `step_skipped` is false, and `grad_nonfinite` counts bad elements at the step.

Fix
---
Skip the step when the norm is not finite: test it, pass ``error_if_nonfinite=True``, or step through a GradScaler. Then
look for what made the gradient: a square root at zero, a division by zero, a logarithm of zero.

Known false alarms
------------------
None known. A step that a scaler skips, and gradients that the script repairs before the step, are not reported.

References
----------
pytorch/pytorch#46849, facebookresearch/habitat-lab#2226.
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

    from stepscope.rules.outcome import Finding


def judge(view: View) -> Iterator[Finding]:
    """Executed steps after a clip that met NaN or infinity."""
    yield from merged([f for rows in view.stepping for f in (_judge(rows),) if f is not None])


def _judge(rows: Rows) -> Finding | None:
    used, ran = rows["grad_norm_clipped"], executed(rows)
    bad = rows.seen("grad_norm_clipped") & ~np.isfinite(used) | (rows["grad_nonfinite"] > 0)
    wiped = (used == 0.0) & np.isinf(rows["clip_norm"])
    wrong = ran & rows.true("clip_nonfinite") & (bad | wiped)
    if not wrong.any() and (bad & ran).any():
        limit, _ = hand_limit(used, rows["grad_norm"], ran & (rows["clip_calls"] == 0.0))
        wrong = ran & bad & (rows["clip_calls"] == 0.0) & np.isfinite(limit)
    if not wrong.any():
        return None
    at = int(np.flatnonzero(wrong)[0])
    norm = rows["clip_norm"][at] if rows.seen("clip_norm")[at] else rows["grad_norm"][at]
    count = rows["grad_nonfinite"][at]
    what = f"{int(count)} elements" if np.isfinite(count) else "elements"
    effect = f"used a gradient with {what} that are not finite" if not wiped[at] else "used a gradient of zeros"
    return finding(
        RULE.code,
        RULE.name,
        "error",
        f"at micro-step {int(rows['micro_step'][at])} the clip found the norm {float(norm):g}, and the step ran and {effect} "
        f"({int(wrong.sum())} such steps in all); skip the step when the norm is not finite",
        rows,
        wrong,
        observed=float(norm),
        expected="a finite norm, or no step",
        columns=["clip_norm", "grad_norm_clipped", "grad_nonfinite", "loss"],
    )


RULE = Rule("CLP303", "clip-nonfinite", "error", judge, needs=("grad_norm_clipped",))
