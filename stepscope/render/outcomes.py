"""Outcomes of checks, where no run was recorded, in the formats of a report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepscope.render.formats import render
from stepscope.render.model import model_of_outcomes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.render.model import RuleText
    from stepscope.rules.outcome import Outcome


def render_outcomes(
    outcomes: Sequence[Outcome],
    format: str,  # noqa: A002 (the name that the command line has)
    *,
    title: str,
    rule_text: RuleText | None = None,
    **options: Any,
) -> str:
    """`outcomes` in a format of a report.

    Args:
        outcomes: one for each check.
        format: ``text``, ``json``, ``junit``, ``github`` or ``html``.
        title: what was checked.
        rule_text: gives the texts of a rule or check; by default those of the installed rules.
        options: of the format, such as ``colour`` of text.

    Raises:
        StepscopeError: there is no such format.
    """
    return render(model_of_outcomes(outcomes, title=title, rule_text=rule_text), format, **options)
