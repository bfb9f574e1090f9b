"""The learning rate of each parameter group, when the step used it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepscope.probes.base import Probe
from stepscope.schema import Column, group_column

if TYPE_CHECKING:
    from stepscope import events
    from stepscope.watch.ledger import Row, WatchedOptimizer

MOST_GROUPS = 8
"""Groups with a column of their own; models with one group per layer name the rest in the table of events."""


def lr_column(group: int) -> Column:
    """Declaration of the column for a group, counted from 1."""
    name = group_column("lr", group)
    return Column(
        name,
        "float64",
        "1",
        f"learning rate of parameter group {group} when the step used it; on rows without a step, at backward",
        "the optimizer has no such group",
    )


def held(value: Any) -> Any:
    """A value that may be a tensor, as it is now: tensors are copied, not read."""
    return value.detach().clone() if hasattr(value, "detach") else value


def rates(optimizer: Any) -> list[Any]:
    """The learning rate of each parameter group as it is now; empty for what has no groups."""
    return [held(g.get("lr")) for g in getattr(optimizer, "param_groups", [])]


class LearningRate(Probe):
    """Reads ``param_groups`` when the optimizer steps; never a scheduler's counters."""

    name = "learning_rate"
    columns = tuple(lr_column(g) for g in range(1, MOST_GROUPS + 1))

    def on_backward_end(self, event: events.BackwardEnd) -> None:
        """The rate at backward, overwritten where a step follows."""
        for row in event.rows:
            if row.optimizer is not None and not row.attempted and "lr" not in row.cells:
                self._read(row.optimizer, row)

    def on_step_begin(self, event: events.StepBegin) -> None:
        """The rate that this step uses."""
        if event.row is not None:
            self._read(event.optimizer, event.row)

    def on_attempt(self, event: events.Attempt) -> None:
        """A skipped step would have used the rate of now."""
        if event.row is not None and not event.ran:
            self._read(event.optimizer, event.row)

    def _read(self, watched: WatchedOptimizer, row: Row) -> None:
        for number, group in enumerate(watched.groups[:MOST_GROUPS], start=1):
            rate = held(group.get("lr"))
            row.cells[group_column("lr", number)] = rate.reshape(()) if hasattr(rate, "reshape") else rate

    def resolve(self, row: Row, cells: dict[str, Any]) -> None:
        """Rates given as integers count too."""
        for number in range(1, MOST_GROUPS + 1):
            name = group_column("lr", number)
            if cells.get(name) is not None:
                cells[name] = _number(cells[name])


def _number(value: Any) -> float | None:
    """The rate as a number; None for what is none: a script may set ``lr`` to anything."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
