"""The one model that every report format is built on: verdict, findings, numbers, charts; plain data, no drawing."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from stepscope.errors import StepscopeError
from stepscope.render.chart import distinct
from stepscope.render.envelope import VerdictWord, envelope, sorted_findings, verdict_word
from stepscope.render.overview import overview
from stepscope.render.parameters import ParameterView, parameter_view
from stepscope.render.ranks import RankView, rank_view
from stepscope.render.rows import Rows
from stepscope.render.steps_table import StepTable, step_table
from stepscope.render.summary import Fact, Number, banners, facts, numbers
from stepscope.render.timeline import WindowPair, window_pairs
from stepscope.render.views import DetailView, FindingView, detail_views, finding_views
from stepscope.render.words import clean, counted, one_line
from stepscope.rules.outcome import SEVERITIES, Finding, Outcome

if TYPE_CHECKING:
    from stepscope.render.chart import Chart, Ints
    from stepscope.store.trace import Trace

LONGEST_TITLE = 80

RuleText = Callable[[str], Mapping[str, str]]
"""From a rule's name to its sections: heading -> text; empty for an unknown rule."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A rule that passed or could not be judged.

    Attributes:
        code: the rule's code.
        name: its name.
        reason: why it was skipped, or what it saw.
    """

    code: str
    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer at the top of every format.

    Attributes:
        word: of the envelope; ``not judged`` where no rule ran.
        tone: colour and symbol: ``good``, or the gravest severity, or ``unknown``.
        heading: the answer in a few words.
        line: the counts behind it.
    """

    word: VerdictWord | Literal["not judged"]
    tone: Literal["good", "error", "warning", "notice", "unknown"]
    heading: str
    line: str


@dataclass(frozen=True, slots=True)
class ReportModel:
    """All that a report says.

    Attributes:
        title: what ran.
        verdict: the answer.
        envelope: what findings.json says, for machines.
        findings: gravest first, then by step.
        passed: rules that passed.
        skipped: rules that could not judge, with reasons.
        details: tables of checks that belong to no finding.
        rules: texts of the rules that found something: name -> heading -> text.
        banners: what limits it: cut off, thinned, not observed, a probe that failed.
        cited: the values at the micro-steps that findings cite; None where they cite none.
        numbers: the run in figures.
        facts: command, versions, devices, settings.
        charts: overview over the steps.
        parameters: table and heat map; None where there are none.
        windows: calls of a good and of a faulty window.
        ranks: processes side by side; None for one process.
    """

    title: str
    verdict: Verdict
    envelope: Mapping[str, Any]
    findings: tuple[FindingView, ...]
    passed: tuple[Judged, ...]
    skipped: tuple[Judged, ...]
    details: tuple[DetailView, ...]
    rules: Mapping[str, Mapping[str, str]]
    banners: tuple[str, ...] = ()
    cited: StepTable | None = None
    numbers: tuple[Number, ...] = ()
    facts: tuple[Fact, ...] = ()
    charts: tuple[Chart, ...] = ()
    parameters: ParameterView | None = None
    windows: tuple[WindowPair, ...] = ()
    ranks: RankView | None = None


def build_model(trace: Trace, outcomes: Sequence[Outcome], *, rule_text: RuleText | None = None) -> ReportModel:
    """Work out everything that a report of `trace` says.

    Args:
        trace: the recorded run.
        outcomes: what the rules said about it; empty if none was asked.
        rule_text: gives a rule's texts; by default those of the installed rules.
    """
    rows = Rows(trace)
    found = sorted_findings(outcomes)
    cited = _cited(found)
    last = int(rows.micro_step.max()) if len(rows) else 0
    words = _Words(
        run_title(trace),
        complete=trace.complete,
        scope=_scope(rows),
        rule_text=rule_text,
    )
    return replace(
        words.model(outcomes),
        banners=banners(trace),
        findings=finding_views(rows, found, last_step=last),
        cited=step_table(rows, cited),
        numbers=numbers(rows),
        facts=facts(trace),
        charts=overview(rows, cited),
        parameters=parameter_view(trace),
        windows=window_pairs(rows, found),
        ranks=rank_view(rows),
    )


def model_of_outcomes(outcomes: Sequence[Outcome], *, title: str, rule_text: RuleText | None = None) -> ReportModel:
    """What there is to say where no run was recorded: the outcomes of checks alone."""
    return _Words(title, complete=True, scope="", rule_text=rule_text).model(outcomes)


