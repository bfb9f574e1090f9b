"""The scheduler moved at every micro-batch although its length counts optimizer steps, or the other way round.

What it does
------------
Counts the steps of each scheduler within windows of more than one micro-step, and asks in which unit the schedule is
written: by the length that its class tells (``T_max``, ``total_steps``, ``total_iters``), else by where the rate comes
to its end. Rates that a script writes by hand are judged by the same curve.

Why it matters
--------------
With K micro-batches per update, warm-up and decay run K times too fast: most of the run has the final rate. The other
way round the rate never gets to its end.

What the evidence looks like
----------------------------
`scheduler_steps` is 1 on every micro-step and `lr` changes inside windows; from a K-th of the run on `lr` stands still,
or it rises again.

Fix
---
Call ``scheduler.step()`` once after each optimizer step, or compute the length of the schedule in micro-batches.

Known false alarms
------------------
A schedule without an end (StepLR, an inverse square root) that is meant to count micro-batches cannot be told from a
mistaken one.

References
----------
Lightning-AI/pytorch-lightning#1476, huggingface/accelerate#963.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.rules.base import Rule
from stepscope.rules.schedule.pace import Pace, length, moving, pace, rates, resumes, saves_state, settled, span
from stepscope.rules.view import Rows, View, finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding


def judge(view: View) -> Iterator[Finding]:
    """Schedules that run K times too fast, or too slow, for their unit."""
    for rows in view.stepping:
        yield from too_fast(view, rows)
        yield from _slow(view, rows)


def too_fast(view: View, rows: Rows) -> list[Finding]:
    """The schedule of an optimizer moves at every micro-step and is K times shorter than that."""
    k = view.usual_k(rows) or 1
    if k < 2 or len(rows.ends) < 2 or not span(rows["lr"]):
        return []
    found = pace(rows)
    if found.each_micro_step:
        return list(_scheduled(view, rows, found, k))
    return list(_by_hand(rows, k)) if not found.total else []


def _scheduled(view: View, rows: Rows, found: Pace, k: int) -> Iterator[Finding]:
    micro, windows = int(rows.ends[-1]) + 1, len(rows.ends)
    planned, lr = length(view, rows), rows["lr"][: int(rows.ends[-1]) + 1]
    if planned is not None:
        if not 0.6 * k <= micro / planned <= 1.67 * k:
            return  # written in micro-batches, or wrong in another way
        why = f"its length is {planned:g} steps for {windows} optimizer steps"
    else:
        end = settled(lr)
        endless = any("gamma" in d["settings"] for d in moving(view, rows))  # steps and exponentials: no end to reach
        falls = bool((np.diff(lr[int(np.nanargmax(lr)) :]) <= 0).all())
        if falls and not endless and end > 0.75 * micro and lr[-1] <= 0.1 * np.nanmax(lr):
            return  # it comes to its end with the run: its unit is the micro-batch
        why = (
            f"its rate stands still from micro-step {end + 1} of {micro} on"
            if end <= 0.75 * micro
            else "its rate has no end to tell"
        )
    yield finding(
        RULE.code,
        RULE.name,
        "error",
        f"the scheduler moved after each of {k} micro-batches of a window, {found.total:g} times for {windows} optimizer "
        f"steps, and {why}: the schedule runs {k} times too fast; step it once per optimizer step",
        rows,
        (np.nan_to_num(rows["scheduler_steps"]) > 0) & ~rows.true("sync_gradients"),
        observed=found.total,
        expected=windows,
        columns=["lr", "scheduler_steps"],
    )


def _by_hand(rows: Rows, k: int) -> Iterator[Finding]:
    """Rates written at every micro-step that reach their end after a K-th of the run."""
    micro = int(rows.ends[-1]) + 1
    lr = rows["lr"][:micro]
    end = settled(lr)
    inside = (np.diff(lr) != 0) & (rows.window_of[1:micro] == rows.window_of[: micro - 1])
    if len(rows.ends) < 2 * k or not 0.5 / k <= end / micro <= 1.5 / k or lr[-1] > np.nanmin(lr):
        return
    if inside[: max(end - 1, 1)].mean() < 0.5 * (k - 1) / k:
        return
    yield finding(
        RULE.code,
        RULE.name,
        "error",
        f"the rate is written at every micro-batch and comes to its end of {lr[-1]:.3g} at micro-step {end + 1} of {micro}, a "
        f"{k}-th of the run, with {k} micro-batches per step: its length counts optimizer steps, its argument micro-batches",
        rows,
        np.arange(end, micro),
        observed=end,
        expected=micro,
        columns=["lr"],
    )


def too_slow(view: View, rows: Rows) -> bool:
    """The schedule of an optimizer moves once per window and is as long as there are micro-batches."""
    k, found = view.usual_k(rows) or 1, pace(rows)
    if k < 2 or not span(rows["lr"]) or not (found.total and found.each_window and found.per_window == 1):
        return False
    planned, micro = length(view, rows), int(rows.ends[-1]) + 1
    if planned is None or len(rows.ends) < 4 or resumes(view, rows) or abs(planned - micro) > max(1, 0.02 * micro):
        return False
    return k > 2 or not saves_state(view, rows)  # with two it may have been stopped half-way, to be continued


def _slow(view: View, rows: Rows) -> Iterator[Finding]:
    if not too_slow(view, rows):
        return
    k, planned, lr = view.usual_k(rows), length(view, rows), rates(rows)
    micro, windows = int(rows.ends[-1]) + 1, len(rows.ends)
    yield finding(
        RULE.code,
        RULE.name,
        "error",
        f"the schedule is {planned:g} steps long, as many as there were micro-batches ({micro}), but moved once for each of "
        f"{windows} optimizer steps: it ran {k} times too slowly and ended at {lr[-1]:.3g}; compute its length in optimizer steps",
        rows,
        rows.ends,
        observed=windows,
        expected=planned,
        columns=["lr", "scheduler_position"],
    )


RULE = Rule("SCH501", "sched-per-microbatch", "error", judge, needs=("lr",))
