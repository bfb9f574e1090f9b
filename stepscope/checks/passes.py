"""Gradients of one model by different ways through the same rows: large batch, micro-batches, accumulation window."""

from __future__ import annotations

import copy
import inspect
import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stepscope.checks.batches import as_dtype, map_tensors
from stepscope.checks.experiment import Experiment, Loss, first_line
from stepscope.checks.precision import FLOAT64, InFloat64, NoDropout, Precision, seeded
from stepscope.checks.terms import count_targets, find_terms, total, weighted
from stepscope.errors import StepscopeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

WHOLE = "loss"
"""Name of the only term of a loss that is no sum."""


class Laboratory:
    """A copy of the model in one precision, on which passes are run from the same state each time.

    Every pass starts from the same parameters, buffers and random state; the caller's model is never touched.

    Args:
        experiment: what is measured.
        precision: number format of the passes.
        dropout: True leaves dropout as it is; False replaces its masks by their mean.
        seed: random state at the start of each pass.
    """

    def __init__(self, experiment: Experiment, precision: Precision, *, dropout: bool = False, seed: int = 0) -> None:
        self.experiment = experiment
        self.precision = precision
        self.dropout = dropout
        self.seed = seed
        self.model = _copy(experiment.model, precision)
        self.parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.dropout_calls = 0
        if not self.parameters:
            raise StepscopeError("the model has no parameter that requires a gradient")
        device = next(iter(self.parameters.values())).device
        self.device = device.type
        self._buffers = {name: b.detach().clone() for name, b in self.model.named_buffers()}
        self._values = {name: p.detach().clone() for name, p in self.parameters.items()}

    def with_seed(self, seed: int) -> Laboratory:
        """The same laboratory with another random state at the start of each pass."""
        other = copy.copy(self)
        other.seed = seed
        return other

    @property
    def sizes(self) -> dict[str, int]:
        """Elements of each parameter, in the order of the gradient vector."""
        return {name: p.numel() for name, p in self.parameters.items()}

    def cast(self, batch: Any) -> Any:
        """The batch in the dtype of the parameters and on their device."""
        return map_tensors(lambda t: t.to(self.device), as_dtype(batch, self.precision.parameters))

    def gradient(self, batch: Any, where: str) -> Tensor:
        """Gradient of the loss of `batch`, as one float64 vector over all parameters.

        Raises:
            StepscopeError: the loss cannot be computed, is not finite, or gives no gradient; the line names `where`.
        """
        with self.running():
            torch.autograd.backward(total(self._loss(self.cast(batch), where)))
            return self._collect(where)

    def gradients_by_term(self, batch: Any, where: str) -> tuple[dict[str, Tensor], int | None]:
        """Gradient of each term of the loss, and the number of targets that counted (None: not known).

        Where the parts do not add up to the gradient of the loss (a term inside another one), there is one term.
        """
        with self.running():
            batch = self.cast(batch)
            loss = self._loss(batch, where)
            targets = self._targets(batch, loss)
            nodes = find_terms(loss)
            parts = {name: self._backward_through(name, nodes, loss) for name in nodes}
            torch.autograd.backward(total(loss))
            whole = self._collect(where)
        if parts and float((torch.stack(list(parts.values())).sum(0) - whole).norm()) > 1e-6 * float(whole.norm()):
            parts = {}
        return parts or {WHOLE: whole}, targets

    def window(self, accumulate: Callable[..., object], micro_batches: list[Any], scale: float = 1.0) -> Tensor:
        """The gradient that an accumulation window leaves in ``.grad``, as one float64 vector.

        Args:
            accumulate: ``accumulate(model, micro_batches)``; it may name ``scaler`` and ``optimizer``.
            micro_batches: the window's micro-batches.
            scale: loss scale of the GradScaler that is handed over in float16.

        Raises:
            StepscopeError: the window raised, changed the parameters or left no gradient.
        """
        with self.running():
            try:
                with self.precision.autocast(self.device):
                    accumulate(self.model, [self.cast(m) for m in micro_batches], **self.extras(accumulate, scale))
            except StepscopeError:
                raise
            except Exception as error:
                raise StepscopeError(
                    f"window() raised in {self.precision.name}: {type(error).__name__}: {first_line(error)}"
                ) from error
            self._require_unchanged()
            return self._collect("the window", finite=False)

    def takes_scaler(self, accumulate: Callable[..., object]) -> bool:
        """Whether a window names ``scaler`` in its signature."""
        return "scaler" in inspect.signature(accumulate).parameters

    def loss(self, batch: Any, where: str) -> float:
        """The loss of a batch."""
        with self.running():
            return float(total(self._loss(self.cast(batch), where)).detach())

    def parameters_after_step(self, gradient: Tensor) -> Tensor:
        """Parameters after one optimizer step with `gradient`, as one float64 vector."""
        with self.running():
            self._assign(gradient)
            self.optimizer().step()
            return self.values()

    def values(self) -> Tensor:
        """All parameters as they are, as one float64 vector."""
        return torch.cat([p.detach().double().flatten() for p in self.parameters.values()])

    @contextmanager
    def perturbed(self, generator: torch.Generator) -> Iterator[None]:
        """Move each parameter by ±√m·u, m its fan-in: the size of a rounding error in an inner product of m terms."""
        kept = self._values
        with torch.no_grad():
            self._values = {name: _perturb(v, self.precision.unit_roundoff, generator) for name, v in kept.items()}
        try:
            yield
        finally:
            self._values = kept

    @contextmanager
    def evaluating(self, modules: list[str]) -> Iterator[None]:
        """Put the named modules in eval mode."""
        chosen = [self.model.get_submodule(name) for name in modules]
        modes = [module.training for module in chosen]
        for module in chosen:
            module.eval()
        try:
            yield
        finally:
            for module, mode in zip(chosen, modes, strict=True):
                module.train(mode)

    @contextmanager
    def running(self) -> Iterator[None]:
        """The start of a pass: parameters, buffers and random state as they were first, dropout as asked for."""
        self._restore()
        if self.dropout and self.precision is not FLOAT64:
            with seeded(self.seed):
                yield
            return
        mode = (InFloat64 if self.precision is FLOAT64 else NoDropout)(keep=self.dropout)
        with seeded(self.seed), mode:
            yield
        self.dropout_calls = max(self.dropout_calls, mode.calls)

    def _restore(self) -> None:
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(self._buffers[name])
            for name, parameter in self.parameters.items():
                parameter.copy_(self._values[name])
        self.model.zero_grad(set_to_none=True)

    def _loss(self, batch: Any, where: str) -> Loss:
        try:
            with self.precision.autocast(self.device):
                loss = self.experiment.loss_fn(self.model, batch)
        except Exception as error:
            raise StepscopeError(
                f"loss_fn failed on {where} in {self.precision.name}: {type(error).__name__}: {first_line(error)}"
            ) from error
        value = total(loss)
        if not math.isfinite(float(value.detach())):
            raise StepscopeError(
                f"the loss of {where} is {float(value.detach())} in {self.precision.name}",
                hint="a mean over no targets is NaN; every micro-batch needs a target that counts",
            )
        if value.grad_fn is None:
            raise StepscopeError(
                f"the loss of {where} has no gradient",
                hint="loss_fn(model, batch) must use the model it is given, without no_grad or detach",
            )
        return loss

    def _backward_through(self, term: str, nodes: Mapping[str, Any], loss: Loss) -> Tensor:
        self.model.zero_grad(set_to_none=True)
        with weighted(nodes, {name: float(name == term) for name in nodes}):
            torch.autograd.backward(total(loss), retain_graph=True)
        gradient = self.vector()
        self.model.zero_grad(set_to_none=True)
        return gradient

    def _targets(self, batch: Any, loss: Loss) -> int | None:
        count = self.experiment.num_targets
        return int(count(batch)) if count is not None else count_targets(loss)

    def extras(self, accumulate: Callable[..., object], scale: float) -> dict[str, object]:
        """The arguments that a window asks for by name, beside the model and the micro-batches."""
        names = inspect.signature(accumulate).parameters
        enabled = self.precision.scaled
        makers: dict[str, Callable[[], object]] = {
            "scaler": lambda: torch.amp.GradScaler(self.device, init_scale=scale, enabled=enabled),
            "optimizer": self.optimizer,
        }
        return {name: make() for name, make in makers.items() if name in names}

    def optimizer(self) -> torch.optim.Optimizer:
        """A new optimizer over the parameters: the experiment's kind, else AdamW."""
        make = self.experiment.optimizer or torch.optim.AdamW
        return make(list(self.parameters.values()))

    def _require_unchanged(self) -> None:
        for name, parameter in self.parameters.items():
            if not torch.equal(parameter.detach(), self._values[name]):
                raise StepscopeError(
                    f"window() changed the parameter {name}",
                    hint="it must leave the accumulated gradient in .grad and not step the optimizer",
                )

    def _collect(self, where: str, *, finite: bool = True) -> Tensor:
        if all(p.grad is None for p in self.parameters.values()):
            raise StepscopeError(
                f"{where} left no gradient on any parameter",
                hint="use the model that is passed in, and call backward() on its loss",
            )
        vector = self.vector()
        if finite and not bool(torch.isfinite(vector).all()):
            raise StepscopeError(f"the gradient of {where} is not finite in {self.precision.name}")
        return vector

    def vector(self) -> Tensor:
        """All gradients in float64, one after the other; zeros where a parameter has none."""
        return torch.cat([_dense(p).flatten() for p in self.parameters.values()])

    def _assign(self, gradient: Tensor) -> None:
        pieces = torch.split(gradient, list(self.sizes.values()))
        for parameter, piece in zip(self.parameters.values(), pieces, strict=True):
            parameter.grad = piece.reshape(parameter.shape).to(parameter.dtype)


def _copy(model: nn.Module, precision: Precision) -> nn.Module:
    try:
        return copy.deepcopy(model).to(precision.parameters)
    except Exception as error:
        raise StepscopeError(
            f"the model cannot be copied to {precision.name}: {type(error).__name__}: {first_line(error)}"
        ) from error


def _dense(parameter: nn.Parameter) -> Tensor:
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros(parameter.shape, dtype=torch.float64, device=parameter.device)
    return (gradient.to_dense() if gradient.is_sparse else gradient).detach().double().clone()


def _perturb(value: Tensor, unit: float, generator: torch.Generator) -> Tensor:
    fan_in = value.numel() // value.shape[0] if value.dim() > 1 else 1
    sign = torch.randint(0, 2, value.shape, generator=generator).to(value) * 2 - 1
    return value * (1 + sign * unit * math.sqrt(fan_in))
