"""`Tracer`: wraps any model and optimizer and runs real AMP micro-steps in the right order, under the watcher."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from stepscope.errors import StepscopeError
from stepscope.watching import Watching, check_types

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch
    from torch import Tensor

    from stepscope.store.trace import Trace

_DEPTH = 6
"""Operations between a loss and an auxiliary loss that was added to it: scaling, moving, adding."""

DTYPES = ("float32", "bfloat16", "float16")


class Tracer:
    """Runs the mechanics of a training step, and records them as it would those of a stranger's loop.

    A micro-step is autocast forward, scaled backward; when the window is full: unscale, clip, step, update, scheduler,
    zero_grad. On CUDA that is CUDA AMP, on a CPU real CPU autocast with a real ``GradScaler("cpu")``.

    Args:
        model: the model; called as ``model(**batch)`` for a dict, ``model(*batch)`` for a list or tuple, else
            ``model(batch)``. It returns its loss: a scalar, or an output with ``loss``; an ``aux_loss`` beside it is
            added unless the loss contains it.
        optimizer: any ``torch.optim.Optimizer`` that needs no closure.
        loss_fn: ``loss_fn(model, batch) -> scalar`` where the model itself does not return its loss.
        dtype: ``float32``, ``bfloat16`` (autocast) or ``float16`` (autocast and a GradScaler).
        accumulation_steps: micro-steps of a full window, K.
        max_norm: limit of the gradient's L2 norm; None for no clip.
        scaler: a GradScaler of one's own; by default one is made for float16.
        scheduler: stepped once after each applied optimizer step.
        device: where the model is; by default that of its first parameter.
        **options: those of `stepscope.watch`: ``out``, ``force``, ``every``, ``max_steps``, ``declare``.

    Raises:
        StepscopeError: an argument is not what it should be; CUDA is asked for and absent.

    It is used as a context manager: what `step` does inside of the ``with`` block is recorded.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        dtype: str = "float32",
        accumulation_steps: int = 1,
        max_norm: float | None = None,
        scaler: Any = None,
        scheduler: Any = None,
        device: str | torch.device | None = None,
        out: str | Path | None = None,
        **options: Any,
    ) -> None:
        _check(dtype, accumulation_steps, max_norm, loss_fn)
        _check_pair(model, optimizer)
        self.device = _device(model, device)
        self.model = model
        self.optimizer = optimizer
        self.loss_fn = loss_fn
        self.accumulation_steps = accumulation_steps
        self.max_norm = max_norm
        self.scheduler = scheduler
        declare = {"accumulation_steps": accumulation_steps, **options.pop("declare", {})}
        self._watching = Watching(
            model, optimizer, scheduler=scheduler, scaler=scaler, out=out, declare=declare, **options
        )
        self.dtype = dtype
        self.scaler = scaler if scaler is not None else _scaler(self.device.type, enabled=dtype == "float16")
        self._filled = 0
        self._size = accumulation_steps
        self._entered = False

    def __enter__(self) -> Tracer:
        self._watching.start()
        self._entered = True
        self.model.train()
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            if error[0] is None:
                self.flush()
        finally:
            self._entered = False
            self._watching.__exit__(*error)

    @property
    def trace(self) -> Trace:
        """What has been recorded so far: `.steps`, `.params`, `.events`, `.findings`, `.meta`."""
        return self._watching.trace

    def step(self, batch: Any, *, window: int | None = None) -> Tensor:
        """One micro-step; the optimizer steps when the window is full.

        Args:
            batch: what the model takes; tensors in it are moved to the model's device.
            window: micro-steps of the window that this one begins, where it is not ``accumulation_steps``: give the
                remainder at an epoch's tail and its losses are divided by that. Read at a window's first micro-step.

        Returns:
            The loss of this micro-step: unscaled, undivided, detached. Shape ``()``.

        Raises:
            StepscopeError: it is called outside of the ``with`` block; what the model returned is no loss to train on.
        """
        if not self._entered:
            raise StepscopeError(
                "Tracer.step was called outside of its with block", hint="with tracer: tracer.step(batch)"
            )
        if self._filled == 0:
            self._size = self.accumulation_steps if window is None else _at_least_one("window", window)
        batch = _to(batch, self.device)
        with self._autocast():
            loss, aux = self._losses(batch)
        whole = loss if aux is None else loss + aux
        self.scaler.scale(whole / self._size).backward()
        self._filled += 1
        if self._filled >= self._size:
            self._finish_window()
        return loss.detach()

    def flush(self) -> bool:
        """End a window that is not full: its gradients are multiplied by K/r, so that they are the mean over r.

        Returns:
            Whether there was anything to flush.
        """
        if self._filled == 0:
            return False
        if self._filled < self._size:
            self._reweight(self._size / self._filled)
        self._finish_window()
        return True

    def _reweight(self, factor: float) -> None:
        """The losses of this window were divided by a K that it did not reach; the gradient is linear in them."""
        import torch

        gradients = [p.grad for g in self.optimizer.param_groups for p in g["params"] if p.grad is not None]
        with torch.no_grad():
            for gradient in gradients:
                gradient.mul_(factor)

    def _finish_window(self) -> None:
        """Unscale, clip, step, update, scheduler, zero_grad."""
        from torch.nn.utils import clip_grad_norm_

        if self.max_norm is not None:
            self.scaler.unscale_(self.optimizer)
            clip_grad_norm_([p for g in self.optimizer.param_groups for p in g["params"]], self.max_norm)
        before = self._scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.scheduler is not None and self._scale() >= before:  # a smaller scale means that the step was skipped
            self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._filled = 0

    def _scale(self) -> float:
        """The scale, read only where a scheduler has to know whether the step was skipped."""
        return float(self.scaler.get_scale()) if self.scheduler is not None and self.scaler.is_enabled() else 1.0

    def _losses(self, batch: Any) -> tuple[Tensor, Tensor | None]:
        """The loss and, where the model returns one beside it, the auxiliary loss."""
        if self.loss_fn is not None:
            return _as_loss(self.loss_fn(self.model, batch)), None
        output = _call(self.model, batch)
        loss, aux = _as_loss(output), _field(output, "aux_loss")
        return loss, None if aux is None or _contains(loss, aux) else aux

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.dtype == "float32":
            return nullcontext()
        import torch

        return torch.autocast(self.device.type, dtype=getattr(torch, self.dtype))


