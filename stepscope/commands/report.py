"""``stepscope report``: a recorded run as a page, text, JSON, JUnit XML or annotations."""

from __future__ import annotations

import json
import sys
from pathlib import Path  # noqa: TC003 (typer reads the annotations)
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stepscope.errors import EXIT_CLEAN, EXIT_FINDINGS, StepscopeError

if TYPE_CHECKING:
    from stepscope.render.model import ReportModel
    from stepscope.store.trace import Trace

EPILOG = "Examples:  stepscope report reports/run   ·   stepscope report reports/run --format text --fail-on warning"
FAIL_ON = ("error", "warning", "notice", "never")


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
    select: Annotated[list[str] | None, typer.Option(metavar="CODE", help="Ask only these rules.")] = None,
    ignore: Annotated[list[str] | None, typer.Option(metavar="CODE", help="Leave out these rules.")] = None,
    declare: Annotated[
        list[str] | None, typer.Option(metavar="K=V", help="What the loop is meant to do, e.g. accumulation_steps=4.")
    ] = None,
    fail_on: Annotated[
        str, typer.Option(metavar="SEVERITY", help="Exit 1 from this severity on: error, warning, notice or never.")
    ] = "error",
    plotlyjs: Annotated[
        str, typer.Option(metavar="HOW", help="inline: in the page; directory: one file beside it, for many pages.")
    ] = "inline",
) -> int:
    """Judge a recorded run and show what was found."""
    from stepscope.render.formats import EXPORTS, chosen_format
    from stepscope.store.trace import Trace

    _check(fail_on, FAIL_ON, "--fail-on")
    _check(plotlyjs, ("inline", "directory"), "--plotlyjs")
    name = chosen_format(format, output, default="html")
    trace = Trace.load(folder)
    if name in EXPORTS:
        from stepscope.render.export import export

        say(export(trace, name, output))
        return EXIT_CLEAN
    model = _model(trace, declare or [], select or [], ignore or [])
    page = _deliver(model, name, output, folder, plotlyjs)
    if open_page and page is not None:
        typer.launch(page.resolve().as_uri())
    return _exit_code(model, fail_on)


def _model(trace: Trace, declare: list[str], select: list[str], ignore: list[str]) -> ReportModel:
    from stepscope.render.judge import outcomes_for
    from stepscope.render.model import build_model

    declared = dict(_declaration(text) for text in declare)
    return build_model(trace, outcomes_for(trace, declared=declared, select=select, ignore=ignore))


def _declaration(text: str) -> tuple[str, Any]:
    """``K=V`` with V as JSON where it is JSON, as text otherwise."""
    key, sign, value = text.partition("=")
    if not sign or not key:
        raise StepscopeError(f"--declare {text!r} is not of the form KEY=VALUE", hint="--declare accumulation_steps=4")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def _deliver(model: ReportModel, name: str, output: str | None, folder: Path, plotlyjs: str) -> Path | None:
    """Write the report to its file and say so, or print it; returns the page that can be opened."""
    from stepscope.render.formats import render, write

    to_stdout = output == "-" or (output is None and name != "html")
    if to_stdout:
        sys.stdout.write(render(model, name, **for_terminal(name)))
        return None
    from pathlib import Path

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


def _exit_code(model: ReportModel, fail_on: str) -> int:
    from stepscope.rules.outcome import SEVERITIES

    if fail_on == "never":
        return EXIT_CLEAN
    grave = SEVERITIES[: SEVERITIES.index(fail_on) + 1]
    return EXIT_FINDINGS if any(f.severity in grave for f in model.findings) else EXIT_CLEAN


def _check(value: str, choices: tuple[str, ...], option: str) -> None:
    if value not in choices:
        raise StepscopeError(f"{option} {value!r} is none of {', '.join(choices)}")


def say(line: str) -> None:
    """Print one line to stderr; stdout is kept for the report."""
    print(line, file=sys.stderr)  # noqa: T201
