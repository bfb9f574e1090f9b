"""What checks found, in the formats of a report. This is the only place where checks meet the renderers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from stepscope.render.outcomes import render_outcomes
from stepscope.store.jsonio import plain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.rules.outcome import Outcome

FORMATS = ("text", "json", "junit", "github", "html")


def render_checks(outcomes: Sequence[Outcome], format: str, *, title: str) -> str:  # noqa: A002 (the option's name)
    """The outcomes of checks as text, JSON, JUnit XML, annotations of GitHub, or a page.

    Text is short: the verdict, the numbers that it rests on, and one paragraph for each finding.

    Raises:
        StepscopeError: there is no such format.
    """
    if format == "text":
        return "\n".join(line for outcome in outcomes for line in text_lines(outcome)) + "\n"
    rendered = render_outcomes(outcomes, format, title=title)
    return _with_details(rendered, outcomes) if format == "json" else rendered


def text_lines(outcome: Outcome) -> list[str]:
    """One outcome for a terminal."""
    mark = {"passed": "passed", "skipped": "skipped"}.get(outcome.status, "failed" if _grave(outcome) else "notice")
    found = [f"  {f.severity} {f.code} {f.name}: {f.message}" for f in outcome.findings]
    return [
        f"{outcome.name} {mark}: {outcome.reason}",
        *outcome.details.get("lines", ()),
        *found,
    ]


def _grave(outcome: Outcome) -> bool:
    return any(finding.severity != "notice" for finding in outcome.findings)


def _with_details(rendered: str, outcomes: Sequence[Outcome]) -> str:
    content: dict[str, Any] = json.loads(rendered)
    content["checks"] = [
        {"code": o.code, "name": o.name, "status": o.status, "reason": o.reason, "details": o.details} for o in outcomes
    ]
    return json.dumps(plain(content), indent=2, allow_nan=False, ensure_ascii=True) + "\n"
