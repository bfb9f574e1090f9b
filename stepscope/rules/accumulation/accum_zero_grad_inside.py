"""Gradients were cleared between the micro-steps of a window: only the last part of it reached the step.

What it does
------------
Looks at what ``.grad`` held before each backward, not at calls of ``zero_grad``. A window is wrong where the weights of all
its micro-steps come to one, but those whose gradient was still there at the step come to less.

Why it matters
--------------
The step uses the gradient of the last micro-batch divided by K: most of the data is computed and thrown away, and the rate
is K times lower than it seems.

What the evidence looks like
----------------------------
`grad_norm_before` is 0 before every backward of the window, `loss_weight_sum` is 1 and `loss_weight_used` is 1/K.

Fix
---
Clear gradients only between a step and the next window's first backward.

Known false alarms
------------------
SAM and LBFGS clear gradients that they have used otherwise; what their steps use has weight one. A guard that drops a batch
now and then is not reported, nor a loop that keeps the sum elsewhere and writes it back.

References
----------
bytetriper/RAE#67, gaozhihan/PreDiff#32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.rules.accumulation.windows import CLOSE, Windows, close, merged, most_common, windows_of
from stepscope.rules.base import Rule
from stepscope.rules.view import finding

if TYPE_CHECKING:
    from stepscope.rules.outcome import Finding
    from stepscope.rules.view import Mask, View


def judge(view: View) -> list[Finding]:
    """Windows of which the step used a part only."""
    return merged([f for w in windows_of(view) if len(w) for f in _judge(w)])


def _judge(w: Windows) -> list[Finding]:
    gone = w.rows.per_window(w.lost.astype(np.float64)) > 0
    several = (w.size >= 2) & ~w.closure
    wrong = several & gone & (_weights_lost(w) | _declared_lost(w)) & ~_rewritten(w)
    if wrong.sum() < 2 or wrong.sum() < 0.5 * len(w):
        return []
    size, live = most_common(w.size[wrong]), most_common(w.live[wrong])
    used = float(np.nanmedian(w.used[wrong])) if np.isfinite(w.used[wrong]).any() else np.nan
    return [
        finding(
            RULE.code,
            RULE.name,
            "error",
            f"{int(wrong.sum())} of {len(w)} steps used {live} of the {size} micro-steps of their window: .grad was empty again "
            f"before a later backward, and the loss weights that reached the step come to {used:.4g} instead of 1; clear "
            f"gradients only after a step",
            w.rows,
            w.mask(wrong),
            observed=used,
            expected=1.0,
            columns=["grad_norm_before", "loss_weight_sum", "loss_weight_used"],
        )
    ]


def _weights_lost(w: Windows) -> Mask:
    """The whole window's weights come to one, what the step used to less."""
    return np.asarray(close(w.total, 1.0) & (w.used < 1.0 - CLOSE))


def _declared_lost(w: Windows) -> Mask:
    """As many micro-steps as were declared, fewer used, and the weights were not moved in between (as SAM does)."""
    if not w.declared or w.declared < 2:
        return np.zeros(len(w), dtype=np.bool_)
    moved = w.rows.per_window((w.rows.true("params_moved") & (w.rows["window_step"] > 1)).astype(np.float64)) > 0
    return np.asarray((w.size == w.declared) & (w.live < w.declared) & ~moved)


def _rewritten(w: Windows) -> Mask:
    """``.grad`` was larger at the step than the last backward left it: somebody put a sum back."""
    return np.asarray(w.ratio > 1.0 + CLOSE)


RULE = Rule(
    "ACC106",
    "accum-zero-grad-inside",
    "error",
    judge,
    needs=("grad_norm_before",),
    explains=("accum-tail-dropped", "accum-tail-misweighted", "accum-double-divide", "accum-boundary-off-by-one"),
)
