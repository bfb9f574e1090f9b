"""Static pictures of charts: inline SVG that needs no script, follows the page's theme, and prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from markupsafe import Markup, escape

from stepscope.render.axes import Axis, step_axis, value_axis
from stepscope.render.chart import Chart, Floats, Marks, Series, thin
from stepscope.render.palette import MARK_SYMBOLS, MARK_TOKENS, series_token
from stepscope.render.words import number

if TYPE_CHECKING:
    from collections.abc import Iterable

WIDTH, HEIGHT = 720, 250
LEFT, RIGHT, TOP, BOTTOM = 74, 12, 10, 44
LANE = 14
"""Height of one row of marks on the strip below the lines."""

POINTS = 480
"""Points of a line; a picture of 634 units width shows no more."""


def picture(chart: Chart) -> Markup:
    """The chart as an ``<svg>`` element; empty for a chart without data."""
    if not chart.series and not chart.marks:
        return Markup("")
    x = step_axis(chart)
    y = value_axis(chart, x)
    bottom = HEIGHT - BOTTOM - LANE * len(chart.marks)
    parts = [*_grid(x, y, bottom)]
    parts += [_line(s, x, y, bottom) for s in chart.series]
    parts += [_lane(m, x, bottom + LANE * (i + 0.5)) for i, m in enumerate(chart.marks)]
    label = escape(f"{chart.title}: {chart.caption}")
    return Markup(
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}" class="picture">{"".join(parts)}</svg>'
    )


def _grid(x: Axis, y: Axis, bottom: float) -> Iterable[str]:
    for tick in y.ticks():
        height = _down(np.array([tick]), y, bottom)[0]
        yield f'<path class="grid" d="M{LEFT} {height:.1f}H{WIDTH - RIGHT}"/>'
        yield f'<text class="tick end" x="{LEFT - 6}" y="{height + 4:.1f}">{escape(_short(tick))}</text>'
    for tick in _whole(x.ticks(6)):
        place = _across(np.array([tick]), x)[0]
        yield f'<text class="tick mid" x="{place:.1f}" y="{HEIGHT - BOTTOM + 18}">{escape(number(int(tick)))}</text>'
    yield f'<path class="axis" d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>'
    yield f'<text class="tick mid" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}">micro-step</text>'


def _whole(ticks: list[float]) -> list[float]:
    """Steps are counted: no tick between two of them."""
    return sorted({round(t) for t in ticks})


def _short(value: float) -> str:
    return (
        "0"
        if value == 0
        else f"{value:.3g}"
        if 1e-3 <= abs(value) < 1e5
        else f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    )


def _across(steps: Floats, x: Axis) -> Floats:
    return np.asarray(LEFT + x.place(steps) * (WIDTH - LEFT - RIGHT))


def _down(values: Floats, y: Axis, bottom: float) -> Floats:
    return np.asarray(bottom - 4 - y.place(values) * (bottom - 4 - TOP))


def _line(series: Series, x: Axis, y: Axis, bottom: float) -> str:
    """A series as a path; as dots where it is one of dots or has a single point."""
    inside = np.flatnonzero((series.x >= x.low) & (series.x <= x.high))
    chosen = inside[thin(series.y[inside], POINTS)]
    across = _across(series.x[chosen].astype(np.float64), x)
    down = _down(series.y[chosen], y, bottom)
    token = series_token(series.colour)
    if series.style == "dots" or len(chosen) < 2:
        dots = "".join(f"M{a:.1f} {d:.1f}h0" for a, d in zip(across, down, strict=True))
        return f'<path class="{token} dots" d="{dots}"/>'
    dashed = " dashed" if series.style == "dashed" else ""
    return f'<path class="{token} line{dashed}" d="{_path(across, down, stairs=series.style == "stairs")}"/>'


def _path(across: Floats, down: Floats, *, stairs: bool) -> str:
    joint = "V{d:.1f}H{a:.1f}" if stairs else "L{a:.1f} {d:.1f}"
    start = f"M{across[0]:.1f} {down[0]:.1f}"
    return start + "".join(joint.format(a=a, d=d) for a, d in zip(across[1:].tolist(), down[1:].tolist(), strict=True))


def _lane(marks: Marks, x: Axis, height: float) -> str:
    """One row of marks: a symbol at each run of steps, a bar under a long one."""
    token, symbol = MARK_TOKENS[marks.kind], MARK_SYMBOLS[marks.kind]
    parts, last = [], -np.inf
    for first, end in marks.spans:
        if end < x.low or first > x.high:
            continue
        a, b = _across(np.array([max(first, x.low), min(end, x.high)]), x)
        if b - a > 6:
            parts.append(f'<path class="{token} bar" d="M{a:.1f} {height}H{b:.1f}"/>')
        elif a - last < 1:
            continue
        last = b
        parts.append(f'<text class="{token} mark" x="{(a + b) / 2:.1f}" y="{height + 4}">{symbol}</text>')
    return "".join(parts)
