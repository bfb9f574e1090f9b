"""Norms with frozen parameters go on updating their running statistics.

What it does
------------
Looks at norms with running statistics (BatchNorm) whose parameters are frozen (where they have none: those of the block
around them), at training forwards: were they in train mode, and did their statistics change?

Why it matters
--------------
``requires_grad=False`` does not stop running statistics. The frozen backbone normalises with the batch at hand and its
statistics drift to the new data, so that it is no longer the network that was pretrained; ``model.train()`` at every
epoch undoes an earlier ``eval()``.

What the evidence looks like
----------------------------
`frozen_norms_in_train` counts such norms at each micro-step; their fingerprints of mean and variance change while those
of their parameters do not.

Fix
---
Call ``eval()`` on the frozen part after every ``model.train()``, or override ``train`` so that it keeps it in eval mode.

Known false alarms
------------------
Adapting statistics to new data on purpose (AdaBN). Norms that are trainable again later (a discriminator during the
generator's step) and those whose parameters are moved from outside (momentum encoders) are not reported.

References
----------
lightly-ai/lightly#1438, pgniewko/gt-pyg#112.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.rules.base import Rule
from stepscope.rules.parameters.census import few
from stepscope.rules.view import finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding
    from stepscope.rules.view import View


def judge(view: View) -> Iterator[Finding]:
    """One finding for the run."""
    told = list(view.events("frozen_norms"))
    if not told:
        return
    norms = [
        n for n in told[-1]["detail"]["norms"] if n["moved"] and not n["trained"] and not n["thawed"] and n["frozen"]
    ]
    norms = [n for n in norms if n["forwards"] >= 2]
    if not norms:
        return
    rows = view.everyone[0]
    where = rows["frozen_norms_in_train"] > 0
    names = [n["module"] for n in norms]
    yield finding(
        RULE.code,
        RULE.name,
        "warning",
        f"{len(names)} norms with frozen parameters ran in train mode at {norms[0]['forwards']} training forwards and changed their running "
        f"statistics: {few(names)}; call eval() on the frozen part after model.train()",
        rows,
        where,
        observed=len(names),
        expected=0,
        columns=["frozen_norms_in_train"],
        modules=names,
    )


RULE = Rule("PAR704", "frozen-bn-stats", "warning", judge, needs=("frozen_norms_in_train",))
