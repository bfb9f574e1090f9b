"""The warm-up starts at rate zero, or jumps where the next phase takes over.

What it does
------------
Looks for an executed step at rate exactly 0, with a gradient, at the start of a rising rate; and for one step at the end
of the warm-up whose rate stands out from those before and after it.

Why it matters
--------------
Little: the first batch changes no weight (moments do move), or one step uses a rate that the decay has already left.
Many published schedules do it, hence a notice.

What the evidence looks like
----------------------------
`lr` is 0 and `grad_norm` is not at the first step, and `update_norm` is 0.

Fix
---
Use ``(step + 1) / warmup``; or accept it.

References
----------
ildoonet/pytorch-gradual-warmup-lr#11, verl-project/verl#3674.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.rules.base import Rule
from stepscope.rules.schedule.pace import rate_columns, rates, resumes
from stepscope.rules.view import Array, View, finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding


def judge(view: View) -> Iterator[Finding]:
    """First steps at rate 0, and jumps at the hand-over."""
    for rows in view.stepping:
        if resumes(view, rows) or len(rows.ends) < 4:
            continue
        highest = np.nanmax(np.stack([rates(rows, c) for c in rate_columns(rows)]), axis=0)
        applied = np.flatnonzero(rows.windows("step_skipped") != 1.0)
        if len(applied) < 3:
            continue
        first, used = int(applied[0]), highest[applied]
        if used[0] == 0.0 and (np.diff(used[:3]) > 0).all() and rows.windows("grad_norm")[first] != 0.0:
            text = (
                f"the first step ran at rate 0 and changed no weight; the warm-up goes on with {used[1]:.4g}, {used[2]:.4g}: it "
                "starts one step early, as many schedules do"
            )
            yield finding(
                RULE.code, RULE.name, "notice", text, rows, rows.ends[[first]],
                observed=0.0, expected=float(used[1]), columns=["lr", "update_norm"],
            )  # fmt: skip
        jump = _jump(highest)
        if jump:
            text = (
                f"step {jump + 1}, the last of the warm-up, ran at {highest[jump]:.4g}, between {highest[jump - 1]:.4g} and "
                f"{highest[jump + 1]:.4g}: the rate jumps where the next phase takes over"
            )
            yield finding(
                RULE.code, RULE.name, "notice", text, rows, rows.ends[[jump]],
                observed=float(highest[jump]), expected=float(highest[jump + 1]), columns=["lr"],
            )  # fmt: skip


def _jump(lr: Array) -> int:
    """The place of a peak after a rise whose fall is out of proportion to the falls after it; 0 if there is none."""
    peak = int(np.nanargmax(lr))
    after = lr[peak + 1 : peak + 6]
    if peak < 2 or len(after) < 4 or not (np.diff(lr[: peak + 1]) > 0).all():
        return 0
    falls = -np.diff(after)
    fall = lr[peak] - after[0]
    return peak if (falls > 0).all() and fall > 5 * falls.max() and fall > 0.05 * lr[peak] else 0


RULE = Rule("SCH506", "warmup-off-by-one", "notice", judge, needs=("lr",))
