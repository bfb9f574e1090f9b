"""Outcomes for a report: judged again from the trace, or as they were judged when the run ended."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from stepscope.errors import StepscopeError
from stepscope.render.envelope import outcomes_of
from stepscope.schema import FINDINGS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stepscope.rules.outcome import Outcome
    from stepscope.store.trace import Trace


def outcomes_for(
    trace: Trace,
    *,
    declared: Mapping[str, Any] | None = None,
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
) -> tuple[Outcome, ...]:
    """What the installed rules say about `trace`; without rules, what its findings.json says.

    Args:
        trace: the recorded run.
        declared: the user's intent, on top of what was declared when it ran.
        select: codes or names of rules to ask; all if empty.
        ignore: codes or names of rules to leave out.

    Raises:
        StepscopeError: findings.json is damaged.
    """
    try:
        engine = importlib.import_module("stepscope.rules.engine")
    except ModuleNotFoundError:
        return _stored(trace)
    intent = {**(trace.meta.get("declared") or {}), **(declared or {})}
    return tuple(engine.judge(trace, declared=intent, select=list(select), ignore=list(ignore)))


def _stored(trace: Trace) -> tuple[Outcome, ...]:
    try:
        return outcomes_of(trace.verdict)
    except (KeyError, TypeError, AttributeError) as error:
        where = f"{trace.path}/{FINDINGS}"
        raise StepscopeError(f"{where} does not hold findings: {error!r}", hint="record the run again") from error
