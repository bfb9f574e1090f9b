"""Known schedules as sums of fixed shapes, so that their rates can be found by linear least squares.

Each formula gives, for steps s with a length T and a warm-up w, one or more shapes; the recorded rates must be a
weighted sum of them. The weights then tell the base rate and the floor. Sources: MiniMind's ``get_lr``; the schedulers
of ``torch.optim.lr_scheduler`` (closed forms in their documentation); ``get_linear_schedule_with_warmup`` and
``get_inverse_sqrt_schedule`` of transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Callable

Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Lengths:
    """What the shapes of a schedule depend on: T total steps (or the period), w warm-up steps, g factor per period."""

    T: float = 1.0
    w: float = 0.0
    g: float = 1.0


@dataclass(frozen=True)
class Formula:
    """A family of schedules.

    Attributes:
        name: what ``--formula`` calls it.
        text: the formula for people, with s, T, w (warm-up), r (floor) and lr (base rate).
        shapes: (s, lengths) -> shapes, each like s, that the rates are a weighted sum of.
        needs: which of T, w and g the shapes depend on.
        read: weights -> base rate and floor (None where there is no floor).
        unit: what its step usually counts.
    """

    name: str
    text: str
    shapes: Callable[[Values, Lengths], list[Values]]
    needs: str
    read: Callable[[Values], tuple[float, float | None]]
    unit: str = "optimizer-step"


def _cosine(s: Values, T: float, w: float) -> Values:
    """(1 + cos(π·(s−w)/(T−w)))/2, held at 0 beyond T."""
    progress = np.clip((s - w) / max(T - w, 1.0), 0.0, 1.0)
    return np.asarray(0.5 * (1 + np.cos(np.pi * progress)))


def _warmup(s: Values, w: float) -> Values:
    return np.minimum(s / w, 1.0) if w >= 1 else np.ones_like(s)


def _first(weights: Values) -> tuple[float, None]:
    return float(weights[0]), None


def _with_floor(weights: Values) -> tuple[float, float]:
    """lr·(r + (1−r)·c) = lr·c + lr·r·(1−c)."""
    return float(weights[0]), float(weights[1] / weights[0]) if weights[0] else 0.0


def _warmup_cosine(s: Values, p: Lengths) -> list[Values]:
    rise, fall = _warmup(s, p.w), _cosine(s, p.T, p.w)
    return [rise * fall, rise * (1 - fall)]


def _warmup_linear(s: Values, p: Lengths) -> list[Values]:
    fall = np.clip((p.T - s) / max(p.T - p.w, 1.0), 0.0, None)
    return [np.where(s < p.w, s / max(p.w, 1.0), fall)]


def _one_cycle(s: Values, p: Lengths) -> list[Values]:
    """Up over w − 1 steps, down over the rest, both along a cosine; divisors 25 and 1e4."""
    top = max(p.w - 1, 1e-9)
    down = max(p.T - 1 - top, 1e-9)
    rising = 1 / 25 + (1 - 1 / 25) * 0.5 * (1 - np.cos(np.pi * np.clip(s / top, 0, 1)))
    low = 1 / 25 / 1e4
    falling = low + (1 - low) * 0.5 * (1 + np.cos(np.pi * np.clip((s - top) / down, 0, 1)))
    return [np.where(s <= top, rising, falling)]


def _inverse_root(s: Values, p: Lengths) -> list[Values]:
    w = max(p.w, 1.0)
    return [np.where(s < p.w, s / w, np.sqrt(w / np.maximum(s, w)))]


def _free_cosine(s: Values, p: Lengths) -> list[Values]:
    wave = 0.5 * (1 + np.cos(np.pi * s / p.T))
    return [wave, 1 - wave]


def _straight(s: Values, p: Lengths) -> list[Values]:
    done = np.minimum(s / p.T, 1.0)
    return [1 - done, done]


FORMULAS: dict[str, Formula] = {
    formula.name: formula
    for formula in (
        Formula("constant", "lr", lambda s, p: [np.ones_like(s)], "", _first),
        Formula(
            "minimind-cosine",
            "lr·(0.1 + 0.45·(1 + cos(π·s/T)))",
            lambda s, p: [0.1 + 0.45 * (1 + np.cos(np.pi * s / p.T))],
            "T",
            _first,
            "micro-step",
        ),
        Formula("cosine", "lr·(r + (1 − r)·(1 + cos(π·s/T))/2): CosineAnnealingLR", _free_cosine, "T", _with_floor),
        Formula(
            "warmup-cosine",
            "lr·s/w for s < w, then lr·(r + (1 − r)·(1 + cos(π·(s − w)/(T − w)))/2)",
            _warmup_cosine,
            "Tw",
            _with_floor,
        ),
        Formula("linear", "lr·(1 − (1 − r)·s/T): LinearLR, PolynomialLR of power 1", _straight, "T", _with_floor),
        Formula("warmup-linear", "lr·s/w for s < w, then lr·(T − s)/(T − w)", _warmup_linear, "Tw", _first),
        Formula(
            "step",
            "lr·g^⌊s/T⌋: StepLR with T = step_size, ExponentialLR with T = 1",
            lambda s, p: [p.g ** np.floor(s / p.T)],
            "Tg",
            _first,
        ),
        Formula("one-cycle", "OneCycleLR with its defaults", _one_cycle, "Tw", _first),
        Formula("inverse-sqrt", "lr·s/w for s < w, then lr·√(w/s)", _inverse_root, "w", _first),
    )
}
"""By name. The order decides between formulas that fit alike."""
