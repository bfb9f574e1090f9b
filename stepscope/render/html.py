"""The report as one HTML file: offline, readable without JavaScript and on paper, the same bytes for the same trace."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from stepscope import __version__
from stepscope.render import figures, heatmap, svg
from stepscope.render.chart import Chart
from stepscope.render.palette import DARK, LIGHT, MARK_SYMBOLS, MARK_TOKENS, css_variables, series_token
from stepscope.render.parameters import CELLS
from stepscope.render.words import clean, steps_phrase

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stepscope.render.model import ReportModel
    from stepscope.render.parameters import Heat

PLOTLY = "plotly-cartesian.min.js"
"""The bundle of plotly.js for plain two-dimensional charts (MIT; its licence lies beside it)."""


def render_html(model: ReportModel, *, plotly: str = "inline") -> str:
    """The page.

    Args:
        model: what it says.
        plotly: ``inline`` puts plotly.js into the page; otherwise the address of a copy beside it.
    """
    charts = [*model.charts, *(c for f in model.findings for c in f.charts)]
    heats = model.parameters.heats if model.parameters is not None else ()
    return page(
        "report.html.j2",
        charts,
        heats,
        plotly=plotly,
        model=model,
        linked={row.step for row in model.cited.rows} if model.cited else set(),
        cell_titles=[title for title, _, _ in CELLS],
    )


def page(template: str, charts: Iterable[Chart], heats: Iterable[Heat], *, plotly: str, **context: Any) -> str:
    """A template filled in, with style, scripts, the data of its charts, and a policy that allows nothing else."""
    scripts = {"theme": asset("theme.js"), "report": asset("report.js")}
    if plotly == "inline":
        scripts["plotly"] = asset(PLOTLY)
    return (
        _environment()
        .get_template(template)
        .render(
            version=__version__,
            policy=_policy(scripts.values(), external=plotly != "inline"),
            css=Markup(_css()),
            scripts={name: Markup(code) for name, code in scripts.items()},
            plotly_address="" if plotly == "inline" else plotly,
            data=script_json(_chart_data(charts, heats)),
            colours=script_json(dict(zip(LIGHT.values(), DARK.values(), strict=True))),
            **context,
        )
    )


@cache
def asset(name: str) -> str:
    """A file of the package's assets."""
    return (files("stepscope.render") / "assets" / name).read_text("utf-8").strip()


@cache
def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("stepscope.render"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"picture": _picture, "prose": prose, "legend": _legend, "slug": slug, "steps": steps_phrase}
    return made


def _visible(value: Any) -> Any:
    """What a template writes: text with control characters spelled out, also where a view forgot to."""
    return clean(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _css() -> str:
    """The style sheet after the colours of both themes: dark by the system's wish or by the reader's choice."""
    light, dark = css_variables(LIGHT), css_variables(DARK)
    return (
        f":root{{{light}color-scheme:light}}"
        f"@media(prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}color-scheme:dark}}}}"
        f":root[data-theme=dark]{{{dark}color-scheme:dark}}"
        f"@media print{{:root:root:root{{{light}color-scheme:light}}}}"
        f"{asset('report.css')}"
    )


def _policy(scripts: Any, *, external: bool) -> str:
    """A content security policy that runs our scripts, by their hashes, and nothing else; no request is made."""
    hashes = [base64.b64encode(hashlib.sha256(code.encode()).digest()).decode() for code in scripts]
    allowed = [f"'sha256-{h}'" for h in hashes] + (["'self'", "file:"] if external else [])
    return (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; "
        f"script-src {' '.join(allowed)}; base-uri 'none'; form-action 'none'"
    )


def script_json(value: Any) -> Markup:
    """JSON that may stand inside a ``<script>``: nothing in it can end the element or start a comment."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(text)


def _chart_data(charts: Iterable[Chart], heats: Iterable[Heat]) -> dict[str, Any]:
    """Plotly's data and layout of each chart by its anchor."""
    made = {c.id: figures.figure(c, legend=False) for c in charts if not c.missing}
    made |= {h.id: figures.heat_figure(h, legend=False) for h in heats}
    return {anchor: _bare(figure) for anchor, figure in made.items()}


def _bare(figure: Any) -> dict[str, Any]:
    """Data and layout; plotly writes arrays as base64 and values that are not finite as null."""
    content: dict[str, Any] = json.loads(figure.to_json())
    content["layout"].pop("template", None)
    return {"data": content["data"], "layout": content["layout"]}


def _picture(chart: Any) -> Markup:
    return svg.picture(chart) if isinstance(chart, Chart) else heatmap.picture(chart)


def _legend(chart: Chart) -> list[dict[str, str]]:
    """What the legend under a chart lists: class and symbol of the key, and the name."""
    lines = [{"token": series_token(s.colour), "style": s.style, "symbol": "", "name": s.name} for s in chart.series]
    marks = [
        {
            "token": MARK_TOKENS[m.kind],
            "style": "mark",
            "symbol": MARK_SYMBOLS[m.kind],
            "name": f"{m.name} ({m.count})",
        }
        for m in chart.marks
    ]
    return lines + marks


def slug(name: str) -> str:
    """A name as part of an id."""
    return re.sub(r"[^A-Za-z0-9-]+", "-", name).strip("-") or "rule"


def prose(text: str) -> Markup:
    """Plain text of a rule as HTML: paragraphs, indented blocks as code, names between backticks as code."""
    blocks = re.split(r"\n\s*\n", text.strip("\n"))
    return Markup("\n").join(_block(b) for b in blocks if b.strip())


def _block(block: str) -> Markup:
    lines = block.splitlines()
    if all(line.startswith("    ") for line in lines):
        return Markup("<pre>{}</pre>").format("\n".join(line[4:] for line in lines))
    safe = str(escape(" ".join(block.split())))
    return Markup("<p>{}</p>").format(Markup(re.sub(r"`{1,2}([^`]+)`{1,2}", r"<code>\1</code>", safe)))
