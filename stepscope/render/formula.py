"""The learning rate that the reference loop's schedules prescribe, computed from their formulas alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from stepscope.render.rows import Points, Rows, Track

if TYPE_CHECKING:
    from stepscope.render.chart import Floats


def minimind_cosine(step: Floats, total: float, base: float) -> Floats:
    """``base · (0.1 + 0.45 · (1 + cos(π · step / total)))``, step counted in micro-steps from 1 (MiniMind's get_lr)."""
    return np.asarray(base * (0.1 + 0.45 * (1 + np.cos(np.pi * step / total))))


def warmup_cosine(step: Floats, warmup: float, total: float, floor: float, base: float) -> Floats:
    """Linear from 0 over `warmup` optimizer steps, then a half cosine down to ``floor · base``, which holds beyond."""
    progress = np.clip((step - warmup) / max(1.0, total - warmup), 0.0, 1.0)
    cosine = floor + (1 - floor) * 0.5 * (1 + np.cos(np.pi * progress))
    return np.asarray(base * np.where(step < warmup, step / max(1.0, warmup), cosine))


def formula_points(rows: Rows) -> Points | None:
    """The rate by the formula at every micro-step where one was used, None where no formula is known."""
    said = rows.trace.meta.get("reference") or {}
    track = rows.optimizers[0] if rows.optimizers else None
    if not isinstance(said, dict) or track is None or not rows.has("lr"):
        return None
    try:
        return _points(rows, track, said)
    except (KeyError, TypeError, ValueError):
        return None


def _points(rows: Rows, track: Track, said: dict[str, Any]) -> Points | None:
    x, used = rows.points("lr", track)
    base = float(_first(said, "learning_rate", "base_lr", "lr"))
    match said.get("schedule"):
        case "constant":
            return Points(x, np.full(len(used), base))
        case "minimind-cosine":
            return Points(x, minimind_cosine(x.astype(np.float64), float(_first(said, "total_steps")), base))
        case "warmup-cosine":
            applied = _applied_before(rows, track)
            total, warmup = float(_first(said, "total_steps")), float(_first(said, "warmup_steps"))
            return Points(x, warmup_cosine(applied, warmup, total, float(_first(said, "min_lr_ratio")), base))
    return None


def _applied_before(rows: Rows, track: Track) -> Floats:
    """Optimizer steps that were applied before each micro-step's window ended: what a LambdaLR has counted by then."""
    _, valid = rows.column("lr")
    applied, known = rows.column("applied_steps")
    at_step, _ = rows.column("sync_gradients")
    count = np.where(known, applied, 0.0)[track.index]
    before = np.maximum.accumulate(np.concatenate(([0.0], np.where(at_step[track.index] == 1, count, 0.0))))[:-1]
    return np.asarray(before[valid[track.index]])


def _first(said: dict[str, Any], *names: str) -> Any:
    return said[next((name for name in names if said.get(name) is not None), names[0])]
