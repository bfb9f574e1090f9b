"""What happens around the step: clearing, averages, reductions, autocast, data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from stepscope import events
from stepscope.watch.ledger import stamps
from stepscope.watch.patches import Listener

if TYPE_CHECKING:
    from stepscope.watch.books import Books
    from stepscope.watch.ledger import WatchedOptimizer


class SurroundingsListener(Listener):
    """Hears calls that have a place in the order of calls and no part in an attempt."""

    def __init__(self, books: Books) -> None:
        self.books = books

    def before_zero_grad(self, args: Any, kwargs: Any) -> None:
        """Gradients that were used are about to go: did anybody write to them after the step?"""
        for watched in self._cleared(args[0]):
            row = watched.row
            if row is None or not row.attempted or watched.window or not watched.stamps:
                continue
            if stamps(watched.params) != watched.stamps:
                self.books.sink(events.Called("", "gradients_written_after_step", watched))
            watched.stamps = []  # the next zero_grad finds what this one wrote

    def after_zero_grad(self, args: Any, kwargs: Any, result: Any, error: BaseException | None) -> None:
        """Somebody cleared gradients, or called a method of that name."""
        owner = args[0]
        concerned = self._cleared(owner)
        for watched in concerned:
            if watched.row is not None:
                watched.row.calls.append("Z")
        self.books.sink(events.ZeroGrad(owner, concerned))

    def _cleared(self, owner: Any) -> list[WatchedOptimizer]:
        """The optimizers whose gradients a ``zero_grad`` of `owner` concerns."""
        if isinstance(owner, torch.optim.Optimizer):
            return [w for w in [self.books.known(owner) or self.books.watched(owner)] if w is not None]
        return self.books.concerned(owner.parameters())

    def after_average(self, args: Any, kwargs: Any, result: Any, error: BaseException | None) -> None:
        """An averaged model took in the current weights."""
        self.books.everywhere("E")
        self.books.sink(events.Called("E", "average_updated", None, {"average": type(args[0]).__name__}))

    def before_all_reduce(self, args: Any, kwargs: Any) -> None:
        """A tensor is about to be summed over ranks by hand."""
        tensor = args[0] if args else kwargs.get("tensor")
        self.books.sink(events.Called("", "all_reduce_begin", None, {"tensor": tensor}))

    def after_all_reduce(self, args: Any, kwargs: Any, result: Any, error: BaseException | None) -> None:
        """A tensor was summed over ranks by hand."""
        given = dict(zip(("tensor", "op", "group", "async_op"), args, strict=False)) | kwargs
        self.books.everywhere("R")
        if error is None:
            self.books.sink(events.Called("R", "all_reduce", None, given))

    def after_grad(self, args: Any, kwargs: Any, result: Any, error: BaseException | None) -> None:
        """Gradients were computed without being left in ``.grad``: the forward before may have served only this."""
        create_graph = args[4] if len(args) > 4 else kwargs.get("create_graph", False)
        self.books.sink(events.Called("", "autograd_grad", None, {"create_graph": bool(create_graph)}))

    def after_autocast_enter(self, args: Any, kwargs: Any, result: Any, error: BaseException | None) -> None:
        """A region of autocast begins."""
        self.books.sink(events.Called("", "autocast_enter", None, {"instance": args[0]}))

    def after_autocast_exit(self, args: Any, kwargs: Any, result: Any, error: BaseException | None) -> None:
        """A region of autocast ends."""
        self.books.sink(events.Called("", "autocast_exit", None, {"instance": args[0]}))

    def after_loader_iter(self, args: Any, kwargs: Any, result: Any, error: BaseException | None) -> None:
        """A DataLoader starts over."""
        loader = args[1] if len(args) > 1 else kwargs.get("loader")
        self.books.sink(events.Called("", "loader_iter", None, {"iterator": args[0], "loader": loader}))

    def after_loader_next(self, args: Any, kwargs: Any, result: Any, error: BaseException | None) -> None:
        """A DataLoader gave a batch, or came to its end."""
        name = "loader_next" if error is None else "loader_end"
        self.books.sink(events.Called("", name, None, {"iterator": args[0]}))
