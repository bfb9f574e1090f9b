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
        additive: terms that add up over their rows (a sum) rather than average.
        targets: targets that counted in each micro-batch; None where a loss does not tell.
    """

    whole: Any
    micro_batches: list[Any]
    large: dict[str, Tensor]
    parts: dict[Key, Tensor]
    additive: frozenset[str]
    targets: list[int] | None

    @property
    def gradient(self) -> Tensor:
        """Gradient of the large batch."""
        return torch.stack(list(self.large.values())).sum(dim=0)

    @property
    def main_term(self) -> str:
        """The term with the largest gradient."""
        return max(self.large, key=lambda term: float(self.large[term].norm()))

    @property
    def shares(self) -> list[float]:
        """n_i/N where the targets are known, else the share of the rows."""
        return self.row_shares if self.targets is None else [count / sum(self.targets) for count in self.targets]

    @property
    def row_shares(self) -> list[float]:
        """Each micro-batch's share of the rows."""
        counts = [batch_size(micro) for micro in self.micro_batches]
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
        dropout_calls: dropout masks that a pass replaced.
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
    dropout_calls: int
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
    modules, frozen, open_terms = [], None, set(coupled)
    if coupled:
        modules = coupling.coupling_modules(laboratory, pieces.whole, pieces.micro_batches)
        found = _with_frozen_statistics(laboratory, settings, modules, limit)
        if found is not None and found[0].keys() == needed.keys():
            needed, frozen, open_terms = found
    window, own = choose_window(laboratory.experiment, pieces, settings)
    accumulated = laboratory.window(window, pieces.micro_batches)
    calls = laboratory.dropout_calls
    parts = list(pieces.parts.values())
    explained = fit(accumulated, parts, [needed[key] for key in pieces.parts])
    used = dict(zip(pieces.parts, explained.weights, strict=True))
    needed = _settle(needed, used, pieces, open_terms)
    right = combine([needed[key] for key in pieces.parts], parts)
    return Evidence(
        pieces, accumulated, right, needed, used, explained.residual, limit, coupled, modules, frozen, calls, own
    )


def cut(laboratory: Laboratory, settings: Settings) -> Pieces:
    """Split the batch and compute every gradient that the comparison is made of."""
    micro_batches = split(laboratory.experiment.batch, settings.accumulation_steps)[: settings.window_size]
    whole = join(micro_batches)
    large = laboratory.gradients_by_term(whole, "the large batch")[0]
    doubled = laboratory.gradients_by_term(join([whole, whole]), "the large batch twice")[0]
    found = [
        laboratory.gradients_by_term(micro, f"micro-batch {place} of {len(micro_batches)}")
        for place, micro in enumerate(micro_batches, 1)
    ]
    counts = [count for _, count in found if count]
    gradients = [terms for terms, _ in found]
    if any(terms.keys() != large.keys() for terms in [*gradients, doubled]):
        large, doubled, gradients = _collapse(large), _collapse(doubled), [_collapse(terms) for terms in gradients]
    parts = {(place, name): g for place, terms in enumerate(gradients) for name, g in terms.items()}
    targets = counts if len(counts) == len(found) else None
    return Pieces(whole, micro_batches, large, parts, _additive(large, doubled), targets)


def needed_weights(pieces: Pieces, limit: rounding.Bound) -> tuple[dict[Key, float], dict[str, float]]:
    """The weights of a right window, and the terms whose large-batch gradient is no weighted sum of the parts.

    A term that couples the rows has no such weights; there each micro-batch gets its share of the targets.
    """
    needed: dict[Key, float] = {}
    coupled: dict[str, float] = {}
    allowed = limit.value * float(pieces.gradient.norm())
    for term, gradient in pieces.large.items():
        keys = [key for key in pieces.parts if key[1] == term]
        additive = term in pieces.additive
        guess = [1.0] * len(keys) if additive else pieces.shares
        parts = [pieces.parts[key] for key in keys]
        found = fit(gradient, parts, guess)
        decomposes = found.residual * float(gradient.norm()) <= allowed and _plausible(found.weights, additive)
        if not decomposes:
            coupled[term] = relative(gradient - combine(guess, parts), gradient)
        needed |= dict(zip(keys, found.weights if decomposes else guess, strict=True))
    return needed, coupled


def _plausible(weights: list[float], additive: bool) -> bool:
    """Whether weights are those of a sum (all 1) or of a mean (positive, together 1).

    With few distinct directions (a router with two experts) even a coupled gradient is some combination of the parts.
    """
    tolerance = 1e-6
    if additive:
        return all(abs(weight - 1) <= tolerance for weight in weights)
    return all(weight > 0 for weight in weights) and abs(sum(weights) - 1) <= tolerance


def _additive(large: dict[str, Tensor], doubled: dict[str, Tensor]) -> frozenset[str]:
    """Terms whose gradient doubles when every row is there twice; batch statistics do not notice the second copy."""
    return frozenset(
        term for term, g in large.items() if float((doubled[term] - 2 * g).norm()) <= 1e-6 * float(g.norm())
    )


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
        kind = "sum" if pieces.main_term in pieces.additive else "mean"
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
    count = len(pieces.micro_batches)
    parts = [part / (1 if term in pieces.additive else count) for (_, term), part in pieces.parts.items()]
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
    laboratory: Laboratory, settings: Settings, modules: list[str], limit: rounding.Bound
) -> tuple[dict[Key, float], float, set[str]] | None:
    """The comparison when the coupling layers normalise with their running statistics; None where they cannot.

    Returns the weights of a right window, its distance from the large batch, and the terms that are coupled still.
    """
    frozen = coupling.freezable(laboratory.model, modules)
    if not frozen:
        return None
    with laboratory.evaluating(frozen):
        pieces = cut(laboratory, settings)
        weights, coupled = needed_weights(pieces, limit)
        right = combine([weights[key] for key in pieces.parts], list(pieces.parts.values()))
    return weights, relative(right - pieces.gradient, pieces.gradient), set(coupled)


def _settle(needed: dict[Key, float], used: dict[Key, float], pieces: Pieces, terms: set[str]) -> dict[Key, float]:
    """Needed weights in which a coupled mean counts micro-batches by rows or by targets, as the window does.

    For such a term no weights give the large batch's gradient, and both are what right loops do.
    """
    settled = dict(needed)
    for term in terms - pieces.additive:
        keys = [key for key in needed if key[1] == term]
        whole = sum(used[key] for key in keys) or 1.0
        given = [used[key] / whole for key in keys]
        by_targets, by_rows = (_distance(given, shares) for shares in (pieces.shares, pieces.row_shares))
        settled |= dict(zip(keys, pieces.row_shares if by_rows < by_targets else pieces.shares, strict=True))
    return settled


def _distance(left: list[float], right: list[float]) -> float:
    return sum(abs(a - b) for a, b in zip(left, right, strict=True))
