"""From the columns of a trace to charts: a series per process and optimizer, thinned, what must not be lost marked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.render import captions
from stepscope.render.chart import POINTS, Chart, Floats, Ints, Marks, Series, Style, distinct, marks, thin
from stepscope.render.formula import formula_points
from stepscope.render.plots import PLOTS, Line, Plot
from stepscope.render.rows import Points, Rows, Track
from stepscope.render.words import grouped, one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

FEW_TRACKS = 6
"""More processes than these are drawn as smallest, median and largest."""


def overview(rows: Rows, cited: Ints) -> tuple[Chart, ...]:
    """The overview charts of a run, each with a caption; those without data say why."""
    whole = (int(rows.steps[0]), int(rows.steps[-1])) if len(rows) else None
    return tuple(draw(plot, rows, cited, zoom=whole) for plot in PLOTS)


def draw(
    plot: Plot, rows: Rows, cited: Ints, *, show_cited: bool = False, zoom: tuple[int, int] | None = None
) -> Chart:
    """One chart.

    Args:
        plot: what to show.
        rows: the run's steps.
        cited: micro-steps that findings name; they survive thinning.
        show_cited: whether to mark them on the strip.
        zoom: first and last micro-step in view.
    """
    lines = [line for line in plot.lines if rows.has(line.column)]
    if not any(not line.muted for line in lines):
        return Chart(
            plot.id, plot.title, plot.unit, reading=plot.reading, missing=why_missing(rows, plot.lines[0].column)
        )
    drawn = list(_lines(lines, plot, rows))
    nonfinite = nonfinite_steps(points for _, points, _, _ in drawn)
    skipped = rows.steps_where("step_skipped") if plot.skips else _NO_STEPS
    keep = distinct(np.concatenate((cited, skipped)))
    series = tuple(series_of(name, points, colour, style, keep) for name, points, colour, style in drawn)
    series += _formula(plot, rows, keep)
    return Chart(
        plot.id,
        plot.title,
        f"{plot.unit} (per {plot.per})" if plot.per else plot.unit,
        series=series,
        marks=_marks(nonfinite, skipped, cited if show_cited else _NO_STEPS),
        caption=_caption(plot, rows, series),
        reading=plot.reading,
        log=plot.log and spreads(series),
        zoom=zoom,
    )


_NO_STEPS: Ints = np.zeros(0, dtype=np.int64)


def _lines(lines: Sequence[Line], plot: Plot, rows: Rows) -> Iterable[tuple[str, Points, int | None, Style]]:
    """Name, points, colour and style of each line for each group and track."""
    tracks = rows.processes if plot.per == "micro-step" else rows.optimizers
    colour = 0
    for line in lines:
        for name, column in _groups(line, rows):
            for label, points in _tracks(column, tracks, rows):
                if not len(points.x) or (line.term and not points.y.any()):
                    continue
                yield f"{name} ({label})" if label else name, points, None if line.muted else colour, line.style
                colour += not line.muted


def _groups(line: Line, rows: Rows) -> Iterable[tuple[str, str]]:
    """Legend and column of each parameter group; groups with the same values throughout share one line."""
    alike: dict[bytes, list[str]] = {}
    columns = rows.group_columns(line.column)
    for column in columns:
        alike.setdefault(rows.column(column)[0].tobytes(), []).append(column)
    for same in alike.values():
        numbers = [column.rpartition("/pg")[2] if "/pg" in column else "1" for column in same]
        which = f", group {' and '.join(numbers)}".replace("group", "groups" if len(numbers) > 1 else "group")
        yield line.name + (which if len(columns) > 1 else ""), same[0]


def _tracks(column: str, tracks: Sequence[Track], rows: Rows) -> Iterable[tuple[str, Points]]:
    """The points of each track, those that are alike as one; or the smallest, median and largest of many."""
    each = [(track.label, rows.points(column, track)) for track in tracks]
    alike: dict[bytes, list[tuple[str, Points]]] = {}
    for label, points in each:
        alike.setdefault(points.x.tobytes() + points.y.tobytes(), []).append((label, points))
    if len(alike) > FEW_TRACKS:
        return _summarised([points for _, points in each])
    return [(_together([label for label, _ in same]), same[0][1]) for same in alike.values()]


def _together(labels: Sequence[str]) -> str:
    """What tracks with the same values are called."""
    if len(labels) == 1:
        return labels[0]
    return f"{' and '.join(labels)} alike" if len(labels) < 4 else f"{len(labels)} tracks alike"


def _summarised(each: Sequence[Points]) -> list[tuple[str, Points]]:
    """Smallest, median and largest over tracks at every step that they share, by sorting all cells once."""
    x = np.concatenate([p.x for p in each])
    y = np.concatenate([p.y for p in each])
    order = np.lexsort((y, x))
    x, y = x[order], y[order]
    steps, first, count = np.unique(x, return_index=True, return_counts=True)
    said = f"of {len(each)} tracks"
    places = {"smallest": first, "median": first + (count - 1) // 2, "largest": first + count - 1}
    return [(f"{name} {said}", Points(steps, y[place])) for name, place in places.items()]


def series_of(name: str, points: Points, colour: int | None, style: Style, keep: Ints) -> Series:
    """Points as a series: what is not finite left out, thinned, the steps in `keep` kept."""
    finite = points.finite()
    chosen = thin(finite.y, POINTS, np.isin(finite.x, keep))
    return Series(name, finite.x[chosen], finite.y[chosen], colour, style, len(finite.x))


def _formula(plot: Plot, rows: Rows, keep: Ints) -> tuple[Series, ...]:
    """The learning rate by its formula, where the run says which one it meant."""
    if plot.lines[0].column != "lr" or (points := formula_points(rows)) is None:
        return ()
    return (series_of("by the formula", points, None, "dashed", keep),)


def nonfinite_steps(all_points: Iterable[Points]) -> Ints:
    """Micro-steps at which any of the points is not finite."""
    return distinct(np.concatenate([_NO_STEPS, *(p.x[~np.isfinite(p.y)] for p in all_points)]))


def _marks(nonfinite: Ints, skipped: Ints, cited: Ints) -> tuple[Marks, ...]:
    all_marks = (
        marks("nonfinite", "not finite (NaN or infinite)", nonfinite),
        marks("skipped", "optimizer step skipped", skipped),
        marks("cited", "cited by the finding", cited),
    )
    return tuple(m for m in all_marks if m.count)


def _caption(plot: Plot, rows: Rows, series: tuple[Series, ...]) -> str:
    first = plot.lines[0].column
    said = captions.caption(plot, rows) if rows.has(first) else why_missing(rows, first)
    total = max(s.total for s in series)
    shown = max(len(s.x) for s in series)
    if shown < total:
        said += (
            f" Shown {grouped(shown)} of {grouped(total)} values: the smallest and largest of each stretch, "
            "and every skipped, non-finite and cited step."
        )
    return said


def spreads(series: Iterable[Series]) -> bool:
    """Whether all values are positive and span more than three decades, so that a linear axis would hide most."""
    y: Floats = np.concatenate([np.zeros(0), *(s.y for s in series if s.colour is not None)])
    return bool(len(y) and y.min() > 0 and y.max() > 1000 * y.min())


def why_missing(rows: Rows, column: str) -> str:
    """One line that says why there is nothing to draw of `column`."""
    reasons = rows.trace.meta.get("not_observed") or {}
    if column in reasons:
        return f"{column} was not observed: {one_line(reasons[column])}."
    declared = {c.name: c for c in rows.trace.columns["steps"]}
    if column not in declared:
        return f"{column} is not in this trace: it was recorded without the probe that measures it."
    when = declared[column].null_when
    return f"{column} has no value in any row" + (f": it is null when {one_line(when)}." if when else ".")
