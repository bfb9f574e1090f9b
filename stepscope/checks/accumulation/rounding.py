"""How far two right computations of one gradient may differ: a bound from the dtype and from reordering the sum.

Both ways through a batch add up the same terms, in another order and in other groups. For a sum of n terms computed
in any order with unit roundoff u, Higham (Accuracy and Stability of Numerical Algorithms, 2nd ed., 2002, sec. 4.2) has

    |computed − exact| ≤ γ_n · Σ|x_i|,        γ_n = n·u / (1 − n·u),

which covers the additions. The terms carry rounding errors of their own from forward and backward. How far a model
amplifies those does not follow from the dtype, so it is measured: the same sum is computed in other orders. The bound
on the distance of two right results is

    γ · ‖Σ|x_i|‖₂ + 2 · max_r ‖R_r − R_0‖₂,

where R_0 is the reference and the R_r are right computations in other orders; the 2 is the triangle inequality.

- In **float64** n is the number of targets or elements that a parameter's gradient sums over, and each R_r is the
  large batch with its rows reordered, from parameters moved by ±√m·u (m the fan-in), which is the size of a rounding
  error in an inner product of m terms (Higham, sec. 2.8: √n·u is the rule of thumb where errors are independent).
- In a **working dtype** the parts are rounded once to the dtype that computes and added in that of the parameters,
  γ = γ_2(u_compute) + γ_K(u_parameters), and each R_r is the right accumulation over the same micro-batches in another
  order, with the rows inside them reordered. They need no perturbation: the rounding of the dtype itself is at work.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SAMPLES = 3
"""Reorderings that are computed for a bound."""


def gamma(terms: int, unit_roundoff: float) -> float:
    """γ_n of Higham (2002, sec. 3.1) for a sum of `terms` terms; infinite where n·u ≥ 1 and no bound holds."""
    product = terms * unit_roundoff
    return product / (1 - product) if product < 1 else float("inf")


@dataclass(frozen=True)
class Bound:
    """A bound on the L2 distance of two right results, relative to the norm of the reference.

    Attributes:
        summation: γ·‖Σ|x_i|‖ / ‖reference‖.
        reordering: twice the largest distance among the sampled orders, over ‖reference‖.
    """

    summation: float
    reordering: float

    @property
    def value(self) -> float:
        """The bound."""
        return self.summation + self.reordering


def bound(reference: Tensor, parts: list[Tensor], orders: list[Tensor], additions: float) -> Bound:
    """Bound on the distance of two right computations of a gradient.

    Args:
        reference: R_0, a vector of P elements.
        parts: the summands x_i, weighted, P elements each.
        orders: the R_r.
        additions: γ.
    """
    norm = float(reference.norm()) or 1.0
    magnitude = torch.stack([part.abs() for part in parts]).sum(dim=0)
    spread = max((float((order - reference).norm()) for order in orders), default=0.0)
    return Bound(additions * float(magnitude.norm()) / norm, 2 * spread / norm)
