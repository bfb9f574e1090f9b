"""Gradients were cleared after backward and before the step: the step saw nothing.

What it does
------------
Compares the gradient that the window's last backward left with the one that the step was given.

Why it matters
--------------
Nothing is learned. With gradients set to None no parameter moves and the optimizer keeps no state; with zeros weight decay
and old momentum still move the weights, so that something seems to happen.

What the evidence looks like
----------------------------
`grad_norm_scaled` is above zero and `grad_norm_clipped` is exactly 0; `grad_params` is 0 where gradients were set to None.

Fix
---
Clear gradients after the step, or before the window's first backward.

Known false alarms
------------------
Single steps whose gradient is cleared by a guard, clips to a norm of zero, and clips that an infinite norm turned to zero are
not reported.

References
----------
Tony-Y/pytorch_warmup#12.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.rules.accumulation.windows import Windows, merged, windows_of
from stepscope.rules.base import Rule
from stepscope.rules.view import finding

if TYPE_CHECKING:
    from stepscope.rules.outcome import Finding
    from stepscope.rules.view import View


def judge(view: View) -> list[Finding]:
    """Steps on an empty gradient where backward had left one."""
    return merged([f for w in windows_of(view) if len(w) for f in _judge(w)])


def _judge(w: Windows) -> list[Finding]:
    rows = w.rows
    left, used = rows.windows("grad_norm_scaled"), rows.windows("grad_norm_clipped")
    clipped = (rows.windows("clip_max_norm") == 0.0) | ~np.isfinite(
        np.nan_to_num(rows.windows("clip_norm"), posinf=np.inf)
    )
    wrong = (left > 0) & (used == 0.0) & ~clipped & ~w.closure
    known = np.isfinite(used) & np.isfinite(left)
    if wrong.sum() < 0.5 * known.sum() or (wrong.sum() < 2 and len(w) > 1) or not wrong.any():
        return []
    at = int(np.flatnonzero(wrong)[0])
    none = bool((rows.windows("grad_params")[wrong] == 0).all())
    moved = rows.windows("update_norm")[wrong]
    still = "no parameter moved" if not (moved > 0).any() else "only weight decay and momentum moved the parameters"
    return [
        finding(
            RULE.code,
            RULE.name,
            "error",
            f"{int(wrong.sum())} of {len(w)} steps were given {'no gradient' if none else 'a gradient of zeros'}: backward had left "
            f"one of norm {float(left[at]):.4g}, which was cleared before the step; {still}",
            rows,
            w.mask(wrong),
            observed=0.0,
            expected=float(left[at]),
            columns=["grad_norm_scaled", "grad_norm_clipped", "update_norm"],
        )
    ]


RULE = Rule("CLR203", "zero-grad-before-step", "error", judge, needs=("grad_norm_scaled", "grad_norm_clipped"))
