"""Which weights a gradient gives to the parts it is summed from, found by least squares."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ROWS = 200_000
"""Elements of the gradient that the solver looks at; a larger model is sampled. Residuals use every element."""


@dataclass(frozen=True)
class Fit:
    """A gradient written as a weighted sum of parts.

    Attributes:
        weights: one weight per part.
        residual: L2 norm of what the sum leaves over, relative to the gradient.
    """

    weights: list[float]
    residual: float


def fit(gradient: Tensor, parts: list[Tensor], guess: list[float]) -> Fit:
    """Write `gradient` as a weighted sum of `parts`, as near to the weights in `guess` as the data allow.

    Solves min ‖gradient − Σ w_i·part_i‖₂ with the minimum-norm least-squares solution of w − guess: where parts are
    linearly dependent (two equal micro-batches) the weights that cannot be known stay at the guess.

    Args:
        gradient: vector of P elements, float64.
        parts: vectors of P elements.
        guess: weights to stay near.
    """
    basis = torch.stack(parts, dim=1)
    rest = gradient - basis @ torch.tensor(guess, dtype=basis.dtype, device=basis.device)
    lengths = basis.norm(dim=0)
    scale = torch.where(lengths > 0, lengths, torch.ones_like(lengths))
    chosen = _sample(basis.shape[0]).to(basis.device)
    system, target = (basis / scale)[chosen].cpu(), rest[chosen, None].cpu()
    change = torch.linalg.lstsq(system, target, driver="gelsd").solution[:, 0].to(basis.device) / scale
    weights = torch.tensor(guess, dtype=basis.dtype, device=basis.device) + change
    return Fit(weights.tolist(), relative(gradient - basis @ weights, gradient))


def combine(weights: list[float], parts: list[Tensor]) -> Tensor:
    """The weighted sum of `parts`."""
    return sum((w * part for w, part in zip(weights, parts, strict=True)), torch.zeros_like(parts[0]))


def relative(difference: Tensor, reference: Tensor) -> float:
    """‖difference‖₂ / ‖reference‖₂; the numerator alone where the reference is zero."""
    norm = float(reference.norm())
    return float(difference.norm()) / (norm or 1.0)


def _sample(size: int) -> Tensor:
    if size <= ROWS:
        return torch.arange(size)
    return torch.randperm(size, generator=torch.Generator().manual_seed(0))[:ROWS]
