"""After a resume the losses are divided by another number than their windows have micro-steps.

What it does
------------
Compares what the loss weights of a window come to in the resumed run with one, where they came to one before.

Why it matters
--------------
Logic for the remainder that counts from the resume point divides by the wrong number near the end (or by zero): the gradient
is off by a factor that the run without a break never had.

What the evidence looks like
----------------------------
`loss_weight_sum` is 1 in the earlier run, and in the resumed one 2 (or infinite) in windows of the same size.

Fix
---
Derive the divisor from the window itself, and what is left from the whole length of the run, not from the resume point.

Known false alarms
------------------
The first window after a resume may have begun before the save; it is not judged where it is short. A tail that the earlier
run weighed the same way is `accum-tail-misweighted`.

References
----------
open-mmlab/mmcv#2083.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.rules.accumulation.windows import Windows, close, merged, windows_of
from stepscope.rules.base import Rule
from stepscope.rules.view import View, finding

if TYPE_CHECKING:
    from stepscope.rules.outcome import Finding


def judge(view: View) -> list[Finding]:
    """Windows of the resumed run whose weights do not come to what they came to before."""
    if view.after is None:
        return []
    earlier = windows_of(View(view.after, view.declared))
    found = []
    for w in windows_of(view):
        before = next((e for e in earlier if e.rows.rank == w.rows.rank and _kind(e) == _kind(w) and len(e)), None)
        if before is not None and len(w):
            found += _judge(w, before)
    return merged(found)


def _kind(w: Windows) -> str:
    return str(w.rows.optimizer).partition("/")[0]


def _judge(w: Windows, before: Windows) -> list[Finding]:
    k = w.declared or before.usual or 1
    full = before.live == k
    if not close(before.effective[full], 1.0).any() or close(before.effective[full], 1.0).mean() < 0.8:
        return []
    wrong = ~w.closure & (w.live == w.size) & _off(w, k) & (w.live >= 1)
    wrong[0] &= w.live[0] >= k
    if not wrong.any():
        return []
    at = int(np.flatnonzero(wrong)[0])
    seen = float(w.effective[at])
    return [
        finding(
            RULE.code,
            RULE.name,
            "error",
            f"{int(wrong.sum())} of {len(w)} windows after the resume have weights that come to {seen:.4g} instead of 1 (window "
            f"{at + 1}: {int(w.live[at])} micro-steps divided by {w.live[at] / seen if seen else np.inf:.4g}); before the resume "
            f"they came to 1: the divisor must not depend on the resume point",
            w.rows,
            w.mask(wrong),
            observed=seen,
            expected=1.0,
            columns=["loss_weight", "loss_weight_sum", "window_size"],
        )
    ]


def _off(w: Windows, k: int) -> np.ndarray:
    """Full windows whose weights do not come to one, or that are not finite; shorter ones but those divided by K."""
    off = (np.isfinite(w.effective) & ~close(w.effective, 1.0)) | np.isinf(w.effective)
    return np.asarray(off & ~((w.live < k) & close(w.effective, w.live / k)))


RULE = Rule(
    "RES620",
    "resume-accum-factor",
    "error",
    judge,
    needs=("loss_weight",),
    channel="resume",
    explains=("accum-missing-divide", "accum-double-divide", "accum-tail-misweighted", "accum-boundary-off-by-one"),
)
