"""The optimizer was built anew in the middle of the run, and its state started over.

What it does
------------
Follows parameters from one optimizer to the next: a later one of the same class that holds the same tensors, starts with
an empty state, and goes on where the earlier one stopped.

Why it matters
--------------
Adam's moments and bias correction restart, so that the first updates after each restart have about the full rate in
every element; momentum is lost.

What the evidence looks like
----------------------------
Several optimizers in the column `optimizer`, one after the other, each with `optimizer_state_step` 0 at its first step,
and ``taken_over`` in the event ``started``.

Fix
---
Build the optimizer once, outside of the loop over epochs, and pass it on.

Known false alarms
------------------
A new phase of training that starts a new optimizer on the same parameters once: that is a notice.

References
----------
alan-turing-institute/deepsensor#47.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from stepscope.rules.base import Rule
from stepscope.rules.view import Rows, View, finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding


def judge(view: View) -> Iterator[Finding]:
    """Chains of optimizers on the same parameters."""
    stepping = {(r.rank, r.optimizer): r for r in view.stepping}
    restarts: list[tuple[Rows, Rows]] = []
    resets = [(e["rank"], e["micro_step"]) for e in view.events("module_loaded") if e["micro_step"] > 0]
    for event in view.events("started"):
        for label, taken in event["detail"].get("taken_over", {}).items():
            old, new = stepping.get((event["rank"], label)), stepping.get((event["rank"], event["optimizer"]))
            if old is not None and new is not None and _restarts(old, new, event["detail"], taken, resets):
                restarts.append((old, new))
    if not restarts:
        return
    first = restarts[0][1]
    steps = [int(new["micro_step"][0]) for _, new in restarts]
    times = f"{len(restarts)} times, first" if len(restarts) > 1 else "once,"
    yield finding(
        RULE.code,
        RULE.name,
        "warning" if len(restarts) > 1 else "notice",
        f"the optimizer was built anew on the same parameters {times} at micro-step {steps[0]}, and its state started over from "
        f"empty ({restarts[0][0].optimizer} had made {len(restarts[0][0].ends)} steps): build it once and pass it on",
        first,
        np.array([0]),
        observed=len(restarts) + 1,
        expected=1,
        micro_steps=steps[:50],
        count=len(steps),
        columns=["optimizer_state_step", "update_norm"],
    )


def _restarts(
    old: Rows, new: Rows, started: dict[str, Any], taken: dict[str, Any], resets: list[tuple[int, int]]
) -> bool:
    """Whether `new` goes on with the parameters of `old`, whose state is lost."""
    last, begin = int(old["micro_step"][-1]), int(new["micro_step"][0])
    held = sum(g["params"] for g in started["hyper"])
    same_class = str(old.optimizer).split("/")[0] == str(new.optimizer).split("/")[0]
    empty = not any(started.get("state", {}).values()) and not started["state_loaded"]
    reset = any(rank == old.rank and last <= at < begin for rank, at in resets)
    in_turn = same_class and taken["stateful"] and taken["params"] == held and last < begin
    return in_turn and empty and not reset and _moved_on(old, new) and _same_weights(old, started)


def _moved_on(old: Rows, new: Rows) -> bool:
    """Whether the weights are where the old optimizer left them: a norm further off than its last update means new weights."""
    before, change = old.windows("param_norm")[-1], old.windows("update_norm")[-1]
    after = new.windows("param_norm")[0]
    return bool(np.isnan([before, change, after]).any() or abs(after - before) <= change * 1.001 + 1e-6 * before)


def _same_weights(old: Rows, started: dict[str, Any]) -> bool:
    """The same for each parameter by itself, where the last update of the old optimizer was recorded by parameter."""
    columns = ("micro_step", "param_norm", "update_norm", "optimizer", "param")
    table = {n: old.trace.values(n, table="params") for n in columns}
    last = (table["optimizer"] == old.optimizer) & (table["micro_step"] == old["micro_step"][old.ends[-1]])
    after = np.array([float(started.get("norms", {}).get(n, np.nan)) for n in table["param"][last]])
    before, change = table["param_norm"][last], table["update_norm"][last]
    apart = np.abs(after - before) > change * 1.001 + 1e-6 * np.abs(before)
    return not apart[~np.isnan(after + before + change)].any()


RULE = Rule("RES609", "optimizer-recreated", "warning", judge)
