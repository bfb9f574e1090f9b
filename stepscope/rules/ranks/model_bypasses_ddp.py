"""The wrapped module is called directly, so that DistributedDataParallel never reduces.

What it does
------------
Looks at training forwards that ran a module inside of a DDP wrapper without going through the wrapper, at steps whose
gradients differ between processes.

Why it matters
--------------
DDP prepares the reduction in its own forward. Called past it (``ddp.module(x)``, or the model that was wrapped), each
process trains a model of its own on its share of the data.

What the evidence looks like
----------------------------
`ddp_bypassed` is true and `grad_norm_clipped` differs between processes at the steps.

Fix
---
Call the wrapper: ``ddp(x)``. Methods other than forward can be reached through a flag of forward.

Known false alarms
------------------
None known. Evaluation through ``ddp.module`` runs without gradients, and a part that is called directly beside a forward
through the wrapper is reduced: neither is reported.

References
----------
torch.nn.parallel.DistributedDataParallel, "Forward Pass".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.rules.base import Rule
from stepscope.rules.ranks.aligned import aligned
from stepscope.rules.view import finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding
    from stepscope.rules.view import View


def judge(view: View) -> Iterator[Finding]:
    """One finding for each optimizer."""
    for steps in aligned(view):
        wrong = steps.differs("grad_norm_clipped") & (steps.at("ddp_bypassed") == 1.0).any(axis=0)
        if not wrong.any():
            continue
        norms = steps.at("grad_norm_clipped")[:, wrong][:, 0]
        yield finding(
            RULE.code,
            RULE.name,
            "error",
            f"{int(wrong.sum())} of {len(steps)} steps of {steps.label} used gradients that differ between processes (norms "
            f"{norms[0]:.4g} and {norms[1]:.4g}): forward ran the wrapped module directly; call the DistributedDataParallel wrapper",
            steps.rows[0],
            steps.ends[0][wrong],
            observed=[float(n) for n in norms],
            expected="the same in all processes",
            columns=["grad_norm_clipped", "ddp_bypassed"],
        )


RULE = Rule(
    "DST805", "model-bypasses-ddp", "error", judge, needs=("ddp_bypassed", "grad_norm_clipped"), channel="ranks"
)