def _check(dtype: str, accumulation_steps: int, max_norm: float | None, loss_fn: Any) -> None:
    if dtype not in DTYPES:
        raise StepscopeError(f"dtype {dtype!r} is not known", hint=f"one of {', '.join(DTYPES)}")
    _at_least_one("accumulation_steps", accumulation_steps)
    if max_norm is not None and not (isinstance(max_norm, int | float) and max_norm > 0):
        raise StepscopeError(f"max_norm is {max_norm!r}", hint="give a number above 0, or None for no clip")
    if loss_fn is not None and not callable(loss_fn):
        raise StepscopeError(f"loss_fn is a {type(loss_fn).__name__}", hint="give loss_fn=lambda model, batch: ...")


def _check_pair(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One model and one optimizer of its parameters, which steps without a closure."""
    if isinstance(model, list | tuple) or isinstance(optimizer, list | tuple) or model is None or optimizer is None:
        raise StepscopeError(
            "Tracer takes one model and one optimizer", hint="use stepscope.watch around a loop of your own"
        )
    check_types([model], [optimizer])
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        name = type(optimizer).__name__
        raise StepscopeError(f"{name} needs a closure", hint="use stepscope.watch around a loop of your own")
    if {id(p) for p in model.parameters()}.isdisjoint(id(p) for g in optimizer.param_groups for p in g["params"]):
        raise StepscopeError(
            "the optimizer holds none of the model's parameters", hint="build it from model.parameters()"
        )


def _at_least_one(name: str, value: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise StepscopeError(f"{name} is {value!r}", hint="give a whole number of at least 1")
    return value


def _device(model: torch.nn.Module, device: str | torch.device | None) -> torch.device:
    import torch

    if device is None:
        parameter = next(model.parameters(), None)
        return parameter.device if parameter is not None else torch.device("cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise StepscopeError(f"device {device!r} is not known to torch", hint="for example cpu or cuda") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise StepscopeError("device cuda was asked for, but torch finds no CUDA here", hint="use device='cpu'")
    return chosen


def _scaler(device: str, *, enabled: bool) -> Any:
    import torch

    return torch.amp.GradScaler(device, enabled=enabled)


def _to(value: Any, device: torch.device) -> Any:
    """`value` with its tensors on `device`; dicts, lists and tuples are searched."""
    if hasattr(value, "to"):
        return value.to(device, non_blocking=True) if hasattr(value, "element_size") else value.to(device)
    if isinstance(value, Mapping):
        return {k: _to(v, device) for k, v in value.items()}
    if isinstance(value, list | tuple):
        moved = [_to(v, device) for v in value]
        return type(value)(*moved) if hasattr(value, "_fields") else type(value)(moved)
    return value


def _call(model: Any, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, list | tuple) else model(batch)


def _field(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)


def _contains(loss: Tensor, part: Any) -> bool:
    """Whether a loss was made from another one with a few operations: it is in there already."""
    wanted = getattr(part, "grad_fn", None)
    ring = [loss.grad_fn]
    for _ in range(_DEPTH):
        if wanted is None or wanted in ring:
            return wanted is not None
        ring = [n for node in ring if node is not None for n, _ in node.next_functions]
    return False


def _as_loss(output: Any) -> Tensor:
    """The loss in what a model or criterion returned: a scalar tensor, or ``.loss`` / ``["loss"]`` of an output."""
    loss = _field(output, "loss")
    loss = output if loss is None else loss
    if isinstance(loss, tuple | list) and loss:
        loss = loss[0]
    if not hasattr(loss, "backward") or loss.numel() != 1:
        shown = f"a tensor of shape {tuple(loss.shape)}" if hasattr(loss, "shape") else f"a {type(loss).__name__}"
        raise StepscopeError(f"the model returned {shown}, not a loss", hint="give loss_fn=lambda model, batch: ...")
    if not loss.requires_grad:
        raise StepscopeError(
            "the loss does not require a gradient", hint="is a parameter trainable, and nothing detached?"
        )
    scalar: Tensor = loss.reshape(())
    return scalar
