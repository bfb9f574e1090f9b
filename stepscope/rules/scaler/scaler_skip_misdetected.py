"""Executed steps were taken for skipped ones because the scale had changed.

What it does
------------
Looks at what the loop does after each executed step: step a scheduler, set another rate, update an average, clear the
gradients. If it does that after nearly all of them, and after none of those at which the scale grew, the loop takes a
change of the scale for a skip. And where a script hooks the step of a fused optimizer, it looks whether the loop went on
at skipped steps as at others.

Why it matters
--------------
``scaler.get_scale() != before`` is true when the scale falls, which is a skip, and also when it grows after
`growth_interval` good steps, which is none. The schedule, the average or the count of steps then falls behind by one at
every growth.

What the evidence looks like
----------------------------
`loss_scale_after` above `loss_scale_before`, `step_skipped` false, and `scheduler_steps` 0 on exactly these rows.

Fix
---
A step was skipped if the scale fell: ``scaler.get_scale() < before``.

Known false alarms
------------------
None known. Two growths and three other steps at least are asked for.

References
----------
huggingface/accelerate#4242, ShiqiYu/OpenGait#147.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.rules.accumulation.windows import merged
from stepscope.rules.base import Rule
from stepscope.rules.clipping.gradients import executed, following
from stepscope.rules.scaler.evidence import need_scaler
from stepscope.rules.view import Array, Mask, Rows, View, finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding

_ACTIONS = {
    "scheduler_steps": "the scheduler was not stepped",
    "average_updates": "the average of weights was not updated",
    "lr": "the learning rate was not set to a new value",
    "cleared": "the gradients were not cleared",
}


def judge(view: View) -> Iterator[Finding]:
    """Growths of the scale after which something was left out that follows every other executed step."""
    need_scaler(view)
    yield from merged([f for rows in view.stepping for f in (_grown(rows) or _fused(rows),) if f is not None])


def _grown(rows: Rows) -> Finding | None:
    ran = executed(rows)[rows.ends]
    before, after = rows.windows("loss_scale_before"), rows.windows("loss_scale_after")
    grew = ran & (after > before)
    others = ran & (after == before)
    if np.count_nonzero(grew) < 1 or np.count_nonzero(others) < 3:
        return None
    for column, left_out in _ACTIONS.items():
        if _only_then(_done(rows, column), grew, others):
            count = int(grew.sum())
            return finding(
                RULE.code,
                RULE.name,
                "warning",
                f"at {count} executed steps the scale grew and {left_out}, as it is after the other {int(others.sum())}: the loop "
                "takes a grown scale for a skipped step; a step was skipped if the scale fell",
                rows,
                rows.ends[grew],
                observed=0,
                expected=count,
                columns=["loss_scale_before", "loss_scale_after", "step_skipped", "lr"],
            )
    return None


def _fused(rows: Rows) -> Finding | None:
    """A fused optimizer's step is called on a skip too: a script that counts the calls takes it for executed."""
    hooked = rows.windows("fused_step_hooked") == 1.0
    skip = hooked & (rows.windows("step_skipped") == 1.0)
    ran = hooked & executed(rows)[rows.ends]
    for column in ("scheduler_steps", "average_updates"):
        done = rows.windows(column) > 0
        if skip.any() and ran.any() and done[skip].all() and done[ran].mean() >= 0.95:
            count = int(skip.sum())
            what = "the scheduler was stepped" if column == "scheduler_steps" else "the average of weights was updated"
            return finding(
                RULE.code,
                RULE.name,
                "warning",
                f"at {count} skipped steps {what}: the script follows the calls of a fused optimizer's step, which is called on "
                "a skip too; a step was skipped if the scale fell",
                rows,
                rows.ends[skip],
                observed=count,
                expected=0,
                columns=["step_skipped", column, "lr"],
            )
    return None


def _done(rows: Rows, column: str) -> Array:
    """What followed each attempt: 1 for done, 0 for not, NaN where it is not known. Shape ``(windows,)``."""
    if column == "lr":
        return _changed(rows.windows("lr"))
    if column == "cleared":
        left = following(rows["grad_norm_before"])[rows.ends]
        return np.where(np.isfinite(left), (left == 0.0).astype(np.float64), np.nan)
    counts = rows.windows(column)
    return np.where(np.isfinite(counts), (counts > 0).astype(np.float64), np.nan)


def _changed(lr: Array) -> Array:
    following_lr = following(lr)
    return np.where(np.isfinite(following_lr), (following_lr != lr).astype(np.float64), np.nan)


def _only_then(done: Array, grew: Mask, others: Mask) -> bool:
    """Left out at every growth, done after (nearly) every other step."""
    at, elsewhere = done[grew & np.isfinite(done)], done[others & np.isfinite(done)]
    enough = len(at) >= 2 or (len(at) == 1 and len(elsewhere) >= 6)
    return bool(enough and len(elsewhere) >= 3 and not at.any() and elsewhere.mean() >= 0.95)


RULE = Rule(
    "SCL407", "scaler-skip-misdetected", "warning", judge, explains=("zero-grad-missing", "sched-advance-on-skip")
)
