"""``stepscope compare``: where two recorded runs part."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepscope.commands.finish import say
from stepscope.commands.report import for_terminal
from stepscope.errors import EXIT_CLEAN, EXIT_FINDINGS, StepscopeError

if TYPE_CHECKING:
    from collections.abc import Sequence

EPILOG = "Example:  stepscope compare reports/before reports/after --format html -o compare.html"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("compare", epilog=EPILOG)(compare)


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="DIR DIR...", help="Trace directories; the first is the rule.")],
    exact: Annotated[bool, typer.Option("--exact", help="Every bit must agree.")] = False,
    rtol: Annotated[
        float | None, typer.Option(metavar="X", help="Relative difference to allow, instead of the derived one.")
    ] = None,
    offset: Annotated[
        int | None, typer.Option(metavar="N", help="Micro-step N + 1 of the first run is the others' first one.")
    ] = None,
    format: Annotated[str | None, typer.Option(help="text, json or html.")] = None,  # noqa: A002
    output: Annotated[str | None, typer.Option("--output", "-o", metavar="FILE", help="Where to; - is stdout.")] = None,
) -> int:
    """Find the first micro-step and column in which runs part, and what led there.

    Exit code 0 if they agree, 1 if they part, 2 if they cannot be compared.
    """
    from stepscope.render.comparison import comparison_model
    from stepscope.render.comparison_formats import FORMATS, render_comparison
    from stepscope.render.formats import chosen_format, write
    from stepscope.store.trace import Trace

    if len(runs) < 2:
        raise StepscopeError("a comparison needs two trace directories", hint="stepscope compare A B")
    if rtol is not None and not 0 <= rtol < 1:
        raise StepscopeError(f"--rtol {rtol:g} is not between 0 and 1")
    name = chosen_format(format, output, default="text")
    if name not in FORMATS:
        raise StepscopeError(f"a comparison has no format {name!r}", hint=f"choose one of {', '.join(FORMATS)}")
    named = dict(zip(_names(runs), (Trace.load(run) for run in runs), strict=True))
    model = comparison_model(named, exact=exact, rtol=rtol, offset=offset)
    if output is None or output == "-":
        sys.stdout.write(render_comparison(model, name, **for_terminal(name)))
    else:
        write(Path(output), render_comparison(model, name))
        say(f"wrote {output}")
    return EXIT_CLEAN if model.same else EXIT_FINDINGS


def _names(runs: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell the runs apart."""
    for count in range(1, max(len(run.parts) for run in runs) + 1):
        names = ["/".join(run.parts[-count:]) for run in runs]
        if len(set(names)) == len(names):
            return names
    return [f"{run} ({place})" for place, run in enumerate(runs, 1)]
