"""Codes and severities of what the checks find, and how a check's outcome is worded for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepscope.errors import StepscopeError
from stepscope.rules.outcome import Finding, Outcome, Severity, failed, passed

if TYPE_CHECKING:
    from collections.abc import Sequence

OWN: dict[str, tuple[str, Severity]] = {
    "accum-still-scaled": ("CHK109", "error"),
    "accum-unequal-weights": ("CHK110", "error"),
    "accum-no-gradient": ("CHK111", "error"),
    "accum-other-gradient": ("CHK112", "error"),
    "accum-batch-coupled": ("CHK113", "notice"),
    "accum-dropout": ("CHK114", "notice"),
    "accum-precision": ("CHK115", "error"),
    "resume-differs": ("CHK201", "error"),
    "schedule-differs": ("CHK301", "error"),
    "schedule-unknown": ("CHK302", "error"),
    "mechanics-missing": ("CHK401", "error"),
    "mechanics-lr": ("CHK402", "error"),
    "mechanics-loss-scaling": ("CHK403", "error"),
    "mechanics-step-condition": ("CHK404", "error"),
    "mechanics-tail-condition": ("CHK405", "error"),
    "mechanics-loop": ("CHK406", "error"),
    "mechanics-tail-weight": ("CHK407", "notice"),
    "ddp-gradient": ("CHK501", "error"),
    "ddp-ranks-differ": ("CHK502", "error"),
}
"""Findings that only an experiment makes: name -> code and severity. The others have the code of their rule."""


def finding(name: str, message: str, *, severity: Severity = "error", **evidence: Any) -> Finding:
    """A finding of a check; the code is its rule's where there is a rule of that name."""
    if name in OWN:
        code, severity = OWN[name]
    else:
        code = _rule_code(name)
    return Finding(code, name, severity, message, evidence=evidence)


def _rule_code(name: str) -> str:
    from stepscope.rules.engine import find_rule

    try:
        return find_rule(name).code
    except StepscopeError:
        return "CHK000"


def outcome(code: str, name: str, findings: Sequence[Finding], summary: str, **details: Any) -> Outcome:
    """The outcome of a check: failed where there are findings."""
    if findings:
        return failed(code, name, *findings, reason=summary, **details)
    return passed(code, name, summary, **details)
