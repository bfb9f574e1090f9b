"""Schedulers, averages and switches of optimizers: how often they moved between two micro-steps, and whom they moved."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from stepscope.probes.base import Context, Probe
from stepscope.probes.learning_rate import held, rates
from stepscope.schema import Column

if TYPE_CHECKING:
    from stepscope import events
    from stepscope.watch.ledger import WatchedOptimizer

_PATIENCE = 3
"""Steps in a row of a scheduler whose optimizer does not step, before that is worth an event."""

_MOST_EVENTS = 50
"""Events of one kind that are written at most."""


class Schedule(Probe):
    """Counts the steps of schedulers from outside; those in constructors and inside other schedulers are not counted."""

    name = "schedule"
    columns = (
        Column("scheduler_steps", "int64", "calls", "steps of the optimizer's schedulers between this backward and the next"),
        Column("schedulers_stepped", "int64", "schedulers", "how many different schedulers those steps belong to"),
        Column("scheduler_position", "int64", "steps", "last_epoch of the scheduler that stepped last", "no scheduler has stepped"),
        Column("lr_inside", "float64", "1", "rate of the first group of another optimizer whose step ran inside of this one's: a wrapper's", "none did, or the rate is no number"),
        Column("metric", "float64", "", "metric given to a ReduceLROnPlateau between this backward and the next", "none was"),
        Column("average_updates", "int64", "calls", "updates of averaged models between this backward and the next"),
    )  # fmt: skip

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._position: dict[int, int] = {}
        self._rows: list[Any] = []
        self._books: list[WatchedOptimizer] = []
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._moved: set[int] = set()
        self._idle: dict[int, tuple[int, dict[int, int], int]] = {}
        self._said: dict[str, int] = {}
        self._evaluating = False

    def on_watched(self, watched: WatchedOptimizer) -> None:
        """An optimizer is seen for the first time."""
        self._books = [*(b for b in self._books if b.optimizer is not None), watched]

    def on_backward_end(self, event: events.BackwardEnd) -> None:
        """Start counting."""
        self._rows = event.rows
        self._evaluating = False
        for row in event.rows:
            row.cells.setdefault("scheduler_steps", 0)
            row.cells.setdefault("average_updates", 0)
            if row.optimizer is not None and row.optimizer.index in self._position:
                row.cells["scheduler_position"] = self._position[row.optimizer.index]

    # ---- schedulers -------------------------------------------------------------------------------------------------

    def on_built(self, event: events.Built) -> None:
        """What the constructor of a scheduler did to the rates."""
        if event.what == "scheduler":
            detail = self._describe(event.instance) | {"lr_before": event.lr_before}
            self.context.note("scheduler_built", event.optimizer, detail)

    def on_loaded(self, event: events.Loaded) -> None:
        """A scheduler's state was loaded; that alone changes no rate."""
        if event.what == "scheduler":
            self.context.note("scheduler_loaded", event.optimizer, self._describe(event.instance))

    def _describe(self, scheduler: Any) -> dict[str, Any]:
        """Number, class, plain settings (``T_max``, ``last_epoch``, ...) and the rates that it left."""
        return {
            "number": self._number(scheduler),
            "class": type(scheduler).__name__,
            "settings": _settings(scheduler),
            "nested": [self._number(s) for s in getattr(scheduler, "_schedulers", [])],
            "lr": rates(getattr(scheduler, "optimizer", None)),
        }

    def _number(self, scheduler: Any) -> int:
        return self._numbers.setdefault(scheduler, len(self._numbers) + 1)

    def on_scheduler_step(self, event: events.SchedulerStep) -> None:
        """A scheduler moved."""
        number = self._number(event.scheduler)
        if number not in self._moved:
            self._moved.add(number)
            detail = self._describe(event.scheduler) | {"lr_before": event.lr_before}
            self.context.note("scheduler_first_step", event.optimizer, detail)
        self._follow(event.scheduler, event.optimizer)
        if event.optimizer is None:
            return
        self._count(event, number)
        if event.metric is not None and hasattr(event.scheduler, "patience"):
            self._plateau(event)

    def _count(self, event: events.SchedulerStep, number: int) -> None:
        position = getattr(event.scheduler, "last_epoch", None)
        if isinstance(position, int) and event.optimizer is not None:
            self._position[event.optimizer.index] = position
        if event.row is None:
            return
        event.row.count("scheduler_steps")
        stepped = event.row.cells.setdefault("_stepped", [])
        if number not in stepped:
            stepped.append(number)
        event.row.cells["schedulers_stepped"] = len(stepped)
        if isinstance(position, int):
            event.row.cells["scheduler_position"] = position

    def _follow(self, scheduler: Any, watched: WatchedOptimizer | None) -> None:
        """Say, once, that a scheduler keeps moving while the optimizer that it writes to does not step."""
        number = self._number(scheduler)
        own = watched.attempts if watched is not None else 0
        now = {b.index: b.attempts for b in self._books if b is not watched}
        at, before, count = self._idle.get(number, (own, now, 0))
        if at != own:
            at, before, count = own, now, 0
        self._idle[number] = at, before, count + 1
        moved = [b for b in self._books if b is not watched and b.attempts - before.get(b.index, 0) >= _PATIENCE]
        if count + 1 < _PATIENCE or not moved or f"idle {number}" in self._said:
            return
        self._said[f"idle {number}"] = 1
        others = [
            {"optimizer": b.label, "attempts": b.attempts - before.get(b.index, 0), "shared": _shared(scheduler, b)}
            for b in moved
        ]
        detail = self._describe(scheduler) | {"steps": count + 1, "attempts": own, "others": others}
        self.context.note("scheduler_of_idle_optimizer", watched, detail)

    def _plateau(self, event: events.SchedulerStep) -> None:
        metric = held(event.metric)
        metric = metric.reshape(()) if hasattr(metric, "reshape") else float(metric)
        if event.row is not None:
            event.row.cells["metric"] = metric
        detail = {"metric": metric, "mode": event.scheduler.mode, "lr_before": event.lr_before}
        detail |= {"lr_after": rates(event.scheduler.optimizer), "best": held(event.scheduler.best)}
        self.context.note("plateau_step", event.optimizer, detail)

    # ---- averages, rates asked for, groups --------------------------------------------------------------------------

    def on_called(self, event: events.Called) -> None:
        """An averaged model took in the weights; a rate was asked for outside of a step; a group came."""
        if event.name == "average_updated":
            for row in self._rows:
                row.count("average_updates")
        elif event.name == "stepped_inside" and event.optimizer is not None and event.optimizer.window.last is not None:
            rate = event.detail["inner"].groups[0].get("lr")
            if isinstance(rate, int | float):
                event.optimizer.window.last.cells["lr_inside"] = float(rate)
        elif event.name == "get_lr" and event.detail["returned"] != event.detail["held"]:
            self._say("rate_of_a_further_step", event.optimizer, event.detail)
        elif event.name == "param_group_added":
            self._say("param_group_added", event.optimizer, event.detail)
        elif event.name == "inner_scheduler_step":
            outer = event.detail["outer"]
            detail = self._describe(event.detail["scheduler"]) | {"outer": outer.label if outer is not None else None}
            if f"inner {detail['number']}" not in self._said:
                self._said[f"inner {detail['number']}"] = 1
                self.context.note("inner_scheduler_of_other_optimizer", event.optimizer, detail)

    def _say(self, name: str, watched: WatchedOptimizer | None, detail: dict[str, Any]) -> None:
        """An event, unless there have been many of its name."""
        self._said[name] = self._said.get(name, 0) + 1
        if self._said[name] <= _MOST_EVENTS:
            self.context.note(name, watched, detail)

    # ---- optimizers with a switch (schedule-free ones) --------------------------------------------------------------

    def on_forward(self, event: events.Forward) -> None:
        """Where the switch stands at an evaluation: the first forward without gradients after a backward."""
        if event.training or self._evaluating:
            return
        for book in self._books:
            mode = train_mode(book.optimizer)
            if mode is not None and not {id(p) for p in book.params}.isdisjoint(map(id, event.module.parameters())):
                self._evaluating = True
                detail = {
                    "train_mode": mode,
                    "module": type(event.module).__name__,
                    "module_training": event.module.training,
                }
                self._say("optimizer_mode_at_evaluation", book, detail)


def train_mode(optimizer: Any) -> bool | None:
    """Where the train/eval switch of a schedule-free optimizer stands; None for optimizers that have none."""
    if not callable(getattr(optimizer, "eval", None)):
        return None
    groups = getattr(optimizer, "param_groups", None) or [{}]
    mode = groups[0].get("train_mode", getattr(optimizer, "train_mode", None))
    return mode if isinstance(mode, bool) else None


def _settings(scheduler: Any) -> dict[str, Any]:
    plain = {k: v for k, v in vars(scheduler).items() if isinstance(v, int | float | str | bool)}
    lists = {
        k: [held(x) for x in v]
        for k, v in vars(scheduler).items()
        if k in ("base_lrs", "max_lrs", "_milestones") and isinstance(v, list)
    }
    elements = getattr(getattr(scheduler, "milestones", None), "elements", None)
    return plain | lists | ({"milestones": sorted(elements())} if elements is not None else {})


def _shared(scheduler: Any, book: WatchedOptimizer) -> int:
    """Parameters that the scheduler's optimizer and another one both hold."""
    groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", [])
    return len({id(p) for g in groups for p in g["params"]} & {id(p) for p in book.params})
