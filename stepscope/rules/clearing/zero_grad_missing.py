"""Gradients that a step has used were never cleared and went into the next step too.

What it does
------------
Looks at what ``.grad`` holds before the first backward of each window, and whether it is cleared before the step.

Why it matters
--------------
Each update uses the sum of all gradients since the last clearing: stale directions, computed at weights long gone, and a
norm that grows.

What the evidence looks like
----------------------------
From the second window on `grad_norm_before` is the norm that the step before used, and no later row of the window finds 0.

Fix
---
Call ``optimizer.zero_grad()`` after each step, on every path; parameters that the model does not hold (those of a criterion,
say) are cleared by the optimizer's method, not by the model's.

Known false alarms
------------------
What another network's backward adds to a used gradient is right as long as it is cleared before the owner's next step: that
is not reported. Neither are gradients that a script shrinks by one factor each time (momentum kept in ``.grad``).

References
----------
wenet-e2e/wekws#73, meta-pytorch/torchforge#71.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.rules.accumulation.windows import Windows, merged, windows_of
from stepscope.rules.base import Rule
from stepscope.rules.view import finding

if TYPE_CHECKING:
    from stepscope.rules.outcome import Finding
    from stepscope.rules.view import Array, View


def judge(view: View) -> list[Finding]:
    """Windows that began with a used gradient and stepped with it again."""
    return merged([f for w in windows_of(view) if len(w) > 1 for f in _judge(w)])


def _judge(w: Windows) -> list[Finding]:
    before = w.rows["grad_norm_before"][w.start]
    old = (before > 0) & (w.live_from == w.start)
    old[0] = False
    if (old.sum() < 2 and old.sum() < 0.5 * len(w)) or _kept_in_part(w, before):
        return []
    at = int(np.flatnonzero(old)[0])
    used = float(w.rows["grad_norm_clipped"][w.end[at - 1]])
    was = f", which is what step {at} had used ({used:.4g})" if np.isclose(used, before[at], rtol=0.01) else ""
    return [
        finding(
            RULE.code,
            RULE.name,
            "error",
            f"{int(old.sum())} of {len(w) - 1} windows began with an old gradient still in .grad (norm {float(before[at]):.4g} at "
            f"the first{was}) and stepped on the sum; clear gradients after every step",
            w.rows,
            w.start[old],
            observed=float(before[at]),
            expected=0.0,
            columns=["grad_norm_before", "grad_norm"],
        )
    ]


def _kept_in_part(w: Windows, before: Array) -> bool:
    """Each window begins with one and the same share of what the step used: momentum by hand, ``p.grad.mul_(0.9)``."""
    share = before[1:] / w.rows.windows("grad_norm_clipped")[:-1]
    if len(share) < 3 or not np.isfinite(share).all():
        return False
    return bool(np.ptp(share) < 1e-3 * share.mean() and share.mean() < 0.999)


RULE = Rule(
    "CLR201",
    "zero-grad-missing",
    "error",
    judge,
    needs=("grad_norm_before",),
    explains=("grad-leak-other-optimizer", "accum-missing-divide", "accum-boundary-off-by-one"),
)
