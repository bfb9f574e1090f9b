"""A checkpointed segment has no graph, so that nothing inside of it gets a gradient.

What it does
------------
Looks for modules that an autograd function ran without gradients (activation checkpointing does) although none of its
inputs requires one, and whose trainable parameters never got a gradient in the whole run.

Why it matters
--------------
Reentrant checkpointing rebuilds a segment during backward only if something going in requires a gradient. With frozen
embeddings in front nothing does: the whole segment is skipped, adapters inside stay at their initial values, and torch
warns once at most.

What the evidence looks like
----------------------------
The trainable parameters inside such segments that have no gradient after any backward.

Fix
---
``checkpoint(..., use_reentrant=False)``; or make the input require a gradient (``model.enable_input_require_grads()``,
``x.requires_grad_()`` after the frozen embedding).

Known false alarms
------------------
None known: modules run under ``torch.no_grad()`` on purpose, and heads that are not used, are not in such a segment.

References
----------
cloneofsimo/lora#26, locuslab/open-unlearning#178, torch.utils.checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.rules.base import Rule
from stepscope.rules.parameters.census import few, of_run, summary

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding
    from stepscope.rules.view import View


def judge(view: View) -> Iterator[Finding]:
    """One finding for the run."""
    facts = summary(view)
    names = facts.get("cut_off", [])
    if not names:
        return
    number = facts["counts"]["cut_off"]
    yield of_run(
        RULE,
        "error",
        f"{number} of {facts['trainable']} trainable parameters are inside checkpointed segments that have no graph and never got a "
        f"gradient: {few(names)}; use checkpoint(..., use_reentrant=False), or let the segment's input require a gradient",
        observed=0,
        expected=number,
        params=names,
    )


RULE = Rule("PAR707", "ckpt-reentrant-no-grad", "error", judge)
