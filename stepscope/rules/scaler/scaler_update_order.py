"""Gradients were divided by another scale than the one that multiplied their loss.

What it does
------------
Compares, at every executed step, the scale by which gradients were divided with the scale of each loss that went into
them. For a loss scale written by hand the product of loss weight and division is compared with one.

Why it matters
--------------
An ``update`` (or an assignment of a new scale) between backward and step changes the divisor: whenever the scale grows
the gradient is half of what it should be, whenever it falls twice.

What the evidence looks like
----------------------------
`unscale_divisor` is 2 or 1/2 times `loss_scale_before`, exactly at steps where the scale changed.

Fix
---
Divide first, update after: backward, ``unscale_``, clip, ``step``, and only then ``update()``.

Known false alarms
------------------
None known. Updates in odd places that never met a change of the scale are told as a notice.

References
----------
deepspeedai/DeepSpeed#8588.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.rules.accumulation.windows import close, merged
from stepscope.rules.base import Rule, Skip
from stepscope.rules.clipping.gradients import executed, kept
from stepscope.rules.view import Mask, Rows, View, finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding


def judge(view: View) -> Iterator[Finding]:
    """Steps whose divisor was not the scale of their losses."""
    found = [
        f for rows in view.stepping for f in (_by_scaler(rows) or _by_hand(rows) or _latent(rows),) if f is not None
    ]
    if not found and not view.trace.has("loss_scale_before"):
        raise Skip("no enabled GradScaler scaled a loss")
    yield from merged(found)


def mismatched(rows: Rows) -> Mask:
    """Rows whose gradients were divided by another scale than that of a loss in them. Shape ``(rows,)``."""
    scale, divisor = rows["loss_scale_before"], rows["unscale_divisor"]
    wrong = np.isfinite(scale) & np.isfinite(divisor) & (scale != divisor)
    if not len(rows.ends):
        return np.asarray(wrong)
    # a scale that changed within the window: the kept part carries another than the divisor of the window's last row
    of_window = np.concatenate([divisor[rows.ends], [np.nan]])[np.minimum(rows.window_of, len(rows.ends))]
    earlier = kept(rows) & np.isfinite(scale) & np.isfinite(of_window) & (scale != of_window)
    hit = rows.per_window(earlier.astype(np.float64), "max") > 0
    wrong[rows.ends] |= hit
    return np.asarray(wrong)


def _by_scaler(rows: Rows) -> Finding | None:
    wrong = mismatched(rows) & executed(rows)
    if not wrong.any():
        return None
    at = int(np.flatnonzero(wrong)[0])
    scale, divisor = float(rows["loss_scale_before"][at]), float(rows["unscale_divisor"][at])
    what = f"scaled by {scale:g} were divided by {divisor:g}: {scale / divisor:g} times what they should be"
    if scale == divisor:
        what = f"of a window whose micro-batches carried different scales were all divided by {divisor:g}"
    return finding(
        RULE.code,
        RULE.name,
        "error",
        f"at {int(wrong.sum())} steps gradients {what}; call update() after the step, not between backward and step",
        rows,
        wrong,
        observed=divisor,
        expected=scale,
        columns=["loss_scale_before", "unscale_divisor", "grad_norm_clipped", "grad_norm"],
    )


def _by_hand(rows: Rows) -> Finding | None:
    """A loss weight that is a power of two and a division of ``.grad`` that undoes it at most steps, and misses at some."""
    weight = rows["loss_weight_sum"]
    among = executed(rows) & (weight >= 16.0) & ~np.isfinite(rows["loss_scale_before"])
    with np.errstate(divide="ignore", invalid="ignore"):
        product = weight * rows["grad_norm_clipped"] / rows["grad_norm_left"]
    right = among & close(product, 1.0, 1e-3)
    wrong = among & (close(product, 0.5, 1e-3) | close(product, 2.0, 1e-3))
    if np.count_nonzero(right) < 3 or not wrong.any() or np.count_nonzero(wrong) > np.count_nonzero(right):
        return None
    at = int(np.flatnonzero(wrong)[0])
    return finding(
        RULE.code,
        RULE.name,
        "error",
        f"at {int(wrong.sum())} steps the loss was multiplied by {float(weight[at]):g} and the gradient divided by "
        f"{float(weight[at] / product[at]):g}: the loss scale changed between backward and the division; divide by the scale "
        "that the loss carried",
        rows,
        wrong,
        observed=float(weight[at] / product[at]),
        expected=float(weight[at]),
        columns=["loss_weight_sum", "grad_norm_left", "grad_norm_clipped"],
    )


def _latent(rows: Rows) -> Finding | None:
    early = executed(rows) & (rows["early_updates"] > 0) & ~rows.true("early_update_between")
    early &= rows["scale_divisions"] == 1
    if np.count_nonzero(early) < 0.5 * np.count_nonzero(executed(rows)) or not early.any():
        return None
    return finding(
        RULE.code,
        RULE.name,
        "notice",
        f"{int(early.sum())} times update() ran between backward and step; the scale did not change at these, but when it does "
        "the gradient will be divided by the wrong one: call update() after the step",
        rows,
        early,
        observed="update before step",
        expected="step before update",
        columns=["early_updates", "loss_scale_after"],
    )


RULE = Rule("SCL411", "scaler-update-order", "error", judge)
