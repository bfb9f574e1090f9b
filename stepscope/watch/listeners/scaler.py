"""The GradScaler: which loss carries which scale, and whether an attempt was skipped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepscope import events
from stepscope.watch.patches import Listener

if TYPE_CHECKING:
    import torch

    from stepscope.watch.books import Books
    from stepscope.watch.ledger import WatchedOptimizer


class ScalerListener(Listener):
    """Hears everything that is called on a GradScaler."""

    def __init__(self, books: Books) -> None:
        self.books = books
        self._scale_before: Any = None

    def after_scaler_init(self, args: Any, kwargs: Any, result: Any, error: BaseException | None) -> None:
        """A GradScaler exists."""
        if error is None:
            self.books.sink(events.Built("scaler", args[0]))

    def after_scale(self, args: Any, kwargs: Any, result: Any, error: BaseException | None) -> None:
        """A loss was scaled."""
        if error is None:
            self.books.sink(events.ScaleLoss(args[0], scale_of(args[0]), result))

    def before_unscale(self, args: Any, kwargs: Any) -> None:
        """Gradients are about to be divided by the scale."""
        watched = self._of_call(args, kwargs)
        row = self.books.adopt(watched) if watched is not None and args[0].is_enabled() else None
        if watched is not None and row is not None:
            self.books.leave(watched, row)

    def after_unscale(self, args: Any, kwargs: Any, result: Any, error: BaseException | None) -> None:
        """Gradients were divided by the scale."""
        watched = self._of_call(args, kwargs)
        if error is not None and self.books.scaler_step is None:
            self._failed("unscale_failed", watched, args[0], error)
        if error is not None or watched is None or not args[0].is_enabled():
            return
        row = self.books.adopt(watched) or watched.row
        if row is not None:
            row.calls.append("U" if self.books.scaler_step is None else "u")
        self.books.sink(events.Unscale(watched, row, args[0], scale_of(args[0])))

    def before_scaler_step(self, args: Any, kwargs: Any) -> None:
        """``scaler.step`` begins; whether it will call the optimizer is not known yet."""
        watched = self._of_call(args, kwargs)
        if watched is None:
            return
        row = self.books.adopt(watched)
        if row is not None and args[0].is_enabled():
            self.books.leave(watched, row)
        self.books.scaler_step = {"optimizer": watched, "ran": False}

    def after_scaler_step(self, args: Any, kwargs: Any, result: Any, error: BaseException | None) -> None:
        """``scaler.step`` returned: the attempt is over and its truth lies in the scaler's own state."""
        pending, self.books.scaler_step = self.books.scaler_step, None
        if pending is None:
            return
        watched, scaler = pending["optimizer"], args[0]
        if error is not None:
            self.books.stepping.clear()
            self._failed("scaler_step_failed", watched, scaler, error)
            return
        last = watched.window.last
        if last is not None and not pending["ran"]:
            last.calls.append("K")
        enabled = scaler.is_enabled()
        found = _found_inf(scaler, watched.optimizer) if enabled else None
        self.books.attempt(watched, ran=pending["ran"], found_inf=found, scaler=scaler if enabled else None)

    def before_update(self, args: Any, kwargs: Any) -> None:
        """The scale is about to change."""
        self._scale_before = scale_of(args[0])

    def after_update(self, args: Any, kwargs: Any, result: Any, error: BaseException | None) -> None:
        """The scale may have changed."""
        if error is not None:
            self._failed("scaler_update_failed", None, args[0], error)
        if error is None and args[0].is_enabled():
            rows = [w.row for w in self.books.alive() if w.row is not None]
            for row in rows:
                row.calls.append("P")
            self.books.sink(events.ScalerUpdate(args[0], self._scale_before, scale_of(args[0]), rows))

    def _failed(self, name: str, watched: WatchedOptimizer | None, scaler: Any, error: BaseException) -> None:
        """A call raised: in which state was the scaler with this optimizer (``READY``, ``UNSCALED``, ``STEPPED``)?"""
        state = scaler._per_optimizer_states.get(watched.key, {}) if watched is not None else {}
        stage = getattr(state.get("stage"), "name", None)
        detail = {"error": f"{type(error).__name__}: {error}", "stage": stage, "started": scaler._scale is not None}
        self.books.sink(events.Called("!", name, watched, detail))

    def _of_call(self, args: Any, kwargs: Any) -> WatchedOptimizer | None:
        return self.books.watched(args[1] if len(args) > 1 else kwargs.get("optimizer"))


def scale_of(scaler: Any) -> torch.Tensor | None:
    """A copy of a scaler's scale as a device scalar; None when it is disabled or has not started."""
    if not scaler.is_enabled():
        return None
    held = scaler._scale
    return held.detach().clone().reshape(()) if held is not None else None


def _found_inf(scaler: Any, optimizer: Any) -> torch.Tensor | None:
    """What the scaler itself found after ``step`` and before ``update``: above 0 where gradients were not finite."""
    state = scaler._per_optimizer_states.get(id(optimizer), {})
    found = list(state.get("found_inf_per_device", {}).values())
    if not found:
        return None
    total: torch.Tensor = found[0].detach().clone().reshape(())
    for other in found[1:]:
        total += other.to(total.device, non_blocking=True).reshape(())
    return total
