"""The comparison in float64: large batch, micro-batches and window, and the weights that connect them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stepscope.checks.accumulation import coupling, rounding
from stepscope.checks.accumulation.weights import combine, fit, relative
from stepscope.checks.batches import batch_size, elements, join, map_tensors, shuffled, split
from stepscope.checks.passes import WHOLE, Laboratory
from stepscope.checks.precision import FLOAT64, WORKING
from stepscope.checks.windows import Window, plain_window
from stepscope.errors import StepscopeError

if TYPE_CHECKING:
    from stepscope.checks.accumulation.settings import Settings
    from stepscope.checks.experiment import Experiment

Key = tuple[int, str]
"""Place of a micro-batch from 0, and the term of its loss."""


@dataclass(frozen=True)
class Pieces:
    """The large batch and its micro-batches, with the gradient of every term of the loss in float64.

    Attributes:
        whole: the large batch: the rows of the window.
        micro_batches: its micro-batches.
        large: term -> gradient of the large batch.
        parts: (micro-batch, term) -> gradient.
        additive: the loss adds up over its rows (a sum) rather than averages: twice the rows, twice the loss.
        targets: targets that counted in each micro-batch; None where a loss does not tell.
    """

    whole: Any
    micro_batches: list[Any]
    large: dict[str, Tensor]
    parts: dict[Key, Tensor]
    additive: bool
    targets: list[int] | None

    @property
    def gradient(self) -> Tensor:
        """Gradient of the large batch."""
        return torch.stack(list(self.large.values())).sum(dim=0)

    @property
    def shares(self) -> list[float]:
        """n_i/N where the targets are known, else the share of the rows."""
        counts = self.targets or [batch_size(micro) for micro in self.micro_batches]
        return [count / sum(counts) for count in counts]


@dataclass(frozen=True)
class Evidence:
    """What the passes in float64 say about a window.

    Attributes:
        pieces: the gradients it is made of.
        accumulated: gradient that the window left.
        right: Σ w_i·g_i, what a right window leaves; the large batch's gradient unless something couples the rows.
        needed: weights w_i of a right window.
        used: weights that this window gave.
        residual: share of `accumulated` that no weights explain.
        coupled: term -> share of its large-batch gradient that no weights explain, for terms that couple the rows.
        modules: modules that couple the rows.
        frozen: difference left when the coupling layers use fixed statistics; None where that was not possible.
        bound: on the distance of two right results.
        own: how the tool's own window weighs the losses, in words; empty for the user's.
    """

    pieces: Pieces
    accumulated: Tensor
    right: Tensor
    needed: dict[Key, float]
    used: dict[Key, float]
    residual: float
    bound: rounding.Bound
    coupled: dict[str, float]
    modules: list[str]
    frozen: float | None
    own: str

    @property
    def difference(self) -> float:
        """Relative L2 distance of the window's gradient from the large batch's."""
        return relative(self.accumulated - self.pieces.gradient, self.pieces.gradient)

    @property
    def equal(self) -> bool:
        """The window gives the large batch's gradient."""
        return self.difference <= self.bound.value

    @property
    def mechanics_right(self) -> bool:
        """Every micro-batch has the weight that it should have."""
        return self.equal or relative(self.accumulated - self.right, self.pieces.gradient) <= self.bound.value


def measure(laboratory: Laboratory, settings: Settings) -> Evidence:
    """Run all passes of the comparison in float64."""
    pieces = cut(laboratory, settings)
    additions = rounding.gamma(elements(pieces.whole), FLOAT64.unit_roundoff)
    limit = _bound(laboratory, pieces, settings, additions)
    if not settings.keep_dropout:
        _require_deterministic(laboratory, pieces, limit)
    needed, coupled = needed_weights(pieces, limit)
    modules, frozen = [], None
    if coupled:
        modules = coupling.coupling_modules(laboratory, pieces.whole, pieces.micro_batches)
        needed, frozen = _with_frozen_statistics(laboratory, settings, modules, limit, needed)
    window, own = choose_window(laboratory.experiment, pieces, settings)
    accumulated = laboratory.window(window, pieces.micro_batches)
    right = combine([needed[key] for key in pieces.parts], list(pieces.parts.values()))
    found = fit(accumulated, list(pieces.parts.values()), [needed[key] for key in pieces.parts])
    used = dict(zip(pieces.parts, found.weights, strict=True))
    return Evidence(pieces, accumulated, right, needed, used, found.residual, limit, coupled, modules, frozen, own)


def cut(laboratory: Laboratory, settings: Settings) -> Pieces:
    """Split the batch and compute every gradient that the comparison is made of."""
    micro_batches = split(laboratory.experiment.batch, settings.accumulation_steps)[: settings.window_size]
    whole = join(micro_batches)
    large, loss, _ = laboratory.gradients_by_term(whole, "the large batch")
    doubled = laboratory.loss(join([whole, whole]), "the large batch twice")
    found = [
        laboratory.gradients_by_term(micro, f"micro-batch {place} of {len(micro_batches)}")
        for place, micro in enumerate(micro_batches, 1)
    ]
    counts = [count for _, _, count in found if count]
    gradients = [terms for terms, _, _ in found]
    if any(terms.keys() != large.keys() for terms in gradients):
        large, gradients = _collapse(large), [_collapse(terms) for terms in gradients]
    parts = {(place, name): g for place, terms in enumerate(gradients) for name, g in terms.items()}
    targets = counts if len(counts) == len(found) else None
    # Twice the rows have the same batch statistics, so this is exact for BatchNorm models as well.
    additive = abs(doubled - 2 * loss) <= 1e-6 * abs(loss)
    return Pieces(whole, micro_batches, large, parts, additive, targets)


