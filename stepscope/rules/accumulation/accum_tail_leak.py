"""The left-over gradients of an epoch's tail went into the first step of the next epoch.

What it does
------------
Finds windows that reach over the end of an epoch and hold more than K micro-steps which are all still there at the step,
with weights that add up to more than one.

Why it matters
--------------
The first step of each epoch sums K new and r old micro-steps, the old ones computed with older weights, all divided by K:
its gradient is (K+r)/K too large.

What the evidence looks like
----------------------------
`window_size` reads K, K, K+r once an epoch, with `loss_weight_used` of (K+r)/K there and `epoch` changing inside the window.

Fix
---
Step at the end of the epoch on what is left, divided by its own number of micro-steps; or clear it.

Known false alarms
------------------
A window that reaches over an epoch's end but has K micro-steps is right, and so is a longer one whose weights come to one.

References
----------
meta-pytorch/torchtune#2745, WalkingMeatAxolotl/AnimaLoraStudio#305.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.rules.accumulation.windows import Windows, close, merged, most_common, windows_of
from stepscope.rules.base import Rule
from stepscope.rules.view import finding

if TYPE_CHECKING:
    from stepscope.rules.outcome import Finding
    from stepscope.rules.view import Mask, View


def judge(view: View) -> list[Finding]:
    """Windows that hold an old epoch's left-overs."""
    return merged([f for w in windows_of(view) if len(w) for f in _judge(w)])


def _judge(w: Windows) -> list[Finding]:
    k = w.k or 1
    if k < 2 or w.closure.any():
        return []
    wrong = _crossing(w, (w.live > k) & ~close(w.effective, 1.0))
    if not wrong.any():
        return []
    r = most_common(w.live[wrong] - k)
    weight = float(np.nanmedian(w.effective[wrong])) if np.isfinite(w.effective[wrong]).any() else np.nan
    return [
        finding(
            RULE.code,
            RULE.name,
            "error",
            f"{int(wrong.sum())} of {len(w)} steps used {k} micro-steps and {r} left over from the epoch before: their loss "
            f"weights come to {weight:.4g} instead of 1; step on the tail at the end of its epoch, or clear it",
            w.rows,
            w.mask(wrong),
            observed=weight,
            expected=1.0,
            columns=["window_size", "loss_weight_used", "epoch"],
        )
    ]


def _crossing(w: Windows, long: Mask) -> Mask:
    """Long windows in which an epoch ends; without epochs those that are alike and evenly spaced."""
    if w.last_of_epoch.any():
        return np.asarray(long & w.crosses)
    place = np.flatnonzero(long)
    even = len(place) >= 2 and len(np.unique(np.diff(w.end[place]))) == 1 and len(np.unique(w.live[place])) == 1
    return long if even and long.mean() <= 0.5 else np.zeros_like(long)


RULE = Rule("ACC108", "accum-tail-leak", "error", judge, needs=("window_size",), explains=("accum-tail-dropped",))
