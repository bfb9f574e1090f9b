"""The books of a recording: which optimizers there are, which rows are open, and what is under way.

Shared by the listeners, which make the entries. Nothing here reads a value from a device: all that is decided is decided
from which calls were made and from the stamps of gradient tensors.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from stepscope import events
from stepscope.watch.ledger import Micro, Row, WatchedOptimizer, stamps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from stepscope.events import Event


class Books:
    """What the listeners know together.

    Args:
        sink: receives every event, in order.
        seal: receives a row when nothing more can be added to it.
        only: ids of the optimizers to watch; None for all.

    Attributes:
        optimizers: the watched optimizers by id.
        idle: optimizers that were there before the recording and have not been used in it, by id.
        gone: the books of optimizers that no longer exist, as far as that has been noticed.
        micro_steps: backward passes begun.
        micro: the backward pass under way, or the last one.
        orphans: rows of backward passes whose gradients no optimizer has claimed.
        pending_calls: calls since the last backward that belong to the next one.
        backward_depth: backward passes within each other; a reentrant checkpoint runs one inside another.
        stepping: optimizers whose step is under way, outermost first, with the time it began.
        scaler_step: the ``scaler.step`` under way: its optimizer, and whether it called the optimizer.
    """

    MOST_ORPHANS = 64
    """Backward passes that no optimizer has claimed are kept open at most this long."""

    def __init__(
        self, sink: Callable[[Event], None], seal: Callable[[Row], None], only: set[int] | None = None
    ) -> None:
        self.sink = sink
        self.seal = seal
        self.optimizers: dict[int, WatchedOptimizer] = {}
        self.idle: dict[int, weakref.ref[Any]] = {}
        self.gone: list[WatchedOptimizer] = []
        self.micro_steps = 0
        self.micro: Micro | None = None
        self.orphans: list[Row] = []
        self.pending_calls: list[str] = []
        self.backward_depth = 0
        self.stepping: list[tuple[WatchedOptimizer, float]] = []
        self.scaler_step: dict[str, Any] | None = None
        self._only = only
        self._seen = 0

    def watched(self, optimizer: Any) -> WatchedOptimizer | None:
        """The book of an optimizer, opened at first sight; None for one that is not to be watched."""
        known = self.optimizers.get(id(optimizer))
        if known is not None and known.optimizer is optimizer:
            return known
        if self._only is not None and id(optimizer) not in self._only:
            return None
        if not isinstance(optimizer, torch.optim.Optimizer) or not hasattr(optimizer, "param_groups"):
            return None
        self._retire()
        self.idle.pop(id(optimizer), None)
        self.optimizers[id(optimizer)] = book = WatchedOptimizer(optimizer, self._seen)
        self._seen += 1
        return book

    def found(self, optimizer: Any) -> None:
        """Take note of an optimizer that exists already; its book is opened when it is used. It may never be."""
        if id(optimizer) not in self.optimizers:
            self.idle[id(optimizer)] = weakref.ref(optimizer)

    def wake(self, module: torch.nn.Module) -> None:
        """Open the books of idle optimizers that hold parameters of `module`, which is being trained."""
        own = {id(p) for p in module.parameters()}
        for optimizer in [ref() for ref in self.idle.values()]:
            if optimizer is not None and any(id(p) in own for g in optimizer.param_groups for p in g["params"]):
                self.watched(optimizer)

    def _retire(self) -> None:
        """Close the books of optimizers that are gone: another object may have got the address of one."""
        for key, book in list(self.optimizers.items()):
            if book.optimizer is None:
                self.gone.append(self.optimizers.pop(key))
                book.stamps, book.before, book.described = [], [], None
                if book.row is not None:
                    self.seal(book.row)
                    book.row = None

    def of_scheduler(self, scheduler: Any) -> WatchedOptimizer | None:
        """The book of the optimizer that a scheduler writes to, None where that one is not watched."""
        return self.known(getattr(scheduler, "optimizer", None))

    def known(self, optimizer: Any) -> WatchedOptimizer | None:
        """The open book of an optimizer, or of the one inside of a wrapper: Accelerate's and Fabric's share its groups."""
        book = self.optimizers.get(id(optimizer))
        if book is not None and book.optimizer is optimizer:
            return book
        held = self.idle.get(id(optimizer))
        if held is not None and held() is optimizer:
            return self.watched(optimizer)
        groups = getattr(optimizer, "param_groups", None)
        return next((b for b in self.alive() if groups is not None and b.groups is groups), None)

    def alive(self) -> list[WatchedOptimizer]:
        """The optimizers that still exist; the last rows of others are complete."""
        if any(w.optimizer is None for w in self.optimizers.values()):
            self._retire()
        return list(self.optimizers.values())

    def concerned(self, parameters: Iterable[Any]) -> list[WatchedOptimizer]:
        """The optimizers that hold any of `parameters`."""
        ids = {id(p) for p in parameters}
        return [w for w in self.alive() if not ids.isdisjoint(map(id, w.params))]

    def open_row(self, watched: WatchedOptimizer, micro: Micro, received: list[int]) -> Row:
        """A new row of an optimizer; the one before it is complete."""
        if watched.row is not None:
            self.seal(watched.row)
        row = watched.open_row(micro, received)
        row.calls = list(micro.calls)
        return row

    def open_orphan(self, micro: Micro) -> Row:
        """A row of a backward pass that gave gradients to no optimizer's parameters."""
        row = Row(micro, None, 1, 0)
        self.orphans.append(row)
        if len(self.orphans) > self.MOST_ORPHANS:
            self.seal(self.orphans.pop(0))
        return row

    def adopt(self, watched: WatchedOptimizer) -> Row | None:
        """The last row of the open window; where there is none, backward passes that nobody else claimed.

        An optimizer of float32 master copies never gets a gradient from a backward: its micro-steps are those that
        gave gradients to parameters of no optimizer.
        """
        if not watched.window and self.orphans and any(p.grad is not None for p in watched.params):
            if watched.row is not None:
                self.seal(watched.row)
            for row in self.orphans:
                row.optimizer, row.window_step, row.global_step = watched, watched.window.size + 1, watched.attempts + 1
                row.calls = list(row.micro.calls)
                watched.window.add(row)
            *complete, watched.row = self.orphans
            self.orphans.clear()
            for row in complete:
                self.seal(row)
        return watched.window.last

    def leave(self, watched: WatchedOptimizer, row: Row) -> None:
        """Tell, once a window, that the gradient that backward left is about to change or to be used."""
        if not row.left:
            row.left = True
            self.sink(events.GradientsLeft(watched, row))

    def attempt(self, watched: WatchedOptimizer, *, ran: bool, found_inf: Any, scaler: Any) -> None:
        """An attempt to step is over: the window ends."""
        row = watched.close_window()
        self.sink(events.Attempt(watched, row, ran, found_inf, scaler))
        watched.stamps = stamps(watched.params)
        for other in self.alive():
            if other is not watched and other.window and other.received <= set(watched.layout):
                other.hand_over_window()

    def everywhere(self, letter: str) -> None:
        """Note a call that concerns no optimizer in particular in every open row."""
        for watched in self.alive():
            if watched.row is not None:
                watched.row.calls.append(letter)

    def seal_all(self) -> None:
        """The recording ends: nothing more can be added to any row."""
        for watched in self.optimizers.values():
            if watched.row is not None:
                self.seal(watched.row)
                watched.row = None
        for row in self.orphans:
            self.seal(row)
        self.orphans.clear()
