"""The scheduler moved several times for each optimizer step, and its schedule ended long before the run.

What it does
------------
Looks for a scheduler that moves W times, W > 1, at every optimizer step, and at where the rate comes to its end.

Why it matters
--------------
Wrappers for several processes move the scheduler once for each process, since they take its length to be that of the
whole data. If the length was already divided by the number of processes, the schedule runs W times too fast, and most
of the run has the final rate, often zero.

What the evidence looks like
----------------------------
`scheduler_steps` is W at each step; `lr` stands still, or rises again, from a W-th of the run on.

Fix
---
Give the scheduler the length of the whole data (W times as many steps), or step it once per optimizer step.

Known false alarms
------------------
A scheduler that moves W times for a length that counts all processes is right, and told as a notice only where its end
cannot be seen.

References
----------
huggingface/transformers#24088, huggingface/diffusers#3954.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.rules.base import Rule
from stepscope.rules.schedule.pace import Pace, length, pace, rates, settled, span
from stepscope.rules.schedule.sched_total_steps import mirrored
from stepscope.rules.view import Rows, View, finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding


def judge(view: View) -> Iterator[Finding]:
    """Schedulers that move W times a step, and schedules W times too long that move once."""
    world = int(view.trace.meta.get("world_size", 1) or 1)
    for rows in view.stepping:
        found, lr = pace(rows), rates(rows)
        if len(lr) < 4 or not found.each_window or found.each_micro_step or not span(lr):
            continue
        if found.per_window >= 2:
            yield from _too_fast(view, rows, found)
        elif world > 1:
            yield from _too_slow(view, rows, world)


def _too_fast(view: View, rows: Rows, found: Pace) -> Iterator[Finding]:
    lr, count = rates(rows), len(rows.ends)
    planned, end = length(view, rows), settled(lr)
    short = planned is not None and planned <= 0.75 * found.total
    still = end <= 0.75 * count and count - end >= 3 and lr[-1] <= np.nanmin(lr)
    again = mirrored(view, rows) is not None
    if short or still or again:
        told = f"has a length of {planned:g} steps" if short else "has passed its end, so that the rate rises again"
        if still:
            told = f"stands still at {lr[-1]:.3g} from step {end + 1} of {count} on"
        yield finding(
            RULE.code,
            RULE.name,
            "warning",
            f"the scheduler moved {found.per_window} times for each optimizer step ({found.total:g} for {count}) and {told}: it runs "
            f"{found.per_window} times too fast; its length must count the steps of all processes, or it must move once per step",
            rows,
            rows.ends[end:] if still else rows.ends,
            observed=found.total,
            expected=count,
            columns=["lr", "scheduler_steps"],
        )
    elif planned is None and lr[-1] > 0.1 * np.nanmax(lr):
        yield finding(
            RULE.code,
            RULE.name,
            "notice",
            f"the scheduler moved {found.per_window} times for each optimizer step ({found.total:g} for {count}): right if its length "
            "counts the steps of all processes",
            rows,
            rows.ends,
            observed=found.per_window,
            expected=1,
            columns=["lr", "scheduler_steps"],
        )


def _too_slow(view: View, rows: Rows, world: int) -> Iterator[Finding]:
    planned, lr, count = length(view, rows), rates(rows), len(rows.ends)
    if planned is None or abs(planned - world * count) > max(1, 0.02 * world * count):
        return
    yield finding(
        RULE.code,
        RULE.name,
        "warning",
        f"the schedule is {planned:g} steps long, {world} times (the number of processes) the {count} steps of this run: training "
        f"ended in the middle of it, at a rate of {lr[-1]:.3g}",
        rows,
        rows.ends,
        observed=planned,
        expected=count,
        columns=["lr", "scheduler_position"],
    )


RULE = Rule(
    "SCH503", "sched-times-world", "warning", judge, needs=("lr", "scheduler_steps"), explains=("sched-total-steps",)
)
