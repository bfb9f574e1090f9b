"""The sentence under each chart: the conclusion in words, from the recorded values and never from the drawn ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.render.formula import formula_points
from stepscope.render.rows import Points, Rows
from stepscope.render.words import counted, grouped, number, share

if TYPE_CHECKING:
    from stepscope.render.plots import Plot


def caption(plot: Plot, rows: Rows) -> str:
    """What the chart shows, in one or two sentences."""
    column = plot.lines[0].column
    return _SAID[column](rows) if column in _SAID else _range(rows, column)


def _first_track(rows: Rows, column: str, *, process: bool = False) -> Points:
    tracks = rows.processes if process else rows.optimizers
    return rows.points(column, tracks[0]) if tracks else Points(rows.micro_step[:0], np.zeros(0))


def _all(rows: Rows, column: str) -> np.ndarray:
    values, valid = rows.column(column)
    return np.asarray(values[valid])


def between(values: np.ndarray) -> str:
    """``between 0.1 and 2``, ``0.1 throughout``, and how many are not finite."""
    finite = values[np.isfinite(values)]
    odd = len(values) - len(finite)
    tail = f"; {counted(odd, 'value')} not finite" if odd else ""
    if not len(finite):
        return f"no finite value{tail}"
    low, high = float(finite.min()), float(finite.max())
    return (f"{number(low)} throughout" if low == high else f"between {number(low)} and {number(high)}") + tail


def _range(rows: Rows, column: str) -> str:
    return f"{between(_all(rows, column)).capitalize()}."


def _loss(rows: Rows) -> str:
    points = _first_track(rows, "loss", process=True)
    finite = points.finite()
    odd = len(points.x) - len(finite.x)
    said = f"{counted(odd, 'value is', 'values are')} not finite." if odd else ""
    if not len(finite.x):
        return said or "No value."
    first, last = number(float(finite.y[0])), number(float(finite.y[-1]))
    start, end = grouped(int(finite.x[0])), grouped(int(finite.x[-1]))
    return f"From {first} at micro-step {start} to {last} at micro-step {end}. {said}".strip()


def _lr(rows: Rows) -> str:
    said = f"{between(_all(rows, 'lr')).capitalize()}."
    formula = formula_points(rows)
    if formula is None:
        return f"{said} No formula is known to compare it with."
    used = _first_track(rows, "lr")
    apart = np.flatnonzero(~np.isclose(used.y, formula.y, rtol=1e-6, atol=0.0))
    if not len(apart):
        return f"{said} Equal to the formula at each of {counted(len(used.x), 'micro-step')}."
    at = int(apart[0])
    return (
        f"{said} Parts from the formula first at micro-step {grouped(int(used.x[at]))}: "
        f"{number(float(used.y[at]))} instead of {number(float(formula.y[at]))}."
    )


def _scale(rows: Rows) -> str:
    skipped, tried = rows.column("step_skipped")
    count, total = int(np.nansum(skipped)), int(tried.sum())
    peak = number(float(np.nanmax(_all(rows, "loss_scale_before"))))
    return f"Highest scale {peak}; {grouped(count)} of {counted(total, 'optimizer step')} skipped."


def _clip(rows: Rows) -> str:
    said = f"Before the clip {between(_all(rows, 'grad_norm'))}."
    bound, seen = rows.column("clip_bound")
    if not seen.any():
        return f"{said} No clip was observed."
    count, total = int(np.nansum(bound)), int(seen.sum())
    return f"{said} The clip bound in {grouped(count)} of {counted(total, 'step')} ({share(count / total)})."


def _weights(rows: Rows) -> str:
    sums = _all(rows, "loss_weight_sum")
    if not len(sums):
        return "The sum over a window was not observed."
    off = int(np.count_nonzero(~np.isclose(sums, 1.0, rtol=1e-3)))
    if not off:
        return f"The weights add up to 1 in each of {counted(len(sums), 'window')}."
    return f"The weights do not add up to 1 in {grouped(off)} of {counted(len(sums), 'window')}: {between(sums)}."


def _updates(rows: Rows) -> str:
    ratio = _all(rows, "update_ratio")
    still = int(np.count_nonzero(ratio == 0))
    return f"{between(ratio).capitalize()}; {counted(still, 'step')} without any change."


_SAID = {
    "loss": _loss,
    "lr": _lr,
    "loss_scale_before": _scale,
    "grad_norm": _clip,
    "loss_weight_sum": _weights,
    "update_ratio": _updates,
}
"""Charts with a conclusion of their own, by their first column."""
