"""The terms of a loss (main loss, auxiliary loss, penalty), found in the autograd graph or named by the user."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stepscope.errors import StepscopeError

if TYPE_CHECKING:
    from stepscope.checks.experiment import Loss

MAX_TERMS = 6
"""A loss with more terms than this is treated as one: each term costs a backward pass."""

_SUMS = ("AddBackward0", "SubBackward0")
_SCALINGS = ("MulBackward0", "DivBackward0", "NegBackward0", "ToCopyBackward0", "ViewBackward0", "SqueezeBackward0")
_LOSS_NAMES = {
    "NllLoss": "cross-entropy",
    "NllLoss2D": "cross-entropy",
    "MseLoss": "mean squared error",
    "SmoothL1Loss": "smooth L1",
    "HuberLoss": "Huber",
    "L1Loss": "L1",
    "BinaryCrossEntropy": "binary cross-entropy",
    "BinaryCrossEntropyWithLogits": "binary cross-entropy",
}


def total(loss: Loss) -> Tensor:
    """The scalar on which backward is called.

    Raises:
        StepscopeError: the loss is not a scalar tensor or a mapping of them.
    """
    parts = list(loss.values()) if isinstance(loss, Mapping) else [loss]
    for part in parts:
        if not isinstance(part, Tensor):
            raise StepscopeError(f"loss_fn returned a {type(part).__name__}, not a tensor")
        if part.numel() != 1:
            raise StepscopeError(f"loss_fn returned a tensor of shape {tuple(part.shape)}, not a scalar")
    scalars = [part.reshape(()) if part.dim() else part for part in parts]
    return torch.stack(scalars).sum() if len(scalars) > 1 else scalars[0]


def find_terms(loss: Loss) -> dict[str, Any]:
    """Name the terms of a loss: term name -> the node of the autograd graph at which its gradient arrives.

    Named losses give their names. Otherwise the graph is followed from the root through sums of scalars and their
    scaling by numbers. A loss that is no sum gives one term.
    """
    if isinstance(loss, Mapping) and len(loss) > 1:
        nodes = {name: part.grad_fn for name, part in loss.items() if part.grad_fn is not None}
    else:
        root = total(loss)
        leaves = list(dict.fromkeys(_leaves(root.grad_fn)))
        nodes = dict(zip(_names(leaves), leaves, strict=True))
    return nodes if 1 < len(nodes) <= MAX_TERMS and len(set(nodes.values())) == len(nodes) else {}


def _leaves(node: Any) -> Iterator[Any]:
    inputs = [child for child, _ in node.next_functions if child is not None] if node is not None else []
    if node is not None and (node.name() in _SUMS or (node.name() in _SCALINGS and len(inputs) == 1)):
        for child in inputs:
            yield from _leaves(child)
    elif node is not None and node.name() != "torch::autograd::AccumulateGrad":
        yield node


def _names(nodes: list[Any]) -> list[str]:
    bases = [_LOSS_NAMES.get(node.name().removesuffix("0").removesuffix("Backward")) for node in nodes]
    named = [
        base or f"term {place} ({node.name()})" for place, (base, node) in enumerate(zip(bases, nodes, strict=True), 1)
    ]
    return [name if named.count(name) == 1 else f"{name} (term {place})" for place, name in enumerate(named, 1)]


@contextlib.contextmanager
def weighted(nodes: Mapping[str, Any], weights: Mapping[str, float]) -> Iterator[None]:
    """Backward passes inside this context multiply the gradient of each term by its weight."""

    def multiply(weight: float) -> Any:
        def hook(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
            return tuple(None if g is None else g * weight if weight else torch.zeros_like(g) for g in gradients)

        return hook

    handles = [node.register_prehook(multiply(weights[name])) for name, node in nodes.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def count_targets(loss: Loss) -> int | None:
    """Targets that counted in a cross-entropy or an elementwise mean loss, read from its graph; None if it cannot be.

    ``NllLossBackward0`` keeps the number of targets that were not ignored (their weight, where classes are weighted);
    elementwise losses count every element.
    """
    queue, seen = [total(loss).grad_fn], set()
    while queue:
        node = queue.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        counted = _targets_at(node)
        if counted is not None:
            return counted
        if len(seen) > 50:
            return None
        queue += [child for child, _ in node.next_functions]
    return None


def _targets_at(node: Any) -> int | None:
    name = node.name().removesuffix("0").removesuffix("Backward")
    if name in ("NllLoss", "NllLoss2D"):
        labels = node._saved_target
        return int((labels != node._saved_ignore_index).sum())
    if name in _LOSS_NAMES:
        return int(node._saved_target.numel())
    return None
