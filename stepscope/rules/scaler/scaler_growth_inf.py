"""The loss scale grows without bound.

What it does
------------
Looks for a loss scale far above what any float16 gradient needs: 2^60, or 2^40 where the gradients are exactly zero.

Why it matters
--------------
The scale doubles after every `growth_interval` steps without an overflow. Gradients that are zero, or that never pass
through float16, never overflow, so nothing stops it. When gradients come back, every step is skipped until the scale has
come down again; old versions of torch reach infinity and never recover.

What the evidence looks like
----------------------------
`loss_scale_after` doubling at a fixed interval without a fall, while `grad_norm` is 0 or tiny.

Fix
---
Cap the scale with ``scaler.update(new_scale)``, do not step the scaler while there is no gradient, or do without a scaler
where nothing runs in float16.

References
----------
pytorch/pytorch#98828.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.rules.accumulation.windows import merged
from stepscope.rules.base import Rule
from stepscope.rules.scaler.evidence import need_scaler, skipped
from stepscope.rules.view import View, finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding

TOO_LARGE = 2.0**60
TOO_LARGE_FOR_ZERO = 2.0**40


def judge(view: View) -> Iterator[Finding]:
    """Scales beyond use."""
    need_scaler(view)
    found = []
    for rows in view.stepping:
        scale = np.fmax(rows["loss_scale_after"], rows["loss_scale_before"])
        with np.errstate(invalid="ignore"):
            large = (scale >= TOO_LARGE) | (scale >= TOO_LARGE_FOR_ZERO) & (rows["grad_norm_left"] == 0.0)
        if not large.any():
            continue
        at = int(np.flatnonzero(large)[0])
        zero = int((rows["grad_norm_left"][: at + 1] == 0.0).sum())
        after = int(skipped(rows)[at:].sum())
        found.append(
            finding(
                RULE.code,
                RULE.name,
                "warning",
                f"the loss scale grew to {float(np.nanmax(scale)):.3g} (above 2^60 nothing needs it): {zero} of {at + 1} "
                f"gradients before had norm 0, and {after} steps after it were skipped; cap it with scaler.update(new_scale)",
                rows,
                large,
                observed=float(np.nanmax(scale)),
                expected=f"below {TOO_LARGE_FOR_ZERO:.3g}",
                columns=["loss_scale_after", "grad_norm", "step_skipped"],
            )
        )
    yield from merged(found)


RULE = Rule("SCL410", "scaler-growth-inf", "warning", judge, explains=("scaler-collapse",))
