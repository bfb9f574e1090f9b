"""A series in one line of text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from stepscope.render.chart import Chart, Series

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII = "_.-:=+*#"


def sparkline(series: Series, chart: Chart, width: int, *, ascii_only: bool = False) -> str:
    """The means of `width` stretches of micro-steps as heights; a stretch with a value that is not finite is a cross.

    Args:
        series: what to draw.
        chart: where it comes from: its marks say what is not finite, and whether heights are logarithmic.
        width: most characters.
        ascii_only: whether only ASCII can be shown.
    """
    first, last = _ends(series, chart)
    width = min(width, max(1, last - first + 1))
    edges = np.linspace(first, last + 1, width + 1)
    y = np.log10(series.y) if chart.log else series.y
    means = _means(series.x, y, edges)
    odd = _marked(chart, edges)
    return "".join(_character(m, o, y, ascii_only=ascii_only) for m, o in zip(means.tolist(), odd, strict=True))


def _ends(series: Series, chart: Chart) -> tuple[int, int]:
    steps = [*series.x[:1].tolist(), *series.x[-1:].tolist()]
    steps += [s for m in chart.marks for span in m.spans[:1] + m.spans[-1:] for s in span]
    return min(steps, default=1), max(steps, default=1)


def _means(x: np.ndarray, y: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Mean of the values in each stretch; where there is none, that of the last one before."""
    place = np.clip(np.searchsorted(edges, x, side="right") - 1, 0, len(edges) - 2)
    count = np.bincount(place, minlength=len(edges) - 1)
    sums = np.bincount(place, weights=y, minlength=len(edges) - 1)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = sums / count
    held = np.maximum.accumulate(np.where(count > 0, np.arange(len(count)), -1))
    return np.where(held >= 0, means[held], np.nan)


def _marked(chart: Chart, edges: np.ndarray) -> list[bool]:
    spans = [span for m in chart.marks if m.kind == "nonfinite" for span in m.spans]
    lows, highs = edges[:-1], edges[1:]
    odd = np.zeros(len(lows), dtype=np.bool_)
    for first, last in spans:
        odd |= (lows <= last) & (first < highs)
    return odd.tolist()


def _character(mean: float, odd: bool, y: np.ndarray, *, ascii_only: bool) -> str:
    if odd:
        return "x" if ascii_only else "✕"
    if not np.isfinite(mean):
        return " "
    marks = ASCII if ascii_only else BLOCKS
    low, high = float(y.min()), float(y.max())
    part = (mean - low) / (high - low) if high > low else 0.5
    return marks[min(len(marks) - 1, int(part * len(marks)))]
