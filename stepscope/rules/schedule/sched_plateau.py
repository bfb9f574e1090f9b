"""ReduceLROnPlateau lowered the rate while its metric improved, or the ranks told it different things.

What it does
------------
Follows the metrics given to ReduceLROnPlateau: in which direction they go, and whether the rate was lowered at a call
that was the best so far in that direction. Compares the metrics of the ranks. Where the metric is the loss of each single
batch, it asks how soon after each other the reductions came.

Why it matters
--------------
With ``mode="max"`` on a loss every improvement counts as a failure, and the rate is driven to nothing while training
goes well. The noisy loss of one batch does the same. Ranks that see different metrics end at different rates.

What the evidence looks like
----------------------------
Events ``plateau_step``: the rate falls at calls whose metric is the lowest so far, and ``mode`` is ``max``.

Fix
---
``mode="min"`` for a loss, ``"max"`` for a score; step once per validation, with the metric averaged over all ranks.

Known false alarms
------------------
A score that really falls from the first evaluation on.

References
----------
FunctionLab/selene#115, rmchurch/disruptcnn#3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from stepscope.rules.base import Rule
from stepscope.rules.view import Array, Rows, View, finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding


def judge(view: View) -> Iterator[Finding]:
    """Reductions that contradict the metric."""
    told: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for event in view.events("plateau_step"):
        if event["optimizer"] is not None:
            told.setdefault(event["optimizer"], {}).setdefault(event["rank"], []).append(event)
    view.need(told, "no ReduceLROnPlateau was stepped")
    for rows in view.stepping:
        calls = told.get(rows.optimizer or "", {}).get(rows.rank, [])
        if len(calls) >= 3:
            found = _wrong_way(rows, calls) or _per_batch(rows, calls)
            if found is not None:
                yield found
    for label, ranks in told.items():
        yield from _ranks_differ(label, ranks)


_LEAST_CALLS = 4
"""Calls from which on the way of a metric can be told."""

_COLLAPSED = 0.05
"""Share of its first value below which a rate trains next to nothing."""


def _alive(calls: list[dict[str, Any]]) -> int:
    """Calls up to the first one whose rate has collapsed."""
    rates = np.array([_sum(c["detail"]["lr_before"]) for c in calls])
    dead = rates < _COLLAPSED * rates[0]
    return int(np.argmax(dead)) if dead.any() else len(calls)


def _metrics(calls: list[dict[str, Any]]) -> Array:
    return np.array([float(c["detail"]["metric"]) for c in calls])


def _lowered(calls: list[dict[str, Any]]) -> Array:
    return np.array([_sum(c["detail"]["lr_after"]) < _sum(c["detail"]["lr_before"]) * (1 - 1e-9) for c in calls])


def _sum(rates: list[Any]) -> float:
    return float(sum(r for r in rates if isinstance(r, int | float)))


def _wrong_way(rows: Rows, calls: list[dict[str, Any]]) -> Finding | None:
    """The metric goes one way from the first call on, the mode wants the other, and the rate was lowered at a new best.

    Judged as long as the rate still moves anything: once it has collapsed, the metric goes nowhere.
    """
    calls = calls[: max(_LEAST_CALLS, _alive(calls))]
    metric, lowered = _metrics(calls), _lowered(calls)
    mode = calls[-1]["detail"]["mode"]
    progress = -metric if mode == "max" else metric  # grows where the metric gets worse by the mode
    record = progress >= np.maximum.accumulate(progress)
    moves = np.diff(progress)
    # what rises in mode min may be a loss that gets worse, unless it looks like a score: a share, or a negated loss
    bounded = mode == "max" or bool(((metric >= 0) & (metric <= 100)).all() or (metric <= 0).all())
    steady = (moves > 0).mean() >= 0.7 and progress[0] == progress.min() and progress[-1] > progress[0]
    wrong = lowered & record
    if not wrong.any() or not steady or not bounded:
        return None
    at = [int(c["micro_step"]) for c, w in zip(calls, wrong, strict=True) if w]
    first, last = calls[0]["detail"]["lr_before"][0], calls[-1]["detail"]["lr_after"][0]
    right = "min" if mode == "max" else "max"
    return finding(
        RULE.code,
        RULE.name,
        "warning",
        f"ReduceLROnPlateau in mode {mode} lowered the rate {int(lowered.sum())} times, from {first:.3g} to {last:.3g}, "
        f"{int(wrong.sum())} times at the {'lowest' if mode == 'max' else 'highest'} metric so far, while the metric went from "
        f"{metric[0]:.4g} to {metric[-1]:.4g}: if that is better, the mode should be {right}",
        rows,
        np.isin(rows["micro_step"], at),
        observed=mode,
        expected=right,
        columns=["lr", "metric"],
    )


def _per_batch(rows: Rows, calls: list[dict[str, Any]]) -> Finding | None:
    """The loss of every single batch, and a rate that was lowered again before the batches of one epoch were seen."""
    metric, lowered = _metrics(calls), _lowered(calls)
    reduced = np.flatnonzero(lowered)
    if len(calls) < max(12, 0.8 * len(rows.ends)) or len(reduced) < 2 or not _raw(rows):
        return None
    apart, epoch = float(np.median(np.diff(reduced))), _steps_per_epoch(rows)
    if apart >= epoch:
        return None
    first, last = calls[0]["detail"]["lr_before"][0], calls[-1]["detail"]["lr_after"][0]
    return finding(
        RULE.code,
        RULE.name,
        "warning",
        f"ReduceLROnPlateau was given the loss of the single batch at each of {len(calls)} steps (from {metric.min():.3g} to "
        f"{metric.max():.3g}) and lowered the rate {len(reduced)} times, every {apart:g} steps, from {first:.3g} to {last:.3g}: "
        "the noise of batches counts as a plateau; give it a validation metric once per epoch",
        rows,
        rows.ends,
        observed=len(calls),
        columns=["lr", "metric"],
    )


def _raw(rows: Rows) -> bool:
    """The metric is the step's own loss, and the batches differ (a step over all data has no noise)."""
    metric, loss = rows["metric"], rows["loss"]
    both = ~np.isnan(metric) & ~np.isnan(loss)
    prints = rows["batch_fingerprint"][both]
    same = np.isclose(metric[both], loss[both], rtol=1e-4, atol=0.0)
    return bool(both.any() and same.mean() > 0.8 and len(np.unique(prints[~np.isnan(prints)])) != 1)


