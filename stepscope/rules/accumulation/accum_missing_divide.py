"""The losses of a window were added up without dividing them by the number of micro-steps.

What it does
------------
Adds up the weights with which the losses of a window enter backward, as far as their gradient was still there at the
step, times whatever ``.grad`` was divided by before the clip and the step. K micro-steps of weight one come to K.

Why it matters
--------------
The step gets K times the mean gradient. Adam hides it, being nearly blind to the gradient's scale; the clip's limit, eps,
plain SGD and every logged norm are off by K.

What the evidence looks like
----------------------------
`loss_weight` is 1 in every row, `loss_weight_sum` is the window's size, and `grad_norm` at the step is that of the sum.

Fix
---
Divide each micro-step's loss by the number of micro-steps in its window, or the gradient by it before the clip.

Known false alarms
------------------
A loop that means a sum, such as a discriminator's two backward calls, looks the same: without
``--declare accumulation_steps=K`` this is a notice, and none at all where the backward calls differ in kind or share a
batch.

References
----------
karpathy/nanoGPT#168, openai/guided-diffusion#111.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.rules.accumulation.windows import Windows, close, merged, most_common, windows_of
from stepscope.rules.base import Rule
from stepscope.rules.view import finding

if TYPE_CHECKING:
    from stepscope.rules.outcome import Finding
    from stepscope.rules.view import View

_LOOKED_AT = 1000
"""Micro-steps whose kind of loss and data are compared: the first ones tell."""


def judge(view: View) -> list[Finding]:
    """Windows whose weights come to their number of micro-steps."""
    return merged([f for w in windows_of(view) if len(w) for f in _judge(view, w)])


def _judge(view: View, w: Windows) -> list[Finding]:
    several = (w.live >= 2) & ~w.closure
    wrong = several & close(w.effective, w.live)
    if not wrong.any() or wrong.sum() < 0.5 * several.sum() or w.declared == 1:
        return []
    if w.declared is None and (len(view.stepping) > 1 or not one_stream(w, wrong)):
        return []
    k = most_common(w.live[wrong])
    stage = (
        ""
        if w.declared
        else "; if these are parts of one sum, that is right: declare accumulation_steps to have it judged"
    )
    return [
        finding(
            RULE.code,
            RULE.name,
            "error" if w.declared else "notice",
            f"{int(wrong.sum())} of {len(w)} steps used the sum of {k} micro-steps' gradients, not their mean: their loss weights "
            f"add up to {float(np.median(w.effective[wrong])):.4g} instead of 1; divide each loss by {k}{stage}",
            w.rows,
            w.mask(wrong),
            observed=float(np.median(w.effective[wrong])),
            expected=1.0,
            columns=["loss_weight", "loss_weight_sum", "grad_norm"],
        )
    ]


def one_stream(w: Windows, chosen: np.ndarray) -> bool:
    """Whether the micro-steps of the chosen windows look like parts of one batch: same loss, each with data of its own."""
    rows = w.rows
    used = np.flatnonzero(w.used_rows & np.isin(rows.window_of, np.flatnonzero(chosen)))[:_LOOKED_AT]
    kinds = set(zip(rows["loss_kind"][used], rows["loss_reduction"][used], strict=True))
    pairs = np.stack([rows.window_of[used], rows["batch_fingerprint"][used]])
    pairs = pairs[:, np.isfinite(pairs[1])]
    fresh = len(np.unique(pairs, axis=1).T) > 0.9 * pairs.shape[1] or not pairs.size
    forwards = [("F" in (c or "")) for c in rows["calls"][used]]
    return len(kinds) == 1 and fresh and all(forwards)


RULE = Rule("ACC101", "accum-missing-divide", "error", judge, needs=("loss_weight",), channel="declare")
