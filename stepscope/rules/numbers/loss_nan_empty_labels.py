"""A micro-step without any valid target has a loss of NaN.

What it does
------------
Finds micro-steps whose loss is not finite while the weights still are and no target counts: all labels ignored, an empty
selection, or a sum divided by a count of zero. Whether the gradient is harmed is looked at separately.

Why it matters
--------------
A hand-written ``(loss * mask).sum() / mask.sum()`` gives NaN gradients, which poison the whole window, all processes, and
with the step every weight. ``cross_entropy`` over ignored labels gives a NaN loss and a gradient of exactly zero: then only
the log suffers.

What the evidence looks like
----------------------------
`loss` is NaN and `num_items` is 0 (or `loss_divisor` is 0); `grad_nonfinite` counts the elements that the step was given.

Fix
---
Divide by ``mask.sum().clamp(min=1)``, or sum the losses and divide by the targets of the whole window.

Known false alarms
------------------
A NaN loss with a zero gradient, or whose step the scaler skipped, is a notice.

References
----------
OpenRLHF/OpenRLHF#583, nvidia-cosmos/cosmos-rl#155.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.rules.accumulation.windows import Windows, merged, windows_of
from stepscope.rules.base import Rule
from stepscope.rules.view import finding

if TYPE_CHECKING:
    from stepscope.rules.outcome import Finding
    from stepscope.rules.view import Mask, View


def judge(view: View) -> list[Finding]:
    """Micro-steps without targets, by what they did to the step."""
    return merged([f for w in windows_of(view) if len(w) for f in _judge(w)])


def _judge(w: Windows) -> list[Finding]:
    empty = _empty(w)
    if not empty.any():
        return []
    hit = w.rows.per_window((empty & w.used_rows).astype(np.float64)) > 0
    bad = (w.rows.windows("grad_nonfinite") > 0) & ~(w.rows.windows("step_skipped") == 1.0)
    applied = hit & bad & _weights_were_finite(w)
    at = int(np.flatnonzero(empty)[0])
    several = w.rows["loss_terms"][at] > 1
    what = "a loss term without any valid target, which" if several else "no valid target and a loss that"
    where = f"micro-step {int(w.rows['micro_step'][at])} has {what} is not finite"
    if applied.any():
        text = (
            f"{where}: its gradients are not finite and the step was executed, so that every weight it touched is lost; "
            f"divide by the count clamped to at least 1, or skip such batches"
        )
        window = int(np.flatnonzero(applied)[0])
        elements = float(w.rows.windows("grad_nonfinite")[window])
        return [_finding(w, empty, "error", text, elements)]
    text = (
        f"{where}; {int(empty.sum())} such micro-steps gave no wrong gradient to a step, only the logged loss suffers"
    )
    return [_finding(w, empty, "notice", text, 0.0)]


def _empty(w: Windows) -> Mask:
    """Rows whose loss is not finite because nothing counts in it."""
    rows = w.rows
    loss = np.where(rows.seen("loss_scaled"), rows["loss_scaled"], rows["loss"])
    seen = rows.seen("loss") | rows.seen("loss_scaled")
    nothing = (rows["num_items"] == 0.0) | (rows["loss_divisor"] == 0.0) | (rows["loss_terms_empty"] > 0)
    return np.asarray(seen & ~np.isfinite(loss) & nothing)


def _weights_were_finite(w: Windows) -> Mask:
    norm = w.rows.windows("param_norm")
    return np.asarray(np.isfinite(norm))


def _finding(w: Windows, empty: Mask, severity: str, text: str, observed: float) -> Finding:
    return finding(
        RULE.code,
        RULE.name,
        "error" if severity == "error" else "notice",
        text,
        w.rows,
        empty,
        observed=observed,
        expected=0.0,
        columns=["loss", "num_items", "grad_nonfinite", "param_norm"],
    )


RULE = Rule(
    "NUM910",
    "loss-nan-empty-labels",
    "error",
    judge,
    explains=("clip-nonfinite", "scaler-collapse"),
    needs=("loss_scaled",),
)
