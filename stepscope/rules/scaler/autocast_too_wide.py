"""Backward, or the step, ran inside the autocast region.

What it does
------------
Looks whether autocast was enabled when backward and the optimizer's step were called.

Why it matters
--------------
Backward needs no autocast: each operation runs in the dtype of its forward. Inside the region, what backward computes
anew, such as the gradient of a part that was kept in float32 on purpose, is cast down too, and casts of weights stay
alive across the step.

What the evidence looks like
----------------------------
`autocast_backward` or `autocast_step` is true.

Fix
---
Let the region cover the forward and the loss only.

Known false alarms
------------------
Frameworks that run a whole training step in one region: the effect is small, and real.

References
----------
pytorch/pytorch#120376.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.rules.accumulation.windows import merged
from stepscope.rules.base import Rule
from stepscope.rules.view import View, finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding, Severity


def judge(view: View) -> Iterator[Finding]:
    """Micro-steps whose backward or step saw autocast."""
    found = []
    for rows in view.stepping:
        backward, step = rows.true("autocast_backward"), rows.true("autocast_step")
        wrong = backward | step
        if not wrong.any():
            continue
        dtype = rows["autocast_dtype"][int(np.flatnonzero(wrong)[0])] or "half precision"
        severity: Severity = "warning" if backward.any() else "notice"
        found.append(
            finding(
                RULE.code,
                RULE.name,
                severity,
                f"{int(backward.sum())} backward passes and {int(step.sum())} steps ran inside an autocast region ({dtype}): what "
                "they compute is cast down too; let the region cover only the forward and the loss",
                rows,
                wrong,
                observed=int(backward.sum()),
                expected=0,
                columns=["autocast_backward", "autocast_step"],
            )
        )
    yield from merged(found)


RULE = Rule("SCL415", "autocast-too-wide", "warning", judge, needs=("autocast_backward",))
