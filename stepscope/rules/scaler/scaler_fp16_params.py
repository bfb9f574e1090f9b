"""A GradScaler was used with parameters that are float16 themselves.

What it does
------------
Looks for float16 gradients in an optimizer that is stepped through an enabled GradScaler.

Why it matters
--------------
The scaler refuses them ("Attempting to unscale FP16 gradients"), since a float16 gradient that was scaled to fit cannot
be unscaled without losing what the scale had saved. A fused optimizer takes them without a word; then updates smaller
than half a unit in the last place of a float16 weight are lost.

What the evidence looks like
----------------------------
An event ``scaler_step_failed`` or ``unscale_failed`` that counts float16 gradients, or rows of the table of parameters
with dtype float16 in an optimizer that a scaler stepped.

Fix
---
Keep the parameters in float32 and let autocast cast them (no ``model.half()``), or train in bfloat16 without a scaler.

References
----------
pytorch/pytorch#74739, Lightning-AI/pytorch-lightning#5140.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.rules.base import Rule
from stepscope.rules.scaler.evidence import failures, need_scaler, where
from stepscope.rules.view import View, finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding


def judge(view: View) -> Iterator[Finding]:
    """float16 gradients that met a scaler."""
    need_scaler(view)
    for event in failures(view, "scaler_step_failed", "unscale_failed"):
        half = event["detail"].get("float16_gradients")
        if half:
            yield finding(
                RULE.code,
                RULE.name,
                "error",
                f"{half} of the {event['detail'].get('gradients')} gradients of {where(event)} are float16, and the scaler refused to "
                "unscale them; keep the parameters in float32 and let autocast cast them",
                optimizer=event["optimizer"],
                micro_steps=[event["micro_step"]],
                observed="float16",
                expected="float32",
            )
            return
    yield from _stepped(view)


def _stepped(view: View) -> Iterator[Finding]:
    """Fused optimizers raise nothing: their float16 parameters stand in the table of parameters."""
    trace = view.trace
    dtype, owner = trace.values("dtype", table="params"), trace.values("optimizer", table="params")
    used = trace.valid("grad_norm_clipped", table="params")
    for rows in view.stepping:
        through = rows.true("sync_gradients") & rows.true("step_in_scaler") & rows.seen("found_inf")
        half = (dtype.astype(object) == "float16") & (owner.astype(object) == rows.optimizer) & used
        if through.any() and half.any():
            names = sorted(set(trace.values("param", table="params")[half]))
            yield finding(
                RULE.code,
                RULE.name,
                "error",
                f"{len(names)} float16 parameters of {rows.optimizer} (such as {names[0]}) are stepped through a GradScaler: "
                "their gradients and updates keep three digits; keep the parameters in float32",
                rows,
                through,
                observed="float16",
                expected="float32",
                params=names[:50],
            )
            return


RULE = Rule("SCL406", "scaler-fp16-params", "error", judge, explains=("bf16-update-lost", "fp16-no-scaler"))
