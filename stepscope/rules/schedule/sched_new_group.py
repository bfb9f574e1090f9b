"""A parameter group that was added later keeps its rate while the others follow the schedule.

What it does
------------
Looks at groups that came after the optimizer was built: their rate never changes although that of others does.

Why it matters
--------------
The schedule knows the groups that existed when it was built. Layers that are unfrozen later train at a constant rate,
in the end many times that of the rest.

What the evidence looks like
----------------------------
`lr/pg2` begins in the middle of the run and stays the same while `lr` falls.

Fix
---
Build the scheduler after the group was added, or loop over all ``param_groups`` where rates are written by hand.

References
----------
pytorch/pytorch#79888, huggingface/transformers#20029.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.rules.base import Rule
from stepscope.rules.schedule.pace import descriptions, rate_columns, rates, span
from stepscope.rules.view import Rows, View, finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding

_FEWEST = 3
"""Different rates that another group must have had in the new group's time."""


def judge(view: View) -> Iterator[Finding]:
    """Added groups whose rate stands still."""
    for rows in view.stepping:
        columns = rate_columns(rows)
        added = _added(view, rows, columns)
        for column in added:
            here = rows.windows(column)
            living = ~np.isnan(here)
            others = {c: rates(rows, c)[living] for c in columns if c not in added}
            lively = max(others, key=lambda c: len(np.unique(others[c])), default=None)
            if lively is None or living.sum() < _FEWEST or span(here) or len(np.unique(others[lively])) < _FEWEST:
                continue
            values = others[lively]
            yield finding(
                RULE.code,
                RULE.name,
                "warning",
                f"the group behind {column} was added later and stays at {here[living][0]:.4g} for {int(living.sum())} steps while "
                f"{lively} goes from {values[0]:.4g} to {values[-1]:.4g}: the schedule does not know the group",
                rows,
                rows.ends[living],
                observed=float(here[living][0]),
                expected=float(here[living][0] * values[-1] / values[0]) if values[0] else None,
                columns=[lively, column],
            )


def _added(view: View, rows: Rows, columns: list[str]) -> list[str]:
    """Columns of groups that were not there when the optimizer was built, or when it made its first step."""
    starts = [c for c in columns if np.isnan(rows.windows(c)[0]) and not np.isnan(rows.windows(c)[-1])]
    first = descriptions(view, rows, "param_group_added")
    if first and all(d["micro_step"] == 0 for d in first):
        starts += columns[int(first[0]["groups"]) - 1 :]
    return list(dict.fromkeys(starts))


RULE = Rule("SCH507", "sched-new-group", "warning", judge, needs=("lr", "lr/pg2"))