@dataclass(frozen=True, slots=True)
class _Words:
    """The part of a report that needs no steps."""

    title: str
    complete: bool
    scope: str
    rule_text: RuleText | None

    def model(self, outcomes: Sequence[Outcome]) -> ReportModel:
        found = sorted_findings(outcomes)
        return ReportModel(
            title=one_line(self.title),
            verdict=verdict(outcomes, complete=self.complete, scope=self.scope),
            envelope=envelope(outcomes, complete=self.complete),
            findings=finding_views(None, found),
            passed=_judged(outcomes, "passed"),
            skipped=_judged(outcomes, "skipped"),
            details=detail_views(outcomes),
            rules=rule_texts(found, self.rule_text or installed_rule_text),
        )


def verdict(outcomes: Sequence[Outcome], *, complete: bool, scope: str = "") -> Verdict:
    """The answer and the counts behind it.

    Args:
        outcomes: of all rules or checks.
        complete: whether everything was seen.
        scope: what was looked at, put behind the counts.
    """
    severities = [f.severity for o in outcomes for f in o.findings]
    counts = [counted(severities.count(s), s) for s in SEVERITIES if s in severities]
    passed, skipped = (sum(o.status == status for o in outcomes) for status in ("passed", "skipped"))
    counts += [f"{passed} passed", f"{skipped} not judged"] if outcomes else []
    line = "; ".join([", ".join(counts) or "no rule was asked", *([scope] if scope else [])])
    if not outcomes:
        return Verdict("not judged", "unknown", "Not judged", line)
    word = verdict_word(outcomes, complete=complete)
    if word == "findings":
        worst = next(s for s in SEVERITIES if s in severities)
        heading = {
            "error": "This loop is wrong",
            "warning": "This loop looks wrong",
            "notice": "Nothing wrong, but note",
        }
        return Verdict(word, worst, heading[worst], line)
    if word == "incomplete":
        return Verdict(word, "unknown", "Nothing found, but not everything was seen", line)
    return Verdict(word, "good", "Nothing wrong found", line)


def run_title(trace: Trace) -> str:
    """What ran, in a few words: the script or the command."""
    command = trace.meta.get("command")
    words = [str(word) for word in command] if isinstance(command, list) else [str(command or "")]
    program = words[0].replace("\\", "/").rpartition("/")[2].replace("__main__.py", "stepscope")
    folder = trace.path.name if trace.path is not None else "training run"
    name = one_line(trace.meta.get("script") or " ".join([program, *words[1:]]) or folder)
    return name if len(name) <= LONGEST_TITLE else f"{name[: LONGEST_TITLE - 1]}…"


def installed_rule_text(name: str) -> Mapping[str, str]:
    """The texts of an installed rule, empty for an unknown one."""
    try:
        engine = importlib.import_module("stepscope.rules.engine")
    except ImportError:
        return {}
    lookup = getattr(engine, "rule_text", None)
    if not callable(lookup):
        return {}
    try:
        return dict(lookup(name))
    except (LookupError, ValueError, StepscopeError):
        return {}


def rule_texts(found: Sequence[Finding], lookup: RuleText) -> dict[str, Mapping[str, str]]:
    """Texts of each rule with a finding, in the order of the findings; rules without text are left out."""
    names = dict.fromkeys(finding.name for finding in found)
    return {name: text for name in names if (text := lookup(name))}


def _scope(rows: Rows) -> str:
    if not len(rows):
        return "no micro-step was recorded"
    steps, _ = rows.column("sync_gradients")
    attempts = len(distinct(rows.micro_step[steps == 1]))
    return f"{counted(len(rows.steps), 'micro-step')}, {counted(attempts, 'optimizer step')}"


def _judged(outcomes: Sequence[Outcome], status: str) -> tuple[Judged, ...]:
    return tuple(Judged(clean(o.code), clean(o.name), clean(o.reason)) for o in outcomes if o.status == status)


def _cited(found: Sequence[Finding]) -> Ints:
    """Every micro-step that a finding names."""
    cited: set[int] = set()
    for finding in found:
        steps = [finding.first_step, finding.last_step, *finding.evidence.get("micro_steps", [])]
        cited.update(int(s) for s in steps if isinstance(s, int | float) and s == s)
    return np.array(sorted(cited), dtype=np.int64)
