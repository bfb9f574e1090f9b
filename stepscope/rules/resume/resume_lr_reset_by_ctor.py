"""A scheduler built after the optimizer was loaded wrote its first rate over the restored one.

What it does
------------
Follows the rates before the first step: as the optimizer's ``load_state_dict`` left them, as each scheduler's
constructor left them, and as the first step used them.

Why it matters
--------------
Constructors write base rate times factor(0). Loading the scheduler's state afterwards does not write the rate back, so
that at least the first step runs at the rate of the very beginning; setting ``last_epoch`` by hand repairs nothing.

What the evidence looks like
----------------------------
Event ``optimizer_loaded`` with one rate, ``scheduler_built`` with ``lr_before`` equal to it and another ``lr``, and
`lr` of the first step equal to the latter.

Fix
---
Build optimizer and scheduler first, then load both.

Known false alarms
------------------
A new schedule on purpose, for a second phase with the old optimizer state.

References
----------
torch-points3d/torch-points3d#630, ultralytics/yolov5#292.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from stepscope.rules.base import Rule
from stepscope.rules.schedule.pace import brings_state, descriptions, rate_columns
from stepscope.rules.view import View, finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding


def judge(view: View) -> Iterator[Finding]:
    """First steps at a rate that a constructor wrote over a loaded one."""
    for rows in view.stepping:
        events = descriptions(view, rows, "optimizer_loaded", "scheduler_built")
        written = _written([e for e in events if e["micro_step"] == 0])
        if written is None:
            continue
        restored, given, scheduler = written
        used = np.array([rows.windows(c)[0] for c in rate_columns(rows)])
        size = min(len(used), len(restored), len(given))
        changed = ~np.isclose(restored[:size], given[:size], rtol=1e-9, atol=0.0)
        wrong = changed & np.isclose(used[:size], given[:size], rtol=1e-9, atol=0.0)
        if not wrong.any():
            continue
        at = int(np.flatnonzero(wrong)[0])
        yield finding(
            RULE.code,
            RULE.name,
            "error",
            f"the optimizer was loaded with a rate of {restored[at]:.4g}, then the constructor of {scheduler} wrote {given[at]:.4g}, and "
            "the first step used that: build the scheduler before loading",
            rows,
            rows.ends[:1],
            observed=float(used[at]),
            expected=float(restored[at]),
            columns=[rate_columns(rows)[at]],
        )


def _written(events: list[dict[str, Any]]) -> tuple[list[float], list[float], str] | None:
    """The rates of the last load, and those that constructors after it left; None where nothing came after.

    A constructor that was told a position (``last_epoch``) means to go on from there: if it is a wrong one, the schedule
    was not restored.
    """
    restored: list[float] | None = None
    given: list[float] | None = None
    scheduler = ""
    for event in events:
        if event["event"] == "optimizer_loaded":
            restored, given = (event["lr"], None) if brings_state(event) else (restored, given)
        elif restored is not None and event["lr"] != event["lr_before"]:
            told = (event["settings"].get("last_epoch") or 0) > 0
            given, scheduler = None if told else event["lr"], event["class"]
    return (restored, given, scheduler) if restored is not None and given is not None else None


RULE = Rule("RES607", "resume-lr-reset-by-ctor", "error", judge, needs=("lr",), explains=("resume-sched-not-restored",))
