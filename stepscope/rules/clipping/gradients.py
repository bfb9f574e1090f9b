"""What became of a gradient: used by a step, kept by the next backward, limited by code of the script's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.rules.accumulation.windows import CLOSE, close

if TYPE_CHECKING:
    from stepscope.rules.view import Array, Mask, Rows

SAME_LIMIT = 1e-3
"""Relative spread of norms that were all limited to one value; ``max_norm / (norm + 1e-6)`` moves it by less."""

FEWEST = 3
"""Windows that must show the same limit before it is taken for one."""


def executed(rows: Rows) -> Mask:
    """Rows after which a step was attempted and not skipped. Shape ``(rows,)``."""
    return np.asarray(rows.true("sync_gradients") & ~rows.true("step_skipped"))


def kept(rows: Rows) -> Mask:
    """Rows without a step whose gradient was still there at the next backward of the same window. Shape ``(rows,)``.

    Where the norm before that backward was not measured the gradient had not been touched.
    """
    out = np.zeros(len(rows), dtype=np.bool_)
    if len(rows) > 1:
        window = rows.window_of
        out[:-1] = (window[1:] == window[:-1]) & (rows["grad_norm_before"][1:] != 0.0)
    return out


def following(values: Array) -> Array:
    """The value of the next row, NaN after the last. Shape ``(rows,)``."""
    return np.concatenate([values[1:], [np.nan]]) if len(values) else values


def hand_limit(after: Array, before: Array, among: Mask) -> tuple[float, Mask]:
    """The limit that a script's own clip applied, told from norms alone.

    A clip brings gradients of different norms to one norm; nothing else in a loop does. So a limit is taken as one only
    where at least `FEWEST` different norms `before` came down to one norm `after`, and where that is what happened to
    most norms that changed at all.

    Args:
        after: norms after the place where a clip may have been. Shape ``(rows,)``.
        before: norms before it.
        among: the rows to look at.

    Returns:
        The limit (NaN if there is none) and the rows that it bound.
    """
    bound = np.zeros(len(after), dtype=np.bool_)
    with np.errstate(invalid="ignore"):
        lowered = among & np.isfinite(after) & np.isfinite(before) & (after > 0) & (after < before * (1 - SAME_LIMIT))
    if np.count_nonzero(lowered) < FEWEST:
        return float("nan"), bound
    limit = _commonest(after[lowered])
    bound = lowered & close(after, limit, SAME_LIMIT)
    count = np.count_nonzero(bound)
    spread = np.ptp(before[bound]) / np.max(before[bound]) if count else 0.0
    if count < FEWEST or count < 0.6 * np.count_nonzero(lowered) or spread < CLOSE:
        return float("nan"), np.zeros(len(after), dtype=np.bool_)
    return limit, bound


def _commonest(values: Array) -> float:
    """The value around which most others lie: the fullest of narrow bins on a logarithmic scale."""
    bins = np.round(np.log(values) / SAME_LIMIT)
    found, counts = np.unique(bins, return_counts=True)
    return float(np.median(values[np.abs(bins - found[np.argmax(counts)]) <= 1]))
