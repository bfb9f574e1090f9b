"""Gradients are divided by the number of processes twice.

What it does
------------
Works out by which factor each step's gradient is the mean over the targets of all processes (see `ddp-world-factor`), and
finds one over the number of processes: DDP has averaged, and the loss or the gradient is divided again.

Why it matters
--------------
Every step is as small as the number of processes is large. Adam hides it, clipping and SGD do not.

What the evidence looks like
----------------------------
Gradients that are the same in all processes when backward ends, and `grad_norm_clipped` that is `grad_norm` over the world
size; or `loss_weight_sum` of one over the world size.

Fix
---
Remove the division: DDP averages during backward. Where gradients are summed by hand, divide once.

Known false alarms
------------------
A division of accumulated gradients by the window is taken into account. A window as long as there are processes, with
losses divided too often, may be either fault.

References
----------
kubeflow/pytorch-operator#122.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.rules.base import Rule
from stepscope.rules.ranks.aligned import aligned
from stepscope.rules.ranks.averaging import TOLERANCE, factor
from stepscope.rules.ranks.ddp_world_factor import summed
from stepscope.rules.view import finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding
    from stepscope.rules.view import View


def judge(view: View) -> Iterator[Finding]:
    """One finding for each optimizer."""
    for steps in aligned(view):
        found = factor(steps)
        wrong = np.abs(found * steps.world - 1.0) < TOLERANCE
        if int(wrong.sum()) < 2 or wrong.sum() < 0.8 * np.isfinite(found).sum() or summed(steps):
            continue
        yield finding(
            RULE.code,
            RULE.name,
            "error",
            f"at {int(wrong.sum())} of {len(steps)} steps of {steps.label} the gradient is 1/{steps.world} of the mean over the processes: "
            "it was averaged and then divided by their number again; divide once",
            steps.rows[0],
            steps.ends[0][wrong],
            observed=1.0 / steps.world,
            expected=1.0,
            columns=["loss_weight_sum", "grad_norm", "grad_norm_clipped"],
        )


RULE = Rule(
    "DST804",
    "ddp-double-average",
    "error",
    judge,
    needs=("loss_weight", "grad_norm_clipped"),
    explains=("accum-double-divide", "accum-denominator-wrong"),
    channel="ranks",
)
