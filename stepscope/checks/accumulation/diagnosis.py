"""What is wrong with a window, read from the weights that it gave and those that it should have given."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from stepscope.checks.accumulation import coupling
from stepscope.checks.batches import batch_size
from stepscope.checks.findings import finding
from stepscope.checks.passes import WHOLE, Laboratory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stepscope.checks.accumulation.exact import Evidence, Key
    from stepscope.checks.accumulation.settings import Settings
    from stepscope.rules.outcome import Finding

NAMING_TOLERANCE = 1e-6
"""Relative distance at which two weights count as the same for naming a fault. No verdict hangs on it: a fault is
established by the bound before it is named."""


@dataclass(frozen=True)
class Pattern:
    """How the weights of one term are wrong: a finding name and the common factor (nan where there is none)."""

    name: str
    factor: float


RIGHT = Pattern("", 1.0)


def explain(evidence: Evidence, settings: Settings, sizes: dict[str, int]) -> list[Finding]:
    """Findings for a window that is not right in float64."""
    lost = _parameters_without_gradient(evidence, sizes)
    if lost and evidence.residual > evidence.bound.value:
        return [_lost_parameters(lost, len(sizes))]
    if evidence.residual > max(evidence.bound.value, NAMING_TOLERANCE):
        return [_other_gradient(evidence)]
    return name_weights(evidence, settings, evidence.used, NAMING_TOLERANCE)


def name_weights(
    evidence: Evidence, settings: Settings, used: dict[Key, float], tolerance: float, where: str = ""
) -> list[Finding]:
    """Findings for weights `used` that differ from the needed ones; empty where they agree within `tolerance`."""
    patterns = {term: _pattern(evidence, settings, used, term, tolerance) for term in _terms(evidence)}
    wrong = {term: pattern for term, pattern in patterns.items() if pattern is not RIGHT}
    factors = all(_is_factor(pattern) for pattern in patterns.values())
    same_kind = factors or len({pattern.name for pattern in patterns.values()}) == 1
    alike = same_kind and _same([pattern.factor for pattern in patterns.values()], tolerance)
    table = weight_table(evidence, used)
    if alike or not factors:
        main = evidence.pieces.main_term
        chosen = {main: wrong[main]} if alike and wrong else wrong
        return [
            finding(
                p.name,
                where + _sentence(p, evidence, settings, used, "" if alike else term),
                rows=table,
                observed=p.factor,
                expected=1.0,
            )
            for term, p in chosen.items()
        ]
    return [_auxiliary(patterns, len(evidence.pieces.micro_batches), where, table)]


def coupling_finding(evidence: Evidence, laboratory: Laboratory) -> Finding:
    """The notice that the rows of a batch influence each other, with the layer and what can still be compared."""
    named = coupling.describe(laboratory.model, evidence.modules)
    share = 100 * max(evidence.coupled.values())
    if evidence.modules:
        verb = "sees" if len(evidence.modules) == 1 else "see"
        cause = f"{named} {verb} the other rows of a batch, so micro-batches cannot add up to the large batch"
    else:
        terms = ", ".join(evidence.coupled)
        cause = f"the loss ({terms}) compares the rows of its batch with each other, so micro-batches cannot add up"
    message = f"{cause}; {share:.2g} % of the gradient is no weighted sum of the micro-batches'. This is no fault."
    if evidence.frozen is not None:
        message += f" With its statistics frozen (eval mode) a right window differs by {evidence.frozen:.1e}."
    return finding(
        "accum-batch-coupled",
        message,
        observed=evidence.difference,
        modules=evidence.modules,
        terms=dict(evidence.coupled),
        frozen=evidence.frozen,
    )


def weight_table(evidence: Evidence, used: dict[Key, float]) -> list[dict[str, Any]]:
    """One row per micro-batch and term: rows, targets, the weight it had and the weight it needed."""
    pieces = evidence.pieces
    return [
        {
            "micro_batch": place + 1,
            "rows": batch_size(pieces.micro_batches[place]),
            "targets": pieces.targets[place] if pieces.targets else None,
            **({} if term == WHOLE else {"term": term}),
            "weight": weight,
            "needed": evidence.needed[place, term],
        }
        for (place, term), weight in used.items()
    ]


def _terms(evidence: Evidence) -> list[str]:
    return list(dict.fromkeys(term for _, term in evidence.needed))


def _pattern(evidence: Evidence, settings: Settings, used: dict[Key, float], term: str, tolerance: float) -> Pattern:
    keys = [key for key in evidence.needed if key[1] == term]
    weights = [used[key] for key in keys]
    needed = [evidence.needed[key] for key in keys]
    ratios = [w / n if n else math.nan for w, n in zip(weights, needed, strict=True)]
    if _same(ratios, tolerance):
        return (
            RIGHT
            if _near(ratios[0], 1.0, tolerance)
            else Pattern(_factor_name(ratios[0], evidence, settings, term), ratios[0])
        )
    largest = max(abs(w) for w in weights)
    kept = [abs(w) > tolerance * largest for w in weights]
    if not any(kept[:-1]):
        return Pattern("accum-zero-grad-inside", math.nan)
    if not kept[-1] and kept == sorted(kept, reverse=True):
        return Pattern("accum-tail-dropped", math.nan)
    if _same(weights, tolerance):
        return Pattern("accum-token-mean", sum(weights) / sum(needed))
    return Pattern("accum-unequal-weights", math.nan)


def _factor_name(factor: float, evidence: Evidence, settings: Settings, term: str) -> str:
    count = len(evidence.pieces.micro_batches)
    if abs(factor) < NAMING_TOLERANCE:
        return "accum-no-gradient"
    if settings.tail and _near(factor, settings.tail / settings.accumulation_steps, 1e-3):
        return "accum-tail-misweighted"
    if count > 1 and term not in evidence.pieces.additive:
        if _near(factor, count, 1e-3):
            return "accum-missing-divide"
        if _near(factor, 1 / count, 1e-3):
            return "accum-double-divide"
    if _is_loss_scale(factor):
        return "accum-still-scaled"
    return "accum-denominator-wrong"


def _is_loss_scale(factor: float) -> bool:
    exponent = math.log2(factor) if factor > 0 else 0.0
    return abs(exponent) >= 7 and abs(exponent - round(exponent)) < 1e-3


def _is_factor(pattern: Pattern) -> bool:
    return pattern is RIGHT or pattern.name in (
        "accum-missing-divide", "accum-double-divide", "accum-tail-misweighted", "accum-denominator-wrong",
        "accum-no-gradient", "accum-still-scaled",
    )  # fmt: skip


def _sentence(p: Pattern, evidence: Evidence, settings: Settings, used: dict[Key, float], term: str) -> str:
    count = len(evidence.pieces.micro_batches)
    of = f" of {term}" if term and term != WHOLE else ""
    times = f"the gradient{of} is {p.factor:.4g} times what it should be in every parameter"
    if p.name in ("accum-token-mean", "accum-unequal-weights", "accum-zero-grad-inside", "accum-tail-dropped"):
        return _uneven_sentence(p, evidence, used, of)
    return times + {
        "accum-missing-divide": f": the losses of {count} micro-batches are added and not divided by {count}",
        "accum-double-divide": f" (1/{count}): the loss is divided by the number of micro-batches twice",
        "accum-tail-misweighted": (
            f" ({settings.tail}/{settings.accumulation_steps}): a tail of {settings.tail} micro-batches is divided by "
            f"{settings.accumulation_steps}; divide by {settings.tail}"
        ),
        "accum-still-scaled": (
            f" (2^{round(math.log2(p.factor or 1.0))}): the loss scale is "
            + ("still in it; call scaler.unscale_(optimizer) once, after the last backward of the window"
               if p.factor > 1 else "taken out once too often")
        ),
        "accum-no-gradient": ": nothing of it was left in .grad",
        "accum-denominator-wrong": _denominator_hint(p.factor, evidence),
    }[p.name]  # fmt: skip


def _denominator_hint(factor: float, evidence: Evidence) -> str:
    pieces = evidence.pieces
    count = len(pieces.micro_batches)
    if pieces.main_term in pieces.additive and _near(factor, 1 / count, 1e-3):
        return f" (1/{count}): the loss adds up over its rows, so a window must not divide it by {count}"
    if pieces.targets and _near(factor, sum(pieces.targets), 1e-3):
        return f": that is the number of targets ({sum(pieces.targets)}), so a sum is used where a mean is meant"
    if _near(factor, batch_size(pieces.whole), 1e-3):
        return f": that is the number of rows ({batch_size(pieces.whole)}), so a sum is used where a mean is meant"
    return ": the losses are divided by the wrong number"


def _uneven_sentence(p: Pattern, evidence: Evidence, used: dict[Key, float], of: str) -> str:
    weights, needed = [], []
    for key, weight in used.items():
        if not of or of == f" of {key[1]}":
            weights.append(weight)
            needed.append(evidence.needed[key])
    given, wanted = _numbers(weights), _numbers(needed)
    if p.name == "accum-zero-grad-inside":
        return f"only the last micro-batch{of} is in the gradient (weights {given}): it is cleared inside the window"
    if p.name == "accum-tail-dropped":
        return f"the last micro-batches{of} are not in the gradient (weights {given} where {wanted} are needed)"
    counts = f" for {_numbers(evidence.pieces.targets)} targets" if evidence.pieces.targets else ""
    ratios = [w / n for w, n in zip(weights, needed, strict=True) if n]
    spread = max(ratios) / min(ratios) if min(ratios) > 0 else math.inf
    text = (
        f"targets have unequal weight{of}: micro-batches have the weights {given} and need {wanted}{counts} "
        f"(weight per target differs by a factor of {spread:.4g})"
    )
    if p.name == "accum-token-mean":
        if not _near(p.factor, 1.0, 1e-3):
            text += f"; together they are {p.factor:.4g} times too large"
        text += ": a mean of means. Divide each summed loss by the targets of the whole window"
    return text


def _auxiliary(patterns: dict[str, Pattern], count: int, where: str, table: list[dict[str, Any]]) -> Finding:
    listed = ", ".join(f"{term} {pattern.factor:.6g}" for term, pattern in patterns.items())
    return finding(
        "aux-loss-scaling",
        f"{where}the terms of the loss are not scaled alike in a window of {count}: relative to the large batch "
        f"their weights are {listed}; divide every term, not the main one alone",
        rows=table,
        observed={term: pattern.factor for term, pattern in patterns.items()},
        expected=1.0,
    )


def _parameters_without_gradient(evidence: Evidence, sizes: dict[str, int]) -> list[str]:
    lengths = list(sizes.values())
    pairs = zip(sizes, torch.split(evidence.accumulated, lengths), torch.split(evidence.right, lengths), strict=True)
    return [name for name, got, right in pairs if bool((got == 0).all()) and bool((right != 0).any())]


def _lost_parameters(lost: list[str], of: int) -> Finding:
    listed = ", ".join(lost[:3]) + (", …" if len(lost) > 3 else "")
    return finding(
        "accum-no-gradient", f"{len(lost)} of {of} parameters have no accumulated gradient: {listed}", params=lost
    )


def _other_gradient(evidence: Evidence) -> Finding:
    if not bool(torch.isfinite(evidence.accumulated).all()):
        return finding("accum-other-gradient", "the accumulated gradient is not finite", observed=math.nan)
    return finding(
        "accum-other-gradient",
        f"the accumulated gradient differs by {evidence.difference:.3g} and {100 * evidence.residual:.3g} % of it is "
        "no weighted sum of the micro-batches' gradients: the window computes another loss, or changes the gradients",
        observed=evidence.difference,
        residual=evidence.residual,
    )


def _numbers(values: Sequence[float]) -> str:
    return "[" + ", ".join(f"{value:.4g}" for value in values) + "]"


def _near(value: float, target: float, tolerance: float) -> bool:
    return abs(value - target) <= tolerance * abs(target)


def _same(values: Sequence[float], tolerance: float) -> bool:
    first = values[0]
    return all(_near(value, first, tolerance) or (math.isnan(value) and math.isnan(first)) for value in values)
