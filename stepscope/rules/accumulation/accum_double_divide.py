"""The losses of a window were divided by the number of micro-steps twice.

What it does
------------
Adds up the loss weights that a step used, times whatever ``.grad`` was divided by. A window of K micro-steps whose weights
come to 1/K was divided twice: by the loop and by the framework's backward, or by the loss and on the gradient.

Why it matters
--------------
The step gets 1/K of the mean gradient: plain SGD learns K times slower, the clip hardly ever binds, and a logged loss taken
from the divided value is K times too small.

What the evidence looks like
----------------------------
`loss_weight` is 1/K² in every row of a window of K, and `loss_weight_sum` is 1/K.

Fix
---
Leave the division to one place: give ``accelerator.backward`` (and the like) the undivided loss.

Known false alarms
------------------
A loss with a coefficient of its own can have the same weight; without ``--declare accumulation_steps=K`` this is a notice.

References
----------
huggingface/accelerate#3533, huggingface/transformers#40709.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.rules.accumulation.windows import Windows, close, merged, windows_of
from stepscope.rules.base import Rule
from stepscope.rules.view import finding

if TYPE_CHECKING:
    from stepscope.rules.outcome import Finding
    from stepscope.rules.view import View


def judge(view: View) -> list[Finding]:
    """Windows of K micro-steps whose weights come to 1/K."""
    return merged([f for w in windows_of(view) if len(w) for f in _judge(w)])


def _judge(w: Windows) -> list[Finding]:
    k = w.declared or w.usual or 1
    full = (w.live == k) & ~w.closure
    wrong = full & close(w.effective, 1.0 / k)
    if k < (2 if w.declared else 3) or not wrong.any() or wrong.sum() < 0.5 * full.sum():
        return []
    return [
        finding(
            RULE.code,
            RULE.name,
            "error" if w.declared else "notice",
            f"{int(wrong.sum())} of {len(w)} steps used 1/{k} of the mean gradient of their {k} micro-steps: the loss weights "
            f"come to {float(np.median(w.effective[wrong])):.4g} instead of 1, so the loss was divided by {k} twice",
            w.rows,
            w.mask(wrong),
            observed=float(np.median(w.effective[wrong])),
            expected=1.0,
            columns=["loss_weight", "loss_weight_sum", "grad_norm"],
        )
    ]


RULE = Rule("ACC102", "accum-double-divide", "error", judge, needs=("loss_weight",), channel="declare")
