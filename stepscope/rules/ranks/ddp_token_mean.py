"""Each process takes the mean over its own targets, and the processes are averaged then.

What it does
------------
Compares the weight of one target between processes, at steps whose gradient was reduced: it is the same in all of them only
if all divide by the same count.

Why it matters
--------------
A mean of means is not the mean: a target in a process with few of them weighs more. With padded sequences the counts
differ at every step, and the gradient depends on how the data happened to be dealt out.

What the evidence looks like
----------------------------
`target_weight` differs between processes within a step, as `num_items` does; the ratio of the largest to the smallest is
the unfairness.

Fix
---
Sum the losses, divide by the number of targets of all processes (``all_reduce`` of the count), and multiply by the number
of processes, since DDP will divide by it.

Known false alarms
------------------
A smaller last batch in one process gives a few such steps; below three in ten they are not reported.

References
----------
vllm-project/speculators#942, PrimeIntellect-ai/prime-rl#2562.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.rules.base import Rule
from stepscope.rules.ranks.aligned import aligned
from stepscope.rules.view import finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding
    from stepscope.rules.view import View

_UNEQUAL = 1.01
"""Ratio of target weights from which they count as unequal."""

_OFTEN = 0.3
"""Share of steps from which it is no matter of a last batch."""


def judge(view: View) -> Iterator[Finding]:
    """One finding for each optimizer."""
    for steps in aligned(view):
        weights = [np.where(r.seen("target_weight"), np.abs(r["target_weight"]), np.nan) for r in steps.rows]
        largest = steps.over_window(weights, "max").max(axis=0)
        smallest = steps.over_window(weights, "min").min(axis=0)
        reduced = ~steps.differs("grad_norm_clipped")
        reduced &= steps.true("ddp_sync") | (steps.at("all_reduce_calls") > 0).all(axis=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            spread = largest / smallest
        wrong = reduced & np.isfinite(spread) & (spread > _UNEQUAL)
        if int(wrong.sum()) < max(2.0, _OFTEN * len(steps)):
            continue
        worst = int(np.argmax(np.where(wrong, spread, 0.0)))
        counts = steps.over_window([np.nan_to_num(r["num_items"]) for r in steps.rows])[:, worst]
        yield finding(
            RULE.code,
            RULE.name,
            "warning",
            f"{int(wrong.sum())} of {len(steps)} steps of {steps.label} averaged over processes that each divide by their own number of "
            f"targets ({', '.join(f'{c:.0f}' for c in counts[:4])} at the worst): a target weighs up to {spread[worst]:.3g} times as much in "
            "one as in another; divide the summed loss by the number of targets in all processes",
            steps.rows[0],
            steps.ends[0][wrong],
            observed=float(spread[worst]),
            expected=1.0,
            columns=["target_weight", "num_items"],
        )


RULE = Rule("DST802", "ddp-token-mean", "warning", judge, needs=("target_weight", "grad_norm_clipped"), channel="ranks")
