"""A clip was given no parameter at all.

What it does
------------
Looks for clip calls that received an empty list while an optimizer's gradients waited for its step, and that were the
only clips of that step.

Why it matters
--------------
A generator or ``filter`` can be read once. The optimizer, a counter or a log line has read it, and the clip then sees an
empty sequence: ``clip_grad_norm_`` returns 0.0, raises nothing, and the gradient goes unlimited. (``clip_grad_value_``
raises.)

What the evidence looks like
----------------------------
`clip_empty` counts such calls; `clip_calls` is 0, and `grad_norm_clipped` is the whole norm.

Fix
---
Make a list once, ``params = [p for p in model.parameters() if p.requires_grad]``, and use it for both.

Known false alarms
------------------
None known. A clip of tensors that have no gradient yet is another matter: see `clip-after-step` and `clip-wrong-params`.

References
----------
pytorch/pytorch#148259, PixArt-alpha/PixArt-alpha#160.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.rules.accumulation.windows import merged
from stepscope.rules.base import Rule
from stepscope.rules.clipping.gradients import executed
from stepscope.rules.view import View, finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding


def judge(view: View) -> Iterator[Finding]:
    """Steps whose only clip got nothing."""
    found = []
    for rows in view.optimizers:
        waits = executed(rows) & (rows["grad_params"] > 0) | (rows.window_of == len(rows.ends))
        wrong = waits & (rows["clip_empty"] > 0) & (rows["clip_calls"] == 0.0)
        if not wrong.any():
            continue
        norm = np.where(executed(rows), rows["grad_norm_clipped"], rows["grad_norm_left"])[wrong]
        count = rows["grad_params"][int(np.flatnonzero(wrong)[0])]
        what = f"{int(count)} gradients" if np.isfinite(count) else "gradients"
        found.append(
            finding(
                RULE.code,
                RULE.name,
                "error",
                f"{int(wrong.sum())} clips were given no parameter at all while {what} (norm up to {float(norm.max()):.4g}) waited "
                "for the step: a generator had been used up; make it a list",
                rows,
                wrong,
                observed=0,
                expected=what,
                columns=["grad_norm_clipped", "clip_empty"],
            )
        )
    yield from merged(found)


RULE = Rule("CLP304", "clip-empty-params", "error", judge, needs=("clip_empty",))
