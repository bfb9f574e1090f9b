"""A reference run from its options to its end: prepare, train, save, resume. It knows nothing of being watched."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from stepscope.errors import StepscopeError
from stepscope.reference.build import Parts, build
from stepscope.reference.checkpoint import capture, load_checkpoint, restore, restore_random, save_checkpoint
from stepscope.reference.config import TraceConfig, flag
from stepscope.reference.loop import MicroStep, WindowEnd, ignore, train_one_epoch

Shapes = dict[str, tuple[int, ...]]

FIXED_ON_RESUME = ("heads", "batch_size", "max_length", "data", "seed", "accumulation_steps", "dtype")
"""Options that a resumed run must share with the saved one, or its data and arithmetic would be others."""


@dataclass(slots=True)
class RunResult:
    """What a run has done.

    Attributes:
        micro_steps: micro-steps of this process, those before a resume not included.
        windows: windows of this process: optimizer steps attempted.
        shapes: see `Prepared.train`.
        checkpoints: files written, in order.
    """

    micro_steps: int = 0
    windows: int = 0
    shapes: Shapes = field(default_factory=dict)
    checkpoints: list[Path] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run that is ready to train; `parts` holds its model, optimizer, scaler and scheduler.

    Attributes:
        config: its options.
        parts: its objects.
        resumed: the checkpoint that was loaded, None for a fresh run.
    """

    config: TraceConfig
    parts: Parts
    resumed: dict[str, Any] | None = None

    def train(
        self,
        *,
        on_start: Callable[[Shapes, Parts], object] | None = None,
        on_micro_step: Callable[[MicroStep], object] = ignore,
        on_window: Callable[[WindowEnd], object] = ignore,
    ) -> RunResult:
        """Train to the end of the run.

        Args:
            on_start: called once, after the first micro-step, with the shapes of all tensors that went into the first
                forward pass and came out of it, by name, and with the parts.
            on_micro_step: called after each backward pass.
            on_window: called after each window, before a checkpoint is written.
        """
        result = RunResult()

        def after_micro_step(info: MicroStep) -> None:
            result.micro_steps += 1
            on_micro_step(info)
            if result.micro_steps == 1 and on_start is not None:
                on_start(result.shapes, self.parts)

        def after_window(info: WindowEnd) -> None:
            result.windows += 1
            on_window(info)
            if self._should_save(info):
                result.checkpoints.append(self.save(info.epoch, info.step))

        record_first_shapes(self.parts.model, result.shapes)
        self._train(after_micro_step, after_window)
        return result

    def _train(self, on_micro_step: Callable[[MicroStep], None], on_window: Callable[[WindowEnd], None]) -> None:
        parts, length = self.parts, self.parts.length
        epoch, start_step = self._position()
        stream = parts.data.stream(epoch * length.iters + start_step)
        if self.resumed is not None:
            restore_random(self.resumed["random"])
        for current in range(epoch, length.epochs):
            first = start_step if current == epoch else 0
            train_one_epoch(
                parts.model,
                islice(stream, length.iters - first),
                parts.optimizer,
                iters=length.iters,
                epoch=current,
                start_step=first,
                accumulation_steps=length.accumulation_steps,
                tail_divisor="full" if self.config.tail == "minimind" else "remainder",
                grad_clip=self.config.grad_clip,
                lr_at=parts.lr_at,
                scheduler=parts.scheduler,
                scaler=parts.scaler,
                autocast_ctx=parts.autocast_ctx,
                device=parts.device,
                loss_fn=parts.loss_fn,
                on_micro_step=on_micro_step,
                on_step=on_window,
            )

    def _position(self) -> tuple[int, int]:
        """Epoch and micro-step in it from which to go on."""
        if self.resumed is None:
            return 0, 0
        epoch, step = self.resumed["position"]["epoch"], self.resumed["position"]["step"]
        return (epoch + 1, 0) if step == self.parts.length.iters else (epoch, step)

    def _should_save(self, info: WindowEnd) -> bool:
        """At every N-th optimizer step, and at the last one whatever N is."""
        if not self.config.save_every:
            return False
        step = self.parts.length.global_step(info.epoch, info.step)
        return step % self.config.save_every == 0 or step == self.parts.length.optimizer_steps

    def save(self, epoch: int, step: int) -> Path:
        """Write a checkpoint of the window that ends at micro-step `step` of `epoch`; returns its path."""
        parts = self.parts
        path = Path(self.config.out) / "checkpoints" / f"step-{parts.length.global_step(epoch, step):06d}.pt"
        state = capture(
            model=parts.model,
            optimizer=parts.optimizer,
            scheduler=parts.scheduler,
            scaler=parts.scaler,
            position={"epoch": epoch, "step": step, "batches": epoch * parts.length.iters + step},
            config=asdict(self.config),
        )
        save_checkpoint(path, state)
        return path


def prepare(config: TraceConfig) -> Prepared:
    """Build a run, and load the checkpoint it resumes from, if any.

    Raises:
        StepscopeError: anything about the options, the data, the factory or the checkpoint that prevents it.
    """
    if config.resume is None:
        return Prepared(config, build(config))
    state = load_checkpoint(Path(config.resume))
    _check_resumable(config, state)
    parts = build(config)
    restore(state, model=parts.model, optimizer=parts.optimizer, scheduler=parts.scheduler, scaler=parts.scaler)
    if state["position"]["batches"] >= parts.length.micro_steps:
        raise StepscopeError(
            f"{config.resume} is at micro-step {state['position']['batches']} and this run ends at "
            f"{parts.length.micro_steps}: nothing is left to train",
            hint="give more --steps or --epochs",
        )
    return Prepared(config, parts, state)


def _check_resumable(config: TraceConfig, state: dict[str, Any]) -> None:
    saved = state["config"]
    for name in FIXED_ON_RESUME:
        if saved.get(name) != getattr(config, name):
            raise StepscopeError(
                f"the checkpoint was saved with {flag(name)} {saved.get(name)}, this run has {getattr(config, name)}",
                hint="give the same value",
            )
    if (saved.get("epochs") is None) != (config.epochs is None):
        raise StepscopeError("the checkpoint's run and this one are not both measured in --steps, or both in --epochs")


def run_reference(
    config: TraceConfig,
    *,
    on_start: Callable[[Shapes, Parts], object] | None = None,
    on_window: Callable[[WindowEnd], object] = ignore,
) -> RunResult:
    """Prepare and train in one call; see `Prepared.train`."""
    return prepare(config).train(on_start=on_start, on_window=on_window)


def record_first_shapes(model: nn.Module, shapes: Shapes) -> None:
    """Fill `shapes` with the tensors of the model's next forward pass, inputs by their argument names, then let go."""

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        handle.remove()
        for name, value in inspect.signature(module.forward).bind(*args, **kwargs).arguments.items():
            shapes.update(_shapes_of(value, name))
        shapes.update(_shapes_of(output, "output"))

    handle = model.register_forward_hook(record, with_kwargs=True)


def _shapes_of(value: Any, name: str) -> Shapes:
    """Shapes of the tensors in `value` that have a dimension; members of a mapping or named tuple by their own name."""
    if isinstance(value, Tensor):
        return {name: tuple(value.shape)} if value.ndim else {}
    members = value._asdict() if hasattr(value, "_asdict") else value
    if isinstance(members, Mapping):
        return {k: v for member, item in members.items() for k, v in _shapes_of(item, str(member)).items()}
    if isinstance(members, list | tuple):
        return {k: v for i, item in enumerate(members) for k, v in _shapes_of(item, f"{name}[{i}]").items()}
    return {}
