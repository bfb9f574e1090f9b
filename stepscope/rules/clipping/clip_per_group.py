"""Parts of one optimizer's gradient were clipped separately.

What it does
------------
Looks for several clips before one step, each on other tensors of the same optimizer.

Why it matters
--------------
Each part is limited on its own, so parts change their size relative to each other and the whole is bounded by the square
root of their number times the limit. Some recipes want that; a loop over ``param_groups`` often does it by accident.

What the evidence looks like
----------------------------
`clip_calls` above 1 with `clip_overlap` false, and `grad_norm_clipped` above the limit.

Fix
---
Clip all parameters in one call, or leave it if the recipe asks for a limit for each part.

References
----------
huggingface/transformers#614, nvidia-cosmos/cosmos-rl#120.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.rules.accumulation.windows import merged
from stepscope.rules.base import Rule
from stepscope.rules.clipping.gradients import executed
from stepscope.rules.view import View, finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding


def judge(view: View) -> Iterator[Finding]:
    """Steps after several clips on disjoint parts, with a limit."""
    found = []
    for rows in view.stepping:
        parts = rows["clip_calls"] - rows["clip_late"]
        limit = np.where(np.isfinite(rows["clip_max_norm"]), rows["clip_max_norm"], np.nan)
        several = executed(rows) & (parts > 1) & ~rows.true("clip_overlap") & np.isfinite(limit)
        if not several.any() or not (several & rows.true("clip_bound")).any():
            continue
        at = int(np.flatnonzero(several)[0])
        used, count = rows["grad_norm_clipped"], int(parts[at])
        over = int((several & (used > limit * 1.001)).sum())
        found.append(
            finding(
                RULE.code,
                RULE.name,
                "notice",
                f"{int(several.sum())} steps used a gradient whose {count} parts were each clipped to {float(limit[at]):g}: "
                f"the whole had norm {float(np.nanmax(used[several])):.4g} at most, {over} times above the limit; clip all "
                "parameters in one call unless a limit for each part is meant",
                rows,
                several,
                observed=count,
                expected=1,
                columns=["clip_calls", "grad_norm_clipped", "clip_max_norm"],
            )
        )
    yield from merged(found)


RULE = Rule("CLP306", "clip-per-group", "notice", judge, needs=("clip_calls", "clip_max_norm"))
