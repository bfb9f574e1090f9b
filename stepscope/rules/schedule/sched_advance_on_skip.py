"""The scheduler moved on in steps that the scaler skipped.

What it does
------------
Counts the windows whose step was skipped and after which the scheduler moved nevertheless, and weighs them against the
length of the warm-up (of the run, where the rate does not warm up).

Why it matters
--------------
The schedule runs ahead of the weights by one for each skip: warm-up is cut short just when the scale is being found.

What the evidence looks like
----------------------------
`step_skipped` is true and `scheduler_steps` is not 0 in the same window; the first executed step has a rate from the
middle of the warm-up.

Fix
---
Step the scheduler only where the optimizer stepped: compare ``scaler.get_scale()`` before and after ``update()``; it has
gone down after a skip.

Known false alarms
------------------
One or two skips at the start of a long schedule are harmless and not reported.

References
----------
Lightning-AI/pytorch-lightning#5558, huggingface/transformers#11144.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.rules.base import Rule
from stepscope.rules.schedule.pace import pace, rates, span
from stepscope.rules.view import Array, Mask, Rows, View, finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding


def judge(view: View) -> Iterator[Finding]:
    """Scheduler steps in skipped windows, where they are more than a few percent of the warm-up."""
    for rows in view.stepping:
        found, lr = pace(rows), rates(rows)
        if found.each_micro_step or not span(lr):
            continue
        moved = rows.per_window(np.nan_to_num(rows["scheduler_steps"])) > 0 if found.total else _by_hand(rows, lr)
        if moved.mean() < 0.8:
            continue
        drifted = moved & (rows.windows("step_skipped") == 1.0)
        drift, room, what = int(drifted.sum()), *_room(lr)
        if drift < 2 or drift <= 0.05 * room:
            continue
        applied = int((rows.windows("step_skipped") != 1.0).sum())
        yield finding(
            RULE.code,
            RULE.name,
            "warning",
            f"the {'scheduler' if found.total else 'rate'} moved in {drift} windows whose optimizer step was skipped: {int(moved.sum())} moves for {applied} "
            f"executed steps, against {what} of {room} steps; step it only where the optimizer stepped",
            rows,
            rows.ends[drifted],
            observed=int(moved.sum()),
            expected=applied,
            columns=["lr", "step_skipped", "scheduler_steps"],
        )


def _by_hand(rows: Rows, lr: Array) -> Mask:
    """Windows after which the script wrote another rate. None where it does so inside of windows: it counts data then."""
    inside = (np.diff(rows["lr"]) != 0) & (np.diff(rows.window_of) == 0)
    if inside.any():
        return np.zeros(len(lr), dtype=np.bool_)
    return np.append(np.diff(lr) != 0, False)


def _room(lr: Array) -> tuple[int, str]:
    """The length against which the drift counts: the warm-up if there is one, else the run."""
    peak = int(np.nanargmax(lr))
    return (peak + 1, "a warm-up") if peak > 0 and lr[0] < 0.9 * lr[peak] else (len(lr), "a run")


RULE = Rule("SCH504", "sched-advance-on-skip", "warning", judge, needs=("lr", "step_skipped", "scheduler_steps"))
