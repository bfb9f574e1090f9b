"""The envelope of findings.json: what was judged about a run, for machines, with a format number."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from stepscope import __version__
from stepscope.errors import StepscopeError
from stepscope.rules.outcome import SEVERITIES, Finding, Outcome, Severity, failed, passed, skipped
from stepscope.schema import FINDINGS, FINDINGS_FORMAT
from stepscope.store.jsonio import write_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from stepscope.store.trace import Trace

VerdictWord = Literal["clean", "findings", "incomplete"]


def envelope(outcomes: Iterable[Outcome], *, complete: bool) -> dict[str, Any]:
    """What was judged, as plain data in a fixed order.

    Args:
        outcomes: one for each rule or check.
        complete: whether the whole run was recorded; where it was not, "nothing found" is no "clean".

    Returns:
        ``format``, ``stepscope``, ``verdict``, ``findings``, ``passed``, ``skipped``.
    """
    outcomes = list(outcomes)
    return {
        "format": FINDINGS_FORMAT,
        "stepscope": __version__,
        "verdict": verdict_word(outcomes, complete=complete),
        "findings": [_finding_row(finding) for finding in sorted_findings(outcomes)],
        "passed": [
            {"code": o.code, "name": o.name} | ({"reason": o.reason} if o.reason else {})
            for o in outcomes
            if o.status == "passed"
        ],
        "skipped": [{"code": o.code, "name": o.name, "reason": o.reason} for o in outcomes if o.status == "skipped"],
    }


def write_findings(folder: Path, outcomes: Iterable[Outcome], *, complete: bool) -> dict[str, Any]:
    """Write the envelope to ``findings.json`` in `folder` and return it."""
    content = envelope(outcomes, complete=complete)
    write_json(folder / FINDINGS, content)
    return content


def judged_now(trace: Trace) -> dict[str, Any]:
    """The envelope of a run that was not judged when it ended: one recorded by `watch`, or killed."""
    from stepscope.rules.engine import judge

    return envelope(judge(trace), complete=trace.complete)


def verdict_word(outcomes: Sequence[Outcome], *, complete: bool) -> VerdictWord:
    """``findings`` if there is any; ``clean`` only if the run was seen whole and at least one rule could judge it."""
    if any(o.findings for o in outcomes):
        return "findings"
    return "clean" if complete and any(o.status == "passed" for o in outcomes) else "incomplete"


def sorted_findings(outcomes: Iterable[Outcome]) -> list[Finding]:
    """All findings, gravest first, then by the first step (those of the whole run lead), then by code."""
    found = [finding for outcome in outcomes for finding in outcome.findings]
    return sorted(found, key=lambda f: (SEVERITIES.index(f.severity), f.first_step or 0, f.code, f.name))


def outcomes_of(content: Mapping[str, Any]) -> tuple[Outcome, ...]:
    """The outcomes that an envelope holds, findings of one rule together; the reverse of `envelope`.

    Raises:
        StepscopeError: it does not hold findings.
    """
    try:
        return _outcomes_of(content)
    except (KeyError, TypeError, AttributeError) as error:
        raise StepscopeError(f"{FINDINGS} does not hold findings: {error!r}", hint="record the run again") from error


def _outcomes_of(content: Mapping[str, Any]) -> tuple[Outcome, ...]:
    by_rule: dict[tuple[str, str], list[Finding]] = {}
    for row in content.get("findings", []):
        finding = _finding(row)
        by_rule.setdefault((finding.code, finding.name), []).append(finding)
    return (
        *(failed(code, name, *found) for (code, name), found in by_rule.items()),
        *(passed(row["code"], row["name"], row.get("reason", "")) for row in content.get("passed", [])),
        *(skipped(row["code"], row["name"], row["reason"]) for row in content.get("skipped", [])),
    )


def _finding_row(finding: Finding) -> dict[str, Any]:
    return {
        "code": finding.code,
        "name": finding.name,
        "severity": finding.severity,
        "message": finding.message,
        "first_step": finding.first_step,
        "last_step": finding.last_step,
        "evidence": finding.evidence,
    }


def _finding(row: Mapping[str, Any]) -> Finding:
    severity: Severity = next((s for s in SEVERITIES if s == row["severity"]), "error")
    return Finding(
        row["code"],
        row["name"],
        severity,
        row["message"],
        row.get("first_step"),
        row.get("last_step"),
        dict(row.get("evidence") or {}),
    )
