"""A step used gradients that another network's backward had left in its parameters.

What it does
------------
For each step, looks for micro-steps in its window that another optimizer's step has already used before the window's last
backward, and that were not cleared since, while that last backward was meant for this optimizer alone.

Why it matters
--------------
In a GAN the generator's loss also reaches the discriminator: if the discriminator's gradients are not cleared before its own
backward, it also learns to be fooled.

What the evidence looks like
----------------------------
The window holds a row more than it should; at its last row `grad_norm_before` is the norm that the other network's backward
left there.

Fix
---
Clear each network's gradients right before its own backward, or freeze the other network while it is only passed through.

Known false alarms
------------------
Optimizers that share one backward, at the same rhythm or a slower one, use it rightly and are not reported.

References
----------
Lightning-AI/pytorch-lightning#591, ajbrock/BigGAN-PyTorch#25.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.rules.accumulation.windows import Windows, merged, siblings, windows_of
from stepscope.rules.base import Rule
from stepscope.rules.view import finding

if TYPE_CHECKING:
    from stepscope.rules.outcome import Finding
    from stepscope.rules.view import Mask, View


def judge(view: View) -> list[Finding]:
    """Steps that used what another optimizer's step had used before."""
    view.need(len(view.stepping) > 1, "one optimizer only")
    return merged([f for w in windows_of(view) if len(w) for f in _judge(view, w)])


def _judge(view: View, w: Windows) -> list[Finding]:
    if w.live.max() < 2:
        return []
    for other in siblings(view, w.rows):
        if other.rows is w.rows or not len(other):
            continue
        leaked = _reused(w, other) if _in_turn(w, other) else _leaked(w, other)
        wrong = w.rows.per_window(leaked.astype(np.float64)) > 0
        if wrong.sum() >= 2 or (wrong.any() and wrong.sum() >= 0.5 * len(w)):
            return [_finding(w, other, wrong)]
    return []


def _same_use(w: Windows, other: Windows) -> bool:
    """The steps of both use every backward: parts of one model."""
    return np.array_equal(w.rows["micro_step"][w.used_rows], other.rows["micro_step"][other.used_rows])


def _in_turn(w: Windows, other: Windows) -> bool:
    """Most steps of each use what a step of the other has used before: every backward of the one leaks into the other."""
    return all(
        (a.rows.per_window(_reused(a, b).astype(np.float64)) > 0).mean() > 0.5 for a, b in ((w, other), (other, w))
    )


def _leaked(w: Windows, other: Windows) -> Mask:
    """Rows that `other` had used before, where the window's last backward was not for `other`. Shape ``(rows,)``."""
    if _same_use(w, other):
        return np.zeros(len(w.rows), dtype=np.bool_)
    theirs = other.rows["micro_step"][other.used_rows & (other.rows.window_of < len(other))]
    end = w.end[np.minimum(w.rows.window_of, len(w) - 1)]
    return _reused(w, other) & ~np.isin(w.rows["micro_step"][end], theirs)


def _reused(w: Windows, other: Windows) -> Mask:
    """Rows in what a step used that a step of `other` had used before the window's last backward. Shape ``(rows,)``."""
    theirs = other.rows["micro_step"][other.used_rows & (other.rows.window_of < len(other))]
    when = other.rows.windows("attempted_at")[
        other.rows.window_of[other.used_rows & (other.rows.window_of < len(other))]
    ]
    mine = w.rows["micro_step"]
    place = np.minimum(np.searchsorted(theirs, mine), len(theirs) - 1)
    shared = theirs[place] == mine
    inside = w.rows.window_of < len(w)
    end = w.end[np.minimum(w.rows.window_of, len(w) - 1)]
    earlier = when[place] < mine[end]
    return np.asarray(shared & inside & w.used_rows & earlier)


def _finding(w: Windows, other: Windows, wrong: Mask) -> Finding:
    rows = w.rows
    at = int(w.end[np.flatnonzero(wrong)[0]])
    held = float(rows["grad_norm_before"][at])
    holding = f" (norm {held:.4g} before {rows.optimizer}'s own backward)" if np.isfinite(held) else ""
    return finding(
        RULE.code,
        RULE.name,
        "error",
        f"{int(wrong.sum())} of {len(w)} steps of {rows.optimizer} also used the gradient that the backward of {other.rows.optimizer} "
        f"left in its parameters{holding}: clear it before its own backward",
        rows,
        w.mask(wrong),
        observed=held,
        expected=0.0,
        other=other.rows.optimizer,
        columns=["grad_norm_before", "grad_norm", "window_size"],
    )


RULE = Rule(
    "CLR202",
    "grad-leak-other-optimizer",
    "error",
    judge,
    needs=("attempted_at",),
    explains=("accum-missing-divide", "accum-boundary-off-by-one"),
)
