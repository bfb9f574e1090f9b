"""``stepscope report``: a recorded run as a page, text, JSON, JUnit XML or annotations."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stepscope.commands.finish import exit_code, say
from stepscope.errors import EXIT_CLEAN, FAIL_ON, require_one_of

if TYPE_CHECKING:
    from stepscope.render.model import ReportModel
    from stepscope.store.trace import Trace

EPILOG = "Examples:  stepscope report reports/run   ·   stepscope report reports/run --format text --fail-on warning"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("report", epilog=EPILOG)(report)


def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Trace directory: the --out of a run.")],
    format: Annotated[  # noqa: A002 (the option's name)
        str | None,
        typer.Option(help="html, text, json, junit, github; or csv, tensorboard, wandb, mlflow to export the values."),
    ] = None,
    output: Annotated[str | None, typer.Option("--output", "-o", metavar="FILE", help="Where to; - is stdout.")] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    select: Annotated[list[str], typer.Option(metavar="CODE", help="Ask only these rules.")] = [],  # noqa: B006
    ignore: Annotated[list[str], typer.Option(metavar="CODE", help="Leave out these rules.")] = [],  # noqa: B006
    declare: Annotated[
        list[str], typer.Option(metavar="KEY=VALUE", help="What the loop is meant to do, e.g. accumulation_steps=4.")
    ] = [],  # noqa: B006
    after: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="This run resumes the one recorded in DIR.  [default: as when it ran]"),
    ] = None,
    fail_on: Annotated[
        str | None,
        typer.Option(metavar="SEVERITY", help="Exit 1 from this severity on: error, warning, notice or never."),
    ] = None,
    plotlyjs: Annotated[
        str, typer.Option(metavar="HOW", help="inline: in the page; directory: one file beside it, for many pages.")
    ] = "inline",
) -> int:
    """Judge a recorded run and show what was found."""
    from stepscope.config import load_config, parse_declarations
    from stepscope.render.formats import EXPORTS, chosen_format
    from stepscope.render.model import build_model
    from stepscope.rules.engine import judge
    from stepscope.store.trace import Trace

    require_one_of("--plotlyjs", plotlyjs, ("inline", "directory"))
    name = chosen_format(format, output, default="html")
    trace = Trace.load(folder)
    if name in EXPORTS:
        from stepscope.render.export import export

        say(export(trace, name, output))
        return EXIT_CLEAN
    config = load_config()
    level = fail_on or config.fail_on
    require_one_of("--fail-on", level, FAIL_ON)
    outcomes = judge(
        trace,
        declared={**config.declare, **trace.meta.get("declared", {}), **parse_declarations(declare)},
        after=_earlier(trace, after),
        select=select or config.select,
        ignore=ignore or config.ignore,
        accepted=config.accept,
    )
    model = build_model(trace, outcomes)
    page = _deliver(model, name, output, folder, plotlyjs)
    if open_page and page is not None:
        typer.launch(page.resolve().as_uri())
    return exit_code((f for outcome in outcomes for f in outcome.findings), level)


def _earlier(trace: Trace, after: Path | None) -> Trace | None:
    """The run that `trace` resumes: the one that is named, else the one that was named when it ran, if it still exists."""
    if after is not None:
        return trace.load(after)
    told = trace.meta.get("after")
    return trace.load(told) if told and Path(told).is_dir() else None


def _deliver(model: ReportModel, name: str, output: str | None, folder: Path, plotlyjs: str) -> Path | None:
    """Write the report to its file and say so, or print it; returns the page that can be opened."""
    from stepscope.render.formats import render, write

    to_stdout = output == "-" or (output is None and name != "html")
    if to_stdout:
        sys.stdout.write(render(model, name, **for_terminal(name)))
        return None
    path = Path(output) if output is not None else folder / "report.html"
    options = {}
    if name == "html" and plotlyjs == "directory":
        from stepscope.render.html import PLOTLY, asset

        write(path.with_name(PLOTLY), asset(PLOTLY) + "\n")
        options = {"plotly": PLOTLY}
    write(path, render(model, name, **options))
    say(f"wrote {path}")
    return path if name == "html" else None


def for_terminal(name: str) -> dict[str, Any]:
    """What the text format may use on this stdout: its width, colours, characters beyond ASCII."""
    if name != "text":
        return {}
    from rich.console import Console

    console = Console()
    unicode = (sys.stdout.encoding or "ascii").lower().replace("-", "").startswith("utf")
    width = console.width if console.is_terminal else max(100, console.width)
    return {"width": width, "colour": console.color_system is not None, "ascii_only": not unicode}
