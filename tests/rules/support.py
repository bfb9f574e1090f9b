"""Record a small loop in this process and judge it by every rule."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import stepscope
from stepscope.rules.engine import judge

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepscope.rules.outcome import Finding
    from stepscope.store.trace import Trace


def record(loop: Callable[[], Any], declared: dict[str, Any] | None = None) -> Trace:
    """The trace of a loop; what it raises is kept in the trace, as with `stepscope run`."""
    gc.collect()  # optimizers of earlier tests must not be found
    watching = stepscope.watch(declare=declared)
    try:
        with watching:
            loop()
    except (RuntimeError, ValueError, AssertionError):
        pass
    return watching.trace


def judged(trace: Trace, declared: dict[str, Any] | None = None, after: Trace | None = None) -> dict[str, Finding]:
    """The first finding of each rule by its name; a rule that fails by itself fails the test."""
    outcomes = judge(trace, declared=declared, after=after)
    assert not [o.reason for o in outcomes if "the rule itself failed" in o.reason]
    assert not trace.meta["probes_off"]
    return {o.name: o.findings[0] for o in outcomes if o.findings}


def findings(loop: Callable[[], Any], declared: dict[str, Any] | None = None) -> dict[str, Finding]:
    """What the rules find in a loop."""
    return judged(record(loop, declared), declared)


def loud(found: dict[str, Finding]) -> dict[str, str]:
    """Warnings and errors, as name -> message: what a right loop must not have."""
    return {n: f.message for n, f in found.items() if f.severity != "notice"}
