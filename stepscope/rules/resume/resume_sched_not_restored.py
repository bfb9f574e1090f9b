"""The learning rate does not go on where it was.

What it does
------------
Compares the rates of the resumed run with those of the earlier one: with what the earlier run itself used after the
save, where it went on; with its rates from some earlier step on, which a schedule that starts over repeats; with the rate
at the save; and with the formula of the schedule, where the scheduler's class tells it.

Why it matters
--------------
A schedule that starts over warms up again in the middle of training, or holds a high rate when it should be decaying.

What the evidence looks like
----------------------------
`lr` of the first or second step after the resume is that of the beginning, not that of the save.

Fix
---
Save ``scheduler.state_dict()`` and load it after the scheduler was built; by hand, restore the step that the rate is
computed from.

Known false alarms
------------------
A run that is given another rate or another schedule on purpose is left alone, where its construction shows it.

References
----------
lightly-ai/lightly-train#301, pytorch/pytorch#60265.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.rules.base import Rule
from stepscope.rules.resume.continuation import Continuation, base_rates, continuations
from stepscope.rules.schedule.formulas import rate_at
from stepscope.rules.schedule.pace import brings_state, descriptions, moving, rates
from stepscope.rules.view import Array, View, finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding

_SHARE = 0.02
"""A jump is at least this share of the rate, and three times the largest change of the last steps before the save."""

_LOOK = 8
"""Rates of the resumed run that are looked for among those of the earlier one."""


def judge(view: View) -> Iterator[Finding]:
    """Rates that start over or jump."""
    for run in continuations(view):
        earlier, now = rates(run.before), rates(run.rows)
        if not len(earlier) or not len(now) or view.after is None:
            continue
        given, before = base_rates(view, run.rows), base_rates(View(view.after), run.before)
        if given and before and not np.isclose(given[0], before[0], rtol=1e-9):
            continue  # another rate was asked for
        goes_on = _as_before(run, earlier, now)
        if goes_on is True or _cycle_goes_on(view, run):
            continue
        found = _repeats(run, earlier, now) or _jumps(run, earlier, now, goes_on) or _departs(view, run, now)
        if found is not None:
            yield found


def _tell(run: Continuation, text: str, at: int, observed: float, expected: float) -> Finding:
    return finding(
        RULE.code,
        RULE.name,
        "error",
        text + "; save and load the scheduler's state (or the step that the rate is computed from)",
        run.rows,
        run.rows.ends[at : at + 10],
        observed=observed,
        expected=expected,
        columns=["lr", "scheduler_position"],
    )


def _cycle_goes_on(view: View, run: Continuation) -> bool:
    """A cyclic scheduler whose counter was restored: its rates jump and repeat by design."""
    cyclic = any("T_0" in d["settings"] or "total_size" in d["settings"] for d in moving(view, run.rows))
    return cyclic and any(brings_state(d) for d in descriptions(view, run.rows, "scheduler_loaded"))


def _as_before(run: Continuation, earlier: Array, now: Array) -> bool | None:
    """Whether the rates are those that the earlier run used after the save; None where it ended there."""
    later = earlier[run.attempts : run.attempts + len(now)]
    if not len(later):
        return None
    shifted = (earlier[run.attempts + d :][: len(later)] for d in (0, 1, -1) if run.attempts + d >= 0)
    return any(len(s) and np.allclose(s, now[: len(s)], rtol=1e-6, atol=0.0) for s in shifted)


def _repeats(run: Continuation, earlier: Array, now: Array) -> Finding | None:
    """From the second rate on, the rates are those of an earlier place in the schedule, and of that place alone.

    Rates that are held for several steps count once, so that schedules by epoch are compared like those by step.
    """
    levels, steps = _levels(earlier)
    piece = _levels(now)[0][1 : 1 + _LOOK]
    if len(piece) < 2 or len(levels) <= len(piece):
        return None
    windows = np.lib.stride_tricks.sliding_window_view(levels, len(piece))
    places = np.flatnonzero(np.isclose(windows, piece, rtol=1e-6, atol=0.0).all(axis=1))
    due = int(np.searchsorted(steps, run.attempts))  # the level that follows the save
    if len(places) != 1 or abs(int(places[0]) - (due + 1)) <= 2:
        return None
    before = [levels[places[0] - 1], levels[places[0] - 2]] if places[0] >= 2 else []
    if before and np.allclose(before, [now[0], levels[due - 1]], rtol=1e-6, atol=0.0):
        return None  # the same way led there: a cycle
    place = int(steps[places[0]])
    text = (
        f"after the resume at step {run.attempts} the rates {', '.join(f'{v:.4g}' for v in _levels(now)[0][:4])} are, from the second "
        f"on, those of step {place + 1} on: the schedule goes on from another place"
    )
    return _tell(run, text, 0, place, run.attempts + 1)


def _levels(values: Array) -> tuple[Array, Array]:
    """The values without repetitions in a row, and the place where each begins."""
    begins = np.flatnonzero(np.concatenate([[True], ~np.isclose(values[1:], values[:-1], rtol=1e-9, atol=0.0)]))
    return values[begins], begins


def _jumps(run: Continuation, earlier: Array, now: Array, goes_on: bool | None) -> Finding | None:
    """The first rate is neither that of the save nor near it, and no milestone or restart explains it."""
    past = earlier[: run.attempts] if run.attempts else earlier[:1]
    later = earlier[run.attempts] if goes_on is False else None
    at_save = later if later is not None else past[-1] if run.saved is None else _rate_at_save(run, past)
    usual = float(np.abs(np.diff(past[-6:])).max(initial=0.0))
    jump = float(now[0] - at_save)
    if abs(jump) <= max(3 * usual, _SHARE * abs(at_save)):
        return None
    back_to_start = bool(np.isclose(now[0], past[0], rtol=1e-6))
    restarts = bool((np.diff(past) >= 0.5 * abs(jump)).any()) and jump > 0
    if restarts or (jump < 0 and not back_to_start and goes_on is None):
        return None
    text = (
        f"the rate was {at_save:.4g} at the save (step {run.attempts}) and is {now[0]:.4g} at the first step after the resume"
        f"{', the rate of the very first step' if back_to_start else ''}"
    )
    return _tell(run, text, 0, float(now[0]), float(at_save))


def _rate_at_save(run: Continuation, past: Array) -> float:
    assert run.saved is not None
    held = run.saved["lr"]
    return float(held[0]) if held and isinstance(held[0], int | float) else float(past[-1])


def _departs(view: View, run: Continuation, now: Array) -> Finding | None:
    """The rates leave the closed form of the schedule, counted on from the position at the save."""
    assert view.after is not None
    old, new = moving(View(view.after), run.before), moving(view, run.rows)
    if run.saved is None or len(old) != 1 or len(new) != 1 or old[0]["class"] != new[0]["class"]:
        return None
    position = next((s["last_epoch"] for s in run.saved["schedulers"] if s["class"] == old[0]["class"]), None)
    steps = run.rows.per_window(np.nan_to_num(run.rows["scheduler_steps"]))
    if position is None or not _same_schedule(old[0]["settings"], new[0]["settings"]):
        return None
    positions = float(position) + np.concatenate([[0.0], np.cumsum(steps)[:-1]])
    expected = rate_at(old[0]["class"], old[0]["settings"], positions)
    if expected is None or np.isclose(expected, now, rtol=1e-3, atol=1e-12).all():
        return None
    shift = rate_at(old[0]["class"], old[0]["settings"], positions + 1)
    if shift is not None and np.isclose(shift, now, rtol=1e-3, atol=1e-12).all():
        return None
    at = int(np.argmax(~np.isclose(expected, now, rtol=1e-3, atol=1e-12)))
    text = (
        f"{old[0]['class']} stood at position {position} at the save; step {at + 1} after the resume ran at {now[at]:.4g} where the "
        f"schedule says {expected[at]:.4g}: its counter started over"
    )
    return _tell(run, text, at, float(now[at]), float(expected[at]))


def _same_schedule(old: dict[str, object], new: dict[str, object]) -> bool:
    keys = (
        "T_max",
        "eta_min",
        "gamma",
        "step_size",
        "milestones",
        "total_iters",
        "start_factor",
        "end_factor",
        "power",
        "base_lrs",
    )
    return all(old.get(k) == new.get(k) for k in keys)


RULE = Rule("RES606", "resume-sched-not-restored", "error", judge, needs=("lr",), channel="resume")
