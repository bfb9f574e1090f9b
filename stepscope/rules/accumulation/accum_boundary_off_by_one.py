"""The condition for a step is shifted or inverted: windows have another length than the losses are divided by.

What it does
------------
The constant factor 1/K in the losses tells how many micro-steps the author means. Windows of another length, away from an
epoch's tail, are then wrong: a first window of one (``i % K == 0`` counted from 0), of K-1 or K+1, windows that are all one
too long or too short, or steps on every micro-step except each K-th.

Why it matters
--------------
The first update, or most of them, uses a fraction of the intended gradient, and what follows is shifted: the last
micro-steps of a run (or an epoch) reach no step.

What the evidence looks like
----------------------------
`window_size` reads 1, K, K, ... with micro-steps left over at the end, and `loss_weight_used` is 1/K in the short window.

Fix
---
Count from 1: ``(i + 1) % K == 0`` with i from 0, and flush the tail.

Known false alarms
------------------
A short window whose losses are divided by its own length is right and stays silent; so do tails, and runs that begin by
loading an optimizer's state, whose first window may have begun before.

References
----------
rasbt/LLMs-from-scratch#299, huggingface/accelerate#435.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.rules.accumulation.windows import Windows, close, merged, most_common, windows_of
from stepscope.rules.base import Rule
from stepscope.rules.view import finding

if TYPE_CHECKING:
    from stepscope.rules.outcome import Finding
    from stepscope.rules.view import Mask, View


def judge(view: View) -> list[Finding]:
    """Windows of the wrong length that are no tails."""
    resumed = view.after is not None or any(True for _ in view.events("optimizer_loaded"))
    return merged([f for w in windows_of(view) if len(w) for f in _judge(view, w, resumed)])


def _judge(view: View, w: Windows, resumed: bool) -> list[Finding]:
    k = w.declared or w.k_of_weights or w.usual or 1
    if k < 2 or w.closure.any() or (w.rows.windows("step_in_backward") == 1.0).any():
        return []
    off = ~close(w.effective, 1.0) & (w.live != k)
    wrong = np.zeros(len(w), dtype=np.bool_)
    shape = ""
    if _mostly_wrong(w, k, off):
        wrong, shape = off, _shape_of_all(w, k)
    elif not resumed and _first_is_off(w, k, off):
        wrong[0] = True
        shape = f"the first window has {w.live[0]} micro-steps, the others {k}"
    if not shape:
        return []
    return [_finding(w, k, wrong, shape)]


def _first_is_off(w: Windows, k: int, off: Mask) -> bool:
    """The first window is short (or one too long) and the others are right, tails aside."""
    first = int(w.live[0])
    if not off[0] or len(w) < 3 or first not in {*range(1, k), k + 1} or w.last_of_epoch[w.end[0]]:
        return False
    others = (w.live[1:] == k).mean() >= 0.5
    if np.isfinite(w.effective[0]):
        whole = w.live == k
        full = float(np.median(w.effective[whole])) if whole.any() else 1.0
        others &= bool(close(w.effective[0] / full, first / k))
    if w.declared or w.k_of_weights:
        return bool(others)
    # Undivided losses do not tell K: then what is missing here must be left over at the end, and be nobody else's.
    left = np.arange(len(w.rows)) > w.end[-1]
    return bool(others and first + w.rows.pending == k and not w.elsewhere[left].any())


def _mostly_wrong(w: Windows, k: int, off: Mask) -> bool:
    """Most windows have another length than the losses say, by one, or by steps at all micro-steps but each K-th."""
    if not (w.k_of_weights or w.declared) or len(w) < 3 or (w.lost[w.rows.window_of < len(w)]).any():
        return False
    weights_say_k = np.nanmedian(w.weight) * k if np.isfinite(w.weight).any() else np.nan
    if not close(weights_say_k, 1.0) or (off & ~w.crosses).mean() < 0.6:
        return False
    usual = int(w.usual or 0)
    inverted = k > 2 and usual == 1 and np.isin(w.live, (1, 2)).all() and (w.live == 2).sum() >= 1
    by_one = k > 2 and usual in (k - 1, k + 1)
    return bool(inverted or by_one)


def _shape_of_all(w: Windows, k: int) -> str:
    usual = most_common(w.live)
    if usual == 1:
        return f"steps ran on every micro-step except each {k}-th"
    return f"windows have {usual} micro-steps"


def _finding(w: Windows, k: int, wrong: Mask, shape: str) -> Finding:
    sizes = ", ".join(str(int(s)) for s in w.live[:6])
    left = f" and {w.rows.pending} left over at the end" if w.rows.pending else ""
    weight = float(w.effective[np.flatnonzero(wrong)[0]])
    weighs = f"; its weights come to {weight:.4g} instead of 1" if np.isfinite(weight) else ""
    return finding(
        RULE.code,
        RULE.name,
        "error",
        f"{shape}: micro-steps per step are {sizes}, ...{left}, where the losses are meant for {k}{weighs}; the step condition "
        f"is off: count micro-steps from 1 and step when the count is a multiple of {k}",
        w.rows,
        w.mask(wrong),
        observed=[int(s) for s in w.live[:12]],
        expected=k,
        columns=["window_size", "loss_weight_used", "sync_gradients"],
    )


RULE = Rule(
    "ACC105",
    "accum-boundary-off-by-one",
    "error",
    judge,
    needs=("window_size",),
    explains=("accum-tail-dropped", "accum-tail-leak", "accum-tail-misweighted", "accum-missing-divide"),
)