def _steps_per_epoch(rows: Rows) -> float:
    """Steps in the usual epoch; where epochs were not seen, as many as it takes to tell a trend from noise."""
    epochs = rows.windows("epoch")
    seen = epochs[~np.isnan(epochs)]
    return float(np.median(np.unique(seen, return_counts=True)[1])) if len(seen) else 30.0


def _ranks_differ(label: str, ranks: dict[int, list[dict[str, Any]]]) -> Iterator[Finding]:
    if len(ranks) < 2:
        return
    shortest = min(len(c) for c in ranks.values())
    table = np.stack([_metrics(c[:shortest]) for _, c in sorted(ranks.items())])
    apart = ~np.isclose(table, table[0], rtol=1e-6, equal_nan=True).all(axis=0)
    if not apart.any():
        return
    at = int(np.flatnonzero(apart)[0])
    seen = ", ".join(f"{v:.4g}" for v in table[:, at])
    yield finding(
        RULE.code,
        RULE.name,
        "warning",
        f"the ranks gave ReduceLROnPlateau of {label} different metrics in {int(apart.sum())} of {shortest} calls (at call {at + 1}: "
        f"{seen}): their rates drift apart; average the metric over the ranks first",
        observed=[float(v) for v in table[:, at]],
        columns=["lr", "metric"],
    )


RULE = Rule("SCH509", "sched-plateau", "warning", judge)
