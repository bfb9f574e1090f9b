"""float16 without loss scaling.

What it does
------------
Looks for training forwards in float16, by autocast or by the model's own dtype, whose loss nobody scaled.

Why it matters
--------------
float16 has no number between 0 and 6e-8, and few below 6e-5. Small gradients become exactly zero on the way back, those
of early layers first, and the layers stop learning without a word.

What the evidence looks like
----------------------------
`autocast_dtype` (or `model_dtype`) is float16, `loss_scale_before` is empty, and `grad_zero_frac` is high.

Fix
---
Scale the loss with ``torch.amp.GradScaler``, or use bfloat16, whose range is that of float32.

Known false alarms
------------------
A loss scale written by hand is recognised by the loss's weight in backward.

References
----------
engichang1467/Open-Rig3R#35.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.rules.accumulation.windows import merged
from stepscope.rules.base import Rule
from stepscope.rules.clipping.gradients import executed
from stepscope.rules.view import Rows, View, finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding

BY_HAND = 16.0
"""Weight from which a loss counts as scaled by hand; a forgotten division by K does not reach it."""


def judge(view: View) -> Iterator[Finding]:
    """Unscaled float16 micro-steps that a step used."""
    yield from merged([f for rows in view.stepping for f in (_judge(rows),) if f is not None])


def _judge(rows: Rows) -> Finding | None:
    autocast = rows["autocast_dtype"].astype(object) == "float16"
    half = autocast | (rows["model_dtype"].astype(object) == "float16")
    with np.errstate(invalid="ignore"):
        by_hand = (np.abs(rows["loss_weight"]) >= BY_HAND) | (np.abs(rows["target_weight"]) >= BY_HAND)
    wrong = half & ~np.isfinite(rows["loss_scale_before"]) & ~rows.true("scale_called") & ~by_hand
    if not (wrong & executed(rows)).any() or np.count_nonzero(wrong) < 0.5 * np.count_nonzero(half):
        return None
    zero = rows["grad_zero_frac"][wrong & np.isfinite(rows["grad_zero_frac"])]
    lost = f"; {float(zero.max()):.0%} of the gradient's elements were exactly zero at one step" if len(zero) else ""
    how = "under float16 autocast" if autocast[wrong].any() else "with float16 parameters"
    return finding(
        RULE.code,
        RULE.name,
        "warning",
        f"{int(wrong.sum())} micro-steps ran {how} and no GradScaler scaled their loss: gradients below 6e-8 become zero{lost}; "
        "scale the loss, or use bfloat16",
        rows,
        wrong,
        observed="no loss scale",
        expected="a GradScaler, or bfloat16",
        columns=["grad_zero_frac", "grad_norm", "loss"],
    )


RULE = Rule("SCL412", "fp16-no-scaler", "warning", judge)
