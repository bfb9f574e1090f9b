"""A finding as a reader meets it: sentence, evidence table, charts with the cited steps marked."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from stepscope.render.overview import draw
from stepscope.render.plots import PLOTS, Line, Plot
from stepscope.render.words import clean, flat, label, one_line, steps_phrase

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stepscope.render.chart import Chart, Ints
    from stepscope.render.rows import Rows
    from stepscope.rules.outcome import Finding, Outcome, Severity

KNOWN = ("observed", "expected", "columns", "micro_steps", "rows", "params", "also")
"""Keys of evidence that have a place of their own; all others become lines of the numbers table."""

MOST_ROWS = 60


@dataclass(frozen=True, slots=True)
class Table:
    """A small table of texts; numbers are already written out.

    Attributes:
        headers: column titles.
        rows: cells, each row as long as `headers`.
        total: rows there were; more than ``len(rows)`` where the table was cut.
    """

    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    total: int


@dataclass(frozen=True, slots=True)
class FindingView:
    """One finding.

    Attributes:
        anchor: id in the page: the code, with ``-2``, ``-3`` for further findings of one rule.
        code: the rule's code.
        name: its name.
        severity: error, warning or notice.
        message: one sentence.
        where: the steps in words.
        first_step: first micro-step, None for the whole run.
        last_step: last micro-step.
        steps: micro-steps cited, to link to.
        numbers: observed, expected and further evidence as pairs of texts.
        table: rows of evidence, None without.
        params: parameters concerned.
        also: consequences folded into this finding.
        charts: evidence, one for each unit.
    """

    anchor: str
    code: str
    name: str
    severity: Severity
    message: str
    where: str
    first_step: int | None
    last_step: int | None
    steps: tuple[int, ...]
    numbers: tuple[tuple[str, str], ...]
    table: Table | None
    params: tuple[str, ...]
    also: tuple[str, ...]
    charts: tuple[Chart, ...]


def finding_views(rows: Rows | None, found: Sequence[Finding], *, last_step: int = 0) -> tuple[FindingView, ...]:
    """The views of sorted findings; without `rows` (a check has no trace) there are no charts."""
    seen: Counter[str] = Counter()
    views = []
    for finding in found:
        seen[finding.code] += 1
        anchor = _anchor(finding.code, seen[finding.code])
        views.append(_view(rows, finding, anchor, last_step))
    return tuple(views)


def _anchor(code: str, nth: int) -> str:
    """An id that is safe in a page whatever the code holds."""
    base = re.sub(r"[^A-Za-z0-9]", "", code) or "finding"
    return base if nth == 1 else f"{base}-{nth}"


def _view(rows: Rows | None, finding: Finding, anchor: str, last_step: int) -> FindingView:
    evidence = finding.evidence
    steps = _steps(evidence.get("micro_steps", ())) or tuple(s for s in (finding.first_step,) if s is not None)
    return FindingView(
        anchor=anchor,
        code=one_line(finding.code),
        name=one_line(finding.name),
        severity=finding.severity,
        message=clean(finding.message),
        where=steps_phrase(finding.first_step, finding.last_step),
        first_step=finding.first_step,
        last_step=finding.last_step,
        steps=steps,
        numbers=tuple(_numbers(evidence)),
        table=table_of(evidence["rows"]) if evidence.get("rows") else None,
        params=tuple(one_line(p) for p in evidence.get("params", ())),
        also=tuple(one_line(a) for a in evidence.get("also", ())),
        charts=tuple(_charts(rows, finding, anchor, steps, last_step)) if rows is not None else (),
    )


def _steps(values: Iterable[Any]) -> tuple[int, ...]:
    return tuple(sorted({int(v) for v in values if isinstance(v, int | float)}))


def _numbers(evidence: dict[str, Any]) -> Iterable[tuple[str, str]]:
    for key in ("observed", "expected"):
        if key in evidence:
            yield key, flat(evidence[key])
    for key, value in evidence.items():
        if key not in KNOWN:
            yield label(key), flat(value)


def table_of(rows: Sequence[dict[str, Any]], *, limit: int = MOST_ROWS) -> Table:
    """A table of flat dicts; its columns are all keys in order of appearance, absent cells are empty."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    cells = (tuple(flat(row[k]) if k in row else "" for k in keys) for row in rows[:limit])
    return Table(tuple(label(k) for k in keys), tuple(cells), len(rows))


