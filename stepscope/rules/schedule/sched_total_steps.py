"""The schedule is shorter or longer than the run: its length was given in another unit, or is wrong.

What it does
------------
Compares the length of the schedule, where the scheduler's class tells it, with the steps that it really makes, and looks
at the rates themselves: zero long before the end, below zero, or rising again along the cosine that has passed its end.

Why it matters
--------------
A schedule that is too short spends the rest of the run at rate zero, or climbs back to the full rate. One that is too
long never decays.

What the evidence looks like
----------------------------
`scheduler_position` goes beyond ``T_max`` and `lr` rises again; or `lr` is 0 over the last steps; or the length equals
the number of batches while the scheduler moves once an epoch.

Fix
---
Give the scheduler the number of times that it will be stepped: epochs times optimizer steps per epoch where it is
stepped at each step, epochs where it is stepped once an epoch.

Known false alarms
------------------
CosineAnnealingLR stepped beyond ``T_max`` on purpose, as a cyclic schedule; CosineAnnealingWarmRestarts and CyclicLR say
so and stay silent. A run that was ended early by hand looks as if its schedule were too long: that is a notice.

References
----------
pwhofman/probly#557, sthalles/SimCLR#8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from stepscope.rules.base import Rule
from stepscope.rules.schedule.pace import (
    length,
    moving,
    pace,
    rate_columns,
    rates,
    resumes,
    saves_state,
    settled,
    span,
)
from stepscope.rules.schedule.sched_per_microbatch import too_fast, too_slow
from stepscope.rules.view import Array, Rows, View, finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.outcome import Finding, Severity


def judge(view: View) -> Iterator[Finding]:
    """The first sign, for each optimizer, that the length of its schedule is wrong."""
    error = str(view.trace.meta.get("error", ""))
    if "specified number of total steps" in error:
        yield finding(RULE.code, RULE.name, "warning", f"the scheduler was stepped more often than it is long: {error}")
        return
    for rows in view.stepping:
        if too_fast(view, rows):
            continue  # what is wrong there is the pace
        signs = (_past_the_end, _below_zero, _zero_early, mirrored, _wrong_unit, _declared, _unfinished)
        found = next((f for sign in signs if (f := sign(view, rows)) is not None), None)
        if found is not None:
            yield found


def _tell(rows: Rows, where: Array, severity: Severity, text: str, observed: float, expected: float) -> Finding:
    columns = ["lr", "scheduler_position"]
    return finding(
        RULE.code, RULE.name, severity, text, rows, where, observed=observed, expected=expected, columns=columns
    )


def _past_the_end(view: View, rows: Rows) -> Finding | None:
    """An annealing scheduler beyond its length, with a rate that rises again."""
    planned, lr = length(view, rows), rates(rows)
    position = rows.windows("scheduler_position")
    if planned is None or not (position > planned).any():
        return None
    beyond = np.flatnonzero((position[:-1] >= planned) & (np.diff(lr) > 0.01 * span(lr)))
    if not len(beyond):
        return None
    last = int(np.nanmax(position))
    text = (
        f"the schedule is {planned:g} steps long and was stepped {last} times: the rate fell to {np.nanmin(lr):.3g} and rose "
        f"again to {np.nanmax(lr[beyond + 1]):.3g}; its length should be {last}, the steps that it really makes"
    )
    return _tell(rows, rows.ends[beyond + 1], "warning", text, planned, last)


def _below_zero(view: View, rows: Rows) -> Finding | None:
    lr = rates(rows)
    negative = lr < 0
    if not negative.any():
        return None
    first = int(np.flatnonzero(negative)[0])
    text = (
        f"the rate is below zero in {int(negative.sum())} steps, down to {np.nanmin(lr):.3g}: the schedule ended at step {first} of "
        f"{len(lr)} and went on falling; its length should be {len(lr)}"
    )
    return _tell(rows, rows.ends[negative], "warning", text, first, len(lr))


def _zero_early(view: View, rows: Rows) -> Finding | None:
    """Rate zero in every group over the last steps of the run."""
    highest = np.nanmax(np.stack([rates(rows, c) for c in rate_columns(rows)]), axis=0)
    end, count = settled(highest), len(highest)
    if not end or highest[-1] != 0.0 or count - end < max(3, 0.1 * count) or pace(rows).per_window >= 2:
        return None
    text = (
        f"the rate is 0 from step {end + 1} of {count} on: the last {count - end} steps changed nothing; the schedule's length "
        f"should be {count} steps"
    )
    return _tell(rows, rows.ends[end:], "warning", text, end, count)


def mirrored(view: View, rows: Rows) -> Finding | None:
    """A half cosine to nearly zero, and back up the same way: a formula that was not stopped at its end."""
    if any("T_0" in d["settings"] or "base_momentums" in d["settings"] for d in moving(view, rows)):
        return None  # cycles by design
    lr = rates(rows)
    if len(lr) < 12 or not np.isfinite(lr).all():
        return None
    peak = int(np.argmax(lr[: max(2, len(lr) // 2)]))
    low = peak + int(np.argmin(lr[peak:])) if not len(_dips(lr, peak)) else int(_dips(lr, peak)[0])
    period, after = low - peak, len(lr) - 1 - low
    reach = min(period, after)
    if lr[low] > 0.02 * lr[peak] or period < 4 or reach < 3 or reach < 0.25 * period:
        return None
    x = np.arange(-reach, reach + 1)
    expected = lr[low] + (lr[peak] - lr[low]) * 0.5 * (1 - np.cos(np.pi * x / period))
    if np.abs(lr[low - reach : low + reach + 1] - expected).max() > 0.08 * lr[peak]:
        return None
    text = (
        f"the rate follows a cosine that ends at step {low + 1} of {len(lr)}, and climbs back to {lr[low + reach]:.3g}: the "
        f"schedule is {low} steps long for a run of {len(lr)}"
    )
    return _tell(rows, rows.ends[low + 1 :], "warning", text, low, len(lr))


def _dips(lr: Array, peak: int) -> Array:
    """Places of local minima near zero after the peak."""
    inner = np.arange(max(peak, 1), len(lr) - 1)
    dip = (lr[inner] <= lr[inner - 1]) & (lr[inner] <= lr[inner + 1]) & (lr[inner] <= 0.02 * lr[peak])
    return np.asarray(inner[dip])


def _wrong_unit(view: View, rows: Rows) -> Finding | None:
    """A length in batches for a scheduler that moves once in many of them."""
    planned, found, lr = length(view, rows), pace(rows), rates(rows)
    if planned is not None and too_slow(view, rows):
        text = (
            f"the schedule is {planned:g} steps long, which is the number of micro-batches, but it moved only {found.total:g} times, "
            f"once per optimizer step: the rate is still {lr[-1]:.3g} at the end; its length should be {found.total:g}"
        )
        return _tell(rows, rows.ends[-1:], "warning", text, planned, found.total)
    if planned is None or found.total < 2 or found.each_window or planned < 2 * found.total:
        return None
    moved = np.flatnonzero(np.nan_to_num(rows["scheduler_steps"]) > 0)
    apart = float(np.median(np.diff(moved))) if len(moved) > 1 else 0.0
    windows_apart = float(np.median(np.diff(rows.window_of[moved]))) if len(moved) > 1 else 0.0
    units = {
        "the optimizer steps of the run": len(rows.ends),
        "its micro-steps": len(rows),
        "the micro-steps between two of its steps": apart,
        "the optimizer steps between two of its steps": windows_apart,
    }
    unit = next((u for u, n in units.items() if n >= 4 and abs(planned - n) <= 1), None)
    if unit is None:
        return None
    text = (
        f"the schedule is {planned:g} steps long, which is the number of {unit}, but it moved only {found.total:g} times: the rate "
        f"is still {lr[-1]:.3g} at the end; its length should be {found.total:g}"
    )
    return _tell(rows, rows.ends[-1:], "warning", text, planned, found.total)


def _declared(view: View, rows: Rows) -> Finding | None:
    """The declared number of optimizer steps against the length of the schedule, known or read off its rates."""
    total, found = view.declared.get("total_steps"), pace(rows)
    if not total or found.each_micro_step or (found.total and not found.each_window):
        return None
    known, ticks = length(view, rows), max(1, found.per_window)
    if known is None and resumes(view, rows):
        return None  # where the schedule began is not in this trace
    planned = known / ticks if known is not None else _extrapolated(rates(rows))
    if planned is None or abs(planned - int(total)) <= max(1, (0.1 if known is not None else 0.25) * int(total)):
        return None
    text = (
        f"{int(total)} optimizer steps are declared, but the schedule ends after {planned:.4g} of them: the rate is "
        f"{rates(rows)[-1]:.3g} after {len(rows.ends)} steps, {np.nanmax(rates(rows)):.3g} at its highest"
    )
    return _tell(rows, rows.ends, "warning", text, planned, int(total))


def _extrapolated(lr: Array) -> float | None:
    """The step at which a straight line or half a cosine through the falling rates reaches zero; None for other curves."""
    peak = len(lr) - 1 - int(np.argmax(lr[::-1])) if len(lr) and np.isfinite(lr).all() else 0
    falling = lr[peak:]
    if len(falling) < 6 or not (np.diff(falling) < 0).all() or falling[-1] <= 0:
        return None
    steps = np.arange(len(falling))
    slopes = np.diff(falling)
    if np.allclose(slopes, slopes.mean(), rtol=1e-4, atol=0.0):
        return float(peak + falling[0] / -slopes.mean())
    angle = np.arccos(2 * falling[1:] / falling[0] - 1)
    if np.allclose(angle / steps[1:], angle[-1] / steps[-1], rtol=1e-3, atol=0.0):
        return float(peak + np.pi * steps[-1] / angle[-1])
    return None


def _unfinished(view: View, rows: Rows) -> Finding | None:
    """A run that came to its own end in the first third of its schedule and left nothing to resume from."""
    planned, lr = length(view, rows), rates(rows)
    position = rows.windows("scheduler_position")
    ended = view.trace.whole and view.trace.meta.get("status") == "complete"
    if planned is None or not ended or view.after is not None or not np.isfinite(position).any():
        return None
    last = float(np.nanmax(position))
    if saves_state(view, rows) or last >= planned / 3 or len(lr) < 10 or last < 2:
        return None
    text = (
        f"the run ended at step {last:g} of a schedule of {planned:g}: the rate is still {lr[-1]:.3g}; right if the run was cut "
        "short on purpose"
    )
    return _tell(rows, rows.ends[-1:], "notice", text, planned, last)


RULE = Rule("SCH502", "sched-total-steps", "warning", judge, needs=("lr",))
