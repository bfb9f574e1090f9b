"""A second loss term is not divided like the main one, so that its coefficient depends on K.

What it does
------------
Whether an auxiliary term is scaled rightly shows only when the same samples are run as one batch and as K micro-batches:
one run does not tell a coefficient from a forgotten division. ``stepscope check accumulation`` makes the experiment.

Why it matters
--------------
A router balance loss, a z-loss or a prior that is added after the main loss was divided counts K times as much as at K=1:
changing the micro-batch size changes what is learned.

What the evidence looks like
----------------------------
`loss_term_weights` lists the weights of the terms of each backward: the main one is 1/K, the other's keeps its coefficient.
The check names the term whose weight does not follow.

Fix
---
Divide the sum of all terms by K: ``((loss + aux_loss) / K).backward()``.

Known false alarms
------------------
Terms that are not linear in the samples (a product of batch means, as in a router balance loss; contrastive losses) differ
between K=1 and K=4 in right code too; the check names the term.

References
----------
OpenNMT/OpenNMT-py#2209, NVIDIA-NeMo/Automodel#3359.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.rules.base import Rule

if TYPE_CHECKING:
    from stepscope.rules.outcome import Finding
    from stepscope.rules.view import View


def judge(view: View) -> list[Finding]:
    """Nothing: one run does not tell."""
    return []


RULE = Rule(
    "ACC111",
    "aux-loss-scaling",
    "error",
    judge,
    channel="check",
    advice="stepscope check accumulation file.py:make --accumulation-steps K compares K micro-batches with one batch",
)
