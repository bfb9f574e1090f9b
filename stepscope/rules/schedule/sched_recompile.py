"""A compiled optimizer step is compiled anew at every change of the learning rate.

What it does
------------
Nothing from a trace: the results are right and only the time of the steps tells. It is listed so that it can be looked
up.

Why it matters
--------------
A rate held as a Python number is a constant of the compiled step. Each scheduler step makes it another constant and
triggers a compilation, until the limit is reached and the step falls back to eager mode.

What the evidence looks like
----------------------------
`step_ms` has a peak wherever `lr` changes; ``TORCH_LOGS=recompiles`` names the guard on ``lr``.

Fix
---
Hold the rate in a tensor: ``torch.optim.AdamW(params, lr=torch.tensor(1e-3))``; schedulers change it in place.

References
----------
pytorch/pytorch#107076, pytorch/pytorch#163093.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.rules.base import Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding
    from stepscope.rules.view import View


def judge(view: View) -> Iterator[Finding]:
    """A trace cannot tell."""
    yield from ()


RULE = Rule(
    "SCH510",
    "sched-recompile",
    "notice",
    judge,
    channel="check",
    advice="run once with TORCH_LOGS=recompiles, and compare step_ms with the rate held in a tensor",
)
