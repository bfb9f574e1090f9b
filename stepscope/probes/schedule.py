"""Schedulers and averages: how often they moved between two micro-steps, and what they were told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepscope.probes.base import Context, Probe
from stepscope.schema import Column

if TYPE_CHECKING:
    from stepscope import events


class Schedule(Probe):
    """Counts the steps of schedulers from outside; those in constructors and inside other schedulers are not counted."""

    name = "schedule"
    columns = (
        Column("scheduler_steps", "int64", "calls", "steps of the optimizer's schedulers between this backward and the next"),
        Column("scheduler_position", "int64", "steps", "last_epoch of the scheduler that stepped last", "no scheduler has stepped"),
        Column("metric", "float64", "", "metric given to a ReduceLROnPlateau between this backward and the next", "none was"),
        Column("average_updates", "int64", "calls", "updates of averaged models between this backward and the next"),
    )  # fmt: skip

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._position: dict[int, int] = {}
        self._rows: list[Any] = []

    def on_backward_end(self, event: events.BackwardEnd) -> None:
        """Start counting."""
        self._rows = event.rows
        for row in event.rows:
            row.cells.setdefault("scheduler_steps", 0)
            row.cells.setdefault("average_updates", 0)
            if row.optimizer is not None and row.optimizer.index in self._position:
                row.cells["scheduler_position"] = self._position[row.optimizer.index]

    def on_scheduler_step(self, event: events.SchedulerStep) -> None:
        """A scheduler moved."""
        position = getattr(event.scheduler, "last_epoch", None)
        if event.optimizer is None:
            self.context.note("scheduler_of_no_watched_optimizer", None, {"scheduler": type(event.scheduler).__name__})
            return
        if isinstance(position, int):
            self._position[event.optimizer.index] = position
        if event.row is not None:
            event.row.count("scheduler_steps")
            if isinstance(position, int):
                event.row.cells["scheduler_position"] = position
        if event.metric is not None and hasattr(event.scheduler, "patience"):
            self._plateau(event)

    def _plateau(self, event: events.SchedulerStep) -> None:
        metric = event.metric
        held = metric.detach().clone().reshape(()) if hasattr(metric, "detach") else float(metric)
        if event.row is not None:
            event.row.cells["metric"] = held
        before = [r for r in event.lr_before if isinstance(r, int | float)]
        after = [g["lr"] for g in event.optimizer.groups if isinstance(g["lr"], int | float)] if event.optimizer else []
        detail = {"metric": held, "mode": event.scheduler.mode, "lr_before": before, "lr_after": after}
        self.context.note("plateau_step", event.optimizer, detail)

    def on_called(self, event: events.Called) -> None:
        """An averaged model took in the weights; a rate was asked for outside of a step."""
        if event.name == "average_updated":
            for row in self._rows:
                row.count("average_updates")