def needed_weights(pieces: Pieces, limit: rounding.Bound) -> tuple[dict[Key, float], dict[str, float]]:
    """The weights of a right window, and the terms whose large-batch gradient is no weighted sum of the parts.

    A term that couples the rows has no such weights; there each micro-batch gets its share of the targets.
    """
    needed: dict[Key, float] = {}
    coupled: dict[str, float] = {}
    allowed = limit.value * float(pieces.gradient.norm())
    for term, gradient in pieces.large.items():
        keys = [key for key in pieces.parts if key[1] == term]
        guess = [1.0] * len(keys) if pieces.additive else pieces.shares
        found = fit(gradient, [pieces.parts[key] for key in keys], guess)
        decomposes = found.residual * float(gradient.norm()) <= allowed
        if not decomposes:
            coupled[term] = found.residual
        needed |= dict(zip(keys, found.weights if decomposes else guess, strict=True))
    return needed, coupled


def choose_window(experiment: Experiment, pieces: Pieces, settings: Settings) -> tuple[Window, str]:
    """The user's window, or the tool's own one with the way it weighs the losses in words.

    Raises:
        StepscopeError: targets are to be weighed and cannot be counted.
    """
    if experiment.window is not None:
        return experiment.window, ""
    count = len(pieces.micro_batches)
    kind = settings.normalisation
    if kind == "auto":
        kind = "sum" if pieces.additive else "mean"
    if kind == "sum":
        return plain_window(experiment.loss_fn, [1.0] * count), "the losses added up"
    if kind == "targets":
        if pieces.targets is None:
            raise StepscopeError(
                "the targets of a micro-batch cannot be counted from its loss",
                hint="let make() return num_targets(batch) as well",
            )
        return plain_window(experiment.loss_fn, pieces.shares), "each loss times its share of the targets"
    divisor = settings.accumulation_steps if settings.full_divisor else count
    return plain_window(experiment.loss_fn, [1.0 / divisor] * count), f"each loss divided by {divisor}"


def _collapse(terms: dict[str, Tensor]) -> dict[str, Tensor]:
    return {WHOLE: torch.stack(list(terms.values())).sum(dim=0)}


def _bound(laboratory: Laboratory, pieces: Pieces, settings: Settings, additions: float) -> rounding.Bound:
    """The bound in float64. A loss that depends on the order of the rows is only perturbed, not reordered."""
    scale = len(pieces.micro_batches) if not pieces.additive else 1
    parts = [part / scale for part in pieces.parts.values()]
    single = additions / FLOAT64.unit_roundoff * WORKING["float32"].unit_roundoff
    for reorder in (not settings.keep_dropout, False):
        orders = _orders(laboratory, pieces.whole, settings.seed, reorder=reorder)
        limit = rounding.bound(pieces.gradient, parts, orders, additions)
        if limit.reordering <= limit.summation / additions * single:
            break
    return limit


def _orders(laboratory: Laboratory, whole: Any, seed: int, *, reorder: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def jitter(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        sign = torch.randint(0, 2, tensor.shape, generator=generator).to(tensor.device) * 2 - 1
        return tensor * (1 + sign * FLOAT64.unit_roundoff)

    found = []
    for _ in range(rounding.SAMPLES):
        batch = map_tensors(jitter, laboratory.cast(whole))
        with laboratory.perturbed(generator):
            found.append(laboratory.gradient(shuffled(batch, generator) if reorder else batch, "the large batch"))
    return found


def _require_deterministic(laboratory: Laboratory, pieces: Pieces, limit: rounding.Bound) -> None:
    other = laboratory.with_seed(laboratory.seed + 1).gradient(pieces.whole, "the large batch")
    difference = relative(other - pieces.gradient, pieces.gradient)
    if difference > limit.value:
        raise StepscopeError(
            f"the gradient of one batch differs by {difference:.2g} between two random states, with dropout off",
            hint="make the forward deterministic: random draws other than dropout cannot be made equal",
        )


def _with_frozen_statistics(
    laboratory: Laboratory, settings: Settings, modules: list[str], limit: rounding.Bound, needed: dict[Key, float]
) -> tuple[dict[Key, float], float | None]:
    """Weights and remaining difference when the coupling layers normalise with their running statistics."""
    frozen = coupling.freezable(laboratory.model, modules)
    if not frozen:
        return needed, None
    with laboratory.evaluating(frozen):
        pieces = cut(laboratory, settings)
        weights, coupled = needed_weights(pieces, limit)
        if pieces.parts.keys() != needed.keys():
            return needed, None
        right = combine([weights[key] for key in pieces.parts], list(pieces.parts.values()))
    rest = relative(right - pieces.gradient, pieces.gradient)
    return (needed, rest) if coupled else (weights, rest)
