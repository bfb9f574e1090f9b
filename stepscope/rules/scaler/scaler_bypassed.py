"""The optimizer stepped on gradients that still carried the loss scale, or the scaler divided ones that did not.

What it does
------------
Compares what the loss carried with what the step did: a scaled loss whose step ran outside ``scaler.step``, and the
reverse, a loss that no scaler scaled whose gradients ``scaler.step`` divided.

Why it matters
--------------
The gradient is loss-scale times too large, or as many times too small. Adam hides it, since it divides by the gradient's
own size: only eps, clipping, weight decay against it and logged norms are off. Overflows are not caught either.

What the evidence looks like
----------------------------
`grad_scaled_at_step` is true although `step_in_scaler` is false; or `loss_scale_before` is empty and `unscale_divisor`
is not.

Fix
---
``scaler.scale(loss).backward()``, ``scaler.step(optimizer)``, ``scaler.update()``: all three or none.

Known false alarms
------------------
Gradients that a script divided by the scale itself are recognised by their norm.

References
----------
IAHispano/Applio#860, nerfstudio-project/nerfacc#307.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.rules.accumulation.windows import merged
from stepscope.rules.base import Rule
from stepscope.rules.clipping.gradients import executed, kept
from stepscope.rules.scaler.evidence import failures, need_scaler, where
from stepscope.rules.view import Rows, View, finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding


def judge(view: View) -> Iterator[Finding]:
    """Scaled gradients outside the scaler, unscaled ones inside, and infinite ones that nobody stopped."""
    need_scaler(view)
    for event in failures(view, "scaler_step_failed", "unscale_failed"):
        if event["detail"].get("started") is False:
            yield finding(
                RULE.code,
                RULE.name,
                "error",
                f"the scaler was to divide the gradients of {where(event)} and raised: no loss had ever been multiplied by its "
                "scale; call scaler.scale(loss).backward()",
                optimizer=event["optimizer"],
                micro_steps=[event["micro_step"]],
                observed="a loss without scale",
                expected="scaler.scale(loss)",
            )
            return
    yield from merged([f for rows in view.stepping for f in (_outside(rows) or _reverse(rows),) if f is not None])


def _outside(rows: Rows) -> Finding | None:
    scale = rows["loss_scale_before"]
    direct = executed(rows) & ~rows.true("step_in_scaler") & np.isfinite(scale) & ~rows.true("closure")
    raw, left = rows["grad_norm_clipped"] * scale, rows["grad_norm_left"]
    with np.errstate(invalid="ignore"):
        divided = raw * scale < left * 1.05
        wrong = direct & rows.true("grad_scaled_at_step") & (scale != 1.0) & ~divided
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        message = (
            f"{int(wrong.sum())} steps ran outside scaler.step on gradients that carried the scale {float(scale[at]):g}: norm "
            f"{float(raw[at]):.4g} instead of {float(raw[at] / scale[at]):.4g}; call scaler.step(optimizer) instead"
        )
        observed, expected = float(raw[at]), float(raw[at] / scale[at])
    else:
        wrong = direct & (rows["grad_nonfinite"] > 0)
        if not wrong.any():
            return None
        at = int(np.flatnonzero(wrong)[0])
        message = (
            f"{int(wrong.sum())} steps ran outside scaler.step on unscaled gradients that are not finite: nothing skipped "
            "them; call scaler.step(optimizer) instead"
        )
        observed, expected = float(rows["grad_norm_clipped"][at]), float("nan")
    return finding(
        RULE.code,
        RULE.name,
        "error",
        message,
        rows,
        wrong,
        observed=observed,
        expected=expected,
        columns=["grad_norm_scaled", "grad_norm_clipped", "loss_scale_before"],
    )


def _reverse(rows: Rows) -> Finding | None:
    """A loss that carries no scale, by scaler or by hand, in gradients that a scaler divided."""
    divisor, weight = rows["unscale_divisor"], rows["loss_weight"]
    unscaled = ~rows.true("scale_called") | rows.true("scale_left_out")
    bare = ~np.isfinite(rows["loss_scale_before"]) & unscaled & ~rows.true("closure")
    of_window = np.concatenate([divisor[rows.ends], [np.nan]])[np.minimum(rows.window_of, len(rows.ends))]
    with np.errstate(invalid="ignore"):
        by_hand = np.abs(weight) * 1024 > of_window
        used = kept(rows) | rows.true("sync_gradients")
        wrong = bare & used & np.isfinite(of_window) & (of_window > 2.0) & ~by_hand
    wrong &= np.concatenate([executed(rows)[rows.ends], [False]])[np.minimum(rows.window_of, len(rows.ends))]
    if not wrong.any():
        return None
    at = int(np.flatnonzero(wrong)[0])
    return finding(
        RULE.code,
        RULE.name,
        "error",
        f"{int(wrong.sum())} backward passes ran on a loss that no scaler had scaled, and scaler.step divided their gradients "
        f"by {float(of_window[at]):g}: they count for next to nothing; call scaler.scale(loss).backward()",
        rows,
        wrong,
        observed=float(of_window[at]),
        expected=1.0,
        columns=["unscale_divisor", "loss_scale_before", "grad_norm_clipped"],
    )


RULE = Rule(
    "SCL404",
    "scaler-bypassed",
    "error",
    judge,
    explains=("clip-before-unscale", "gradnorm-logged-scaled", "fp16-no-scaler", "scaler-no-inf-checks"),
)
