"""The script asked ``get_lr()`` for a rate and got that of a further step.

What it does
------------
Notes calls of a scheduler's ``get_lr()`` outside of its step whose answer differs from the rate in ``param_groups``.

Why it matters
--------------
Training is right, the log is not: for recursive schedules ``get_lr`` computes the next rate, so the decay appears to be
applied twice at a milestone.

What the evidence looks like
----------------------------
Events ``rate_of_a_further_step`` with what was returned and what the groups held.

Fix
---
Log ``scheduler.get_last_lr()`` or ``optimizer.param_groups[i]["lr"]`` where the step is made.

References
----------
pytorch/pytorch#22107.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.rules.base import Rule
from stepscope.rules.schedule.pace import descriptions
from stepscope.rules.view import View, finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding


def judge(view: View) -> Iterator[Finding]:
    """One notice for each optimizer whose rates were asked for in the wrong way."""
    for rows in view.stepping:
        wrong = [d for d in descriptions(view, rows, "rate_of_a_further_step") if not _alike(d["returned"], d["held"])]
        if not wrong:
            continue
        first = wrong[0]
        yield finding(
            RULE.code,
            RULE.name,
            "notice",
            f"get_lr() of {first['scheduler']} was called outside of its step {len(wrong)} times and returned "
            f"{first['returned'][0]:.4g} where the steps use {first['held'][0]:.4g}; log get_last_lr() instead",
            rows,
            np.isin(rows["micro_step"], [d["micro_step"] + 1 for d in wrong]),
            observed=first["returned"][0],
            expected=first["held"][0],
            columns=["lr"],
        )


def _alike(returned: list[float], held: list[float]) -> bool:
    return not returned or len(returned) != len(held) or bool(np.allclose(returned, held, rtol=1e-9, atol=0.0))


RULE = Rule("SCH512", "sched-lr-log-wrong", "notice", judge)
