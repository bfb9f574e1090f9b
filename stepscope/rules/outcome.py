"""What a rule or a check says: an outcome, and in a failed one the findings with their evidence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Severity = Literal["error", "warning", "notice"]
Status = Literal["passed", "failed", "skipped"]

SEVERITIES: tuple[Severity, ...] = ("error", "warning", "notice")
"""From the gravest down."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is mechanically wrong, and how it is known.

    Attributes:
        code: stable code, a family of three letters and three digits (``ACC101``).
        name: the catalogue's name (``accum-missing-divide``).
        severity: ``error``, ``warning`` or ``notice``.
        message: one sentence: where, what was observed, what it should have been.
        first_step: first micro-step (1-based) that shows it; None where it belongs to the whole run.
        last_step: last micro-step that shows it.
        evidence: plain JSON data. Keys that renderers know: ``observed``, ``expected`` (numbers or text), ``columns``
            (names of `steps` columns to chart), ``micro_steps`` (cited micro-steps, at most 50), ``rows`` (a small
            table: list of flat dicts), ``params`` (parameter names), ``also`` (consequences that were folded into this
            finding: list of names). Non-finite numbers are allowed here; writers turn them into strings.
    """

    code: str
    name: str
    severity: Severity
    message: str
    first_step: int | None = None
    last_step: int | None = None
    evidence: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The verdict of one rule on one trace, or of one check.

    Attributes:
        code: stable code of the rule or check.
        name: its name.
        status: ``passed``, ``failed`` (then `findings` is not empty) or ``skipped`` (then `reason` says why).
        reason: why it was skipped, or for a passed check a sentence with the numbers that matter.
        findings: what was found; a notice alone makes the status ``failed`` too.
        details: plain JSON data for the renderers (tables, figures) that is not tied to one finding.
    """

    code: str
    name: str
    status: Status
    reason: str = ""
    findings: tuple[Finding, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)


def passed(code: str, name: str, reason: str = "", **details: Any) -> Outcome:
    """An outcome without findings."""
    return Outcome(code, name, "passed", reason, details=details)


def skipped(code: str, name: str, reason: str) -> Outcome:
    """An outcome that could not be judged, with the reason in one line."""
    return Outcome(code, name, "skipped", reason)


def failed(code: str, name: str, *findings: Finding, reason: str = "", **details: Any) -> Outcome:
    """An outcome with at least one finding."""
    if not findings:
        raise ValueError("a failed outcome needs a finding")
    return Outcome(code, name, "failed", reason, findings, details)


def worst(findings: tuple[Finding, ...] | list[Finding]) -> Severity | None:
    """The gravest severity among `findings`, None when there are none."""
    present = {f.severity for f in findings}
    return next((s for s in SEVERITIES if s in present), None)
