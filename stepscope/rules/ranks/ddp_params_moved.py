"""Parameters were replaced after the module was wrapped, so that DDP does not know them.

What it does
------------
Looks at training forwards through a DDP wrapper: does its module have trainable parameters that were not there when it was
wrapped, and do gradients differ between processes?

Why it matters
--------------
The reducer hangs on the tensors that it was given. What replaces them (a new head, ``load_state_dict(assign=True)``) is
never reduced: that part drifts apart between processes, silently.

What the evidence looks like
----------------------------
The names of the new parameters, and `grad_norm_clipped` that differs between processes although forward went through the
wrapper.

Fix
---
Change the model first and wrap it last; wrap again after ``load_state_dict(assign=True)``.

Known false alarms
------------------
None known.

References
----------
torch.nn.parallel.DistributedDataParallel, first warning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.rules.base import Rule
from stepscope.rules.parameters.census import few
from stepscope.rules.ranks.aligned import aligned
from stepscope.rules.view import finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding
    from stepscope.rules.view import View


def judge(view: View) -> Iterator[Finding]:
    """One finding for each optimizer whose gradients differ."""
    told = list(view.events("ddp_parameters_replaced"))
    if not told:
        return
    names, number = told[0]["detail"]["params"], told[0]["detail"]["count"]
    for steps in aligned(view):
        wrong = steps.differs("grad_norm_clipped") & (steps.at("ddp_bypassed") != 1.0).all(axis=0)
        if wrong.any():
            yield finding(
                RULE.code,
                RULE.name,
                "error",
                f"{number} parameters were replaced after wrapping ({few(names)}) and are not reduced: {int(wrong.sum())} of {len(steps)} "
                f"steps of {steps.label} used gradients that differ between processes; change the model before it is wrapped",
                steps.rows[0],
                steps.ends[0][wrong],
                observed=number,
                expected=0,
                columns=["grad_norm_clipped"],
                params=names,
            )


RULE = Rule(
    "DST806",
    "ddp-params-moved",
    "error",
    judge,
    needs=("ddp_sync", "grad_norm_clipped"),
    explains=("nosync-misuse",),
    channel="ranks",
)
