"""The watcher: all listeners over one set of books, started and stopped together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from stepscope.events import Event
from stepscope.watch.books import Books
from stepscope.watch.listeners import LISTENERS
from stepscope.watch.patches import subscribe, unsubscribe

if TYPE_CHECKING:
    import torch

    from stepscope.watch.ledger import Row, WatchedOptimizer

Sink = Callable[[Event], None]


class Watcher:
    """Watches every optimizer that appears, or only the given ones, and tells `sink` what happens.

    Args:
        sink: receives every event, in order.
        on_row_sealed: receives a row when nothing more can be added to it.
        on_failure: receives the name and the error of a method of ours that raised.
        only: the optimizers to watch; None for all.
    """

    def __init__(
        self,
        sink: Sink,
        on_row_sealed: Callable[[Row], None],
        on_failure: Callable[[str, Exception], None],
        only: Iterable[torch.optim.Optimizer] | None = None,
    ) -> None:
        self.books = Books(sink, on_row_sealed, None if only is None else {id(o) for o in only})
        self._listeners = [listener(self.books) for listener in LISTENERS]
        for listener in self._listeners:
            listener.failed = on_failure  # type: ignore[method-assign, assignment]

    @property
    def optimizers(self) -> dict[int, WatchedOptimizer]:
        """The watched optimizers by id."""
        return self.books.optimizers

    @property
    def all_optimizers(self) -> list[WatchedOptimizer]:
        """Those and the ones that are gone, in the order in which they were first seen."""
        return sorted((*self.books.gone, *self.books.optimizers.values()), key=lambda w: w.index)

    @property
    def micro_steps(self) -> int:
        """Backward passes begun."""
        return self.books.micro_steps

    def watched(self, optimizer: torch.optim.Optimizer) -> WatchedOptimizer | None:
        """The book of an optimizer; None if it is not to be watched."""
        return self.books.watched(optimizer)

    def found(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer existed before; it is watched from its first use on."""
        self.books.found(optimizer)

    def start(self) -> None:
        """Install the patches and begin to listen."""
        subscribe(self._listeners)

    def stop(self) -> None:
        """Stop listening and seal what is open."""
        unsubscribe(self._listeners)
        self.books.seal_all()
