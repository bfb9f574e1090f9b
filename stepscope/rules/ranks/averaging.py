"""By which factor the gradient of a step is the mean over all processes' batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.rules.accumulation.windows import of_all_terms
from stepscope.rules.ranks.aligned import uses_ddp

if TYPE_CHECKING:
    from stepscope.rules.ranks.aligned import Aligned
    from stepscope.rules.view import Array, Rows

TOLERANCE = 1e-3


def factor(steps: Aligned) -> Array:
    """How large each step's gradient is, where 1 is the mean over the targets of all processes. Shape ``(steps,)``.

    With a loss that is a mean, its weight, summed over the window and averaged over the processes, times what was done to
    the gradient between backward and step other than a clip. NaN where the gradient was not the same in all processes,
    or where a part of this was not observed.
    """
    used = _before_clip(steps)
    weight = steps.over_window([_weights(rows) for rows in steps.rows]).mean(axis=0)
    out = weight * (_after_ddp(steps, used) if uses_ddp(steps) else _by_hand(steps, used))
    return np.where(steps.differs("grad_norm_clipped"), np.nan, out)


def _weights(rows: Rows) -> Array:
    """The weight of each micro-step's loss: of all its targets together where their number is known."""
    per_target = rows["target_weight"] * rows["num_items"]
    known = rows.seen("target_weight") & rows.seen("num_items")
    mean = np.array([r == "mean" for r in rows["loss_reduction"]])
    return np.where(known, per_target, np.where(mean, of_all_terms(rows, rows["loss_weight"]), np.nan))


def _before_clip(steps: Aligned) -> Array:
    """Norm of the unscaled gradient after all that was done to it but a clip. Shape ``(processes, steps)``."""
    clipped = ~np.isnan(steps.at("clip_max_norm"))
    return np.where(clipped, steps.at("grad_norm"), steps.at("grad_norm_clipped"))


def _left(steps: Aligned) -> Array:
    """Norm of the gradient as backward left it, the loss scale taken out. Shape ``(processes, steps)``."""
    scale = steps.at("loss_scale_before")
    return steps.at("grad_norm_scaled") / np.where(np.isnan(scale), 1.0, scale)


def _after_ddp(steps: Aligned, used: Array) -> Array:
    """DDP has averaged when backward ends; what is done to the gradient afterwards counts."""
    averaged = steps.true("ddp_sync") & ~steps.differs("grad_norm_scaled")
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(averaged, (used / _left(steps)).mean(axis=0), np.nan)


def _by_hand(steps: Aligned, used: Array) -> Array:
    """A reduction by hand sums (or averages) what it is given; divisions before and after it count."""
    summed = np.where(steps.at("reduced_mean") == 1.0, 1.0, float(steps.world))
    with np.errstate(divide="ignore", invalid="ignore"):
        given, done = steps.at("given_norm") / _left(steps), used / steps.at("reduced_norm")
    return np.asarray((given * summed * done).mean(axis=0))


def exceeds_every_mean(steps: Aligned) -> Array:
    """Steps whose gradient, the same in all processes, is longer than the longest of their own: no mean of them is.

    It tells a sum that was not divided also where the reduction itself was not observed (started without waiting).
    """
    if uses_ddp(steps):
        return np.zeros(len(steps), dtype=bool)
    own, used = _left(steps).max(axis=0), _before_clip(steps).min(axis=0)
    weight = steps.over_window([_weights(rows) for rows in steps.rows]).mean(axis=0)
    handled = np.isnan(steps.at("reduced_norm")).any(axis=0) & (steps.at("all_reduce_calls") > 0).all(axis=0)
    plain = np.abs(weight - 1.0) < TOLERANCE
    apart = steps.differs("grad_norm_scaled") & ~steps.differs("grad_norm_clipped")
    return np.asarray(handled & plain & apart & (used > own * (1.0 + TOLERANCE)))


def ambiguous(steps: Aligned) -> bool:
    """Whether the window is as long as there are processes, so that a missing division by one looks like the other."""
    sizes = steps.at("window_size")
    return bool(np.median(sizes) == steps.world)


def untouched(steps: Aligned) -> bool:
    """Whether every loss entered backward as it was: weight 1."""
    return all(bool(np.nanmax(np.abs(_weights(rows) - 1.0), initial=0.0) < TOLERANCE) for rows in steps.rows)
