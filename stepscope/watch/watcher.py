"""From patches and hooks to events: which backward is which micro-step, which attempt ends which window.

The watcher owns the books (`ledger`) and knows nothing of what is measured. It never reads a value from a device: all
that it decides, it decides from which calls were made and from the stamps of gradient tensors.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from stepscope import events
from stepscope.events import ClipCall, Event
from stepscope.watch.ledger import Micro, Row, WatchedOptimizer, stamps
from stepscope.watch.patches import Listener, patch_late_scheduler, subscribe, unsubscribe

Sink = Callable[[Event], None]


class Watcher(Listener):
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
        self._sink = sink
        self._seal = on_row_sealed
        self._on_failure = on_failure
        self._only = None if only is None else {id(o) for o in only}
        self.optimizers: dict[int, WatchedOptimizer] = {}
        self.micro_steps = 0
        self.pending_calls: list[str] = []
        self._orphans: list[Row] = []
        self._last_row: Row | None = None
        self._backward_depth = 0
        self._stepping: list[tuple[WatchedOptimizer, float]] = []
        self._scaler_step: dict[str, Any] | None = None
        self._scheduler_depth = 0
        self._clip_calls: list[list[tuple[ClipCall, WatchedOptimizer, Row | None]]] = []
        self._norm_type = 2.0
        self._forward = threading.local()
        self._saving = False
        self._started_at: dict[str, float] = {}
        self._lr_before: list[list[Any]] = []
        self._scale_before: Any = None
        self._state_before: list[dict[str, Any]] = []

    # ---- life -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Install the patches and begin to listen."""
        subscribe(self)

    def stop(self) -> None:
        """Stop listening and seal what is open."""
        unsubscribe(self)
        for watched in self.optimizers.values():
            if watched.row is not None:
                self._seal(watched.row)
                watched.row = None
        for row in self._orphans:
            self._seal(row)
        self._orphans.clear()

    def failed(self, method: str, error: Exception) -> None:
        """A method of ours raised: say so, and go on."""
        self._on_failure(method, error)

    def watched(self, optimizer: Any) -> WatchedOptimizer | None:
        """The book of an optimizer, opened at first sight; None for one that is not to be watched."""
        known = self.optimizers.get(id(optimizer))
        if known is not None and known.optimizer is optimizer:
            return known
        if self._only is not None and id(optimizer) not in self._only:
            return None
        if not isinstance(optimizer, torch.optim.Optimizer) or not hasattr(optimizer, "param_groups"):
            return None
        if known is not None and known.row is not None:
            self._seal(known.row)
        book = WatchedOptimizer(optimizer, len(self.optimizers) + self._retired)
        if known is not None:
            self._retired += 1
        self.optimizers[id(optimizer)] = book
        return book

    _retired = 0

    def _alive(self) -> list[WatchedOptimizer]:
        return [w for w in self.optimizers.values() if w.optimizer is not None]

    # ---- forward ----------------------------------------------------------------------------------------------------

    def before_forward(self, module: Any) -> None:
        """A module is called; only the outermost call is timed."""
        local = self._forward
        depth = getattr(local, "depth", 0)
        if depth == 0:
            local.begin = time.perf_counter()
        local.depth = depth + 1

    def after_forward(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        """A module's call ended."""
        local = self._forward
        local.depth = max(0, getattr(local, "depth", 1) - 1)
        if local.depth or self._backward_depth:
            return
        training = torch.is_grad_enabled()
        elapsed = (time.perf_counter() - local.begin) * 1e3
        if training:
            self.pending_calls.append("F")
        self._sink(events.Forward(module, args, kwargs, output, training, elapsed))

    # ---- backward ---------------------------------------------------------------------------------------------------

    def before_backward(self, args: Any, kwargs: Any) -> None:
        """``torch.autograd.backward`` begins; one within another (reentrant checkpoints) is part of the outer one."""
        self._backward_depth += 1
        if self._backward_depth > 1:
            return
        self._forward.depth = 0
        roots = _tensors(args[0] if args else kwargs.get("tensors"))
        given = args[1] if len(args) > 1 else kwargs.get("grad_tensors")
        self.micro_steps += 1
        micro = Micro(self.micro_steps)
        micro.calls, self.pending_calls = [*self.pending_calls, "B"], []
        self._micro = micro
        for watched in self._alive():
            watched.refresh()
            watched.before = stamps(watched.params)
        self._sink(events.BackwardBegin(micro, roots, _tensors(given)))
        self._started_at["backward"] = time.perf_counter()

    def after_backward(self, args: Any, kwargs: Any, result: Any, error: BaseException | None) -> None:
        """The backward ended: open a row for each optimizer whose gradients it changed."""
        self._backward_depth -= 1
        if self._backward_depth:
            return
        elapsed = (time.perf_counter() - self._started_at["backward"]) * 1e3
        if error is not None:
            return
        micro = self._micro
        rows = []
        for watched in self._alive():
            if watched.row is not None and watched.row.micro is micro:  # it stepped inside this backward
                rows.append(watched.row)
                watched.stamps = stamps(watched.params)
                continue
            now = stamps(watched.params)
            received = [i for i, (a, b) in enumerate(zip(watched.before, now, strict=False)) if a != b and b is not None]
            watched.stamps = now
            if received:
                rows.append(self._open(watched, micro, received))
        if not rows:
            row = Row(micro, None, 1, 0)
            self._orphans.append(row)
            rows.append(row)
            if len(self._orphans) > _MOST_ORPHANS:
                self._seal(self._orphans.pop(0))
        self._last_row = rows[-1]
        self._sink(events.BackwardEnd(micro, rows, elapsed))

    def _open(self, watched: WatchedOptimizer, micro: Micro, received: list[int]) -> Row:
        if watched.row is not None:
            self._seal(watched.row)
        row = watched.open_row(micro, received)
        row.calls = list(micro.calls)
        return row

    # ---- the optimizer's step ---------------------------------------------------------------------------------------

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """The official pre-hook: an optimizer is about to step. A step inside a step is part of the outer one."""
        watched = self.watched(optimizer)
        if watched is None:
            return
        if self._scaler_step is not None and self._scaler_step["optimizer"] is watched:
            self._scaler_step["ran"] = True
        if any(w is watched for w, _ in self._stepping):
            self._stepping.clear()  # its last step raised and never returned
        if self._stepping and not self._backward_depth:
            self._stepping.append((watched, 0.0))
            return
        closure = (bool(args[1:]) and callable(args[1])) or callable(kwargs.get("closure"))
        if self._backward_depth and not any(r.micro is self._micro for r in watched.window):
            received = [i for i, p in enumerate(watched.params) if p.grad is not None]
            self._open(watched, self._micro, received)
        row = self._adopt(watched)
        if row is not None and not closure:
            self._leave(watched, row)
        if row is not None:
            row.calls.append("S")
        in_scaler = self._scaler_step is not None
        self._stepping.append((watched, time.perf_counter()))
        self._sink(events.StepBegin(watched, row, in_scaler, bool(self._backward_depth), closure))
        self._stepping[-1] = (watched, time.perf_counter())

    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """The official post-hook: the step returned."""
        watched = self.optimizers.get(id(optimizer))
        if watched is None or not any(w is watched for w, _ in self._stepping):
            return
        while self._stepping[-1][0] is not watched:
            self._stepping.pop()
        _, begin = self._stepping.pop()
        if not begin:
            return
        row = watched.window[-1] if watched.window else None
        self._sink(events.StepEnd(watched, row, (time.perf_counter() - begin) * 1e3))
        if self._scaler_step is None:
            self._attempt(watched, ran=True, found_inf=None, scaler=None)

    def _attempt(self, watched: WatchedOptimizer, *, ran: bool, found_inf: Any, scaler: Any) -> None:
        row = watched.close_window()
        self._sink(events.Attempt(watched, row, ran, found_inf, scaler))
        watched.stamps = stamps(watched.params)

    def _adopt(self, watched: WatchedOptimizer) -> Row | None:
        """The last row of the open window; where there is none, backward passes that nobody else claimed.

        An optimizer of float32 master copies never gets a gradient from a backward: its micro-steps are those that
        gave gradients to parameters of no optimizer.
        """
        if not watched.window and self._orphans and any(p.grad is not None for p in watched.params):
            if watched.row is not None:
                self._seal(watched.row)
            for row in self._orphans:
                row.optimizer, row.window_step, row.global_step = watched, len(watched.window) + 1, watched.attempts + 1
                row.calls = list(row.micro.calls)
                watched.window.append(row)
            self._orphans.clear()
            watched.row = watched.window[-1]
            for row in watched.window[:-1]:
                self._seal(row)
        return watched.window[-1] if watched.window else None

    def _leave(self, watched: WatchedOptimizer, row: Row) -> None:
        """Tell, once a window, that the gradient that backward left is about to change or to be used."""
        if not row.left:
            row.left = True
            self._sink(events.GradientsLeft(watched, row))

    # ---- clipping ---------------------------------------------------------------------------------------------------

    def before_total_norm(self, args: Any, kwargs: Any) -> None:
        """A norm is taken, by a clip or on its own."""
        self._norm_type = float(args[1] if len(args) > 1 else kwargs.get("norm_type", 2.0))

    def before_clip(self, args: Any, kwargs: Any) -> None:
        """Gradients are about to be multiplied to fit a norm."""
        names = ("parameters", "max_norm", "total_norm")
        given = dict(zip(names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in names}
        parameters = _tensors(given.get("parameters"))
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
        if not isinstance(parameters, torch.Tensor | Sequence):
            parameters = []  # a generator: looking at it would exhaust it
        self._begin_clip(ClipCall("value", [], _as_float(limit), float("inf")), _tensors(parameters))

    def after_clip_value(self, args: Any, kwargs: Any, result: Any, error: BaseException | None) -> None:
        """The clip ended."""
        self._end_clip(error)

    def _begin_clip(self, call: ClipCall, parameters: list[torch.Tensor]) -> None:
        call.parameters = parameters
        call.gradients = [p.grad for p in parameters if p.grad is not None]
        targets = self._concerned(parameters) if call.gradients else []
        begun: list[tuple[ClipCall, WatchedOptimizer, Row | None]] = []
        for watched in targets:
            row = watched.window[-1] if watched.window else watched.row
            if row is not None:
                if watched.window:
                    self._leave(watched, row)
                row.calls.append("C" if call.kind == "norm" else "V")
            self._sink(events.ClipBegin(call, watched, row))
            begun.append((call, watched, row))
        if not targets:
            self._sink(events.ClipNothing(call))
        self._clip_calls.append(begun)

    def _end_clip(self, error: BaseException | None) -> None:
        for call, watched, row in self._clip_calls.pop():
            if error is None:
                self._sink(events.ClipEnd(call, watched, row))

    def _concerned(self, parameters: Iterable[Any]) -> list[WatchedOptimizer]:
        """The optimizers that hold any of `parameters`."""
        ids = {id(p) for p in parameters}
        return [w for w in self._alive() if not ids.isdisjoint(map(id, w.params))]

    # ---- the scaler -------------------------------------------------------------------------------------------------

    def after_scaler_init(self, args: Any, kwargs: Any, result: Any, error: BaseException | None) -> None:
        """A GradScaler exists."""
        if error is None:
            self._sink(events.Built("scaler", args[0]))

    def after_scale(self, args: Any, kwargs: Any, result: Any, error: BaseException | None) -> None:
        """A loss was scaled."""
        if error is None:
            self._sink(events.ScaleLoss(args[0], scale_of(args[0]), result))

    def before_unscale(self, args: Any, kwargs: Any) -> None:
        """Gradients are about to be divided by the scale."""
        watched = self._of_call(args, kwargs)
        row = self._adopt(watched) if watched is not None and args[0].is_enabled() else None
        if watched is not None and row is not None:
            self._leave(watched, row)

    def after_unscale(self, args: Any, kwargs: Any, result: Any, error: BaseException | None) -> None:
        """Gradients were divided by the scale."""
        watched = self._of_call(args, kwargs)
        if error is not None or watched is None or not args[0].is_enabled():
            return
        row = self._adopt(watched) or watched.row
        if row is not None:
            row.calls.append("U" if self._scaler_step is None else "u")
        self._sink(events.Unscale(watched, row, args[0], scale_of(args[0])))

    def before_scaler_step(self, args: Any, kwargs: Any) -> None:
        """``scaler.step`` begins; whether it will call the optimizer is not known yet."""
        watched = self._of_call(args, kwargs)
        if watched is None:
            return
        row = self._adopt(watched)
        if row is not None and args[0].is_enabled():
            self._leave(watched, row)
        self._scaler_step = {"optimizer": watched, "ran": False}

    def after_scaler_step(self, args: Any, kwargs: Any, result: Any, error: BaseException | None) -> None:
        """``scaler.step`` returned: the attempt is over and its truth lies in the scaler's own state."""
        pending, self._scaler_step = self._scaler_step, None
        if pending is None:
            return
        watched, scaler = pending["optimizer"], args[0]
        if error is not None:
            self._stepping.clear()
            self._sink(events.Called("!", "scaler_step_failed", watched, {"error": f"{type(error).__name__}: {error}"}))
            return
        if watched.window and not pending["ran"]:
            watched.window[-1].calls.append("K")
        enabled = scaler.is_enabled()
        found = _found_inf(scaler, watched.optimizer) if enabled else None
        self._attempt(watched, ran=pending["ran"], found_inf=found, scaler=scaler if enabled else None)

    def before_update(self, args: Any, kwargs: Any) -> None:
        """The scale is about to change."""
        self._scale_before = scale_of(args[0])

    def after_update(self, args: Any, kwargs: Any, result: Any, error: BaseException | None) -> None:
        """The scale may have changed."""
        if error is None and args[0].is_enabled():
            rows = [w.row for w in self._alive() if w.row is not None]
            for row in rows:
                row.calls.append("P")
            self._sink(events.ScalerUpdate(args[0], self._scale_before, scale_of(args[0]), rows))

    def _of_call(self, args: Any, kwargs: Any) -> WatchedOptimizer | None:
        return self.watched(args[1] if len(args) > 1 else kwargs.get("optimizer"))

    # ---- clearing, schedules, averages ------------------------------------------------------------------------------

    def after_zero_grad(self, args: Any, kwargs: Any, result: Any, error: BaseException | None) -> None:
        """Somebody cleared gradients, or called a method of that name."""
        owner = args[0]
        if isinstance(owner, torch.optim.Optimizer):
            concerned = [w for w in [self.watched(owner)] if w is not None]
        else:
            concerned = self._concerned(owner.parameters())
        for watched in concerned:
            if watched.row is not None:
                watched.row.calls.append("Z")
        self._sink(events.ZeroGrad(owner, concerned))

    def before_scheduler_init(self, args: Any, kwargs: Any) -> None:
        """A scheduler is built: its constructor writes rates and steps itself."""
        self._scheduler_depth += 1
        if self._scheduler_depth == 1:
            optimizer = args[1] if len(args) > 1 else kwargs.get("optimizer")
            self._lr_before.append(_rates(optimizer))

    def after_scheduler_init(self, args: Any, kwargs: Any, result: Any, error: BaseException | None) -> None:
        """The scheduler is built."""
        self._scheduler_depth -= 1
        if self._scheduler_depth == 0:
            patch_late_scheduler(type(args[0]))
            before = self._lr_before.pop()
            if error is None:
                self._sink(events.Built("scheduler", args[0], before))

    def before_scheduler_step(self, args: Any, kwargs: Any) -> None:
        """A scheduler steps; one inside another (SequentialLR, constructors) is part of the outer one."""
        self._scheduler_depth += 1
        if self._scheduler_depth == 1:
            self._lr_before.append(_rates(getattr(args[0], "optimizer", None)))

    def after_scheduler_step(self, args: Any, kwargs: Any, result: Any, error: BaseException | None) -> None:
        """The scheduler has stepped."""
        self._scheduler_depth -= 1
        if self._scheduler_depth:
            return
        before = self._lr_before.pop()
        if error is not None:
            return
        scheduler = args[0]
        watched = self.optimizers.get(id(getattr(scheduler, "optimizer", None)))
        row = watched.row if watched is not None else None
        if row is not None:
            row.calls.append("L")
        metric = args[1] if len(args) > 1 else kwargs.get("metrics")
        self._sink(events.SchedulerStep(scheduler, watched, row, metric, before))

    def after_get_lr(self, args: Any, kwargs: Any, result: Any, error: BaseException | None) -> None:
        """``get_lr`` outside of a step gives the rate of a further step, not the current one."""
        if self._scheduler_depth == 0 and error is None:
            watched = self.optimizers.get(id(getattr(args[0], "optimizer", None)))
            rates = [float(r) for r in result if isinstance(r, int | float)]
            held = [float(r) for r in _rates(getattr(args[0], "optimizer", None)) if isinstance(r, int | float)]
            detail = {"returned": rates, "held": held, "scheduler": type(args[0]).__name__}
            self._sink(events.Called("g", "get_lr", watched, detail))

    def after_average(self, args: Any, kwargs: Any, result: Any, error: BaseException | None) -> None:
        """An averaged model took in the current weights."""
        self._everywhere("E")
        self._sink(events.Called("E", "average_updated", None, {"average": type(args[0]).__name__}))

    def after_all_reduce(self, args: Any, kwargs: Any, result: Any, error: BaseException | None) -> None:
        """A tensor was summed over ranks by hand."""
        tensor = args[0] if args else kwargs.get("tensor")
        numel = int(tensor.numel()) if isinstance(tensor, torch.Tensor) else 0
        self._everywhere("R")
        self._sink(events.Called("R", "all_reduce", None, {"numel": numel}))

    def _everywhere(self, letter: str) -> None:
        """Note a call that concerns no optimizer in particular in every open row."""
        for watched in self._alive():
            if watched.row is not None:
                watched.row.calls.append(letter)

    # ---- autocast, data, building, loading, saving ------------------------------------------------------------------

    def after_autocast_enter(self, args: Any, kwargs: Any, result: Any, error: BaseException | None) -> None:
        """A region of autocast begins."""
        self._sink(events.Called("", "autocast_enter", None, {"instance": args[0]}))

    def after_autocast_exit(self, args: Any, kwargs: Any, result: Any, error: BaseException | None) -> None:
        """A region of autocast ends."""
        self._sink(events.Called("", "autocast_exit", None, {"instance": args[0]}))

    def after_loader_iter(self, args: Any, kwargs: Any, result: Any, error: BaseException | None) -> None:
        """A DataLoader starts over."""
        loader = args[1] if len(args) > 1 else kwargs.get("loader")
        self._sink(events.Called("", "loader_iter", None, {"iterator": args[0], "loader": loader}))

    def after_loader_next(self, args: Any, kwargs: Any, result: Any, error: BaseException | None) -> None:
        """A DataLoader gave a batch, or came to its end."""
        name = "loader_next" if error is None else "loader_end"
        self._sink(events.Called("", name, None, {"iterator": args[0]}))

    def after_optimizer_init(self, args: Any, kwargs: Any, result: Any, error: BaseException | None) -> None:
        """An optimizer exists."""
        if error is None and self.watched(args[0]) is not None:
            self._sink(events.Built("optimizer", args[0]))

    def after_add_group(self, args: Any, kwargs: Any, result: Any, error: BaseException | None) -> None:
        """Constructors add their groups through this too; only what comes later is news."""
        watched = self.optimizers.get(id(args[0]))
        if error is None and watched is not None and watched.optimizer is args[0]:
            self._sink(events.Called("", "param_group_added", watched, {"groups": len(watched.groups)}))

    def after_ddp_init(self, args: Any, kwargs: Any, result: Any, error: BaseException | None) -> None:
        """A module was wrapped in DistributedDataParallel."""
        if error is None:
            self._sink(events.Built("ddp", args[0]))

    def before_load_optimizer(self, args: Any, kwargs: Any) -> None:
        """An optimizer's state is about to be replaced."""
        self._state_before.append({"lr": _rates(args[0])})

    def after_load_optimizer(self, args: Any, kwargs: Any, result: Any, error: BaseException | None) -> None:
        """An optimizer's state was replaced."""
        before = self._state_before.pop()
        if error is None and self.watched(args[0]) is not None:
            self._sink(events.Loaded("optimizer", args[0], before))

    def after_load_scheduler(self, args: Any, kwargs: Any, result: Any, error: BaseException | None) -> None:
        """A scheduler's state was replaced."""
        if error is None:
            self._sink(events.Loaded("scheduler", args[0]))

    def after_load_scaler(self, args: Any, kwargs: Any, result: Any, error: BaseException | None) -> None:
        """A scaler's state was replaced."""
        if error is None:
            self._sink(events.Loaded("scaler", args[0]))

    def after_load_module(self, args: Any, kwargs: Any, result: Any, error: BaseException | None) -> None:
        """A module's parameters were replaced."""
        if error is None:
            self._sink(events.Loaded("module", args[0]))

    def before_save(self, args: Any, kwargs: Any) -> None:
        """Something is about to be written to a checkpoint."""
        if not self._saving:
            content = args[0] if args else kwargs.get("obj")
            where = args[1] if len(args) > 1 else kwargs.get("f")
            self._sink(events.Saved(str(where) if not hasattr(where, "write") else "a file object", content))
        self._saving = True

    def after_save(self, args: Any, kwargs: Any, result: Any, error: BaseException | None) -> None:
        """It was written."""
        self._saving = False


_MOST_ORPHANS = 64
"""Backward passes that no optimizer has claimed are kept open at most this long."""


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
    total = found[0].detach().clone().reshape(())
    for other in found[1:]:
        total += other.to(total.device, non_blocking=True).reshape(())
    return total


def _rates(optimizer: Any) -> list[Any]:
    """The learning rates of an optimizer's groups as they are now (tensors are copied)."""
    rates = [g.get("lr") for g in getattr(optimizer, "param_groups", [])]
    return [r.detach().clone() if isinstance(r, torch.Tensor) else r for r in rates]


def _tensors(value: Any) -> list[Any]:
    if value is None:
        return []
    return [value] if isinstance(value, torch.Tensor) else list(value)


def _as_float(value: Any) -> float:
    """A limit given to a clip; NaN for a device tensor, which reading would wait for."""
    return float(value) if isinstance(value, int | float) else float("nan")
