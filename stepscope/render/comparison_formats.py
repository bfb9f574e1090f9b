"""A comparison as text, JSON or a page."""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from stepscope import __version__
from stepscope.errors import StepscopeError
from stepscope.render.text import printed, rich_table
from stepscope.store.jsonio import plain

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import RenderableType

    from stepscope.render.comparison import ComparisonModel, PairView

FORMATS = ("text", "json", "html")
FORMAT = 1
"""Format number of the JSON."""


def render_comparison(model: ComparisonModel, format: str, **options: Any) -> str:  # noqa: A002 (the option's name)
    """`model` in one of `FORMATS`.

    Raises:
        StepscopeError: there is no such format.
    """
    if format == "json":
        return _json(model)
    if format == "html":
        from stepscope.render.html import page

        return page("compare.html.j2", model.charts, (), plotly=options.get("plotly", "inline"), model=model)
    if format == "text":
        return _text(model, **options)
    raise StepscopeError(f"a comparison has no format {format!r}", hint=f"choose one of {', '.join(FORMATS)}")


def _json(model: ComparisonModel) -> str:
    content = {
        "format": FORMAT,
        "stepscope": __version__,
        "same": model.same,
        "heading": model.heading,
        "runs": model.names,
        "comparisons": [_plain_pair(pair) for pair in model.pairs],
    }
    return json.dumps(plain(content), indent=2, allow_nan=False, ensure_ascii=True) + "\n"


def _plain_pair(pair: PairView) -> dict[str, Any]:
    found = pair.comparison
    return {
        "runs": pair.names,
        "same": pair.same,
        "sentence": pair.sentence,
        "micro_steps": len(found.aligned),
        "offset": found.offset,
        "tolerance": found.tolerance,
        "compared": found.compared,
        "partings": [asdict(p) for p in found.partings],
        "before": found.before,
        "parameters": found.parameters,
        "notes": found.notes,
    }


def _text(model: ComparisonModel, *, width: int = 100, colour: bool = False, ascii_only: bool = False) -> str:
    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=colour,
        color_system="standard" if colour else None,
        highlight=False,
        legacy_windows=False,
    )
    for part in _parts(model):
        console.print(part)
    return printed(console, ascii_only=ascii_only)


def _parts(model: ComparisonModel) -> Iterable[RenderableType]:
    yield Text(model.heading, style="bold green" if model.same else "bold yellow")
    for pair in model.pairs:
        yield Text(f"{pair.names[0]} and {pair.names[1]}: {pair.sentence}")
        for note in pair.notes:
            yield Padding(Text(note, style="dim"), (0, 0, 0, 2))
        for title, table in (
            ("columns that differ, by their first step", pair.partings),
            ("what led there", pair.before),
            ("parameters that differ first", pair.parameters),
        ):
            if table is not None:
                yield Padding(Text(title, style="bold"), (1, 0, 0, 2))
                yield Padding(rich_table(table), (0, 0, 0, 4))
