"""Ranges and round tick values of an axis, linear or logarithmic."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from stepscope.render.chart import Chart, Floats


@dataclass(frozen=True, slots=True)
class Axis:
    """A range of values mapped to the unit interval."""

    low: float
    high: float
    log: bool = False

    def place(self, values: Floats) -> Floats:
        """Where `values` lie, 0 at the low end and 1 at the high end."""
        if self.log:
            values = np.log10(np.maximum(values, 1e-300))
            return np.asarray((values - math.log10(self.low)) / (math.log10(self.high) - math.log10(self.low)))
        return np.asarray((values - self.low) / (self.high - self.low))

    def ticks(self, count: int = 5) -> list[float]:
        """About `count` round values inside the range."""
        return _decades(self.low, self.high, count) if self.log else _round_values(self.low, self.high, count)


def _round_values(low: float, high: float, count: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten."""
    raw = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next((m * power for m in (1, 2, 5) if m * power >= raw), 10 * power)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def _decades(low: float, high: float, count: int) -> list[float]:
    """Powers of ten, thinned; round values where the range holds fewer than two of them."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    if last - first < 1:
        return [t for t in _round_values(low, high, count) if t > 0]
    return [10.0**e for e in range(first, last + 1, max(1, -(-(last - first) // count)))]


def step_axis(chart: Chart) -> Axis:
    """The micro-steps in view, with half a step on either side."""
    if chart.zoom is not None:
        return _around(*chart.zoom)
    ends = [int(s.x[i]) for s in chart.series if len(s.x) for i in (0, -1)]
    ends += [step for m in chart.marks for span in m.spans[:1] + m.spans[-1:] for step in span]
    return _around(min(ends, default=1), max(ends, default=1))


def _around(first: int, last: int) -> Axis:
    room = 0.5 if last - first > 3 else 2.5
    return Axis(first - room, last + room)


def value_axis(chart: Chart, x: Axis) -> Axis:
    """The values in view with a margin; never of no height."""
    seen = [s.y[(s.x >= x.low) & (s.x <= x.high)] for s in chart.series]
    y = np.concatenate([np.zeros(0), *seen])
    if not len(y):
        return Axis(0.0, 1.0)
    low, high = float(y.min()), float(y.max())
    if chart.log and low > 0:
        room = max(1.05, (high / low) ** 0.06)
        return Axis(low / room, high * room, log=True)
    room = 0.06 * (high - low) or 0.1 * abs(high) or 1.0
    return Axis(low - room, high + room)
