"""The short last window of an epoch was stepped on, but its losses were divided by the full K.

What it does
------------
Finds windows of r < K micro-steps whose loss weights come to r/K where those of full windows come to one.

Why it matters
--------------
The tail's gradient is r/K of the mean over its micro-steps: its samples count less, and a step is taken with a smaller
gradient (which Adam turns into a full-sized one of more noise).

What the evidence looks like
----------------------------
`tail` is true, `window_size` is r, each `loss_weight` is still 1/K and `loss_weight_sum` is r/K.

Fix
---
Divide the losses of the tail by its own number of micro-steps.

Known false alarms
------------------
Some recipes mean it so, to give every sample the same pull on plain SGD: without ``--declare accumulation_steps=K`` this is
a notice.

References
----------
Lightning-AI/pytorch-lightning#19987.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.rules.accumulation.windows import Windows, close, merged, most_common, windows_of
from stepscope.rules.base import Rule
from stepscope.rules.view import finding

if TYPE_CHECKING:
    from stepscope.rules.outcome import Finding
    from stepscope.rules.view import Array, View


def judge(view: View) -> list[Finding]:
    """Short windows whose weights come to r/K."""
    return merged([f for w in windows_of(view) if len(w) for f in _judge(w)])


def _judge(w: Windows) -> list[Finding]:
    k = w.declared or w.usual or 1
    relative = _relative(w, k)
    full = w.live == k
    wrong = (w.live < k) & (w.live == w.size) & close(relative, w.live / k) & ~w.closure
    if k < 2 or not full.any() or not wrong.any() or wrong.mean() > 0.5 or not _at_ends(w, np.flatnonzero(wrong)):
        return []
    r = most_common(w.live[wrong])
    some = w.live[wrong] == r
    seen = float(np.median(relative[wrong][some]))
    return [
        finding(
            RULE.code,
            RULE.name,
            "warning" if w.declared else "notice",
            f"{int(wrong.sum())} of {len(w)} windows hold {r} micro-steps instead of {k}, but their losses are divided as in a "
            f"full one: the weights come to {seen:.4g} of a full window's; divide the losses of a tail by its own number",
            w.rows,
            w.mask(wrong),
            observed=seen,
            expected=1.0,
            columns=["window_size", "loss_weight_sum", "tail"],
        )
    ]


def _relative(w: Windows, k: int) -> Array:
    """What the weights of a window come to, over those of a full one.

    A sum over targets whose weight is the same throughout the run is compared too; where the weight follows the number of
    targets in the window there is nothing to compare.
    """
    weight = w.effective
    full = weight[(w.live == k) & np.isfinite(weight)]
    if len(full):
        return np.asarray(weight / float(np.median(full)))
    target = w.rows["target_weight"]
    known = target[np.isfinite(target)]
    if not len(known) or close(known, float(np.median(known))).mean() < 0.9:
        return np.full(len(w), np.nan)
    return np.asarray(w.rows.per_window(np.where(w.used_rows, target, 0.0)) * w.divided / (k * float(np.median(known))))


def _at_ends(w: Windows, places: Array) -> bool:
    """The windows end an epoch or the run; without epochs they are evenly spaced."""
    last = w.end[places]
    if w.last_of_epoch.any():
        return bool(w.last_of_epoch[last].all())
    ends_run = last[-1] == len(w.rows) - 1
    return bool((len(last) == 1 and ends_run) or (len(last) > 1 and len(np.unique(np.diff(last))) == 1))


RULE = Rule("ACC109", "accum-tail-misweighted", "warning", judge, needs=("loss_weight",), channel="declare")
