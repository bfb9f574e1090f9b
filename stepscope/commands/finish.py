"""The end of `trace` and `run`: judge what was recorded, write findings.json and the report, say it on stderr."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from stepscope.errors import EXIT_CLEAN, EXIT_COULD_NOT_RUN, EXIT_FINDINGS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from stepscope.rules.outcome import Finding, Outcome
    from stepscope.store.trace import Trace


def say(line: str) -> None:
    """One line to stderr; stdout belongs to the script, or to what was asked for."""
    print(line, file=sys.stderr, flush=True)  # noqa: T201


def finish(
    folder: Path,
    *,
    declared: Mapping[str, Any],
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    accepted: Mapping[str, str] | None = None,
    fail_on: str = "error",
    after: Path | None = None,
    report: bool = True,
    quiet: bool = False,
) -> int:
    """Judge the trace in `folder` and write the verdict beside it.

    Returns:
        0 clean, 1 findings at or above `fail_on`, 2 nothing was recorded.
    """
    from stepscope.render.envelope import write_findings
    from stepscope.rules.engine import judge
    from stepscope.store.trace import Trace

    trace = Trace.load(folder)
    earlier = Trace.load(after) if after is not None else None
    outcomes = judge(trace, declared=declared, after=earlier, select=select, ignore=ignore, accepted=accepted)
    write_findings(folder, outcomes, complete=trace.complete)
    if report:
        _write_report(trace, outcomes, folder)
    if not quiet:
        _summarise(trace, outcomes, folder, report=report)
    if not len(trace.tables["steps"]):
        say("stepscope: no training step was recorded: no backward pass of a watched model ran in this process")
        return EXIT_COULD_NOT_RUN
    return exit_code((f for outcome in outcomes for f in outcome.findings), fail_on)


def exit_code(findings: Iterable[Finding], fail_on: str) -> int:
    """1 where a finding is at or above `fail_on`, else 0."""
    from stepscope.rules.outcome import SEVERITIES

    if fail_on == "never":
        return EXIT_CLEAN
    loud = SEVERITIES[: SEVERITIES.index(fail_on) + 1]
    return EXIT_FINDINGS if any(f.severity in loud for f in findings) else EXIT_CLEAN


def _write_report(trace: Trace, outcomes: Sequence[Outcome], folder: Path) -> None:
    """The HTML report; a fault in rendering must not hide the verdict."""
    from stepscope.render.html import render_html
    from stepscope.render.model import build_model
    from stepscope.schema import REPORT
    from stepscope.store.atomic import write_text

    try:
        write_text(folder / REPORT, render_html(build_model(trace, outcomes)))
    except Exception as error:
        say(f"stepscope: the report could not be written: {type(error).__name__}: {error}")


def _summarise(trace: Trace, outcomes: Sequence[Outcome], folder: Path, *, report: bool) -> None:
    """The verdict, the findings, and the next command."""
    from stepscope.render.envelope import sorted_findings
    from stepscope.render.model import verdict
    from stepscope.render.words import clean

    told = verdict(outcomes, complete=trace.complete)
    say(f"stepscope: {told.heading.lower()}: {told.line}")
    for finding in sorted_findings(outcomes):
        say(f"  {finding.severity:<8}{finding.code} {finding.name}: {clean(finding.message)}")
    seen = f"open {folder / 'report.html'}" if report else f"stepscope report {folder}"
    say(f"stepscope: trace in {folder}; next: {seen}")
