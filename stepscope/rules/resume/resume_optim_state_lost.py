"""The optimizer's state did not survive the resume.

What it does
------------
Compares, by parameter name, the optimizer's state at the save with its state before the first backward of the resumed
run: missing entries, counters that start over, moments that are not the saved ones.

Why it matters
--------------
Adam without its moments makes a first update of about the full rate for every element, and its bias correction starts
over; momentum starts from rest. The loss jumps and takes its time to come back.

What the evidence looks like
----------------------------
The state in the event ``started`` is empty, or `optimizer_state_step` is 0 at the first step, although the earlier run
had saved it.

Fix
---
Save ``optimizer.state_dict()`` with the weights, and load it into the optimizer that steps, after it was built.

Known false alarms
------------------
A new optimizer after a resume by intention: it is a fresh start that this tool cannot tell from a lost state.

References
----------
EvolvingLMMs-Lab/OneVision-Encoder#65, KempnerInstitute/KempnerForge#115.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.rules.base import Rule
from stepscope.rules.resume.continuation import Continuation, continuations, counter, moments
from stepscope.rules.view import View, finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding


def judge(view: View) -> Iterator[Finding]:
    """Optimizers that start without the state that was saved, or with another one."""
    for run in continuations(view):
        found = _unseen(run) if run.saved is None else _missing(run) or _restarted(run) or _replaced(run)
        if found is not None:
            yield found


def _tell(run: Continuation, text: str, params: list[str], observed: object, expected: object) -> Finding:
    return finding(
        RULE.code,
        RULE.name,
        "error",
        text + "; save and load optimizer.state_dict()",
        run.rows,
        run.rows.ends[:1],
        observed=observed,
        expected=expected,
        params=params[:20],
        columns=["optimizer_state_step", "update_norm"],
    )


def _unseen(run: Continuation) -> Finding | None:
    """No save was seen: the counters at the end of the earlier run must do."""
    steps = run.before.windows("optimizer_state_step")
    if not len(steps) or not steps[-1] > 0 or any(run.started["state"].values()):
        return None
    text = f"the optimizer starts without any state, while its counters stood at {steps[-1] + 1:g} at the end of the earlier run"
    return _tell(run, text, list(run.names), 0, float(steps[-1]) + 1)


def _missing(run: Continuation) -> Finding | None:
    assert run.saved is not None
    had = [n for n in run.names if moments(run.saved, n)]
    lost = [n for n in had if not run.started["state"].get(n)]
    if not lost:
        return None
    steps = max((c for n in lost if (c := counter(run.saved, n)) is not None), default=None)
    stood = f" (its counters stood at {steps:g})" if steps is not None else ""
    text = f"{len(lost)} of {len(had)} parameters start without the optimizer state that they had at the save{stood}"
    return _tell(run, text, lost, 0, steps if steps is not None else len(lost))


def _restarted(run: Continuation) -> Finding | None:
    assert run.saved is not None
    pairs = {n: (counter(run.saved, n), counter(run.started, n)) for n in run.names}
    back = {n: (old, new) for n, (old, new) in pairs.items() if old is not None and new is not None and new < old}
    if not back:
        return None
    name, (old, new) = next(iter(back.items()))
    text = f"the step counters of {len(back)} parameters went back from {old:g} to {new:g} ({name}): bias correction starts over"
    return _tell(run, text, list(back), new, old)


def _replaced(run: Continuation) -> Finding | None:
    """Every moment is another one than the saved, though the weights are exactly those of the save."""
    assert run.saved is not None
    had = [n for n in run.names if moments(run.saved, n)]
    known = {v for n in had for v in moments(run.saved, n).values()}
    fresh = [n for n in had if not known.intersection(moments(run.started, n).values())]
    if not run.exact or not had or len(fresh) < len(had):
        return None
    text = f"the optimizer state of all {len(had)} parameters is not the one that was saved with these weights"
    return _tell(run, text, fresh, "another state", "the saved one")


RULE = Rule("RES601", "resume-optim-state-lost", "error", judge, channel="resume")
