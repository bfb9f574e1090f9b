"""Gradients were clipped while they still carried the loss scale.

What it does
------------
Looks at each clip by norm: the gradients were scaled when it ran, by a scale other than one, and the clip bound.

Why it matters
--------------
The limit is compared with a norm that is loss-scale times too large, so the clip always binds and the step gets a
gradient of norm ``max_norm / scale``: training crawls, and slower the larger the scale.

What the evidence looks like
----------------------------
`clip_scaled` is true, `clip_norm` is the scale times the true norm, and `grad_norm_clipped` is ``max_norm / scale``.

Fix
---
Call ``scaler.unscale_(optimizer)`` after the window's last backward and before the clip.

Known false alarms
------------------
A clip with ``max_norm=inf`` only measures: that is `gradnorm-logged-scaled`.

References
----------
torch.amp, "Working with Unscaled Gradients". milesial/Pytorch-UNet#468, Lightning-AI/pytorch-lightning#9599.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from stepscope.rules.base import Rule
from stepscope.rules.outcome import Finding
from stepscope.rules.view import View, finding


def judge(view: View) -> Iterator[Finding]:
    """Clips on scaled gradients with a finite limit."""
    for rows in view.stepping:
        scale = rows["loss_scale_before"]
        wrong = rows.true("clip_scaled") & np.isfinite(rows["clip_max_norm"]) & (scale != 1.0)
        if not wrong.any():
            continue
        at = int(np.flatnonzero(wrong)[0])
        limit, seen, used = (float(rows[c][at]) for c in ("clip_max_norm", "clip_norm", "grad_norm_clipped"))
        yield finding(
            RULE.code,
            RULE.name,
            "error",
            f"{int(wrong.sum())} clips compared max_norm {limit:g} with gradients scaled by {float(scale[at]):g}: the norm was "
            f"taken as {seen:.4g}, and the step got a gradient of norm {used:.3g}; call scaler.unscale_(optimizer) first",
            rows,
            wrong,
            observed=seen,
            expected=seen / float(scale[at]),
            columns=["clip_norm", "grad_norm", "grad_norm_clipped", "clip_max_norm"],
        )


RULE = Rule(
    "CLP301",
    "clip-before-unscale",
    "error",
    judge,
    needs=("clip_scaled", "loss_scale_before"),
    explains=("gradnorm-logged-scaled",),
)
