"""The gradient is too large or too small by the number of processes.

What it does
------------
Works out by which factor each step's gradient is the mean over the targets of all processes: the weights with which the
losses enter backward, averaged over the processes, times what was done to the gradient until the step. It should be 1; here
it is the number of processes, or, for a summed loss, one over it.

Why it matters
--------------
DDP averages over processes. A mean loss multiplied by the world size gives a gradient that grows with the number of
processes; a summed loss divided by the global count needs exactly that factor. By hand, a sum must be divided once.

What the evidence looks like
----------------------------
`loss_weight_sum` equal to the world size in every process, with gradients that are the same everywhere; or `reduced_norm`
that reaches the step undivided.

Fix
---
Leave a locally averaged loss as it is under DDP. Multiply by the world size only what is divided by a global count.

Known false alarms
------------------
None known: a sum times the world size over a global count has the factor 1. A window as long as there are processes
makes this fault look like a forgotten division by the window; then only the latter is reported.

References
----------
NVIDIA-NeMo/Automodel#3830, neuralmagic/sparseml#135.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.rules.base import Rule
from stepscope.rules.ranks.aligned import aligned
from stepscope.rules.ranks.averaging import TOLERANCE, ambiguous, exceeds_every_mean, factor, untouched
from stepscope.rules.view import finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding
    from stepscope.rules.ranks.aligned import Aligned
    from stepscope.rules.view import Mask, View


def judge(view: View) -> Iterator[Finding]:
    """One finding for each optimizer."""
    for steps in aligned(view):
        found = factor(steps)
        many = np.abs(found / steps.world - 1.0) < TOLERANCE
        few = (np.abs(found * steps.world - 1.0) < TOLERANCE) & summed(steps)
        if _usual(many, found) and not (ambiguous(steps) and untouched(steps)):
            yield _finding(
                steps,
                many,
                float(steps.world),
                "do not multiply a mean by the number of processes, or divide a sum over them",
            )
        elif _usual(few, found):
            yield _finding(
                steps,
                few,
                1.0 / steps.world,
                "multiply a sum over a global count by the number of processes: DDP divides by it",
            )
        elif (over := exceeds_every_mean(steps)).sum() >= max(2, 0.5 * len(steps)):
            yield _finding(steps, over, float(steps.world), "divide the sum over processes by their number")


def _usual(which: Mask, known: np.ndarray) -> bool:
    return int(which.sum()) >= 2 and which.sum() >= 0.8 * np.isfinite(known).sum()


def summed(steps: Aligned) -> bool:
    """Whether the loss is a sum over its targets."""
    return any("sum" in set(rows["loss_reduction"]) for rows in steps.rows)


def _finding(steps: Aligned, where: Mask, seen: float, advice: str) -> Finding:
    return finding(
        RULE.code,
        RULE.name,
        "error",
        f"at {int(where.sum())} of {len(steps)} steps of {steps.label} the gradient is {seen:g} times the mean over the {steps.world} "
        f"processes' targets; {advice}",
        steps.rows[0],
        steps.ends[0][where],
        observed=seen,
        expected=1.0,
        columns=["loss_weight_sum", "grad_norm", "grad_norm_clipped"],
    )


RULE = Rule(
    "DST803",
    "ddp-world-factor",
    "error",
    judge,
    needs=("loss_weight", "grad_norm_clipped"),
    explains=("accum-missing-divide", "accum-double-divide", "accum-denominator-wrong"),
    channel="ranks",
)
