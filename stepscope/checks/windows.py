"""Accumulation windows of the tool's own: the way most loops write them, and the right one for given weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stepscope.checks.terms import find_terms, total, weighted

if TYPE_CHECKING:
    from stepscope.checks.experiment import Loss

Window = Callable[..., object]
Weights = Sequence[Mapping[str, float]]
"""For each micro-batch the weight of each term of its loss."""


def plain_window(loss_fn: Callable[[nn.Module, Any], Loss], weights: Sequence[float]) -> Window:
    """The window that most loops write: each micro-batch's loss times its weight, backward, no more."""

    def accumulate(model: nn.Module, micro_batches: list[Any], scaler: torch.amp.GradScaler) -> None:
        for micro_batch, weight in zip(micro_batches, weights, strict=True):
            torch.autograd.backward(scaler.scale(total(loss_fn(model, micro_batch)) * weight))
        unscale(model, scaler)

    return accumulate


def weighted_window(loss_fn: Callable[[nn.Module, Any], Loss], weights: Weights) -> Window:
    """A window that gives each term of each micro-batch its own weight."""

    def accumulate(model: nn.Module, micro_batches: list[Any], scaler: torch.amp.GradScaler) -> None:
        for micro_batch, weight in zip(micro_batches, weights, strict=True):
            loss = loss_fn(model, micro_batch)
            nodes = find_terms(loss) if len(weight) > 1 else {}
            factor = 1.0 if nodes else next(iter(weight.values()))
            with weighted(nodes, weight):
                torch.autograd.backward(scaler.scale(total(loss) * factor))
        unscale(model, scaler)

    return accumulate


def unscale(model: nn.Module, scaler: torch.amp.GradScaler) -> None:
    """Divide the gradients by the loss scale."""
    if scaler.is_enabled():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= scaler.get_scale()
