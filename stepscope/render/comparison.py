"""A comparison of runs as people read it: where they part, what led there, and their curves on one axis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from stepscope.compare import compare
from stepscope.render.chart import Chart, marks
from stepscope.render.overview import nonfinite_steps, series_of, spreads
from stepscope.render.plots import PLOTS
from stepscope.render.rows import Points, Rows
from stepscope.render.views import Table, table_of
from stepscope.render.words import counted, flat, grouped, number, one_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from stepscope.compare import Comparison, Parting
    from stepscope.render.plots import Plot
    from stepscope.store.trace import Trace

MOST_PARTINGS = 40


@dataclass(frozen=True, slots=True)
class PairView:
    """The first run and another one.

    Attributes:
        names: of both.
        same: whether nothing parts.
        step: micro-step of the first parting.
        sentence: the answer.
        notes: what to know.
        partings: columns that differ.
        before: both runs at the steps before.
        parameters: parameters that differ first.
        comparison: the plain data.
    """

    names: tuple[str, str]
    same: bool
    step: int | None
    sentence: str
    notes: tuple[str, ...]
    partings: Table | None
    before: Table | None
    parameters: Table | None
    comparison: Comparison


@dataclass(frozen=True, slots=True)
class ComparisonModel:
    """All that a comparison says: heading, one view for each further run, charts that overlay all runs."""

    names: tuple[str, ...]
    same: bool
    heading: str
    line: str
    pairs: tuple[PairView, ...]
    charts: tuple[Chart, ...]


def comparison_model(runs: Mapping[str, Trace], **options: Any) -> ComparisonModel:
    """Compare the first run with each further one.

    Args:
        runs: two or more traces by name.
        options: of `compare`.
    """
    names = [one_line(name) for name in runs]
    traces = list(runs.values())
    found = [compare(traces[0], other, **options) for other in traces[1:]]
    pairs = tuple(_pair((names[0], name), one) for name, one in zip(names[1:], found, strict=True))
    steps = [p.step for p in pairs if p.step is not None]
    shifts = [0, *(one.offset for one in found)]
    return ComparisonModel(
        names=tuple(names),
        same=not steps,
        heading=_heading(pairs),
        line=_line(pairs),
        pairs=pairs,
        charts=tuple(_charts(names, [Rows(t) for t in traces], shifts, steps, _parted(found))),
    )


def _nearest(pairs: Sequence[PairView]) -> PairView:
    """The pair that parts first; the first one where none does."""
    return min(pairs, key=lambda p: float("inf") if p.step is None else p.step)


def _heading(pairs: Sequence[PairView]) -> str:
    pair = _nearest(pairs)
    if pair.step is None:
        return "No difference"
    return f"They part at micro-step {grouped(pair.step)}, first in {pair.comparison.partings[0].column}"


def _line(pairs: Sequence[PairView]) -> str:
    pair = _nearest(pairs)
    return pair.sentence if len(pairs) == 1 else f"{pair.names[0]} and {pair.names[1]}: {pair.sentence}"


def _pair(names: tuple[str, str], found: Comparison) -> PairView:
    first = found.partings[0] if found.partings else None
    return PairView(
        names=names,
        same=found.same,
        step=first.micro_step if first else None,
        sentence=_sentence(found, first),
        notes=tuple(one_line(note) for note in found.notes),
        partings=_partings(names, found.partings) if first else None,
        before=_before(names, found.before) if found.before else None,
        parameters=_before(names, found.parameters) if found.parameters else None,
        comparison=found,
    )


def _sentence(found: Comparison, first: Parting | None) -> str:
    what = f"{counted(len(found.aligned), 'micro-step')} and {counted(len(found.compared), 'column')}"
    allowed = f"the tolerance of {number(found.tolerance, digits=2)}" if found.tolerance else "every bit"
    if first is None:
        return f"{what} agree within {allowed}." if found.tolerance else f"{what} agree in {allowed}."
    a, b = (_value(v) for v in first.values)
    more = f", a relative difference of {text}" if (text := _difference(first)) else ""
    where = f" ({one_line(first.track)})" if first.track else ""
    step = grouped(first.micro_step)
    before = (
        f"Before micro-step {step} they agree within {allowed}"
        if first.micro_step > found.aligned[0]
        else "They part at once"
    )
    return f"{before}; at micro-step {step} {first.column}{where} is {a} and {b}{more}."


def _value(value: Any) -> str:
    return "not observed" if value is None else number(value, digits=7)


def _difference(parting: Parting) -> str:
    """The relative difference; empty between texts, and where one run has no number."""
    if parting.difference is None or None in parting.values:
        return ""
    return number(parting.difference, digits=2)


def _partings(names: tuple[str, str], partings: Sequence[Parting]) -> Table:
    rows = [
        {
            "column": p.column,
            **({"of": p.track} if p.track else {}),
            "first differs at": p.micro_step,
            names[0]: _value(p.values[0]),
            names[1]: _value(p.values[1]),
            "relative difference": _difference(p),
            "differs at": counted(p.steps, "step"),
        }
        for p in partings
    ]
    return table_of(rows, limit=MOST_PARTINGS)


def _before(names: tuple[str, str], rows: Iterable[Mapping[str, Any]]) -> Table:
    keys = {"first": names[0], "other": names[1]}
    signs = {True: "=", False: "≠"}
    table = []
    for row in rows:
        cells = {keys.get(k, k): _value(v) if k in keys else flat(v) for k, v in row.items() if k != "same"}
        table.append(cells | ({"equal": signs[row["same"]]} if "same" in row else {}))
    return table_of(table)


def _parted(found: Iterable[Comparison]) -> set[str]:
    return {p.column for one in found for p in one.partings}


def _charts(
    names: Sequence[str], runs: Sequence[Rows], shifts: Sequence[int], steps: Sequence[int], parted: set[str]
) -> Iterable[Chart]:
    """A chart for each overview column that some run observed; those that part come first."""
    cited = np.array(sorted(set(steps)), dtype=np.int64)
    made = [c for plot in PLOTS for line in plot.lines if (c := _chart(plot, line.column, names, runs, shifts, cited))]
    yield from sorted(made, key=lambda c: c.title not in parted)


def _chart(
    plot: Plot, column: str, names: Sequence[str], runs: Sequence[Rows], shifts: Sequence[int], cited: np.ndarray
) -> Chart | None:
    drawn = []
    for name, rows, shift in zip(names, runs, shifts, strict=True):
        if rows.has(column) and not column.endswith("_ms"):
            points = rows.points(column, rows.optimizers[0])
            drawn.append((name, Points(points.x + shift, points.y)))
    if not drawn:
        return None
    series = tuple(
        series_of(name, points, colour, "dashed" if colour else "line", cited)
        for colour, (name, points) in enumerate(drawn)
    )
    found = (
        marks("nonfinite", "not finite in a run", nonfinite_steps(points for _, points in drawn)),
        marks("cited", "first difference", cited),
    )
    return Chart(
        f"fig-{column.replace('_', '-')}",
        column,
        plot.unit,
        series=series,
        marks=tuple(m for m in found if m.count),
        caption=_caption(drawn),
        reading=plot.reading,
        log=plot.log and spreads(series),
    )


def _caption(drawn: Sequence[tuple[str, Points]]) -> str:
    """How far apart the first two curves are at most, where both have a value."""
    if len(drawn) < 2:
        return f"Only {drawn[0][0]} observed it."
    (_, a), (_, b) = drawn[:2]
    steps, i, j = np.intersect1d(a.x, b.x, return_indices=True)
    both = np.isfinite(a.y[i]) & np.isfinite(b.y[j])
    steps, ours, theirs = steps[both], a.y[i][both], b.y[j][both]
    if not len(steps):
        return "No step at which both have a finite value."
    at = int(np.argmax(np.abs(ours - theirs)))
    if ours[at] == theirs[at]:
        return f"Equal at {counted(len(steps), 'common step')}."
    values = f"{number(float(ours[at]))} and {number(float(theirs[at]))}"
    return f"Farthest apart at micro-step {grouped(int(steps[at]))}: {values}."
