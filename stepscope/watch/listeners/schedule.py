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
                self.books.sink(events.Built("scheduler", args[0], before))

    def before_scheduler_step(self, args: Any, kwargs: Any) -> None:
        """A scheduler steps; one inside another (SequentialLR, constructors) is part of the outer one."""
        self._depth += 1
        if self._depth == 1:
            self._lr_before.append(rates(getattr(args[0], "optimizer", None)))

    def after_scheduler_step(self, args: Any, kwargs: Any, result: Any, error: BaseException | None) -> None:
        """The scheduler has stepped."""
        self._depth -= 1
        if self._depth:
            return
        before = self._lr_before.pop()
        if error is not None:
            return
        scheduler = args[0]
        watched = self.books.optimizers.get(id(getattr(scheduler, "optimizer", None)))
        row = watched.row if watched is not None else None
        if row is not None:
            row.calls.append("L")
        metric = args[1] if len(args) > 1 else kwargs.get("metrics")
        self.books.sink(events.SchedulerStep(scheduler, watched, row, metric, before))

    def after_get_lr(self, args: Any, kwargs: Any, result: Any, error: BaseException | None) -> None:
        """``get_lr`` outside of a step gives the rate of a further step, not the current one."""
        if self._depth == 0 and error is None:
            watched = self.books.optimizers.get(id(getattr(args[0], "optimizer", None)))
            rates = [float(r) for r in result if isinstance(r, int | float)]
            held = [float(r) for r in rates(getattr(args[0], "optimizer", None)) if isinstance(r, int | float)]
            detail = {"returned": rates, "held": held, "scheduler": type(args[0]).__name__}
            self.books.sink(events.Called("g", "get_lr", watched, detail))
