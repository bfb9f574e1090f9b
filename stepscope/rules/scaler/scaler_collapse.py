"""Every step is skipped and the loss scale falls without end.

What it does
------------
Looks for long runs of skipped steps that lowering the scale does not end: the loss itself is NaN, or the scale has fallen
below one.

Why it matters
--------------
The scaler halves the scale because it takes NaN for an overflow, but the NaN is in the loss or the gradients at any
scale. Nothing is trained, silently. Below 2^-127 the reciprocal of the scale is infinite in float32, and the next clean
batch writes infinity or NaN into the weights.

What the evidence looks like
----------------------------
`step_skipped` at step after step, `loss_scale_after` halving each time, and `loss` NaN, or finite with gradients that
never are.

Fix
---
Look for the first value that is not finite at scale 1: bad input, a division by zero, a logarithm of zero. Stop the run
when the scale falls below 1.

Known false alarms
------------------
Calibration: the first steps of a run are skipped until the scale fits, fewer than about twenty, and one step now and then
when the scale has grown. Neither is reported.

References
----------
Junjue-Wang/FactSeg#6, NVIDIA/apex#834.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.rules.accumulation.windows import merged
from stepscope.rules.base import Rule
from stepscope.rules.scaler.evidence import need_scaler, skipped
from stepscope.rules.view import Array, Mask, Rows, View, finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding

CALIBRATION = 20
"""Skips in a row that a healthy start may need; from 65536 the scale is below 1 after 17."""

BELOW_ONE = 16
"""Skips in a row, at the end of the run, that a scale below one gives away; a healthy run ends with executed steps."""

FEWEST_NAN = 8
"""Skips in a row with a NaN loss, at the end of the run, that no scale can mend."""


def judge(view: View) -> Iterator[Finding]:
    """Runs of skips that no scale ends."""
    need_scaler(view)
    yield from merged([f for rows in view.stepping for f in (_judge(rows),) if f is not None])


def _judge(rows: Rows) -> Finding | None:
    ends = rows.ends
    first, length = runs(skipped(rows)[ends])
    if not len(length):
        return None
    nan = np.isnan(rows["loss"]) & rows.seen("loss") | np.isnan(rows["loss_scaled"]) & rows.seen("loss_scaled")
    share = _share(nan[ends], first, length)
    after = rows["loss_scale_after"][ends][first + length - 1]
    last = first + length == len(ends)
    hopeless = (length >= CALIBRATION) & ((after < 1.0) | (share > 0.5))
    hopeless |= (length >= BELOW_ONE) & (after < 1.0) & last
    hopeless |= (length >= FEWEST_NAN) & (share > 0.9) & last
    if not hopeless.any():
        return None
    at = int(np.argmax(np.where(hopeless, length, 0)))
    where = ends[first[at] : first[at] + length[at]]
    before = float(rows["loss_scale_before"][where[0]])
    loss = "the loss is NaN" if share[at] > 0.5 else "the loss is finite and the gradients are not, at any scale"
    end = float(after[at])
    return finding(
        RULE.code,
        RULE.name,
        "error",
        f"{int(length[at])} steps in a row were skipped and the scale fell from {before:g} to {end:g}: {loss}, so that no "
        "scale can help; find the first value that is not finite",
        rows,
        where,
        observed=int(length[at]),
        expected=f"fewer than {CALIBRATION}",
        columns=["loss_scale_after", "step_skipped", "loss", "grad_norm"],
    )


def runs(mask: Mask) -> tuple[Array, Array]:
    """First positions and lengths of the runs of true values."""
    edges = np.diff(np.concatenate([[0], mask.astype(np.int8), [0]]))
    first = np.flatnonzero(edges == 1)
    return first, np.flatnonzero(edges == -1) - first


def _share(mask: Mask, first: Array, length: Array) -> Array:
    """Share of true values in each run."""
    total = np.concatenate([[0], np.cumsum(mask)])
    return np.asarray((total[first + length] - total[first]) / length)


RULE = Rule("SCL402", "scaler-collapse", "error", judge)