@dataclass(frozen=True, slots=True)
class DetailView:
    """What a check measured, beside its findings.

    Attributes:
        code: the check's code.
        name: its name.
        status: passed, failed or skipped.
        reason: a sentence with the numbers that matter.
        pairs: single values as texts.
        tables: title and table of each list of rows.
    """

    code: str
    name: str
    status: str
    reason: str
    pairs: tuple[tuple[str, str], ...]
    tables: tuple[tuple[str, Table], ...]


def detail_views(outcomes: Iterable[Outcome]) -> tuple[DetailView, ...]:
    """The details of each outcome that has any."""
    return tuple(_detail(o) for o in outcomes if o.details)


def _detail(outcome: Outcome) -> DetailView:
    rows = {
        k: v for k, v in outcome.details.items() if isinstance(v, list) and v and all(isinstance(r, dict) for r in v)
    }
    return DetailView(
        one_line(outcome.code),
        one_line(outcome.name),
        outcome.status,
        clean(outcome.reason),
        tuple((label(k), flat(v)) for k, v in outcome.details.items() if k not in rows),
        tuple((label(k), table_of(v)) for k, v in rows.items()),
    )


def _charts(rows: Rows, finding: Finding, anchor: str, steps: tuple[int, ...], last_step: int) -> Iterable[Chart]:
    """Charts of the columns that the finding names, those of one unit together, with the cited steps marked."""
    named = [c for c in finding.evidence.get("columns", ()) if isinstance(c, str) and rows.has(c)]
    by_plot: dict[str, list[str]] = {}
    for column in named:
        by_plot.setdefault(_home(column).id, []).append(column)
    zoom = _zoom(finding, steps, last_step)
    cited: Ints = np.array(steps, dtype=np.int64)
    for nth, columns in enumerate(by_plot.values(), 1):
        plot = _evidence_plot(f"fig-{anchor}-{nth}", columns, rows)
        if chart := _drawable(draw(plot, rows, cited, show_cited=True, zoom=zoom)):
            yield chart


def _drawable(chart: Chart) -> Chart | None:
    return chart if chart.series or chart.marks else None


def _home(column: str) -> Plot:
    """The overview plot that shows `column`, or a plot of its own."""
    base = column.partition("/pg")[0]
    for plot in PLOTS:
        if base in {line.column for line in plot.lines}:
            return plot
    return Plot(f"only-{column}", column, column, "optimizer step", (Line(column, column),), "")


def _evidence_plot(chart_id: str, columns: list[str], rows: Rows) -> Plot:
    """The part of the overview plot that concerns `columns`; limits in grey come along."""
    home = _home(columns[0])
    bases = {c.partition("/pg")[0] for c in columns}
    lines = tuple(line for line in home.lines if line.column in bases or line.muted)
    declared = {c.name: c for c in rows.trace.columns["steps"]}
    if home.id.startswith("only-") and (column := declared.get(columns[0])) is not None:
        unit = f" [{column.unit}]" if column.unit not in ("", "1") else ""
        return replace(home, id=chart_id, unit=one_line(column.meaning + unit), title=one_line(columns[0]))
    return replace(home, id=chart_id, lines=lines)


def _zoom(finding: Finding, steps: tuple[int, ...], last_step: int) -> tuple[int, int] | None:
    """The cited steps with a tenth of their width (eight steps at least) on either side; None near the whole run."""
    places = [s for s in (finding.first_step, finding.last_step, *steps) if s is not None]
    if not places or last_step <= 40:
        return None
    first, last = min(places), max(places)
    room = max(8, (last - first) // 10)
    zoom = max(1, first - room), min(last_step, last + room)
    return None if zoom[1] - zoom[0] > 0.8 * last_step else zoom
