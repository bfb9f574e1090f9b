"""Gradients were clipped while they still carried the loss scale.

What it does
------------
Looks at each clip that ran before the gradients were divided by the loss scale, and at whether it bound. A clip written
by hand is seen in the norms: gradients of different size, never unscaled by the script, that all reach the step with the
norm ``limit / scale``.

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
A clip with ``max_norm=inf``, or one whose limit no scaled norm ever reached, changes nothing: that is
`gradnorm-logged-scaled`. Gradients that a script divided by the scale itself are recognised by their norm.

References
----------
torch.amp, "Working with Unscaled Gradients". milesial/Pytorch-UNet#468, Lightning-AI/pytorch-lightning#9599.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.rules.accumulation.windows import merged
from stepscope.rules.base import Rule
from stepscope.rules.clipping.gradients import executed, hand_limit
from stepscope.rules.view import Mask, Rows, View, finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding


def judge(view: View) -> Iterator[Finding]:
    """Clips on scaled gradients that bound."""
    found = [f for rows in view.stepping for f in (_seen(rows) or _by_hand(rows),) if f is not None]
    yield from merged(found)


def still_scaled(rows: Rows) -> Mask:
    """Clips whose gradients carried a scale other than one; not those that the script had divided itself."""
    scale, left, clipped = rows["loss_scale_before"], rows["grad_norm_left"], rows["clip_norm"]
    with np.errstate(invalid="ignore"):
        divided = np.isclose(clipped * scale, left, rtol=0.05) & (scale > 2.0)
        return np.asarray(rows.true("clip_scaled") & np.isfinite(scale) & (scale != 1.0) & ~divided)


def _seen(rows: Rows) -> Finding | None:
    by_value = np.isfinite(rows["clip_value"])
    lowered = rows["grad_norm_clipped"] < rows["grad_norm"] * (1 - 1e-3)
    bound = rows.true("clip_bound") & np.isfinite(rows["clip_max_norm"]) | by_value & lowered
    wrong = still_scaled(rows) & bound & ~rows.true("step_skipped")
    if not wrong.any():
        return None
    at = int(np.flatnonzero(wrong)[0])
    kind = "clip_value" if by_value[at] else "clip_max_norm"
    scale, used, true = (float(rows[c][at]) for c in ("loss_scale_before", "grad_norm_clipped", "grad_norm"))
    seen = float(rows["clip_norm"][at]) if not by_value[at] else true * scale
    return finding(
        RULE.code,
        RULE.name,
        "error",
        f"{int(wrong.sum())} clips compared the limit {float(rows[kind][at]):g} with gradients scaled by {scale:g}: the norm "
        f"was taken as {seen:.4g} instead of {seen / scale:.4g}, and the step got a gradient of norm {used:.3g}; call "
        "scaler.unscale_(optimizer) before the clip",
        rows,
        wrong,
        observed=seen,
        expected=seen / scale,
        columns=["clip_norm", "grad_norm", "grad_norm_clipped", kind],
    )


def _by_hand(rows: Rows) -> Finding | None:
    """No clip of torch's, no ``unscale_``, and yet one norm (times the scale) at every step: clipped while scaled."""
    scale = rows["loss_scale_before"]
    among = executed(rows) & rows.true("step_in_scaler") & (scale > 2.0) & (rows["unscale_calls"] == 0.0)
    used = rows["grad_norm_clipped"] * rows["unscale_divisor"]
    limit, bound = hand_limit(used, rows["grad_norm_left"], among & (rows["clip_calls"] == 0.0))
    if not bound.any():
        return None
    at = int(np.flatnonzero(bound)[0])
    return finding(
        RULE.code,
        RULE.name,
        "error",
        f"{int(bound.sum())} steps got a gradient of norm {float(rows['grad_norm_clipped'][at]):.3g}, which is {limit:.4g} "
        f"divided by the loss scale {float(scale[at]):g}: the script limits the norm to {limit:.4g} while the gradients are "
        "still scaled; call scaler.unscale_(optimizer) first",
        rows,
        bound,
        observed=float(rows["grad_norm_clipped"][at]),
        expected=min(limit, float(rows["grad_norm"][at])),
        columns=["grad_norm", "grad_norm_clipped", "loss_scale_before"],
    )


RULE = Rule(
    "CLP301",
    "clip-before-unscale",
    "error",
    judge,
    needs=("loss_scale_before",),
    explains=("gradnorm-logged-scaled",),
)
