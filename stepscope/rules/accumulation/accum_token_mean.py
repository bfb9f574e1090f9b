"""Targets of one window count differently: each micro-step's loss is a mean over its own number of targets.

What it does
------------
Compares the weight of one target in backward between the micro-steps that a step used.

Why it matters
--------------
The mean of means is not the mean: with K micro-steps of n_k valid targets a target weighs 1/(K·n_k) instead of
1/sum(n_k). Short answers pull harder than long ones, and the result depends on how a batch was cut into micro-batches.

What the evidence looks like
----------------------------
`loss_weight` is 1/K throughout, `num_items` varies inside a window, and `target_weight` varies with it.

Fix
---
Sum the losses (``reduction="sum"``) and divide by the number of valid targets of the whole window; or weigh each mean by
n_k / sum(n_k).

Known false alarms
------------------
Where the counts hardly differ (large batches level out) this is a notice; a last batch of an epoch that is merely smaller
is not reported. ``--declare loss_average=targets`` asks for equal weights however small the difference.

References
----------
meta-pytorch/torchtune#1875, huggingface/blog#2414.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.rules.accumulation.windows import CLOSE, Windows, close, merged, windows_of
from stepscope.rules.base import Rule
from stepscope.rules.view import finding

if TYPE_CHECKING:
    from stepscope.rules.outcome import Finding
    from stepscope.rules.view import Array, View

LARGE = 1.75
"""A target that counts this many times another's weight, in a quarter of the windows, is a warning without being asked."""


def judge(view: View) -> list[Finding]:
    """Windows inside which the weight of a target varies."""
    return merged([f for w in windows_of(view) if len(w) for f in _judge(view, w)])


def _judge(view: View, w: Windows) -> list[Finding]:
    asked = view.declared.get("loss_average") == "targets"
    spread, low, high = _spread(w)
    several = (w.live >= 2) & ~w.closure & np.isfinite(spread)
    wrong = several & (spread > 1.0 + CLOSE)
    if not wrong.any() or (not asked and (_by_design(w) or _smaller_last_batch(w))):
        return []
    large = (spread[several] > LARGE).mean() >= 0.25
    worst = int(np.nanargmax(np.where(wrong, spread, np.nan)))
    return [
        finding(
            RULE.code,
            RULE.name,
            "warning" if large or asked else "notice",
            f"in {int(wrong.sum())} of {len(w)} windows a target's weight depends on its micro-step, by up to a factor "
            f"{spread[worst]:.3g} ({low[worst]:.3g} to {high[worst]:.3g}): each loss is a mean over its own targets; sum the "
            f"losses and divide by the targets of the whole window",
            w.rows,
            w.mask(wrong),
            observed=float(spread[worst]),
            expected=1.0,
            columns=["target_weight", "num_items", "loss_weight"],
        )
    ]


def _spread(w: Windows) -> tuple[Array, Array, Array]:
    """Largest over least weight of a target in what each step used, and the two; NaN where some weight is not known."""
    weight = np.abs(w.rows["target_weight"])
    some = w.used_rows & (w.rows["num_items"] != 0) & _one_mean_each(w, weight)
    high = w.rows.per_window(np.where(some, weight, -np.inf), "max")
    low = w.rows.per_window(np.where(some, weight, np.inf), "min")
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(np.isfinite(high) & (low > 0), high / low, np.nan), low, high


def _one_mean_each(w: Windows, weight: Array) -> Array:
    """Rows whose targets together weigh as much as those of the window's weightiest row, as means over them do.

    Losses of different kind in one window, such as one of labelled and one of unlabelled data, have weights of their own.
    """
    whole = np.where(w.used_rows & np.isfinite(weight), weight * w.rows["num_items"], -np.inf)
    most = w.rows.per_window(whole, "max")
    return np.asarray(close(whole, np.append(most, np.nan)[np.minimum(w.rows.window_of, len(w))]))


def _by_design(w: Windows) -> bool:
    """Each place in the window always has the same count: several losses of different kind, not one cut into parts."""
    place = np.arange(len(w.rows)) - np.concatenate([w.live_from, [0]])[np.minimum(w.rows.window_of, len(w))]
    counts, used = w.rows["num_items"], w.used_rows
    first_of = {int(p): counts[used & (place == p)] for p in np.unique(place[used])}
    return len(w) >= 2 and all((c == c[0]).mean() > 0.9 for c in first_of.values()) and not _smaller_last_batch(w)


def _smaller_last_batch(w: Windows) -> bool:
    """All micro-steps have one number of targets but some that are fewer and end an epoch (or, without epochs, a window)."""
    counts = w.rows["num_items"]
    values, times = np.unique(counts[np.isfinite(counts)], return_counts=True)
    if not len(values):
        return False
    usual = values[np.argmax(times)]
    other = np.isfinite(counts) & (counts != usual)
    ends = w.last_of_epoch if w.last_of_epoch.any() else w.rows.true("sync_gradients")
    return bool(times.max() >= 0.5 * times.sum() and (counts[other] < usual).all() and ends[other].all())


RULE = Rule("ACC103", "accum-token-mean", "warning", judge, needs=("target_weight", "num_items"))
