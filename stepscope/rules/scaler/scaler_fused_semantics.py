"""A fused optimizer did not do with the scaler's numbers what an unfused one does.

What it does
------------
Checks fused optimizers that a GradScaler steps against what they promise: parameters stay where they are when the
gradients were not finite, and a plain SGD step moves them by the learning rate times the unscaled gradient.

Why it matters
--------------
A fused optimizer gets the scale and the overflow flag as tensors and divides and skips inside its kernel. Versions of
torch have divided twice after an explicit ``unscale_``, applied NaN, or started SGD's momentum from memory that a skipped
first step had left uninitialised.

What the evidence looks like
----------------------------
`found_inf` true and `update_norm` above 0 (or NaN); or `update_norm` other than `lr` times `grad_norm_clipped` at the
first executed step of SGD.

Fix
---
Use another version of torch, or ``fused=False``.

Known false alarms
------------------
None known. Optimizers whose update does not follow from the gradient's norm (Adam) are checked for skips only.

References
----------
Lightning-AI/pytorch-lightning#15501, pytorch/pytorch#95847.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from stepscope.rules.base import Rule
from stepscope.rules.clipping.gradients import executed
from stepscope.rules.view import Rows, View, finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding


def judge(view: View) -> Iterator[Finding]:
    """Fused steps that moved on overflow, or moved wrongly."""
    fused = {o["name"]: o for o in view.trace.meta.get("optimizers", []) if o.get("fused")}
    chosen = [
        r for r in view.stepping if r.optimizer in fused and (r.seen("found_inf") & r.true("step_in_scaler")).any()
    ]
    view.need(chosen, "no fused optimizer was stepped through a GradScaler")
    for rows in chosen:
        found = _moved_on_overflow(rows) or _wrong_first_step(rows, fused[str(rows.optimizer)])
        if found is not None:
            yield found
            return


def _moved_on_overflow(rows: Rows) -> Finding | None:
    moved = rows["update_norm"] != 0.0
    wrong = rows.true("found_inf") & rows.seen("update_norm") & moved
    if not wrong.any():
        return None
    at = int(np.flatnonzero(wrong)[0])
    return finding(
        RULE.code,
        RULE.name,
        "error",
        f"{int(wrong.sum())} fused steps moved the parameters (by {float(rows['update_norm'][at]):.3g}) although the scaler had "
        "found gradients that are not finite; use fused=False",
        rows,
        wrong,
        observed=float(rows["update_norm"][at]),
        expected=0.0,
        columns=["found_inf", "update_norm"],
    )


def _wrong_first_step(rows: Rows, optimizer: dict[str, Any]) -> Finding | None:
    """The first executed step of SGD without decay: ``lr * g``, with Nesterov's momentum ``lr * (1 + momentum) * g``."""
    groups = optimizer.get("groups", [])
    if optimizer.get("class") != "SGD" or len(groups) != 1 or groups[0].get("weight_decay"):
        return None
    ran = np.flatnonzero(executed(rows) & rows.seen("update_norm"))
    if not len(ran) or groups[0].get("dampening") or int(rows["applied_steps"][ran[0]]) != 1:
        return None
    at = int(ran[0])
    momentum = float(groups[0].get("momentum") or 0.0) if groups[0].get("nesterov") else 0.0
    moved = float(rows["update_norm"][at])
    due = float(rows["lr"][at] * rows["grad_norm_clipped"][at]) * (1.0 + momentum)
    # an update may also round away: only one that is too large, or off by a factor, is a fault
    rounded = moved < due < 1e-4 * float(rows["param_norm"][at])
    if not np.isfinite(due) or due == 0.0 or 0.5 < moved / due < 1.5 or rounded:
        return None
    return finding(
        RULE.code,
        RULE.name,
        "error",
        f"the first executed step of a fused SGD moved the parameters by {moved:.3g}, lr times the unscaled gradient is "
        f"{due:.3g}: the scale or the momentum buffer was used wrongly; use fused=False",
        rows,
        ran[:1],
        observed=moved,
        expected=due,
        columns=["update_norm", "lr", "grad_norm_clipped"],
    )


RULE = Rule("SCL408", "scaler-fused-semantics", "error", judge)
