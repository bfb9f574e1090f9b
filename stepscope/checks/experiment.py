"""What a check works on: a model, one batch, a loss and, optionally, the user's own accumulation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from stepscope.checks.batches import batch_size
from stepscope.errors import StepscopeError

if TYPE_CHECKING:
    from torch.optim import Optimizer

Loss = Tensor | Mapping[str, Tensor]
"""A scalar, or several named scalars whose sum is the loss."""


@dataclass(frozen=True)
class Experiment:
    """What ``make()`` of a target returns.

    Attributes:
        model: any module; it is copied and never changed.
        batch: tensors (or a dict, list, tuple of them) whose first dimension is the batch.
        loss_fn: ``loss_fn(model, batch)`` gives the loss: a scalar, or a dict of named scalars whose sum is the loss.
        window: ``window(model, micro_batches)``, the user's own accumulation. It leaves the accumulated, unscaled
            gradient in ``.grad`` and does not step. Where its signature names ``scaler`` or ``optimizer`` it is given
            a `torch.amp.GradScaler` (enabled in float16 only) or an optimizer over the model's parameters.
        optimizer: ``optimizer(parameters)`` builds the optimizer; AdamW with torch's defaults if absent.
        num_targets: ``num_targets(batch)`` counts the targets of a batch; read from the loss where absent.
    """

    model: nn.Module
    batch: Any
    loss_fn: Callable[[nn.Module, Any], Loss]
    window: Callable[..., object] | None = None
    optimizer: Callable[[Any], Optimizer] | None = None
    num_targets: Callable[[Any], int] | None = None


_REQUIRED = ("model", "batch", "loss_fn")
_OPTIONAL = ("window", "optimizer", "num_targets")


def as_experiment(made: object) -> Experiment:
    """Read an experiment from what ``make()`` returned: a dict, an object with these names, or an `Experiment`.

    Raises:
        StepscopeError: a part is missing or of the wrong kind; the line names the part.
    """
    if isinstance(made, Experiment):
        return made
    parts = {name: _part(made, name) for name in _REQUIRED + _OPTIONAL}
    missing = [name for name in _REQUIRED if parts[name] is None]
    if missing:
        raise StepscopeError(
            f"make() returned {_describe(made)} without {', '.join(missing)}",
            hint="return a dict with model, batch and loss_fn(model, batch), optionally window(model, micro_batches)",
        )
    if not isinstance(parts["model"], nn.Module):
        raise StepscopeError(f"model must be a torch.nn.Module, not {type(parts['model']).__name__}")
    for name in ("loss_fn", *_OPTIONAL):
        if parts[name] is not None and not callable(parts[name]):
            raise StepscopeError(f"{name} must be callable, not {type(parts[name]).__name__}")
    batch_size(parts["batch"])
    return Experiment(**parts)  # type: ignore[arg-type]


def _part(made: object, name: str) -> object:
    return made.get(name) if isinstance(made, Mapping) else getattr(made, name, None)


def _describe(made: object) -> str:
    if isinstance(made, Mapping):
        return f"a dict with {', '.join(map(repr, made)) or 'nothing'}"
    return f"an object of type {type(made).__name__}"


def load_experiment(target: str) -> Experiment:
    """Load ``file.py:make`` or ``pkg.mod:make`` and call it.

    Raises:
        StepscopeError: it cannot be imported, is not callable, raises, or returns the wrong thing.
    """
    from stepscope.reference.factory import load_object

    make = load_object(target)
    if not callable(make):
        raise StepscopeError(f"{target} is a {type(make).__name__}, not a function", hint="name a function make()")
    try:
        made = make()
    except Exception as error:
        raise StepscopeError(f"{target} raised {type(error).__name__}: {first_line(error)}") from error
    return as_experiment(made)


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, cut to a length that fits a terminal."""
    text = str(error).strip().splitlines()
    return text[0][:200] if text else "(no message)"
