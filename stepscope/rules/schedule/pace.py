"""How the rules of this family look at a schedule: the rate of each step, how fast schedulers move, how long they are.

The rate is always the one in ``param_groups`` when the step ran. A scheduler's counter only tells how far a schedule of
known length has come, never what the rate is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from stepscope.schema import group_column

if TYPE_CHECKING:
    from stepscope.rules.view import Array, Rows, View

MOST_GROUPS = 8
"""Parameter groups whose rate has a column."""


def rate_columns(rows: Rows) -> list[str]:
    """Columns with the rate of each parameter group that was seen."""
    names = [group_column("lr", n) for n in range(1, MOST_GROUPS + 1)]
    return [n for n in names if rows.seen(n).any()]


def rates(rows: Rows, column: str = "lr") -> Array:
    """The rate that each attempt used, skipped ones included. Shape ``(windows,)``."""
    return rows.windows(column)


def span(values: Array) -> float:
    """Greatest less least value, NaN left out; 0 where there is none."""
    seen = values[~np.isnan(values)]
    return float(seen.max() - seen.min()) if len(seen) else 0.0


def settled(values: Array) -> int:
    """The first place from which the values stay the same until the end."""
    if not len(values):
        return 0
    different = np.flatnonzero(~np.isclose(values, values[-1], rtol=1e-9, atol=0.0))
    return int(different[-1]) + 1 if len(different) else 0


@dataclass(frozen=True, slots=True)
class Pace:
    """How a scheduler moves along with its optimizer.

    Attributes:
        per_window: the usual number of steps of one scheduler in a window that has any; 0 where none moved.
        share: share of the windows in which a scheduler moved.
        inside: share of the micro-steps before a window's last after which a scheduler moved.
        total: steps of one scheduler altogether.
    """

    per_window: int
    share: float
    inside: float
    total: float

    @property
    def each_micro_step(self) -> bool:
        """A scheduler moved after every backward."""
        return self.inside >= 0.8

    @property
    def each_window(self) -> bool:
        """A scheduler moved in practically every window."""
        return self.share >= 0.8


def pace(rows: Rows) -> Pace:
    """The pace of an optimizer's schedulers; where several of them move, of one."""
    steps = np.nan_to_num(rows["scheduler_steps"]) / np.maximum(np.nan_to_num(rows["schedulers_stepped"], nan=1.0), 1.0)
    windows = rows.per_window(steps)
    if not windows.any():
        return Pace(0, 0.0, 0.0, 0.0)
    early = np.ones(len(rows), dtype=np.bool_)
    early[rows.ends] = False
    early[rows.ends[-1] + 1 :] = False
    inside = float((steps[early] > 0).mean()) if early.any() else 0.0
    moved = windows[windows > 0]
    return Pace(int(np.median(moved)), len(moved) / len(windows), inside, float(steps.sum()))


def descriptions(view: View, rows: Rows, *events: str) -> list[dict[str, Any]]:
    """Details of an optimizer's events of the given names, in order, each with ``event`` and ``micro_step`` added.

    Parsed once for each set of names: there may be an optimizer for every tensor.
    """
    cache: dict[tuple[str, ...], dict[Any, list[dict[str, Any]]]] = view.__dict__.setdefault("_descriptions", {})
    if events not in cache:
        cache[events] = {}
        for e in view.events(*events):
            detail = {**e["detail"], "event": e["event"], "micro_step": e["micro_step"]}
            cache[events].setdefault((e["rank"], e["optimizer"]), []).append(detail)
    return cache[events].get((rows.rank, rows.optimizer), [])


def moving(view: View, rows: Rows) -> list[dict[str, Any]]:
    """The schedulers that stepped, each as it was described at its first step."""
    return descriptions(view, rows, "scheduler_first_step")


def length(view: View, rows: Rows) -> float | None:
    """Steps after which the schedule of an optimizer has ended, where its scheduler's class tells; else None.

    Known for cosine annealing (``T_max``), one-cycle (``total_steps``), polynomial and falling linear ones
    (``total_iters``), and for sequences whose last part is one of them.
    """
    schedulers = moving(view, rows)
    if len(schedulers) != 1:
        return None
    built = {d["number"]: d for d in descriptions(view, rows, "scheduler_built")}
    return _length(schedulers[0], built)


def _length(scheduler: dict[str, Any], built: dict[int, dict[str, Any]]) -> float | None:
    settings = scheduler["settings"]
    starts, nested = settings.get("_milestones"), scheduler.get("nested") or []
    if starts and len(nested) == len(starts) + 1 and nested[-1] in built:
        last = _length(built[nested[-1]], built)
        return None if last is None else float(starts[-1]) + last
    if nested:
        return None
    if "T_max" in settings:
        return float(settings["T_max"])
    if "total_steps" in settings:
        return float(settings["total_steps"])
    falls = "power" in settings or settings.get("end_factor", 1.0) < settings.get("start_factor", 0.0)
    return float(settings["total_iters"]) if "total_iters" in settings and falls else None


def saves_state(view: View, rows: Rows) -> bool:
    """Whether the optimizer's state went into a checkpoint: the run may be meant to be continued."""
    saves = descriptions(view, rows, "saved", "saved_again")
    return any("optimizer" in d.get("holds", ()) or d.get("where") == "state_dict" for d in saves)


def resumes(view: View, rows: Rows) -> bool:
    """Whether the run goes on from an earlier one: its first rate need not be the start of a schedule."""
    loads = descriptions(view, rows, "optimizer_loaded", "scheduler_loaded")
    return view.after is not None or any(d["micro_step"] == 0 and brings_state(d) for d in loads)


def brings_state(load: dict[str, Any]) -> bool:
    """Wrappers load a fresh optimizer's own empty state back into it, which is no resume."""
    if load["event"] == "scheduler_loaded":
        return bool(load["settings"].get("last_epoch"))
    return bool(load.get("state_entries")) or load.get("lr_before") != load.get("lr")
