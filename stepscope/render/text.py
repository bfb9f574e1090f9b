"""The report for a terminal: verdict, findings with what to do, the run in numbers and sparklines."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from rich.console import Console
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from stepscope.render.sparkline import sparkline
from stepscope.render.words import clean, one_line

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import RenderableType

    from stepscope.render.model import ReportModel
    from stepscope.render.views import DetailView, FindingView, Table

_STYLES = {
    "error": "bold red",
    "warning": "bold yellow",
    "notice": "bold blue",
    "good": "bold green",
    "unknown": "bold",
}
_SYMBOLS = {"error": "✕", "warning": "▲", "notice": "●", "good": "✓", "unknown": "?"}
_PLAIN = {"error": "x", "warning": "!", "notice": "*", "good": "+", "unknown": "?"}
SPARK_WIDTH = 48


def render_text(model: ReportModel, *, width: int = 100, colour: bool = False, ascii_only: bool = False) -> str:
    """The report as text.

    Args:
        model: what it says.
        width: columns of the terminal.
        colour: whether to write ANSI colours.
        ascii_only: whether the terminal shows nothing but ASCII.
    """
    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=colour,
        color_system="standard" if colour else None,
        highlight=False,
        legacy_windows=False,
    )
    for part in _parts(model, ascii_only):
        console.print(part, soft_wrap=False)
    return printed(console, ascii_only=ascii_only)


def printed(console: Console, *, ascii_only: bool) -> str:
    """What was printed to a console that writes to a `StringIO`, without blanks at the ends of lines."""
    written = console.file.getvalue()  # type: ignore[attr-defined]
    text = "".join(f"{line.rstrip()}\n" for line in written.split("\n")).rstrip("\n") + "\n"
    return _to_ascii(text) if ascii_only else text


def _parts(model: ReportModel, ascii_only: bool) -> Iterable[RenderableType]:
    tone = model.verdict.tone
    yield Text(f"{_symbol(tone, ascii_only)} {model.verdict.heading}", style=_STYLES[tone])
    yield Text(f"  {model.title}: {model.verdict.line}")
    for banner in model.banners:
        yield Padding(Text(f"! {banner}", style="yellow"), (0, 0, 0, 2))
    for finding in model.findings:
        yield Text()
        yield from _finding(finding, model, ascii_only)
    for detail in model.details:
        yield Text()
        yield from _detail(detail)
    if model.numbers:
        yield Text()
        yield _numbers(model)
    if lines := _sparklines(model, ascii_only):
        yield Text()
        yield lines
    if model.skipped:
        yield Text()
        yield from _skipped(model)


def _symbol(tone: str, ascii_only: bool) -> str:
    return (_PLAIN if ascii_only else _SYMBOLS)[tone]


def _finding(finding: FindingView, model: ReportModel, ascii_only: bool) -> Iterable[RenderableType]:
    head = Text(f"{_symbol(finding.severity, ascii_only)} {finding.severity} ", style=_STYLES[finding.severity])
    head.append(f"{finding.code} {finding.name}", style="bold")
    head.append(f"  {finding.where}", style="dim")
    yield head
    yield Padding(Text(finding.message), (0, 0, 0, 2))
    for label, value in finding.numbers:
        yield Padding(Text(f"{label}: {value}", style="dim"), (0, 0, 0, 4))
    if finding.table is not None:
        yield Padding(rich_table(finding.table), (0, 0, 0, 4))
    fix = model.rules.get(finding.name, {}).get("Fix")
    if fix:
        first, *rest = (" ".join(b.split()) if b[:1] != " " else b for b in clean(fix).strip("\n").split("\n\n"))
        yield Padding(Text("\n".join([f"fix: {first}", *rest])), (0, 0, 0, 2))


def _detail(detail: DetailView) -> Iterable[RenderableType]:
    head = Text(f"{detail.code} {detail.name}: {detail.status}", style="bold")
    yield head
    if detail.reason:
        yield Padding(Text(detail.reason), (0, 0, 0, 2))
    for label, value in detail.pairs:
        yield Padding(Text(f"{label}: {value}"), (0, 0, 0, 2))
    for title, table in detail.tables:
        yield Padding(Text(title, style="dim"), (0, 0, 0, 2))
        yield Padding(rich_table(table), (0, 0, 0, 4))


def rich_table(table: Table) -> RichTable:
    """A table of texts without lines."""
    made = RichTable(box=None, pad_edge=False, show_edge=False)
    for header in table.headers:
        made.add_column(Text(header), style="dim", overflow="fold")
    for row in table.rows:
        made.add_row(*(Text(cell) for cell in row))
    return made


def _numbers(model: ReportModel) -> RenderableType:
    grid = RichTable.grid(padding=(0, 3))
    shown = [n for n in model.numbers if n.value is not None]
    half = -(-len(shown) // 2)
    for left, right in zip(shown[:half], [*shown[half:], None], strict=False):
        cells = [left.label, left.text, *((right.label, right.text) if right else ("", ""))]
        grid.add_row(*(Text(cell, style="" if i % 2 else "dim") for i, cell in enumerate(cells)))
    return Padding(grid, (0, 0, 0, 2))


def _sparklines(model: ReportModel, ascii_only: bool) -> RenderableType | None:
    grid = RichTable.grid(padding=(0, 2))
    for whole in (True, True, False):
        grid.add_column(no_wrap=whole)
    charts = [c for c in model.charts if c.series and c.id in _SPARKS]
    for chart in charts:
        line = sparkline(chart.series[0], chart, SPARK_WIDTH, ascii_only=ascii_only)
        grid.add_row(Text(_SPARKS[chart.id], style="dim"), Text(line), Text(chart.caption, style="dim"))
    return Padding(grid, (0, 0, 0, 2)) if charts else None


_SPARKS = {"fig-loss": "loss", "fig-lr": "lr", "fig-loss-scale": "loss scale", "fig-grad-norm": "grad norm"}
"""Charts with a line in the terminal, and what it is called."""


def _skipped(model: ReportModel) -> Iterable[RenderableType]:
    """One line for each reason, cut at the edge: the page and the other formats have them in full."""
    by_reason: dict[str, list[str]] = {}
    for rule in model.skipped:
        by_reason.setdefault(one_line(rule.reason), []).append(rule.name)
    yield Text("  not judged", style="dim")
    grid = RichTable.grid()
    grid.add_column(no_wrap=True, overflow="ellipsis", style="dim")
    for reason, names in by_reason.items():
        who = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        grid.add_row(Text(f"{who}: {reason}"))
    yield Padding(grid, (0, 0, 0, 4))


_ASCII = str.maketrans(
    {"\u202f": " ", "–": "-", "…": "...", "×": "x", "√": "sqrt", "‖": "|", "Δ": "d", "≠": "!=", "²": "^2"}
)


def _to_ascii(text: str) -> str:
    return text.translate(_ASCII).encode("ascii", "backslashreplace").decode("ascii")
