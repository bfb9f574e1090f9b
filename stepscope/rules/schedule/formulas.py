"""Rates of torch's schedulers in closed form, as their documentation gives them; used to tell how a schedule goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepscope.rules.view import Array

Settings = dict[str, Any]


def _cosine(base: float, s: Settings, t: Array) -> Array:
    low = float(s["eta_min"])
    return np.asarray(low + (base - low) * (1 + np.cos(np.pi * t / float(s["T_max"]))) / 2)


def _step(base: float, s: Settings, t: Array) -> Array:
    return np.asarray(base * float(s["gamma"]) ** (t // float(s["step_size"])))


def _multi_step(base: float, s: Settings, t: Array) -> Array:
    return np.asarray(base * float(s["gamma"]) ** np.searchsorted(np.asarray(s["milestones"]), t, side="right"))


def _linear(base: float, s: Settings, t: Array) -> Array:
    start, end, total = (float(s[k]) for k in ("start_factor", "end_factor", "total_iters"))
    return np.asarray(base * (start + (end - start) * np.minimum(t, total) / total))


def _polynomial(base: float, s: Settings, t: Array) -> Array:
    total = float(s["total_iters"])
    return np.asarray(base * (1 - np.minimum(t, total) / total) ** float(s["power"]))


FORMULAS: dict[str, Callable[[float, Settings, Array], Array]] = {
    "CosineAnnealingLR": _cosine,
    "StepLR": _step,
    "MultiStepLR": _multi_step,
    "LinearLR": _linear,
    "PolynomialLR": _polynomial,
}
"""By class of the scheduler: ``formula(base rate, settings, positions) -> rates``."""


def rate_at(name: str, settings: Settings, positions: Array) -> Array | None:
    """The rate of the first group at positions of a schedule, None for classes without a closed form here."""
    bases = settings.get("base_lrs") or [None]
    if name not in FORMULAS or not isinstance(bases[0], int | float):
        return None
    return FORMULAS[name](float(bases[0]), settings, positions)
