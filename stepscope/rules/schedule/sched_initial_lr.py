"""The first step used the rate of the wrong scheduler.

What it does
------------
Compares the rate of the first step with what the scheduler that is stepped first had written when it was built, and with
the warm-up that follows: a first rate above the second, where the rates then rise, belongs to no warm-up.

Why it matters
--------------
Every scheduler writes a rate when it is built, and the last one built wins. Where that is not the one that is active
first, the first update is made at the full rate, before any warm-up, while Adam's moments are still empty.

What the evidence looks like
----------------------------
`lr` of the first step is several times that of the second, and the following ones rise.

Fix
---
Build the scheduler that is active first last, or combine them in one SequentialLR.

Known false alarms
------------------
None known: schedulers that are stepped together (chained by design) are left alone.

References
----------
pytorch/pytorch#185872, threestudio-project/threestudio#226.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.rules.base import Rule
from stepscope.rules.schedule.pace import descriptions, moving, rate_columns, rates, resumes
from stepscope.rules.view import Array, Rows, View, finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding


def judge(view: View) -> Iterator[Finding]:
    """First rates that are out of line."""
    for rows in view.stepping:
        if resumes(view, rows) or len(rows.ends) < 2:
            continue
        groups = [rates(rows, c) for c in rate_columns(rows)]
        overwritten = _overwritten(view, rows)
        spiked = [g for g in groups if _spike(g)]
        if overwritten is not None and not np.isclose(overwritten[0], groups[0][0], rtol=1e-6):
            yield _tell(rows, groups[0], *overwritten)
        elif spiked:
            before = float(2 * spiked[0][1] - spiked[0][2])
            yield _tell(rows, spiked[0], max(before, 0.0), "the warm-up that follows")


def _tell(rows: Rows, lr: Array, expected: float, source: str) -> Finding:
    return finding(
        RULE.code,
        RULE.name,
        "warning",
        f"the first step used a rate of {lr[0]:.4g}; {source} says {expected:.4g} (the next steps: "
        f"{', '.join(f'{v:.4g}' for v in lr[1:4])}); build the scheduler that is active first last",
        rows,
        rows.ends[:1],
        observed=float(lr[0]),
        expected=expected,
        columns=["lr"],
    )


def _spike(lr: Array) -> bool:
    """A first rate well above the second, with at least three rising ones after it."""
    return len(lr) >= 4 and bool(lr[0] > 1.5 * lr[1] and (np.diff(lr[1:4]) > 0).all() and lr[1] >= 0)


def _overwritten(view: View, rows: Rows) -> tuple[float, str] | None:
    """The rate that the scheduler stepped first had written, where another one wrote over it before the first step."""
    stepped = [d for d in moving(view, rows) if d["micro_step"] > 0]
    first = [d for d in stepped if d["micro_step"] == stepped[0]["micro_step"]]
    built = [d for d in descriptions(view, rows, "scheduler_built") if d["micro_step"] == 0]
    own = next((n for n, d in enumerate(built) if first and d["number"] == first[0]["number"]), None)
    if own is None or len(first) != 1 or first[0]["micro_step"] > rows["micro_step"][rows.ends[0]]:
        return None
    others = [d for d in built[own + 1 :] if d["lr"] != d["lr_before"] and built[own]["number"] not in d["nested"]]
    if not others or not isinstance(built[own]["lr"][0], int | float):
        return None
    return float(
        built[own]["lr"][0]
    ), f"{built[own]['class']}, which is stepped first and over which {others[-1]['class']} wrote,"


RULE = Rule("SCH505", "sched-initial-lr", "warning", judge, needs=("lr",))
