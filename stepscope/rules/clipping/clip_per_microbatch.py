"""Gradients were clipped after each micro-batch of a window.

What it does
------------
Looks for clips that came before the window's last backward, on gradients that the next backward added to. A clip written
by hand is seen in the norm that the next backward found: less than what was left, and the same in several windows.

Why it matters
--------------
The limit then holds for partial sums. Micro-batches with large gradients lose weight against the others, so that the sum
points elsewhere, and its norm is not bounded by the limit either. Two micro-batches (4, 0) and (0, 3) with limit 1 end
at (0.32, 0.95) instead of (0.8, 0.6).

What the evidence looks like
----------------------------
Several `clip_calls` in one window, on rows where no step follows, and `clip_bound` on some of them.

Fix
---
Clip once, after the window's last backward.

Known false alarms
------------------
A gradient that was cleared after the clip, as in a guard that drops a batch or in the first pass of SAM, is not reported.

References
----------
huggingface/transformers#1563, facebookresearch/lingua#59.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.rules.accumulation.windows import merged
from stepscope.rules.base import Rule
from stepscope.rules.clipping.gradients import following, hand_limit, kept
from stepscope.rules.view import Rows, View, finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding, Severity


def judge(view: View) -> Iterator[Finding]:
    """Clips inside a window."""
    yield from merged([f for rows in view.stepping for f in (_seen(rows) or _by_hand(rows),) if f is not None])


def _seen(rows: Rows) -> Finding | None:
    limit = np.where(np.isfinite(rows["clip_max_norm"]), rows["clip_max_norm"], rows["clip_value"])
    early = kept(rows) & (rows["clip_calls"] > 0) & np.isfinite(limit)
    if not early.any():
        return None
    found, left = following(rows["grad_norm_before"]), rows["grad_norm_left"]
    bound = early & (rows.true("clip_bound") | np.isfinite(rows["clip_value"]) & (found < left * (1 - 1e-3)))
    at = int(np.flatnonzero(bound if bound.any() else early)[0])
    windows = len(np.unique(rows.window_of[early]))
    severity: Severity = "warning" if bound.any() else "notice"
    return finding(
        RULE.code,
        RULE.name,
        severity,
        f"{int(early.sum())} clips to {float(limit[at]):g} ran before the last backward of their window ({windows} windows), "
        f"{int(bound.sum())} of them bound: partial sums are limited, not the gradient; clip once a window, before the step",
        rows,
        early,
        observed=int(early.sum()),
        expected=0,
        columns=["clip_norm", "clip_calls", "window_step", "grad_norm_clipped"],
    )


def _by_hand(rows: Rows) -> Finding | None:
    found = following(rows["grad_norm_before"])
    limit, bound = hand_limit(found, rows["grad_norm_left"], kept(rows) & (rows["clip_calls"] == 0.0))
    if not bound.any():
        return None
    at = int(np.flatnonzero(bound)[0])
    return finding(
        RULE.code,
        RULE.name,
        "warning",
        f"{int(bound.sum())} micro-steps left a gradient that was brought to the norm {limit:.4g} before the window's next "
        "backward added to it: partial sums are limited, not the gradient; clip once a window, before the step",
        rows,
        bound,
        observed=float(found[at]),
        expected=float(rows["grad_norm_left"][at]),
        columns=["grad_norm_left", "grad_norm_before", "window_step"],
    )


RULE = Rule("CLP305", "clip-per-microbatch", "warning", judge, needs=("clip_calls", "grad_norm_before"))
