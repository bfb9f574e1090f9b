"""A gradient norm was taken while the gradients still carried the loss scale.

What it does
------------
Looks for measurements of scaled gradients: a clip with an infinite limit, one whose limit was never reached, or
``get_total_norm``.

Why it matters
--------------
The step is right, the number is not: it is loss-scale times the norm, and jumps by a factor of two whenever the scale
changes. Alarms and comparisons that rest on it are wrong.

What the evidence looks like
----------------------------
`clip_norm` (or `scaled_norm_taken`) is `loss_scale_before` times `grad_norm`.

Fix
---
Call ``scaler.unscale_(optimizer)`` before the norm is taken, or divide it by ``scaler.get_scale()``.

Known false alarms
------------------
A script that divides the number by the scale before it uses it: that division is not seen.

References
----------
languini-kitchen/languini-kitchen#7.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.rules.accumulation.windows import merged
from stepscope.rules.base import Rule
from stepscope.rules.clipping.clip_before_unscale import still_scaled
from stepscope.rules.view import View, finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding


def judge(view: View) -> Iterator[Finding]:
    """Norms of scaled gradients that changed nothing."""
    found = []
    for rows in view.stepping:
        scale = rows["loss_scale_before"]
        measured = still_scaled(rows) & (np.isinf(rows["clip_max_norm"]) | ~rows.true("clip_bound"))
        measured &= np.isfinite(rows["clip_norm"])
        clipped = rows.true("clip_scaled") & rows.true("clip_bound")
        own = np.isfinite(rows["scaled_norm_taken"]) & (scale != 1.0) & ~clipped
        wrong = measured | own
        if not wrong.any():
            continue
        at = int(np.flatnonzero(wrong)[0])
        column = "scaled_norm_taken" if own[at] else "clip_norm"
        norm = float(rows[column][at])
        found.append(
            finding(
                RULE.code,
                RULE.name,
                "notice",
                f"{int(wrong.sum())} gradient norms were taken before unscaling: {norm:.4g} at scale {float(scale[at]):g} "
                f"instead of {norm / float(scale[at]):.4g}; call scaler.unscale_(optimizer) before a norm is logged",
                rows,
                wrong,
                observed=norm,
                expected=norm / float(scale[at]),
                columns=[column, "grad_norm", "loss_scale_before"],
            )
        )
    yield from merged(found)


RULE = Rule("CLP308", "gradnorm-logged-scaled", "notice", judge, needs=("loss_scale_before",))
