"""The optimizer steps inside backward, at every micro-step: nothing is accumulated.

What it does
------------
Looks for steps that ran inside a backward pass, where several micro-steps are meant for one update: declared with
``--declare accumulation_steps=K``, or told by losses that are divided by K.

Why it matters
--------------
Each micro-step becomes an update of its own with 1/K of its gradient: K small steps along noisy gradients instead of one,
and neither the norm of the whole gradient nor a loss scale can be taken into account.

What the evidence looks like
----------------------------
`step_in_backward` is true and every window has one micro-step.

Fix
---
Step outside of backward once a window, or give up accumulation (K=1 and a larger batch).

Known false alarms
------------------
Without accumulation a fused backward is a way to save memory, and right: nothing is said then.

References
----------
pytorch/pytorch#124523.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.rules.accumulation.windows import Windows, merged, windows_of
from stepscope.rules.base import Rule
from stepscope.rules.view import finding

if TYPE_CHECKING:
    from stepscope.rules.outcome import Finding
    from stepscope.rules.view import View


def judge(view: View) -> list[Finding]:
    """Steps inside backward where micro-steps should be accumulated."""
    found = [f for w in windows_of(view) if len(w) for f in _judge(w)]
    return merged(found)


def _judge(w: Windows) -> list[Finding]:
    k = w.declared or w.k_of_weights or 1
    inside = w.rows.windows("step_in_backward") == 1.0
    wrong = inside & (w.live < k)
    if k < 2 or not wrong.any():
        return []
    return [
        finding(
            RULE.code,
            RULE.name,
            "warning",
            f"{w.rows.optimizer} stepped {int(wrong.sum())} times inside backward, after {int(w.live[wrong][0])} micro-step each, "
            f"where {k} are meant for one update: step outside of backward, once a window",
            w.rows,
            w.mask(wrong),
            observed=int(w.live[wrong][0]),
            expected=k,
            columns=["step_in_backward", "window_size", "loss_weight"],
        )
    ]


RULE = Rule(
    "ACC112",
    "optim-in-backward",
    "warning",
    judge,
    needs=("step_in_backward",),
    channel="declare",
    explains=("accum-boundary-off-by-one", "accum-double-divide", "accum-tail-misweighted", "accum-tail-dropped"),
)
