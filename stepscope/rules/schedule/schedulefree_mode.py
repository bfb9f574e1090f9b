"""An averaging optimizer stood in train mode when the model was evaluated or its weights were saved.

What it does
------------
Looks where the train/eval switch of a schedule-free optimizer stands at evaluations, at saves of weights without the
optimizer's state, and at steps.

Why it matters
--------------
Such optimizers keep two sequences of weights and swap them in ``optimizer.train()`` and ``optimizer.eval()``. Without
the switch, the weights that are evaluated or shipped are those at which gradients are taken, not the averaged ones.

What the evidence looks like
----------------------------
Events ``optimizer_mode_at_evaluation`` with ``train_mode`` true.

Fix
---
``optimizer.eval()`` before evaluating and saving, ``optimizer.train()`` before training goes on.

Known false alarms
------------------
A forward without gradients that is part of every training step (old log-probabilities, targets) is left alone.

References
----------
huggingface/accelerate#4159, facebookresearch/schedule_free#22.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from stepscope.rules.base import Rule
from stepscope.rules.schedule.pace import descriptions
from stepscope.rules.view import Rows, View, finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding


def judge(view: View) -> Iterator[Finding]:
    """Evaluations, saves and steps on the wrong side of the switch."""
    for rows in view.stepping:
        evaluations = descriptions(view, rows, "optimizer_mode_at_evaluation")
        part_of_training = len(evaluations) > 0.3 * len(rows)
        wrong = [d for d in evaluations if d["train_mode"] and not (part_of_training and d["module_training"])]
        saves = [d for d in descriptions(view, rows, "saved", "saved_again") if _ships_weights(d)]
        if wrong:
            yield _tell(rows, wrong, f"{len(wrong)} of {len(evaluations)} evaluations ran with the optimizer")
        elif saves:
            yield _tell(
                rows,
                saves,
                f"the weights were saved {len(saves)} times, without the optimizer's state, with the optimizer",
            )
        stepped = rows.seen("optimizer_train_mode") & (rows["optimizer_train_mode"] == 0.0)
        if stepped.any():
            text = f"{int(stepped.sum())} steps were made with the optimizer in eval mode: the gradients were taken at the averaged weights"
            yield finding(RULE.code, RULE.name, "warning", text + "; call optimizer.train() first", rows, stepped)


def _ships_weights(save: dict[str, Any]) -> bool:
    return bool(save.get("train_mode")) and "tensors" in save["holds"] and "optimizer" not in save["holds"]


def _tell(rows: Rows, events: list[dict[str, Any]], what: str) -> Finding:
    return finding(
        RULE.code,
        RULE.name,
        "warning",
        f"{what} in train mode, on the weights at which gradients are taken and not on the averaged ones: call optimizer.eval() "
        "before, and optimizer.train() after",
        rows,
        np.isin(rows["micro_step"], [d["micro_step"] for d in events]),
        observed="train",
        expected="eval",
    )


RULE = Rule("SCH513", "schedulefree-mode", "warning", judge)
