"""Runs the rules on a trace and gives one outcome for each."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import warnings
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

import stepscope.rules
from stepscope.errors import StepscopeError
from stepscope.rules.base import HEADINGS, Rule, Skip
from stepscope.rules.outcome import Finding, Outcome, failed, passed, skipped
from stepscope.rules.view import View

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from stepscope.store.trace import Trace


@cache
def all_rules() -> tuple[Rule, ...]:
    """Every rule, ordered by code. A rule is a module in a family's folder that defines ``RULE``."""
    return tuple(sorted((rule for rule, _ in _modules().values()), key=lambda r: r.code))


@cache
def _modules() -> dict[str, tuple[Rule, Any]]:
    found: dict[str, tuple[Rule, Any]] = {}
    for info in pkgutil.walk_packages(stepscope.rules.__path__, "stepscope.rules."):
        module = importlib.import_module(info.name)
        rule = getattr(module, "RULE", None)
        if isinstance(rule, Rule):
            found[rule.name] = (rule, module)
    return found


def find_rule(text: str) -> Rule:
    """The rule with a code or name.

    Raises:
        StepscopeError: there is none; the hint names the nearest.
    """
    import difflib

    for rule in all_rules():
        if text in (rule.code, rule.name) or text.upper() == rule.code:
            return rule
    known = [r.name for r in all_rules()] + [r.code for r in all_rules()]
    near = difflib.get_close_matches(text, known, n=3, cutoff=0.4)
    raise StepscopeError(
        f"there is no rule {text!r}", hint=f"did you mean {', '.join(near)}?" if near else "see `stepscope rules`"
    )


@cache
def rule_text(name: str) -> dict[str, str]:
    """The explanation of a rule by heading, from its module's docstring; ``Summary`` is its first line."""
    rule = find_rule(name)
    text = inspect.cleandoc(_modules()[rule.name][1].__doc__ or "")
    marks = [
        (m.start(), m.end(), m.group(1)) for m in re.finditer(rf"^({'|'.join(HEADINGS)})\n-+\n", text, re.MULTILINE)
    ]
    sections = {"Summary": text[: marks[0][0] if marks else None].strip()}
    for number, (_, end, heading) in enumerate(marks):
        sections[heading] = text[end : marks[number + 1][0] if number + 1 < len(marks) else None].strip()
    return sections


def judge(
    trace: Trace,
    *,
    declared: Mapping[str, Any] | None = None,
    after: Trace | None = None,
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    accepted: Mapping[str, str] | None = None,
) -> list[Outcome]:
    """Judge a run by every rule.

    Args:
        trace: the run.
        declared: intents, laid over those in the trace's own meta.
        after: the trace that this run resumes.
        select: codes, names or prefixes of codes to judge by; empty for all.
        ignore: the same, left out.
        accepted: names of findings that the configuration accepts, each with its reason: they are reported as skipped.

    Returns:
        One outcome for each rule, in order of code. Findings that another finding explains are folded into it.
    """
    intents = {**trace.meta.get("declared", {}), **(declared or {})}
    view = View(trace, intents, after)
    outcomes = {r.name: _apply(r, view) for r in all_rules() if _chosen(r, select, ignore)}
    _fold(outcomes)
    for name, reason in (accepted or {}).items():
        rule = find_rule(name)
        if rule.name in outcomes and outcomes[rule.name].findings:
            outcomes[rule.name] = skipped(rule.code, rule.name, f"accepted in the configuration: {reason}")
    return list(outcomes.values())


def _chosen(rule: Rule, select: Iterable[str], ignore: Iterable[str]) -> bool:
    def matches(patterns: Iterable[str]) -> bool:
        return any(rule.code.startswith(p.upper()) or rule.name == p for p in patterns if p)

    return (not list(select) or matches(select)) and not matches(ignore)


def _apply(rule: Rule, view: View) -> Outcome:
    """The outcome of one rule. A rule that fails is reported as skipped: the others still judge."""
    reason = _missing(rule, view)
    if reason:
        return skipped(rule.code, rule.name, reason)
    try:
        # Columns hold NaN where null: comparing and dividing such arrays is meant, and must not warn the user.
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            findings = list(rule.judge(view))
    except Skip as skip:
        return skipped(rule.code, rule.name, str(skip))
    except Exception as error:
        return skipped(rule.code, rule.name, f"the rule itself failed: {type(error).__name__}: {error}")
    if findings:
        return failed(rule.code, rule.name, *findings)
    if not len(view.trace.tables["steps"]):
        return skipped(rule.code, rule.name, "no micro-step was recorded")
    return passed(rule.code, rule.name)


def _missing(rule: Rule, view: View) -> str:
    """Why a rule cannot judge this trace, empty if it can."""
    if rule.channel == "check":
        return f"only an experiment decides: {rule.advice}"
    if rule.channel == "resume" and view.after is None:
        return "judged only for a run that resumes another: give --after DIR"
    if rule.channel == "ranks" and len(view.trace.meta.get("ranks", {})) < 2:
        return "needs the traces of several processes"
    if not len(view.trace.tables["steps"]) and not len(view.trace.tables["events"]):
        return "nothing was recorded"
    for column in rule.needs:
        if not view.trace.has(column):
            said = view.trace.meta.get("not_observed", {}).get(column)
            return f"{column} was not observed" + (f": {said}" if said else "")
    return ""


def _fold(outcomes: dict[str, Outcome]) -> None:
    """Fold the findings that another rule's finding explains into that one's evidence."""
    for rule in all_rules():
        cause = outcomes.get(rule.name)
        if cause is None or not cause.findings:
            continue
        gone = [n for n in rule.explains if n in outcomes and outcomes[n].findings]
        if not gone:
            continue
        first, *rest = cause.findings
        evidence = {**first.evidence, "also": [*first.evidence.get("also", []), *gone]}
        bigger = Finding(
            first.code, first.name, first.severity, first.message, first.first_step, first.last_step, evidence
        )
        outcomes[rule.name] = failed(cause.code, cause.name, bigger, *rest)
        for name in gone:
            other = outcomes[name]
            outcomes[name] = skipped(other.code, other.name, f"a consequence of {rule.name}, and told there")
