"""Loading a checkpoint made the optimizer step, and moved the weights.

What it does
------------
Looks for optimizer steps without any backward before the first one of the run that changed parameters, after the
weights were loaded.

Why it matters
--------------
Helpers create lazy optimizer state by one step with zero gradients. With weight decay (or momentum, or Adam's moments)
that moves the freshly loaded weights; done before the weights are loaded, or at rate 0, it is harmless.

What the evidence looks like
----------------------------
Event ``parameters_stepped_without_backward`` with an ``update_norm`` above 0 at micro-step 0; the parameters in
``started`` are not those of ``saved``.

Fix
---
Create the state before loading the weights, or with the rate and the decay at 0.

References
----------
pytorch/pytorch#125708.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from stepscope.rules.base import Rule, Skip
from stepscope.rules.resume.continuation import continuations
from stepscope.rules.view import Array, Rows, View, finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding


def judge(view: View) -> Iterator[Finding]:
    """Steps while loading that left their mark."""
    intact = _intact(view)
    order = [e for e in view.events("parameters_stepped_without_backward", "module_loaded") if e["micro_step"] == 0]
    loaded = [e["seq"] for e in order if e["event"] == "module_loaded"]
    for rows in view.stepping:
        steps = [e for e in order if e["event"] != "module_loaded" and e["optimizer"] == rows.optimizer]
        late = [float(e["detail"]["update_norm"]) for e in steps if _late(e, loaded, view)]
        if (rows.rank, rows.optimizer) in intact:
            late = []
        empty = _on_nothing(rows) if loaded or view.after is not None else np.zeros(0)
        moved = [norm for norm in (*late, *empty) if norm > 0]
        if not moved:
            continue
        change = sum(moved)
        yield finding(
            RULE.code,
            RULE.name,
            "error",
            f"{len(moved)} optimizer step{'s' * (len(moved) > 1)} without a gradient changed the loaded weights by {change:.3g} (L2) "
            "before the first batch: create the optimizer's state before loading, or at rate 0",
            rows,
            rows.ends[:1],
            observed=change,
            expected=0.0,
            columns=["param_norm", "update_norm"],
        )


def _on_nothing(rows: Rows) -> Array:
    """Change of the parameters in each of the steps that come before the first gradient other than zero."""
    nothing = rows.windows("grad_norm") == 0.0
    leading = np.logical_and.accumulate(nothing)
    return np.nan_to_num(rows.windows("update_norm")[leading])


def _late(step: dict[str, Any], loaded: list[int], view: View) -> bool:
    """After the last load of weights; loads that were not seen are judged by the parameters themselves."""
    return step["seq"] > loaded[-1] if loaded else view.after is not None


def _intact(view: View) -> set[tuple[int, str | None]]:
    """Optimizers whose parameters are bit for bit those of a save."""
    if view.after is None:
        return set()
    try:
        return {(r.rows.rank, r.rows.optimizer) for r in continuations(view) if r.saved and not r.changed}
    except Skip:
        return set()


RULE = Rule(
    "RES605",
    "resume-load-steps-optimizer",
    "error",
    judge,
    explains=("resume-optim-state-lost", "resume-optim-state-mismatch", "resume-sched-not-restored"),
)
