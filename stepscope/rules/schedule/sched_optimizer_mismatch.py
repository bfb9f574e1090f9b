"""The scheduler writes its rates to an optimizer that does not step.

What it does
------------
Looks for schedulers that keep moving while the optimizer they belong to makes no step and another one does, with the
same parameters or, where the scheduler's optimizer never stepped at all, with none of its own that moves.

Why it matters
--------------
The optimizer was built anew after the scheduler, or came back from a checkpoint as another object: the schedule goes
nowhere, and training runs at a constant rate.

What the evidence looks like
----------------------------
Event ``scheduler_of_idle_optimizer``; `lr` of the optimizer that steps is constant.

Fix
---
Build the scheduler after the last ``optimizer = ...``, on the optimizer that steps.

References
----------
ildoonet/pytorch-gradual-warmup-lr#27.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from stepscope.rules.base import Rule
from stepscope.rules.schedule.pace import pace, rates, span
from stepscope.rules.view import Rows, View, finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding


def judge(view: View) -> Iterator[Finding]:
    """Schedulers of idle optimizers beside a stepping optimizer of constant rate."""
    stepping = {(rows.rank, rows.optimizer): rows for rows in view.stepping}
    for event in view.events("scheduler_of_idle_optimizer"):
        rows = _victim(view, stepping, event)
        if rows is not None:
            yield _tell(rows, event)
    for rows in view.stepping:
        if _wrapper_alone(rows):
            yield _tell_wrapper(rows)
    for event in view.events("inner_scheduler_of_other_optimizer"):
        rows = stepping.get((event["rank"], event["detail"]["outer"]))
        after = rows["micro_step"] > event["micro_step"] if rows is not None else None
        if rows is not None and after is not None and after.sum() >= 2 and not span(rows["lr"][after]):
            yield _tell(rows, event)


def _wrapper_alone(rows: Rows) -> bool:
    """The rate of a wrapper moves, and that of the optimizer that makes its steps stays where both began."""
    inside, lr = rows.windows("lr_inside"), rates(rows)
    seen = np.isfinite(inside)
    if seen.sum() < 3 or not seen.all() or not span(lr) or span(inside) or not pace(rows).total:
        return False
    return bool(np.isclose(inside[0], np.nanmax(lr), rtol=1e-6) or np.isclose(inside[0], lr[0], rtol=1e-6))


def _tell_wrapper(rows: Rows) -> Finding:
    inside, lr = rows.windows("lr_inside"), rates(rows)
    return finding(
        RULE.code,
        RULE.name,
        "error",
        f"the schedule takes the rate of {rows.optimizer} from {lr[0]:.4g} to {lr[-1]:.4g}, but its steps are made by an optimizer "
        f"inside of it, whose rate stays at {inside[-1]:.4g}: share the param_groups, or build the scheduler on the inner one",
        rows,
        rows.ends,
        observed=float(inside[-1]),
        expected=float(lr[-1]),
        columns=["lr", "lr_inside"],
    )


def _victim(view: View, stepping: dict[tuple[int, str | None], Rows], event: dict[str, Any]) -> Rows | None:
    """The optimizer that steps in place of the scheduler's own."""
    seen_all = not view.trace.meta.get("chosen_optimizers") or event["optimizer"] is not None
    for other in event["detail"]["others"]:
        rows = stepping.get((event["rank"], other["optimizer"]))
        if rows is None:
            continue
        since = rows["micro_step"] >= event["micro_step"] - other["attempts"]
        idle = event["detail"]["attempts"] == 0 and seen_all and not pace(rows).total
        if (other["shared"] or idle) and not span(rows["lr"][since]):
            return rows
    return None


def _tell(rows: Rows, event: dict[str, Any]) -> Finding:
    detail = event["detail"]
    owner = event["optimizer"] or "an optimizer that never stepped"
    return finding(
        RULE.code,
        RULE.name,
        "error",
        f"{detail['class']} moves the rate of {owner}, but the steps are made by {rows.optimizer}, whose rate stays at "
        f"{float(rows['lr'][-1]):.4g}: build the scheduler on the optimizer that steps",
        rows,
        rows["micro_step"] >= event["micro_step"],
        observed=owner,
        expected=rows.optimizer,
        columns=["lr"],
    )


RULE = Rule("SCH511", "sched-optimizer-mismatch", "error", judge, needs=("lr",))
