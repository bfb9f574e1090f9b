"""From the options to the parts of a run: device, precision, model, optimizer, data and schedule."""

from __future__ import annotations

import random
import sys
import textwrap
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from stepscope.errors import StepscopeError
from stepscope.reference.data import VOCAB_SIZE, load_batches
from stepscope.reference.factory import load_parts
from stepscope.reference.loop import LossFunction, language_model_loss
from stepscope.reference.model import CausalLM
from stepscope.reference.optim import make_adamw
from stepscope.reference.schedules import SCHEDULES, ScheduleLength

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.optim import Optimizer

    from stepscope.reference.config import TraceConfig


class BatchSource(Protocol):
    """Batches that can be streamed from any position."""

    def __len__(self) -> int:
        """Batches in an epoch."""

    def stream(self, start: int = 0) -> Iterator[Any]:
        """Yield batch `start`, `start` + 1, …, without end."""


@dataclass(frozen=True, slots=True)
class RunLength:
    """How long a run is. One that is measured in optimizer steps is a single epoch over endless data.

    Attributes:
        epochs: passes of the loop.
        iters: micro-steps in each.
        accumulation_steps: K.
    """

    epochs: int
    iters: int
    accumulation_steps: int

    @property
    def micro_steps(self) -> int:
        """Micro-steps in all."""
        return self.epochs * self.iters

    @property
    def windows(self) -> int:
        """Windows in an epoch, a shorter last one included."""
        return -(-self.iters // self.accumulation_steps)

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps in all, if none is skipped."""
        return self.epochs * self.windows

    def global_step(self, epoch: int, step: int) -> int:
        """Optimizer steps attempted up to and with the window that ends at micro-step `step` of `epoch`."""
        return epoch * self.windows + -(-step // self.accumulation_steps)


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything a run needs, ready to train. Names as in `loop.train_one_epoch`."""

    model: nn.Module
    optimizer: Optimizer
    data: BatchSource
    loss_fn: LossFunction
    scheduler: LRScheduler | None
    lr_at: Callable[[int], float] | None
    scaler: GradScaler
    autocast_ctx: AbstractContextManager[Any]
    device: torch.device
    length: RunLength


def build(config: TraceConfig) -> Parts:
    """Build the parts of a run, the reference's own or a factory's, from a fixed seed.

    Raises:
        StepscopeError: a device that is not there, data that cannot be read, a factory that does not deliver.
    """
    device = resolve_device(config.device)
    scaler, autocast_ctx = precision(config.dtype, device, config.init_scale)
    seed_everything(config.seed)
    if config.factory is None:
        return _build_reference(config, device, scaler, autocast_ctx)
    return _build_from_factory(config, device, scaler, autocast_ctx)


def _build_reference(
    config: TraceConfig, device: torch.device, scaler: GradScaler, autocast_ctx: AbstractContextManager[Any]
) -> Parts:
    data = load_batches(config.data, max_length=config.max_length, batch_size=config.batch_size, seed=config.seed)
    length = run_length(config, data)
    model = CausalLM(config.model_config(VOCAB_SIZE)).to(device)
    optimizer = _adamw(config, model)
    lr_at, scheduler = make_schedule(config, optimizer, length)
    return Parts(model, optimizer, data, language_model_loss, scheduler, lr_at, scaler, autocast_ctx, device, length)


def _build_from_factory(
    config: TraceConfig, device: torch.device, scaler: GradScaler, autocast_ctx: AbstractContextManager[Any]
) -> Parts:
    """A factory's own optimizer keeps its own rates; the schedule options go with the reference's AdamW."""
    assert config.factory is not None
    own = load_parts(config.factory)
    length = run_length(config, own.data)
    model = own.model.to(device)
    optimizer, scheduler, lr_at = own.optimizer, own.scheduler, None
    if optimizer is None:
        optimizer = _adamw(config, model)
        lr_at, scheduler = make_schedule(config, optimizer, length)
    return Parts(model, optimizer, own.data, own.loss_fn, scheduler, lr_at, scaler, autocast_ctx, device, length)


def _adamw(config: TraceConfig, model: nn.Module) -> torch.optim.AdamW:
    return make_adamw(
        model,
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
        betas=(config.beta1, config.beta2),
        fused=config.fused,
    )


def seed_everything(seed: int) -> None:
    """Seed every generator that training may draw from."""
    random.seed(seed)
    torch.manual_seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)


def resolve_device(name: str) -> torch.device:
    """Turn ``auto`` or a torch device name into a device that works here.

    Raises:
        StepscopeError: no such kind of device, or none of it in this machine.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise StepscopeError(f"--device {name!r} is no torch device", hint="try cpu, cuda or cuda:1") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise StepscopeError(f"--device {name} was asked for, and torch sees no CUDA device", hint="use --device cpu")
    try:
        torch.ones(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        reason = textwrap.shorten(str(error) or type(error).__name__, 100)
        raise StepscopeError(f"--device {name} cannot be used: {reason}", hint="use --device cpu") from error
    return device


def precision(dtype: str, device: torch.device, init_scale: float) -> tuple[GradScaler, AbstractContextManager[Any]]:
    """The loss scaler and autocast context of a dtype: float16 has both, bfloat16 only autocast, float32 neither."""
    scaler = GradScaler(device.type, enabled=dtype == "float16", init_scale=init_scale)
    if dtype == "float32":
        return scaler, nullcontext()
    try:
        return scaler, torch.autocast(device.type, dtype=getattr(torch, dtype))
    except RuntimeError as error:
        raise StepscopeError(f"--dtype {dtype} is not possible on {device}: {error}") from error


def run_length(config: TraceConfig, data: BatchSource) -> RunLength:
    """Length of the run: whole passes over the data, or as many micro-steps as the optimizer steps need."""
    accumulation_steps = config.accumulation_steps
    if config.optimizer_steps is None:
        return RunLength(config.epochs or 1, len(data), accumulation_steps)
    return RunLength(1, config.optimizer_steps * accumulation_steps, accumulation_steps)


def make_schedule(
    config: TraceConfig, optimizer: Optimizer, length: RunLength
) -> tuple[Callable[[int], float] | None, LRScheduler | None]:
    """The schedule of a run: a rate for each micro-step, or a scheduler for each optimizer step, or neither."""
    schedule = SCHEDULES[config.schedule]
    if schedule.name == "constant":
        return None, None
    total = length.micro_steps if schedule.unit == "micro-step" else length.optimizer_steps
    told = ScheduleLength(total, config.warmup_steps, config.min_lr_ratio)
    if schedule.unit == "micro-step":
        return lambda step: schedule.lr(step, told, config.learning_rate), None
    return None, LambdaLR(optimizer, lambda step: schedule.lr(step, told, 1.0))
