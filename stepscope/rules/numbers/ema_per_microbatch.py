"""The average of the weights is updated at every micro-step instead of at every step.

What it does
------------
Looks at micro-steps after which no optimizer stepped: was an average of the weights updated there? torch's AveragedModel
says so itself; copies that a script keeps by hand are recognised by their motion: a share of the way towards the weights.

Why it matters
--------------
Between steps the weights stay as they are, so K updates in a window of K make the average forget K times as fast: a decay
of 0.999 becomes 0.999^K for each step.

What the evidence looks like
----------------------------
`averaged` above zero, or `average_rate` above zero, at micro-steps that no step follows. The finding gives the updates
for each step and the decay that they amount to.

Fix
---
Update the average inside of the branch that steps the optimizer, after ``optimizer.step()``.

Known false alarms
------------------
Copies that are replaced as a whole (a target network, an old policy) are no averages. Averages on another device than the
weights are not seen.

References
----------
SWivid/F5-TTS#631, lucidrains/vector-quantize-pytorch#221.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.rules.base import Rule
from stepscope.rules.view import finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding
    from stepscope.rules.view import Mask, Rows, View


def judge(view: View) -> Iterator[Finding]:
    """One finding for the run: the optimizer in whose windows most of the idle updates fall."""
    found = [f for rows in view.stepping if rows.rank == view.stepping[0].rank for f in _judge(view, rows)]
    yield from found[:1]


def _judge(view: View, rows: Rows) -> Iterator[Finding]:
    inside = np.zeros(len(rows), dtype=bool)
    inside[: rows.ends[-1] + 1] = rows.windows("window_size")[rows.window_of[: rows.ends[-1] + 1]] > 1
    idle = inside & ~_followed_by_step(view, rows)
    averaged = np.nan_to_num(rows["averaged"]) > 0
    rate = rows["average_rate"]
    moved = averaged | ((rate > 0) & (rate < 0.9999))
    known = idle & (rows.seen("average_rate") | averaged)
    bad = idle & moved
    if bad.sum() < 2 or bad.sum() < 0.5 * known.sum():
        return
    inner = rows.windows("window_size")[rows.windows("window_size") > 1].mean() - 1.0
    updates = 1.0 + float(
        inner * bad.sum() / known.sum()
    )  # those after the step, and as many inside as were seen to be
    step = rate[bad & (rate > 0)]
    decay = (
        f", so that a decay of {1 - np.median(step):.4g} becomes {(1 - np.median(step)) ** updates:.4g} per step"
        if len(step)
        else ""
    )
    yield finding(
        RULE.code,
        RULE.name,
        "warning",
        f"the average of the weights was updated after {int(bad.sum())} micro-steps that no step followed, {updates:.3g} times per step of "
        f"{rows.optimizer} instead of once{decay}; update it only after optimizer.step()",
        rows,
        bad,
        observed=updates,
        expected=1,
        columns=["averaged", "average_rate"],
    )


def _followed_by_step(view: View, rows: Rows) -> Mask:
    """Whether any optimizer of this process stepped between a micro-step and the next."""
    stepped = [r["micro_step"][r.ends] for r in view.stepping if r.rank == rows.rank]
    return np.isin(rows["micro_step"], np.concatenate(stepped))


RULE = Rule("NUM903", "ema-per-microbatch", "warning", judge, needs=("averaged",))
