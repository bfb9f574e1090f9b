"""The scale was updated between the steps of two optimizers that share one scaler.

What it does
------------
Looks for ``update`` calls that came after one optimizer's step and before another's, whose gradients already waited.

Why it matters
--------------
The second optimizer divides its gradients by the new scale although its loss carried the old one: after an overflow of
the first they are twice too large, after a growth half. And the scale grows twice as often as it should.

What the evidence looks like
----------------------------
`early_update_between` is true; where the scale changed, `unscale_divisor` differs from `loss_scale_before`.

Fix
---
Call ``scaler.step`` for every optimizer, then ``scaler.update()`` once.

Known false alarms
------------------
None known. An ``update`` before the next optimizer's own backward, as in many GAN loops, is right and not reported.

References
----------
huggingface/accelerate#439, neosr-project/neosr#9.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.rules.accumulation.windows import merged
from stepscope.rules.base import Rule
from stepscope.rules.clipping.gradients import executed
from stepscope.rules.scaler.evidence import need_scaler
from stepscope.rules.scaler.scaler_update_order import mismatched
from stepscope.rules.view import Rows, View, finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding, Severity


def judge(view: View) -> Iterator[Finding]:
    """Updates between two steps."""
    need_scaler(view)
    yield from merged([f for rows in view.stepping for f in (_judge(rows),) if f is not None])


def _judge(rows: Rows) -> Finding | None:
    between = rows.true("sync_gradients") & rows.true("early_update_between")
    if not between.any():
        return None
    wrong = mismatched(rows) & between & executed(rows)
    severity: Severity = "error" if wrong.any() else "warning"
    at = int(np.flatnonzero(wrong if wrong.any() else between)[0])
    scale, divisor = float(rows["loss_scale_before"][at]), float(rows["unscale_divisor"][at])
    effect = f"the scale did not change at these so far ({scale:g})"
    if wrong.any():
        effect = f"at {int(wrong.sum())} of them gradients scaled by {scale:g} were divided by {divisor:g}"
    return finding(
        RULE.code,
        RULE.name,
        severity,
        f"{int(between.sum())} steps came after an update() that followed another optimizer's step in the same iteration: "
        f"{effect}; step all optimizers, then call update() once",
        rows,
        wrong if wrong.any() else between,
        observed=divisor,
        expected=scale,
        columns=["loss_scale_before", "unscale_divisor", "early_updates"],
    )


RULE = Rule("SCL403", "scaler-update-twice", "error", judge, explains=("scaler-update-order",))
