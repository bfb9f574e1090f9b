"""Learning-rate schedulers: built, stepped, asked for a rate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepscope import events
from stepscope.watch.ledger import rates
from stepscope.watch.patches import Listener, patch_late_scheduler

if TYPE_CHECKING:
    from stepscope.watch.books import Books


class ScheduleListener(Listener):
    """Hears schedulers from outside; what they do in constructors and to each other is part of the outer call."""

    def __init__(self, books: Books) -> None:
        self.books = books
        self._depth = 0
        self._lr_before: list[list[Any]] = []
        self._under_way: list[Any] = []

    def before_scheduler_init(self, args: Any, kwargs: Any) -> None:
        """A scheduler is built: its constructor writes rates and steps itself."""
        self._depth += 1
        if self._depth == 1:
            optimizer = args[1] if len(args) > 1 else kwargs.get("optimizer")
            self._lr_before.append(rates(optimizer))

    def after_scheduler_init(self, args: Any, kwargs: Any, result: Any, error: BaseException | None) -> None:
        """The scheduler is built."""
        self._depth -= 1
        if self._depth == 0:
            patch_late_scheduler(type(args[0]))
            before = self._lr_before.pop()
            if error is None:
                self.books.sink(events.Built("scheduler", args[0], before, self.books.of_scheduler(args[0])))

    def before_scheduler_step(self, args: Any, kwargs: Any) -> None:
        """A scheduler steps; one inside another (SequentialLR, constructors) is part of the outer one."""
        self._depth += 1
        self._under_way.append(args[0])
        if self._depth == 1:
            self._lr_before.append(rates(getattr(args[0], "optimizer", None)))

    def after_scheduler_step(self, args: Any, kwargs: Any, result: Any, error: BaseException | None) -> None:
        """The scheduler has stepped."""
        self._depth -= 1
        if self._under_way:
            self._under_way.pop()
        if self._depth:
            self._inner(args[0])
            return
        before = self._lr_before.pop()
        if error is not None:
            return
        scheduler = args[0]
        watched = self.books.of_scheduler(scheduler)
        row = watched.row if watched is not None else None
        if row is not None:
            row.calls.append("L")
        metric = args[1] if len(args) > 1 else kwargs.get("metrics")
        self.books.sink(events.SchedulerStep(scheduler, watched, row, metric, before))

    def _inner(self, scheduler: Any) -> None:
        """A scheduler that another one steps should write to the same optimizer as that one."""
        outer = self._under_way[0] if self._under_way else None
        owner = getattr(scheduler, "optimizer", None)
        if outer is not None and owner is not None and owner is not getattr(outer, "optimizer", owner):
            detail = {"scheduler": scheduler, "outer": self.books.of_scheduler(outer)}
            self.books.sink(events.Called("", "inner_scheduler_step", self.books.of_scheduler(scheduler), detail))

    def after_get_lr(self, args: Any, kwargs: Any, result: Any, error: BaseException | None) -> None:
        """``get_lr`` outside of a step gives the rate of a further step, not the current one."""
        if self._depth == 0 and error is None:
            watched = self.books.of_scheduler(args[0])
            returned = [float(r) for r in result if isinstance(r, int | float)]
            held = [float(r) for r in rates(getattr(args[0], "optimizer", None)) if isinstance(r, int | float)]
            detail = {"returned": returned, "held": held, "scheduler": type(args[0]).__name__}
            self.books.sink(events.Called("g", "get_lr", watched, detail))
