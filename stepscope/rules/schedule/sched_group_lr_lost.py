"""Parameter groups were built with different rates, and a schedule made them all alike.

What it does
------------
Compares the groups' rates when the optimizer was built, or just before a scheduler was built, with those of the steps.

Why it matters
--------------
One scalar maximum overwrites every group's rate: the backbone that was to be fine-tuned gently gets the rate of the
fresh head.

What the evidence looks like
----------------------------
Different rates at construction; `lr` and `lr/pg2` equal at every step.

Fix
---
Give the scheduler a list with one maximum per group: ``max_lr=[g["lr"] for g in optimizer.param_groups]``; by hand,
multiply each group's own base rate.

References
----------
shariqfarooq123/AdaBins#44.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from stepscope.rules.base import Rule
from stepscope.rules.schedule.pace import descriptions, rate_columns, rates, resumes
from stepscope.rules.view import Rows, View, finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding


def judge(view: View) -> Iterator[Finding]:
    """Groups whose rates differed once and are equal at every step."""
    for rows in view.stepping:
        columns = rate_columns(rows)
        if len(columns) < 2 or resumes(view, rows):
            continue
        used = np.stack([rates(rows, c) for c in columns])
        before, source = _before(view, rows)
        pair = _unequal(before[: len(columns)])
        if pair is None or not np.isclose(used[pair[0]], used[pair[1]], rtol=1e-9, atol=0.0).all():
            continue
        if not np.nanmax(np.abs(used[list(pair)])):
            continue
        low, high = (before[i] for i in pair)
        yield finding(
            RULE.code,
            RULE.name,
            "warning",
            f"groups {pair[0] + 1} and {pair[1] + 1} had rates {low:.4g} and {high:.4g}, but {source} made them equal: both have "
            f"{used[pair[0]][0]:.4g} at the first of {used.shape[1]} steps and stay equal; give it one rate per group",
            rows,
            rows.ends,
            observed=1.0,
            expected=max(low, high) / max(min(low, high), 1e-300),
            columns=[columns[i] for i in pair],
        )


def _before(view: View, rows: Rows) -> tuple[list[Any], str]:
    """The groups' rates before a schedule touched them, and what touched them."""
    for built in descriptions(view, rows, "scheduler_built"):
        if built["micro_step"] == 0 and _unequal(built["lr_before"]) and not _unequal(built["lr"]):
            return built["lr_before"], f"the constructor of {built['class']}"
    for built in descriptions(view, rows, "optimizer_built"):
        return [g.get("lr") for g in built["groups"]], "the schedule"
    return [], ""


def _unequal(values: list[Any]) -> tuple[int, int] | None:
    """The places of the least and the greatest rate, None where all are alike or not plain numbers."""
    if len(values) < 2 or not all(isinstance(v, int | float) for v in values):
        return None
    low, high = int(np.argmin(values)), int(np.argmax(values))
    return (low, high) if values[high] > values[low] * (1 + 1e-6) else None


RULE = Rule("SCH508", "sched-group-lr-lost", "warning", judge, needs=("lr", "lr/pg2"))
