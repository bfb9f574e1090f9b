"""The report as workflow commands of GitHub Actions, which appear as annotations of the run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.render.words import clean, steps_phrase

if TYPE_CHECKING:
    from stepscope.render.model import ReportModel


def render_github(model: ReportModel) -> str:
    """One line for each finding and a notice with the verdict."""
    lines = [
        _command(
            f["severity"],
            f"{f['code']} {f['name']}",
            f"{steps_phrase(f['first_step'], f['last_step'])}: {f['message']}",
        )
        for f in model.envelope["findings"]
    ]
    lines.append(_command("notice", "stepscope", f"{model.title}: {model.verdict.heading}: {model.verdict.line}"))
    return "\n".join(lines) + "\n"


def _command(severity: str, title: str, message: str) -> str:
    return f"::{severity} title={_property(title)}::{_data(message)}"


def _data(text: str) -> str:
    """Escapes of a message, as in `@actions/core`: percent first."""
    return clean(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    """Escapes of a property: those of a message, and what would end it."""
    return _data(text).replace(":", "%3A").replace(",", "%2C")
