"""Training goes on in eval mode, so that Dropout and BatchNorm do not do their work.

What it does
------------
Looks at the modules whose behaviour depends on their mode (Dropout with p > 0, norms with running statistics) in the
parts of the model to which the step's backward gave gradients: were they in eval mode at the last forward before a step?

Why it matters
--------------
Validation calls ``eval()``; without ``train()`` after it the rest of the epoch trains without dropout and with running
statistics in place of the batch's.

What the evidence looks like
----------------------------
`modules_in_eval` is above zero at training micro-steps, usually from a validation to the next epoch; `model_in_eval`
says that the model as a whole was in eval mode.

Fix
---
Call ``model.train()`` after every evaluation, best where the evaluation function ends.

Known false alarms
------------------
Norms in eval mode inside a model in train mode are common on purpose (frozen statistics) and not reported; so are parts
whose parameters are all frozen. A model with norms and no Dropout that trains in eval mode from the first step to the
last may be meant so: a notice.

References
----------
fartashf/vsepp#4, ThilinaRajapakse/simpletransformers#941.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.rules.base import Rule
from stepscope.rules.view import finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding, Severity
    from stepscope.rules.view import Rows, View


def judge(view: View) -> Iterator[Finding]:
    """One finding for each optimizer; processes do the same, so the first one's rows are enough."""
    for rows in view.stepping:
        if rows.rank == view.stepping[0].rank:
            yield from _judge(view, rows)


def _judge(view: View, rows: Rows) -> Iterator[Finding]:
    count, dropouts = rows.windows("modules_in_eval"), rows.windows("dropouts_in_eval")
    whole = rows.windows("model_in_eval") == 1.0
    known = ~np.isnan(count)
    switched = bool((dropouts[known] == 0).any())
    wrong = (count > 0) & (whole | ((dropouts > 0) & switched))
    if not wrong.any():
        return
    always = bool(wrong[known].all())
    severity: Severity = "notice" if always and not (dropouts > 0).any() else "warning"
    at = rows.ends[wrong]
    names = _names(view)
    yield finding(
        RULE.code,
        RULE.name,
        severity,
        f"{int(wrong.sum())} of {int(known.sum())} steps of {rows.optimizer} trained with {int(np.nanmax(count[wrong]))} modules in eval "
        f"mode ({names}), first at micro-step {int(rows['micro_step'][at[0]])}; call model.train() after each evaluation",
        rows,
        at,
        observed=int(np.nanmax(count[wrong])),
        expected=0,
        columns=["modules_in_eval"],
    )


def _names(view: View) -> str:
    """The modules that the trace names."""
    told = [e["detail"] for e in view.events("modules_in_eval_at_training") if e["detail"].get("count")]
    names = told[0]["modules"] if told else []
    return ", ".join(names[:4]) + (f" and {told[0]['count'] - 4} more" if told and told[0]["count"] > 4 else "")


RULE = Rule("NUM901", "eval-mode-left-on", "warning", judge, needs=("modules_in_eval",))
