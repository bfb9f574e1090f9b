"""Learning-rate schedules as plain formulas, and the registry of those that the reference loop can follow.

Two conventions meet here. MiniMind counts **micro-steps**, from 1, and writes the rate into the parameter groups
before each forward pass. The warm-up schedule counts **optimizer steps**, from 0, and is driven by a `LambdaLR` that
moves only after a step that was applied.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

Unit = Literal["micro-step", "optimizer-step"]


def cosine_lr(current_step: int, total_steps: int, base_lr: float) -> float:
    """MiniMind's `get_lr`: a cosine from `base_lr` at step 0 down to a tenth of it at `total_steps`.

    lr(s) = base_lr (0.1 + 0.45 (1 + cos(π s / T))). No warm-up and no clamp: past `total_steps` it rises again.

    Args:
        current_step: s, in micro-steps over all epochs; the loop counts from 1.
        total_steps: T, micro-steps in the whole run.
        base_lr: the rate at s = 0.
    """
    return base_lr * (0.1 + 0.45 * (1 + math.cos(math.pi * current_step / total_steps)))


def warmup_cosine_factor(step: int, warmup_steps: int, total_steps: int, min_lr_ratio: float = 0.1) -> float:
    """Share of the peak rate: linear from 0 to 1 over the warm-up, then a cosine down to `min_lr_ratio`.

    With w warm-up steps, T steps in all and a floor r: s/w for s < w, and after that
    r + (1 - r) (1 + cos(π p)) / 2 with progress p = (s - w) / (T - w). The rate stays at the floor beyond T.

    Args:
        step: s, optimizer steps taken so far, from 0.
        warmup_steps: w; 0 starts at the peak.
        total_steps: T, optimizer steps in the whole run.
        min_lr_ratio: r, clamped to [0, 1].
    """
    floor = max(0.0, min(1.0, min_lr_ratio))
    if step < warmup_steps:
        return step / max(1, warmup_steps)
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))


@dataclass(frozen=True, slots=True)
class ScheduleLength:
    """What a schedule is told about the run, in its own unit.

    Attributes:
        total_steps: length of the run.
        warmup_steps: length of the warm-up.
        min_lr_ratio: floor, as a share of the peak.
    """

    total_steps: int
    warmup_steps: int = 0
    min_lr_ratio: float = 0.1


@dataclass(frozen=True, slots=True)
class Schedule:
    """A named schedule.

    Attributes:
        name: what ``--schedule`` calls it.
        unit: what its step counts.
        first_step: the step with which the first value of a run is computed.
        formula: for people, with s, T, w (warm-up), r (floor) and lr (peak).
        lr: (step, length, base_lr) -> learning rate.
    """

    name: str
    unit: Unit
    first_step: int
    formula: str
    lr: Callable[[int, ScheduleLength, float], float]


SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        Schedule(
            "minimind-cosine",
            "micro-step",
            1,
            "lr·(0.1 + 0.45·(1 + cos(π·s/T)))",
            lambda step, length, base_lr: cosine_lr(step, length.total_steps, base_lr),
        ),
        Schedule(
            "warmup-cosine",
            "optimizer-step",
            0,
            "lr·s/w for s < w, then lr·(r + (1 − r)·(1 + cos(π·(s − w)/(T − w)))/2)",
            lambda step, length, base_lr: (
                base_lr * warmup_cosine_factor(step, length.warmup_steps, length.total_steps, length.min_lr_ratio)
            ),
        ),
        Schedule("constant", "optimizer-step", 0, "lr", lambda step, length, base_lr: base_lr),
    )
}
"""By name, in the order in which they are offered."""
