"""A chart as plain data: what the static picture, plotly and the terminal all draw. Knows no drawing library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Style = Literal["line", "stairs", "dots", "dashed"]
MarkKind = Literal["nonfinite", "skipped", "cited"]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

POINTS = 2000
"""Most points of a series in a chart; a screen is not wider."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart, finite values only.

    Attributes:
        name: legend, with stage and unit.
        x: micro-steps, ascending; shape ``(points,)``.
        y: values, shape ``(points,)``.
        colour: index into the palette; None for a muted line such as a limit.
        style: how it is drawn; ``stairs`` for a value that holds until it is changed.
        total: finite values that were observed; more than ``len(x)`` where the series was thinned.
    """

    name: str
    x: Ints
    y: Floats
    colour: int | None
    style: Style
    total: int


@dataclass(frozen=True, slots=True)
class Marks:
    """Steps to point at, on a strip below the lines.

    Attributes:
        kind: which symbol and colour.
        name: what they mean, in words.
        spans: first and last micro-step of each run of marked steps; none of them is ever dropped.
        count: marked steps.
    """

    kind: MarkKind
    name: str
    spans: tuple[tuple[int, int], ...]
    count: int


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart over micro-steps.

    Attributes:
        id: anchor in the page.
        title: what it shows.
        unit: label of the y axis, with the stage.
        series: lines; empty where nothing was observed (then `missing` says why).
        marks: what is marked on the strip.
        caption: the conclusion in words.
        reading: how to read it, with the formula.
        log: whether the y axis is logarithmic.
        zoom: first and last micro-step shown at first, None for all.
        missing: why there is no chart.
    """

    id: str
    title: str
    unit: str
    series: tuple[Series, ...] = ()
    marks: tuple[Marks, ...] = ()
    caption: str = ""
    reading: str = ""
    log: bool = False
    zoom: tuple[int, int] | None = None
    missing: str = ""

    @property
    def shown(self) -> int:
        """Points of the longest series as drawn."""
        return max((len(s.x) for s in self.series), default=0)

    @property
    def total(self) -> int:
        """Values of the longest series as recorded."""
        return max((s.total for s in self.series), default=0)


def thin(y: Floats, limit: int, keep: npt.NDArray[np.bool_] | None = None) -> Ints:
    """Which points to draw so that the picture stays the same: smallest and largest of each of ``limit / 2`` buckets.

    Args:
        y: finite values in order of the step, shape ``(n,)``.
        limit: about how many points may remain.
        keep: points that must stay, shape ``(n,)``; more than `limit` of these are thinned like the others.

    Returns:
        Ascending indices into `y`, always with the first and the last.
    """
    n = len(y)
    if n <= limit:
        return np.arange(n)
    width = -(-n // max(1, limit // 2))
    padded = np.append(y, np.full(-n % width, y[-1])).reshape(-1, width)
    base = np.arange(len(padded)) * width
    chosen = [base + padded.argmin(axis=1), base + padded.argmax(axis=1), np.array([0, n - 1])]
    if keep is not None:
        kept = np.flatnonzero(keep)
        chosen.append(kept if len(kept) <= limit else kept[thin(y[kept], limit)])
    return np.unique(np.minimum(np.concatenate(chosen), n - 1))


def distinct(values: Ints) -> Ints:
    """The different values in order; sorting beats the hashing of `numpy.unique` on values that are nearly sorted."""
    ordered = np.sort(values, kind="stable")
    return ordered[np.append(True, ordered[1:] != ordered[:-1])] if len(ordered) else ordered


def spans(steps: Ints, limit: int = POINTS) -> tuple[tuple[int, int], ...]:
    """Ascending steps as runs ``(first, last)``, nearest runs joined until at most `limit` remain.

    Every step lies in a run: joining may mark a few steps too many, never one too few.
    """
    if not len(steps):
        return ()
    gaps = np.diff(steps)
    allowed = 1
    if np.count_nonzero(gaps > 1) >= limit:
        allowed = int(np.sort(gaps)[-limit])
    breaks = np.flatnonzero(gaps > allowed)
    first = steps[np.concatenate(([0], breaks + 1))]
    last = steps[np.concatenate((breaks, [len(steps) - 1]))]
    return tuple(zip(first.tolist(), last.tolist(), strict=True))


def marks(kind: MarkKind, name: str, steps: Ints) -> Marks:
    """Marks at `steps`, in any order and with repetitions."""
    unique = distinct(steps)
    return Marks(kind, name, spans(unique), len(unique))
