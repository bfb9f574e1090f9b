"""A forward used casts of old weights that its autocast region had cached.

What it does
------------
Looks for forwards in an autocast region in which the optimizer of these parameters had stepped after an earlier forward.

Why it matters
--------------
Autocast casts each float32 weight once and keeps the cast until the outermost region ends. After a step inside the region
the weights are new and the casts are old: further forwards, and the gradients from them, belong to weights that no
longer exist.

What the evidence looks like
----------------------------
`autocast_stale` is true: parameters moved (`update_norm`), outputs did not.

Fix
---
Let the region end before the step, ``with autocast: loss = ...``, then backward and step outside; or call
``torch.clear_autocast_cache()`` after the step.

Known false alarms
------------------
A script that clears the cache itself. Regions with ``cache_enabled=False`` and parameters that are half precision
themselves are not reported.

References
----------
pytorch/pytorch#112583, NVIDIA/apex#132.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.rules.accumulation.windows import merged
from stepscope.rules.base import Rule
from stepscope.rules.view import View, finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding


def judge(view: View) -> Iterator[Finding]:
    """Micro-steps on stale casts."""
    found = []
    for rows in view.stepping:
        wrong = rows.true("autocast_stale")
        if not wrong.any():
            continue
        at = int(np.flatnonzero(wrong)[0])
        dtype = rows["autocast_dtype"][at] or "half-precision"
        found.append(
            finding(
                RULE.code,
                RULE.name,
                "error",
                f"{int(wrong.sum())} micro-steps ran in an autocast region in which {rows.optimizer} had already stepped: their "
                f"forward used {dtype} copies of the weights from before that step; end the region before the step",
                rows,
                wrong,
                observed="weights from before the step",
                expected="current weights",
                columns=["autocast_stale", "update_norm", "loss"],
            )
        )
    yield from merged(found)


RULE = Rule(
    "SCL414", "autocast-cache-stale", "error", judge, needs=("autocast_stale",), explains=("autocast-too-wide",)
)
