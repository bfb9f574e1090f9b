"""The training loop as the textbook has it: accumulation, mixed precision, clipping and the step, in the right order.

Nothing is measured here and nothing waits for the device; callers that want to see something pass a callback.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_norm_

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

TailDivisor = Literal["remainder", "full"]
LossFunction = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True, slots=True)
class MicroStep:
    """One backward pass that has just happened.

    Attributes:
        epoch: from 0.
        step: micro-step within the epoch, from 1.
        window_size: micro-steps in the window it belongs to.
        batch: what the loader gave, on the device.
        loss: what backward started from before the loss scale: divided for accumulation, still on the device.
    """

    epoch: int
    step: int
    window_size: int
    batch: Any
    loss: Tensor


@dataclass(frozen=True, slots=True)
class WindowEnd:
    """A window whose step was attempted and whose gradients are cleared.

    Attributes:
        epoch: from 0.
        step: last micro-step of the window within the epoch, from 1.
        window_size: micro-steps in the window.
    """

    epoch: int
    step: int
    window_size: int


def ignore(_: object) -> None:
    """The callback of a caller that does not want to know."""


def scale_loss_for_accumulation(loss: Tensor, accumulation_steps: int) -> Tensor:
    """Divide a mean loss by K, so that K backward passes add up to the mean gradient and not to K times it."""
    return loss / accumulation_steps


def should_step_optimizer(step: int, accumulation_steps: int) -> bool:
    """Whether micro-step `step`, counted from 1, is the last one of a full window."""
    return step % accumulation_steps == 0


def should_flush_tail(last_step: int, start_step: int, accumulation_steps: int) -> bool:
    """Whether an epoch that ran micro-steps `start_step` + 1 … `last_step` leaves gradients that no step has used."""
    return last_step > start_step and last_step % accumulation_steps != 0


def window_size(step: int, iters: int, accumulation_steps: int) -> int:
    """Micro-steps in the window of micro-step `step`: K, or what is left in the last window of `iters`."""
    remainder = iters % accumulation_steps
    return remainder if step > iters - remainder else accumulation_steps


def language_model_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Next-token loss plus the routers' auxiliary loss, which is 0 in a dense model."""
    input_ids, labels = batch
    outputs = model(input_ids, labels=labels)
    loss: Tensor = outputs.loss + outputs.aux_loss
    return loss


def to_device(batch: Any, device: torch.device | str | None) -> Any:
    """Move every tensor of a batch (tensor, tuple, list or dict); the copy overlaps where the memory is pinned."""
    if isinstance(batch, Tensor):
        return batch if device is None else batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {name: to_device(item, device) for name, item in batch.items()}
    if isinstance(batch, list | tuple) and not hasattr(batch, "_fields"):
        return type(batch)(to_device(item, device) for item in batch)
    if isinstance(batch, tuple):
        return type(batch)(*(to_device(item, device) for item in batch))
    return batch


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    """Write the rate of the coming step into every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def step_optimizer(
    optimizer: Optimizer, scaler: GradScaler, *, grad_clip: float = 1.0, scheduler: LRScheduler | None = None
) -> None:
    """End a window: unscale, clip, step, update the scale, move the schedule, clear the gradients.

    Args:
        optimizer: holds the accumulated, scaled gradients.
        scaler: the step is skipped where it finds a gradient that is not finite.
        grad_clip: largest L2 norm of the unscaled gradient; 0 switches clipping off.
        scheduler: moves only if the step was applied.
    """
    scaler.unscale_(optimizer)
    if grad_clip > 0:
        # The optimizer's own parameters: exactly those that were unscaled and that the step will move.
        clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], grad_clip)
    # Reading the scale waits for the device, so it is done once a window and only where a scheduler depends on it.
    scale_before = scaler.get_scale() if scheduler is not None else 0.0
    scaler.step(optimizer)
    scaler.update()
    if scheduler is not None and scaler.get_scale() >= scale_before:
        scheduler.step()
    optimizer.zero_grad(set_to_none=True)


def train_one_epoch(
    model: nn.Module,
    loader: Iterable[Any],
    optimizer: Optimizer,
    *,
    iters: int,
    epoch: int = 0,
    start_step: int = 0,
    accumulation_steps: int = 1,
    tail_divisor: TailDivisor = "remainder",
    grad_clip: float = 1.0,
    lr_at: Callable[[int], float] | None = None,
    scheduler: LRScheduler | None = None,
    scaler: GradScaler | None = None,
    autocast_ctx: AbstractContextManager[Any] | None = None,
    device: torch.device | str | None = None,
    loss_fn: LossFunction = language_model_loss,
    on_micro_step: Callable[[MicroStep], object] = ignore,
    on_step: Callable[[WindowEnd], object] = ignore,
) -> int:
    """Train on one pass over `loader`, as MiniMind's `train_epoch` does, and step on a last, shorter window too.

    Args:
        model: put into training mode here.
        loader: the batches from `start_step` on.
        optimizer: its gradients are expected to be clear.
        iters: micro-steps in the whole epoch, those before `start_step` included.
        epoch: number of this epoch, from 0.
        start_step: micro-steps of this epoch that an earlier run has done.
        accumulation_steps: K, micro-steps in a window.
        tail_divisor: what the losses of a last window of r < K micro-steps are divided by: ``remainder`` (r, the mean)
            or ``full`` (K, as MiniMind does; the step is then r/K of the mean gradient).
        grad_clip: largest gradient norm; 0 switches clipping off.
        lr_at: learning rate at a micro-step counted from 1 over all epochs, written before the forward pass.
        scheduler: stepped after each optimizer step that was applied.
        scaler: loss scaling for float16; None for none.
        autocast_ctx: entered around each forward pass; None for none.
        device: where batches go; None leaves them.
        loss_fn: (model, batch) -> mean loss, a scalar.
        on_micro_step: called after each backward pass.
        on_step: called after each window, with the gradients cleared.

    Returns:
        The last micro-step of the epoch that ran; `start_step` where the loader was empty.
    """
    scaler = GradScaler(enabled=False) if scaler is None else scaler
    autocast_ctx = nullcontext() if autocast_ctx is None else autocast_ctx

    def finish_window(step: int) -> None:
        step_optimizer(optimizer, scaler, grad_clip=grad_clip, scheduler=scheduler)
        on_step(WindowEnd(epoch, step, window_size(step, iters, accumulation_steps)))

    model.train()
    last_step = start_step
    for step, batch in enumerate(loader, start=start_step + 1):
        last_step = step
        size = window_size(step, iters, accumulation_steps)
        batch = to_device(batch, device)
        if lr_at is not None:
            set_learning_rate(optimizer, lr_at(epoch * iters + step))
        with autocast_ctx:
            loss = loss_fn(model, batch)
            loss = scale_loss_for_accumulation(loss, size if tail_divisor == "remainder" else accumulation_steps)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        on_micro_step(MicroStep(epoch, step, size, batch, loss.detach()))
        if should_step_optimizer(step, accumulation_steps):
            finish_window(step)
    if should_flush_tail(last_step, start_step, accumulation_steps):
        finish_window(last_step)
    return last_step
