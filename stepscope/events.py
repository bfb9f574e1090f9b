"""What can happen in a training loop, as the watcher tells it to the probes. No torch at import.

An event carries the live objects: probes look at them at once, keep device scalars, and let go. The names of the
classes are the handlers' names: a probe that defines ``on_backward_end`` is told every `BackwardEnd`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from stepscope.watch.ledger import Micro, Row, WatchedOptimizer


@dataclass(slots=True)
class Forward:
    """The outermost call of a module ended. `training` is False under ``no_grad`` (an evaluation)."""

    module: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    training: bool
    milliseconds: float


@dataclass(slots=True)
class BackwardBegin:
    """A backward pass is about to run: `micro` has its number, gradients are still those from before."""

    micro: Micro
    roots: Sequence[torch.Tensor]
    gradients: Sequence[torch.Tensor | None]


@dataclass(slots=True)
class BackwardEnd:
    """A backward pass ended: one row for each optimizer whose parameters it gave gradients to."""

    micro: Micro
    rows: list[Row]
    milliseconds: float


@dataclass(slots=True)
class GradientsLeft:
    """The gradient is about to be unscaled, clipped or used for the first time since the last backward."""

    optimizer: WatchedOptimizer
    row: Row


@dataclass(slots=True)
class ScaleLoss:
    """``GradScaler.scale`` multiplied a loss. `scale` is a copy of the scale then (None when disabled)."""

    scaler: Any
    scale: torch.Tensor | None
    outputs: Any


@dataclass(slots=True)
class Unscale:
    """``GradScaler.unscale_`` divided the gradients of one optimizer; `scale` is a copy of the divisor."""

    optimizer: WatchedOptimizer
    row: Row | None
    scaler: Any
    scale: torch.Tensor | None


@dataclass(slots=True)
class ClipCall:
    """One call that limits gradients: what it was given and, at its end, the norm it found.

    `kind` is ``norm`` or ``value``; `total_norm` is None for ``value`` and until the call ends.
    """

    kind: str
    gradients: list[torch.Tensor]
    max_norm: float
    norm_type: float
    total_norm: torch.Tensor | None = None
    parameters: list[torch.Tensor] = field(default_factory=list)

    @property
    def measures(self) -> bool:
        """Without a limit a clip only measures: it leaves finite gradients as they are."""
        return self.kind == "norm" and self.max_norm == math.inf


@dataclass(slots=True)
class ClipBegin:
    """Gradients of `row` are about to be clipped."""

    call: ClipCall
    optimizer: WatchedOptimizer
    row: Row | None


@dataclass(slots=True)
class ClipEnd:
    """Gradients of `row` have been clipped."""

    call: ClipCall
    optimizer: WatchedOptimizer
    row: Row | None


@dataclass(slots=True)
class ClipNothing:
    """A clip call matched no gradient at all."""

    call: ClipCall


@dataclass(slots=True)
class StepBegin:
    """An optimizer is about to step. `row` is the last micro-step of its window, None if there was no backward."""

    optimizer: WatchedOptimizer
    row: Row | None
    in_scaler: bool
    in_backward: bool
    closure: bool


@dataclass(slots=True)
class StepEnd:
    """The optimizer's step returned."""

    optimizer: WatchedOptimizer
    row: Row | None
    milliseconds: float


@dataclass(slots=True)
class Attempt:
    """An attempt to step is over, executed or not. `ran` is False where the scaler did not call the optimizer.

    `found_inf` counts devices whose gradients were not finite (device scalar), None without an enabled scaler.
    """

    optimizer: WatchedOptimizer
    row: Row | None
    ran: bool
    found_inf: torch.Tensor | None
    scaler: Any


@dataclass(slots=True)
class ScalerUpdate:
    """``GradScaler.update`` ran; `before` and `after` are copies of the scale."""

    scaler: Any
    before: torch.Tensor | None
    after: torch.Tensor | None
    rows: list[Row]


@dataclass(slots=True)
class ZeroGrad:
    """``zero_grad`` was called on an optimizer or a module; `optimizers` are those whose parameters it concerns."""

    owner: Any
    optimizers: list[WatchedOptimizer]


@dataclass(slots=True)
class SchedulerStep:
    """A learning-rate scheduler was stepped, once, from outside; `optimizer` is None if none that is watched has it."""

    scheduler: Any
    optimizer: WatchedOptimizer | None
    row: Row | None
    metric: Any
    lr_before: list[Any]


@dataclass(slots=True)
class Built:
    """An optimizer, scheduler, scaler or wrapper came into being. `lr_before` is given for schedulers.

    `optimizer` is the book of the optimizer that it is or belongs to, None where none is watched.
    """

    what: str
    instance: Any
    lr_before: list[Any] = field(default_factory=list)
    optimizer: WatchedOptimizer | None = None


@dataclass(slots=True)
class Loaded:
    """``load_state_dict`` ran on an optimizer, scheduler, scaler or module; `before` is what it held.

    `optimizer` is the book of the optimizer that it is or belongs to, None where none is watched.
    """

    what: str
    instance: Any
    before: dict[str, Any] = field(default_factory=dict)
    optimizer: WatchedOptimizer | None = None


@dataclass(slots=True)
class Saved:
    """A checkpoint is being made: ``torch.save`` writes something, or an optimizer's ``state_dict`` is asked for.

    `optimizer` is given for the latter, where it is not known whether and where the state will be written.
    """

    where: str
    content: Any
    optimizer: WatchedOptimizer | None = None


@dataclass(slots=True)
class Called:
    """Another call worth a place in the order of calls: its letter, its name and what is known of it."""

    letter: str
    name: str
    optimizer: WatchedOptimizer | None = None
    detail: dict[str, Any] = field(default_factory=dict)


Event = (
    Forward
    | BackwardBegin
    | BackwardEnd
    | GradientsLeft
    | ScaleLoss
    | Unscale
    | ClipBegin
    | ClipEnd
    | ClipNothing
    | StepBegin
    | StepEnd
    | Attempt
    | ScalerUpdate
    | ZeroGrad
    | SchedulerStep
    | Built
    | Loaded
    | Saved
    | Called
)
"""Every event there is."""


def handler_name(event_type: type) -> str:
    """The method that a probe defines to be told events of a type: ``BackwardEnd`` -> ``on_backward_end``."""
    name = event_type.__name__
    return "on" + "".join(f"_{c.lower()}" if c.isupper() else c for c in name)
