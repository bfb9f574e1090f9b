"""Frozen parameters are still changed by the optimizer's step.

What it does
------------
Looks at each step for parameters that do not require a gradient, got none in this window (theirs is absent, zero, or
left from before they were frozen) and change all the same. With ``--declare frozen=PATTERN`` the parameters of that name
must not change at all, whatever their flags say.

Why it matters
--------------
Momentum, Adam's moments and weight decay move a parameter for as long as the optimizer finds a gradient tensor there,
even one full of zeros. The frozen part drifts away from its pretrained values.

What the evidence looks like
----------------------------
`frozen_moved` counts such parameters in each step and `frozen_update_norm` gives the size of their change; the table of
parameters names them.

Fix
---
Set ``p.grad = None`` when freezing (``zero_grad(set_to_none=True)`` is the default), or take the parameters out of the
optimizer. Freeze again after code that switches ``requires_grad`` back.

Known false alarms
------------------
Tensors of no model that get their gradient by hand (master copies) are not counted. Averages and momentum encoders move
outside of the step.

References
----------
KellerJordan/Muon#54, iamwangyabin/S-Prompts#2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from stepscope.patterns import names_match
from stepscope.rules.base import Rule
from stepscope.rules.parameters.census import few
from stepscope.rules.view import finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding
    from stepscope.rules.view import Rows, View


def judge(view: View) -> Iterator[Finding]:
    """By the flags of each optimizer's parameters; by declaration where there is one."""
    for rows in view.stepping:
        if rows.rank == view.optimizers[0].rank:
            yield from _by_flag(view, rows)
    if view.declared.get("frozen"):
        yield from _declared(view, str(view.declared["frozen"]))


def _by_flag(view: View, rows: Rows) -> Iterator[Finding]:
    moved = rows["frozen_moved"] > 0
    if not moved.any():
        return
    names = _names(view, rows)
    size = float(np.nanmax(rows["frozen_update_norm"][moved]))
    most = int(np.nanmax(rows["frozen_moved"][moved]))
    yield finding(
        RULE.code,
        RULE.name,
        "error",
        f"{int(moved.sum())} steps of {rows.optimizer} changed up to {most} parameters with requires_grad False, by as much as {size:.3g} "
        f"in norm ({few(names)}): the optimizer still finds a gradient tensor or applies decay; set their .grad to None, or "
        "take them out of the optimizer",
        rows,
        moved,
        observed=size,
        expected=0.0,
        columns=["frozen_moved", "frozen_update_norm"],
        params=names,
    )


def _names(view: View, rows: Rows) -> list[str]:
    """Parameters that the table names as moved although frozen."""
    column: dict[str, Any] = {
        c: view.trace.values(c, table="params") for c in ("param", "frozen_moved", "optimizer", "rank")
    }
    chosen = (column["frozen_moved"] == 1.0) & (column["optimizer"] == rows.optimizer) & (column["rank"] == rows.rank)
    return list(dict.fromkeys(column["param"][chosen]))


def _declared(view: View, pattern: str) -> Iterator[Finding]:
    """Parameters of the declared names that changed: in a step, or outside of one."""
    table = {c: view.trace.values(c, table="params") for c in ("param", "update_norm", "micro_step")}
    known = {name: names_match(name, pattern) for name in set(table["param"])}
    hit = np.array([known[name] for name in table["param"]], dtype=bool) & (table["update_norm"] > 0)
    names = dict.fromkeys(table["param"][hit])
    for event in view.events("parameters"):
        names |= dict.fromkeys(p["param"] for p in event["detail"].get("declared_frozen", []) if p["moved"])
    if not names:
        return
    steps = sorted({int(m) for m in table["micro_step"][hit]})
    yield finding(
        RULE.code,
        RULE.name,
        "error",
        f"{len(names)} parameters that are declared frozen ({pattern}) changed: {few(names)}; keep them out of the optimizer and their "
        ".grad None, and freeze them after code that sets requires_grad",
        observed="changed",
        expected="bitwise constant",
        params=list(names),
        micro_steps=steps[:50],
    )


RULE = Rule("PAR702", "frozen-still-updated", "error", judge, explains=("zero-grad-missing",))
