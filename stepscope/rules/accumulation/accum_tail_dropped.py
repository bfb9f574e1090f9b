"""The last micro-steps of an epoch ran backward, but no step used their gradients.

What it does
------------
Finds runs of fewer than K micro-steps at the end of an epoch or of the run whose gradient was cleared before a step, or
still lay there when the run ended.

Why it matters
--------------
The samples at the end of each epoch are computed and thrown away. Where an epoch has fewer than K micro-steps, nothing is
trained at all.

What the evidence looks like
----------------------------
After the epoch's last `sync_gradients` come r rows more; the next row finds `grad_norm_before` at 0, or there is none.

Fix
---
Step once more at the end of the epoch, with the losses of the tail divided by its own number of micro-steps.

Known false alarms
------------------
Runs that were interrupted, or whose recording stopped early, are not judged at their end; guards that drop a whole window
or single batches now and then are not reported.

References
----------
tomhosking/torchseq#8, ultralytics/ultralytics#11217.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.rules.accumulation.windows import CLOSE, Windows, close, merged, most_common, windows_of
from stepscope.rules.base import Rule
from stepscope.rules.view import finding

if TYPE_CHECKING:
    from stepscope.rules.outcome import Finding
    from stepscope.rules.view import Array, View


def judge(view: View) -> list[Finding]:
    """Tails whose gradients reached no step."""
    return merged([f for w in windows_of(view) if len(w.rows) for f in _judge(w)])


def _judge(w: Windows) -> list[Finding]:
    k = w.k or 1
    accumulates = w.declared or (w.usual or k) == k
    if k < 2 and not len(w):
        return _never_stepped(w)
    if k < 2 or not accumulates or w.closure.any():
        return []
    first, size = _blocks(w)
    tails = _at_the_end(w, first, size, (size < k) & _weigh_less(w, first, size) & _alike(w, first, size))
    if not len(tails):
        return []
    rows = np.concatenate([np.arange(first[t], first[t] + size[t]) for t in tails])
    r = most_common(size[tails])
    steps = f"{len(w)} steps of {k}" if len(w) else "no step at all"
    return [
        finding(
            RULE.code,
            RULE.name,
            "error",
            f"{len(rows)} micro-steps reached no step: {len(tails)} times the last {r} backward passes before an epoch (or the "
            f"run) ended were cleared or left over, beside {steps}; step once more at the end, with the losses divided by {r}",
            w.rows,
            rows,
            observed=len(rows),
            expected=0,
            columns=["sync_gradients", "window_step", "grad_norm_before"],
        )
    ]


def _never_stepped(w: Windows) -> list[Finding]:
    """The run came to its own end, and an optimizer whose parameters got gradients never stepped."""
    count = int(w.lost.sum())
    if w.rows.optimizer is None or not count or w.view.trace.meta.get("status") != "complete":
        return []
    return [
        finding(
            RULE.code,
            RULE.name,
            "warning",
            f"{count} backward passes gave gradients to the parameters of {w.rows.optimizer}, which never stepped: nothing was "
            f"trained; call optimizer.step(), at the end of each window if {count} micro-steps are less than one",
            w.rows,
            w.lost,
            observed=0,
            expected="a step for each window",
            columns=["sync_gradients", "window_step", "grad_norm_before"],
        )
    ]


def _blocks(w: Windows) -> tuple[Array, Array]:
    """First row and length of each run of lost rows; a clearing or a step between two of them parts them."""
    lost = w.lost
    begins = lost & (~np.concatenate([[False], lost[:-1]]) | w.cleared | (w.rows["window_step"] == 1))
    first = np.flatnonzero(begins)
    ends = np.flatnonzero(lost & ~np.concatenate([(lost & ~begins)[1:], [False]]))
    return first, ends - first + 1


def _weigh_less(w: Windows, first: Array, size: Array) -> Array:
    """Runs whose weights do not already come to one by themselves (what SAM's first pass does), or are not known."""
    whole = np.concatenate([[0.0], np.cumsum(w.weight)])
    weight = whole[first + size] - whole[first]
    plain = (
        np.isfinite(w.weight).any() and np.nanmedian(w.weight) > 1.0 - CLOSE
    )  # losses that are not divided tell nothing
    return np.asarray(~(weight >= 1.0 - CLOSE) | plain)


def _alike(w: Windows, first: Array, size: Array) -> Array:
    """Runs whose losses weigh what the others do, where that is known: a backward for another purpose is no tail."""
    if w.k_of_weights is None:
        return np.ones(len(first), dtype=np.bool_)
    other = np.concatenate([[0], np.cumsum(~close(w.weight, float(np.nanmedian(w.weight))))])
    return np.asarray(other[first + size] == other[first])


def _at_the_end(w: Windows, first: Array, size: Array, short: Array) -> Array:
    """Which of the short runs end an epoch or the run, at least half of the times that an epoch ends."""
    last = first + size - 1
    if w.last_of_epoch.any():
        at = short & w.last_of_epoch[last] if len(first) else short
        return np.flatnonzero(at) if at.sum() >= 0.5 * w.last_of_epoch.sum() else np.zeros(0, dtype=np.int64)
    chosen = np.flatnonzero(short)
    left = len(chosen) > 0 and last[chosen[-1]] == len(w.rows) - 1
    alike = len(chosen) > 0 and len(np.unique(size[chosen])) == 1 and len(chosen) == len(first)
    regular = len(np.unique(np.diff(last[chosen]))) == 1
    once = len(chosen) == 1 and left
    return chosen if alike and (once or regular) else np.zeros(0, dtype=np.int64)


RULE = Rule("ACC107", "accum-tail-dropped", "error", judge, needs=("grad_norm_before",))
