"""Plotly figures from charts: for the page (without legend, colours by name) and for notebooks."""

from __future__ import annotations

import html
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go

from stepscope.render import heatmap
from stepscope.render.axes import step_axis, value_axis
from stepscope.render.palette import HEAT, LIGHT, MARK_TOKENS, series_token
from stepscope.render.words import number

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stepscope.render.chart import Chart, Marks, Series
    from stepscope.render.parameters import Heat

_SHAPES = {"line": "linear", "stairs": "vh", "dots": "linear", "dashed": "linear"}
_MARKERS = {"nonfinite": "x", "skipped": "triangle-down", "cited": "diamond"}
LANE = 0.07
"""Share of the height for one row of marks."""


def figure(chart: Chart, *, legend: bool = True) -> go.Figure:
    """The chart as a plotly figure in the light theme.

    Args:
        chart: with series or marks.
        legend: whether plotly draws it; the page has its own.
    """
    strip = LANE * len(chart.marks)
    made = go.Figure()
    made.add_traces([_line(s) for s in chart.series])
    made.add_traces([_marks(m, len(chart.marks) - i) for i, m in enumerate(chart.marks)])
    layout = _layout(legend=legend)
    x = step_axis(chart)
    layout["xaxis"] |= {"range": [x.low, x.high], "title": {"text": "micro-step"}, "tickformat": ",d"}
    layout["yaxis"]["type"] = "log" if chart.log else "linear"
    y = value_axis(chart, x)
    if len({v for s in chart.series if len(s.y) for v in (s.y.min(), s.y.max())}) == 1:
        layout["yaxis"]["range"] = [math.log10(y.low), math.log10(y.high)] if chart.log else [y.low, y.high]
    layout["yaxis"]["domain"] = [strip + 0.02 if strip else 0, 1]
    if strip:
        lanes = [0.5, len(chart.marks) + 0.5]
        layout["yaxis2"] = {"domain": [0, strip], "range": lanes, "visible": False, "fixedrange": True}
        layout["xaxis"]["anchor"] = "y2"
    if legend:
        layout["yaxis"]["title"] = {"text": text(chart.unit)}
        layout["title"] = {"text": text(chart.title)}
    made.update_layout(layout)
    return made


def heat_figure(heat: Heat, *, legend: bool = True) -> go.Figure:
    """The heat map as a plotly figure: logarithms as colours, a cross where a value was not finite."""
    _, low, high = heatmap.colours(heat)
    logs = np.log10(np.where(heat.values > 0, heat.values, np.nan))
    names = [text(n) for n in heat.names]
    steps = heat.steps.astype(str)
    made = go.Figure(
        go.Heatmap(
            z=logs.astype(np.float32),
            x=steps,
            y=names,
            zmin=low,
            zmax=high if high > low else low + 1,
            colorscale=[[i / (len(HEAT) - 1), c] for i, c in enumerate(HEAT)],
            customdata=heat.values.astype(np.float32),
            hovertemplate="%{y}<br>micro-step %{x}<br>%{customdata:.4g}<extra></extra>",
            colorbar={"title": {"text": "log₁₀"}, "thickness": 10, "outlinewidth": 0},
        )
    )
    if heat.odd.any():
        row, column = np.nonzero(heat.odd)
        made.add_trace(
            go.Scatter(
                x=steps[column],
                y=[names[i] for i in row],
                mode="markers",
                name="not finite",
                marker={"symbol": "x", "size": 7, "color": LIGHT["error"]},
                hovertemplate="%{y}<br>micro-step %{x}<br>not finite<extra></extra>",
            )
        )
    layout = _layout(legend=False)
    layout["xaxis"] |= {"type": "category", "nticks": 8, "title": {"text": "micro-step"}}
    layout["yaxis"] |= {"type": "category", "autorange": "reversed", "automargin": True, "showgrid": False}
    layout["xaxis"]["range"] = [-0.5, len(steps) - 0.5]
    layout["height"] = min(900, max(220, 90 + 15 * len(names)))
    if legend:
        layout["title"] = {"text": text(heat.title)}
    made.update_layout(layout)
    return made


def text(value: str) -> str:
    """A name as plotly text, which reads HTML-like marks: those are taken literally."""
    return html.escape(value, quote=False)


def _line(series: Series) -> go.Scatter:
    colour = LIGHT[series_token(series.colour)]
    small = len(series.x) <= 60 and series.style != "dashed"
    mode = "markers" if series.style == "dots" else "lines+markers" if small else "lines"
    return go.Scatter(
        x=series.x.astype(np.int32),
        y=_smallest(series.y),
        name=text(series.name),
        mode=mode,
        line={"color": colour, "width": 1.6, "dash": "dash" if series.style == "dashed" else "solid"}
        | {"shape": _SHAPES[series.style]},
        marker={"color": colour, "size": 5},
        hovertemplate=f"{text(series.name)}: %{{y:.5g}}<extra></extra>",
    )


def _smallest(values: np.ndarray) -> np.ndarray:
    """float32 where nothing would overflow or vanish in it; the eye sees no more digits."""
    size = np.abs(values[values != 0])
    safe = not len(size) or (size.max() < 3e38 and size.min() > 1.2e-38)
    return values.astype(np.float32) if safe else values


def _marks(marks: Marks, lane: int) -> go.Scatter:
    """One row of marks: a symbol at both ends of each run, a line between them."""
    colour = LIGHT[MARK_TOKENS[marks.kind]]
    x = [step for first, last in marks.spans for step in ((first, last, None) if last > first else (first, None))]
    return go.Scatter(
        x=x,
        y=[None if step is None else lane for step in x],
        yaxis="y2",
        name=text(f"{marks.name} ({number(marks.count)})"),
        mode="lines+markers",
        line={"color": colour, "width": 3},
        marker={"color": colour, "size": 8, "symbol": _MARKERS[marks.kind]},
        hovertemplate=f"{text(marks.name)}<extra></extra>",
    )


def _layout(*, legend: bool) -> dict[str, Any]:
    axis = {"gridcolor": LIGHT["rule"], "linecolor": LIGHT["muted"], "zeroline": False, "exponentformat": "power"}
    return {
        "template": None,
        "showlegend": legend,
        "hovermode": "x unified" if legend else "x",
        "margin": {"l": 70 if legend else 56, "r": 10, "t": 44 if legend else 8, "b": 44 if legend else 38},
        "height": 320 if legend else 250,
        "paper_bgcolor": LIGHT["page"],
        "plot_bgcolor": LIGHT["page"],
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": LIGHT["text"]},
        "xaxis": dict(axis),
        "yaxis": axis | {"automargin": True},
    }


def all_figures(charts: Iterable[Chart], heats: Iterable[Heat]) -> dict[str, go.Figure]:
    """A figure for every chart that has data, by its anchor without ``fig-``."""
    made = {c.id.removeprefix("fig-"): figure(c) for c in charts if not c.missing}
    return made | {h.id.removeprefix("fig-"): heat_figure(h) for h in heats}
