"""What a probe is: it declares columns, looks at events, and turns what it saw into cells.

A probe works in two places. `on_<event>` methods run inside the training loop: they keep device scalars in the cells of
a row and wait for nothing. `resolve` runs later, in row order, when all scalars of a batch of rows have reached the host:
it computes the declared columns. Cells whose name starts with an underscore are raw material and are never written.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepscope.schema import Column
    from stepscope.watch.ledger import Row, WatchedOptimizer
    from stepscope.watch.naming import Names


@dataclass(slots=True)
class Settings:
    """What the user asked for.

    Attributes:
        every: parameter-level work is done at every n-th window; 0 leaves the rhythm to `Context.detailed`.
        max_steps: micro-steps after which nothing more is recorded; 0 for no end.
        declared: intents stated by the user (``accumulation_steps``, ``total_steps``, ...).
    """

    every: int = 0
    max_steps: int = 0
    declared: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Context:
    """What the recorder offers to probes.

    Attributes:
        note: adds a row to the table of events: ``note(event, optimizer, detail)``.
        not_observed: says once why a column has no values: ``not_observed(column, reason)``.
        names: names of parameters.
        measure: the module of measurements (passed in, so that probes can be imported without torch).
        settings: what the user asked for.
        meta: facts of the run; probes may add their own.
    """

    note: Callable[..., None]
    not_observed: Callable[[str, str], None]
    names: Names
    measure: Any
    settings: Settings
    meta: dict[str, Any]

    def detailed(self, attempt: int) -> bool:
        """Whether parameter-level work is due at an attempt (from 1): all early ones, then ever fewer.

        Every one of the first 200, every 10th up to 10 000, every 100th beyond, so that a table with a row for each
        parameter does not outgrow the run. ``--every`` replaces this.
        """
        if self.settings.every:
            return (attempt - 1) % self.settings.every == 0
        return attempt <= 200 or attempt % (10 if attempt <= 10_000 else 100) == 0


class Probe:
    """One measured thing. Subclasses define `name`, `columns` and the ``on_<event>`` methods they need."""

    name: ClassVar[str]
    columns: ClassVar[tuple[Column, ...]] = ()
    param_columns: ClassVar[tuple[Column, ...]] = ()

    def __init__(self, context: Context) -> None:
        self.context = context

    def resolve(self, row: Row, cells: dict[str, Any]) -> None:
        """Turn raw cells into columns. `cells` holds host values only; called once for each row, in order."""


def per_optimizer(row: Row) -> int:
    """A key for state that a probe keeps for each optimizer; -1 for rows that no optimizer claimed."""
    watched: WatchedOptimizer | None = row.optimizer
    return watched.index if watched is not None else -1
