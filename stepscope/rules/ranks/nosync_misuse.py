"""DDP's no_sync covers the wrong micro-steps, or has no effect.

What it does
------------
Compares the gradient that each process steps with. Where it differs and the window's last forward ran without
synchronisation, `no_sync` (or ``require_backward_grad_sync``) is on the wrong micro-step. Where the flag is down at
backward and was up at forward, it is set too late to have an effect.

Why it matters
--------------
DDP decides when *forward* runs whether the backward will reduce. With the last micro-step under `no_sync` each process
steps with gradients of its own, and the copies of the model drift apart; with `no_sync` around backward alone, every
micro-step communicates.

What the evidence looks like
----------------------------
`ddp_sync` is false in the last row of the window and `grad_norm_clipped` differs between processes; often at each step, at
times only at the tail of an epoch that is flushed.

Fix
---
``with model.no_sync() if not last else nullcontext():`` around forward and backward, where `last` is the micro-step that
the step follows, flushed tails included.

Known false alarms
------------------
None known. Gradients that are reduced by hand afterwards are equal, and not reported.

References
----------
modelscope/FunASR#3472, speechbrain/speechbrain#2010. torch.nn.parallel.DistributedDataParallel.no_sync.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.rules.base import Rule
from stepscope.rules.ranks.aligned import aligned
from stepscope.rules.view import finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

    from stepscope.rules.outcome import Finding
    from stepscope.rules.ranks.aligned import Aligned
    from stepscope.rules.view import View


def judge(view: View) -> Iterator[Finding]:
    """Different gradients are an error; a flag without effect is a warning."""
    for steps in aligned(view):
        unsynced = (steps.at("ddp_sync") == 0.0).any(axis=0)
        wrong = steps.differs("grad_norm_clipped") & unsynced & ~(steps.at("ddp_bypassed") == 1.0).any(axis=0)
        if wrong.any():
            yield _different(steps, wrong)
        else:
            yield from _without_effect(steps)


def _different(steps: Aligned, wrong: np.ndarray) -> Finding:
    norms = steps.at("grad_norm_clipped")[:, wrong][:, 0]
    listed = " and ".join(f"{n:.4g}" for n in norms[:2])
    return finding(
        RULE.code,
        RULE.name,
        "error",
        f"{int(wrong.sum())} of {len(steps)} steps of {steps.label} used gradients that differ between processes (norms {listed}): the "
        "window's last forward ran under no_sync, so that nothing was reduced; let the micro-step before the step synchronise",
        steps.rows[0],
        steps.ends[0][wrong],
        observed=[float(n) for n in norms],
        expected="the same in all processes",
        columns=["grad_norm_clipped", "ddp_sync"],
    )


def _without_effect(steps: Aligned) -> Iterator[Finding]:
    rows = steps.rows[0]
    late = rows.true("ddp_sync") & (rows["ddp_sync_at_backward"] == 0.0)
    if int(late.sum()) < 2:
        return
    yield finding(
        RULE.code,
        RULE.name,
        "warning",
        f"{int(late.sum())} micro-steps ran forward with synchronisation and backward without: DDP decides at forward, so that they were "
        "reduced all the same; put forward inside of no_sync too",
        rows,
        late,
        observed=int(late.sum()),
        expected=0,
        columns=["ddp_sync", "ddp_sync_at_backward"],
    )


RULE = Rule("DST801", "nosync-misuse", "error", judge, needs=("ddp_sync", "grad_norm_clipped"), channel="ranks")
