"""Calls that limit gradients, and what they were given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepscope import events
from stepscope.events import ClipCall
from stepscope.watch.ledger import Row, WatchedOptimizer, stamps, tensors
from stepscope.watch.patches import Listener

if TYPE_CHECKING:
    import torch

    from stepscope.watch.books import Books


class ClipListener(Listener):
    """Hears torch's clips, whatever name they were imported by."""

    def __init__(self, books: Books) -> None:
        self.books = books
        self._calls: list[list[tuple[ClipCall, WatchedOptimizer, Row | None]]] = []
        self._norm_type = 2.0

    def before_total_norm(self, args: Any, kwargs: Any) -> None:
        """A clip takes its norm."""
        self._norm_type = float(args[1] if len(args) > 1 else kwargs.get("norm_type", 2.0))

    def after_own_norm(self, args: Any, kwargs: Any, result: Any, error: BaseException | None) -> None:
        """A script took a norm itself, to log it or to clip to it."""
        if error is None:
            self.before_total_norm(args, kwargs)
            given = tensors(args[0] if args else kwargs.get("tensors"))
            self.books.sink(events.Called("", "norm_taken", None, {"tensors": given, "norm": result}))

    def before_clip(self, args: Any, kwargs: Any) -> None:
        """Gradients are about to be multiplied to fit a norm."""
        names = ("parameters", "max_norm", "total_norm")
        given = dict(zip(names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in names}
        parameters = tensors(given.get("parameters"))
        call = ClipCall("norm", [], _as_float(given.get("max_norm")), self._norm_type, given.get("total_norm"))
        self._norm_type = 2.0
        self._begin_clip(call, parameters)

    def after_clip(self, args: Any, kwargs: Any, result: Any, error: BaseException | None) -> None:
        """The clip ended."""
        self._end_clip(error)

    def before_clip_value(self, args: Any, kwargs: Any) -> None:
        """Gradients are about to be limited element by element."""
        limit = args[1] if len(args) > 1 else kwargs.get("clip_value")
        parameters = args[0] if args else kwargs.get("parameters")
        self._begin_clip(ClipCall("value", [], _as_float(limit), float("inf")), tensors(parameters))

    def after_clip_value(self, args: Any, kwargs: Any, result: Any, error: BaseException | None) -> None:
        """The clip ended."""
        self._end_clip(error)

    def _begin_clip(self, call: ClipCall, parameters: list[torch.Tensor]) -> None:
        call.parameters = parameters
        call.gradients = [p.grad for p in parameters if p.grad is not None]
        targets = self.books.concerned(parameters) if call.gradients else []
        begun: list[tuple[ClipCall, WatchedOptimizer, Row | None]] = []
        for watched in targets or self._filled_by_hand():
            self.books.adopt(watched)
        for watched in targets:
            row = watched.window.last or watched.row
            if row is not None:
                if watched.window:
                    self.books.leave(watched, row)
                row.calls.append("C" if call.kind == "norm" else "V")
            self.books.sink(events.ClipBegin(call, watched, row))
            begun.append((call, watched, row))
        if not targets:
            self.books.sink(events.ClipNothing(call))
        self._calls.append(begun)

    def _filled_by_hand(self) -> list[WatchedOptimizer]:
        """Optimizers whose gradients a script has written itself since their last step: master copies."""
        if not self.books.orphans:
            return []
        return [w for w in self.books.alive() if not w.window and stamps(w.params) != w.stamps][:1]

    def _end_clip(self, error: BaseException | None) -> None:
        for call, watched, row in self._calls.pop():
            if error is None:
                self.books.sink(events.ClipEnd(call, watched, row))


def _as_float(value: Any) -> float:
    """A limit given to a clip; NaN for a device tensor, which reading would wait for."""
    return float(value) if isinstance(value, int | float) else float("nan")
