"""A step that evaluates a closure used gradients that were not those of one evaluation.

What it does
------------
Looks inside steps that evaluate a closure (LBFGS and its like): gradients that add up over evaluations while the weights
move in between, micro-steps before the step that the closure's clearing throws away, and a loss scale that is applied to a
closure's gradients but never taken off.

Why it matters
--------------
A line search that is given the sum of gradients at several points walks off; accumulation outside of the closure is lost;
scaled gradients make the first step as large as the scale.

What the evidence looks like
----------------------------
`closure` is true and `grad_norm_before` is above 0 from the second evaluation on, with `params_moved` true; or
`before_closure` counts micro-steps and the next row finds 0.

Fix
---
Clear gradients at the start of the closure and run the whole window inside it; do not use a GradScaler with a closure.

Known false alarms
------------------
A closure that accumulates several micro-steps at the same weights is right.

References
----------
pfnet/pytorch-pfn-extras#636, NeuroDiffGym/neurodiffeq#159.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.rules.accumulation.windows import Windows, merged, windows_of
from stepscope.rules.base import Rule
from stepscope.rules.view import finding

if TYPE_CHECKING:
    from stepscope.rules.outcome import Finding
    from stepscope.rules.view import Mask, View


def judge(view: View) -> list[Finding]:
    """Steps with a closure whose gradients are not those of one evaluation."""
    refused = [e for e in view.events("scaler_step_failed") if "losure" in str(e["detail"].get("error", ""))]
    found = [f for w in windows_of(view) if len(w) for f in _judge(w)]
    if refused:
        text = f"scaler.step refused the closure of {refused[0]['optimizer']}: {refused[0]['detail']['error']}"
        found.append(finding(RULE.code, RULE.name, "error", f"{text}; train with a closure without a GradScaler"))
    view.need(found or any(w.closure.any() for w in windows_of(view)), "no step evaluated a closure")
    return merged(found)


def _judge(w: Windows) -> list[Finding]:
    scaled = w.closure & (w.rows.windows("step_in_scaler") == 1.0) & (w.rows.windows("loss_scale_before") != 1.0)
    scaled &= np.isfinite(w.rows.windows("loss_scale_before"))
    for wrong, text, observed in (
        (_summed(w), "added up the gradients of several evaluations at different weights", "grad_norm_before"),
        (_outside(w), "threw away the micro-steps before it, which its closure cleared", "before_closure"),
        (scaled, "used the closure's gradients with the loss scale still on them", "loss_scale_before"),
    ):
        if wrong.any():
            return [_finding(w, wrong, text, observed)]
    return []


def _summed(w: Windows) -> Mask:
    """More than half of a step's evaluations began with a gradient of other weights."""
    rows = w.rows
    later = rows["window_step"] > 1
    stale = later & (rows["grad_norm_before"] > 0) & rows.true("params_moved")
    moved = w.rows.per_window((later & rows.true("params_moved")).astype(np.float64))
    return np.asarray(w.closure & (moved > 0) & (w.rows.per_window(stale.astype(np.float64)) > 0.5 * moved))


def _outside(w: Windows) -> Mask:
    """Micro-steps ran before the step, and their gradient was gone at the first evaluation."""
    before = w.rows.windows("before_closure")
    outside = w.closure & (before >= 2)
    first = np.minimum(w.start + np.nan_to_num(before).astype(np.int64), w.end)
    return np.asarray(outside & w.cleared[first])


def _finding(w: Windows, wrong: Mask, text: str, column: str) -> Finding:
    at = np.flatnonzero(wrong)[0]
    seen = w.rows[column][w.start[at] : w.end[at] + 1]
    observed = float(np.nanmax(seen)) if np.isfinite(seen).any() else None
    return finding(
        RULE.code,
        RULE.name,
        "error",
        f"{int(wrong.sum())} of {len(w)} steps with a closure {text}: clear gradients at the start of the closure and run the "
        f"whole window inside it",
        w.rows,
        w.mask(wrong),
        observed=observed,
        expected=1.0 if column == "loss_scale_before" else 0.0,
        columns=["grad_norm_before", "loss", "closure"],
    )


RULE = Rule(
    "CLR204",
    "closure-optimizer",
    "error",
    judge,
    explains=(
        "zero-grad-missing",
        "accum-missing-divide",
        "accum-tail-dropped",
        "scaler-bypassed",
        "clip-per-microbatch",
    ),
)
