"""The formats by name, and the guess from a file's suffix. Each renderer is imported when it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepscope.errors import StepscopeError

if TYPE_CHECKING:
    from pathlib import Path

    from stepscope.render.model import ReportModel

REPORTS = ("html", "text", "json", "junit", "github")
"""Formats of a report."""

EXPORTS = ("csv", "tensorboard", "wandb", "mlflow")
"""Formats that hand on the recorded values instead of the verdict."""

_SUFFIXES = {".html": "html", ".htm": "html", ".txt": "text", ".json": "json", ".xml": "junit", ".csv": "csv"}


def chosen_format(name: str | None, output: str | None, *, default: str) -> str:
    """The format that was asked for by name, or by the suffix of the output file.

    Raises:
        StepscopeError: there is no such format.
    """
    if name is None:
        suffix = "" if output in (None, "-") else "." + str(output).rpartition(".")[2].lower()
        return _SUFFIXES.get(suffix, default)
    if name not in REPORTS + EXPORTS:
        raise StepscopeError(f"no format {name!r}", hint=f"choose one of {', '.join(REPORTS + EXPORTS)}")
    return name


def render(model: ReportModel, name: str, **options: Any) -> str:
    """The report in one of `REPORTS`; `options` are those of its renderer."""
    if name == "html":
        from stepscope.render.html import render_html

        return render_html(model, **options)
    if name == "text":
        from stepscope.render.text import render_text

        return render_text(model, **options)
    return _plain(model, name)


def _plain(model: ReportModel, name: str) -> str:
    from stepscope.render.github import render_github
    from stepscope.render.json import render_json
    from stepscope.render.junit import render_junit

    made = {"json": render_json, "junit": render_junit, "github": render_github}
    if name not in made:
        raise StepscopeError(f"no format {name!r}", hint=f"choose one of {', '.join(REPORTS)}")
    return made[name](model)


def write(path: Path, content: str) -> None:
    """Write a report as UTF-8, whole or not at all.

    Raises:
        StepscopeError: the file cannot be written.
    """
    from stepscope.store.atomic import write_text

    try:
        write_text(path, content)
    except OSError as error:
        raise StepscopeError(
            f"cannot write {path}: {error.strerror or error}", hint="give another path with -o"
        ) from error
