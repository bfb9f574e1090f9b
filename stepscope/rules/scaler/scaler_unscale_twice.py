"""Gradients were divided by the loss scale more than once, or before the window was complete.

What it does
------------
Looks for ``unscale_`` calls that are followed by a further backward into the same gradients, for gradients that were
divided twice before their step, and for ``unscale_`` calls that the scaler refused. A division written by hand is seen in
the norm that the step used.

Why it matters
--------------
After an early ``unscale_`` the next scaled backward adds gradients that are loss-scale times too large to ones that are
already unscaled. With an ``update`` in between nothing is raised, and the first micro-batches are divided again and lost.

What the evidence looks like
----------------------------
`unscale_calls` above 0 on a row without a step, whose gradient the next row still finds (`grad_norm_before`); or
`scale_divisions` above 1 on one row.

Fix
---
Call ``unscale_`` once per step, after the window's last backward, and ``update()`` also when the step is skipped.

Known false alarms
------------------
Gradients that are cleared after ``unscale_``, as in a guard that drops a batch or in the first pass of SAM, are right and
not reported.

References
----------
espnet/espnet#2362, Haian-Jin/LVSM#19.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.rules.accumulation.windows import merged
from stepscope.rules.base import Rule
from stepscope.rules.clipping.gradients import FEWEST, executed, kept
from stepscope.rules.scaler.evidence import failures, need_scaler, where
from stepscope.rules.view import Rows, View, finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding


def judge(view: View) -> Iterator[Finding]:
    """Gradients divided early or twice."""
    need_scaler(view)
    for event in failures(view, "unscale_failed"):
        if event["detail"].get("stage") == "UNSCALED":
            yield finding(
                RULE.code,
                RULE.name,
                "error",
                f"unscale_ was called a second time for {where(event)} and raised: call it once per step, after the window's "
                "last backward, and update() also when the step is skipped",
                optimizer=event["optimizer"],
                micro_steps=[event["micro_step"]],
                observed=2,
                expected=1,
            )
            return
    yield from merged([f for rows in view.optimizers for f in (_early(rows) or _twice(rows),) if f is not None])


def _early(rows: Rows) -> Finding | None:
    early = kept(rows) & (rows["unscale_calls"] > 0) & (rows["loss_scale_before"] != 1.0)
    if not early.any():
        return None
    at = int(np.flatnonzero(early)[0])
    scale = float(rows["unscale_divisor"][at])
    return finding(
        RULE.code,
        RULE.name,
        "error",
        f"{int(early.sum())} times unscale_ ran before the window's last backward: the next micro-batch added gradients that "
        f"still carried the scale {scale:g} to ones already divided by it; call unscale_ once, after the last backward",
        rows,
        early,
        observed=int(rows["window_step"][at]),
        expected="the window's last micro-step",
        columns=["unscale_calls", "grad_norm_left", "grad_norm_before", "grad_norm_clipped"],
    )


def _twice(rows: Rows) -> Finding | None:
    scale, left, used = rows["loss_scale_before"], rows["grad_norm_left"], rows["grad_norm_clipped"]
    again = executed(rows) & (rows["scale_divisions"] > 1) & (scale != 1.0)
    if not again.any():
        with np.errstate(divide="ignore", invalid="ignore"):
            square = np.abs(used * scale**2 / left - 1.0) < 1e-3
        by_hand = executed(rows) & (scale > 2.0) & (rows["scale_divisions"] == 1) & square
        again = by_hand if np.count_nonzero(by_hand) >= FEWEST else again & False
    if not again.any():
        return None
    at = int(np.flatnonzero(again)[0])
    return finding(
        RULE.code,
        RULE.name,
        "error",
        f"{int(again.sum())} steps used gradients that had been divided by the scale {float(scale[at]):g} twice: norm "
        f"{float(used[at]):.3g} instead of {float(left[at] / scale[at]):.3g}; divide once, and call update() after the step",
        rows,
        again,
        observed=float(used[at]),
        expected=float(left[at] / scale[at]),
        columns=["scale_divisions", "grad_norm_scaled", "grad_norm_clipped"],
    )


RULE = Rule(
    "SCL401",
    "scaler-unscale-twice",
    "error",
    judge,
    explains=("clip-before-unscale", "scaler-update-order", "clip-per-microbatch", "gradnorm-logged-scaled"),
)
