"""A trace in a notebook: plotly figures by name, and a summary that needs no script."""

from __future__ import annotations

from typing import TYPE_CHECKING

from markupsafe import Markup

from stepscope.render.envelope import outcomes_of
from stepscope.render.model import ReportModel, build_model
from stepscope.render.palette import LIGHT, css_variables

if TYPE_CHECKING:
    from collections.abc import Sequence

    import plotly.graph_objects as go

    from stepscope.rules.outcome import Outcome
    from stepscope.store.trace import Trace

_SHOWN = ("fig-loss", "fig-lr", "fig-loss-scale", "fig-grad-norm")

_STYLE = (
    ".stepscope .picture{width:100%;max-width:620px}.stepscope text{font:11px sans-serif;fill:var(--soft)}"
    ".stepscope .end{text-anchor:end}.stepscope .mid,.stepscope .mark{text-anchor:middle}"
    ".stepscope path{fill:none;stroke-width:1.6}.stepscope .dots{stroke-width:5;stroke-linecap:round}"
    ".stepscope .dashed{stroke-dasharray:6 4}.stepscope .grid{stroke:var(--rule)}.stepscope .axis{stroke:var(--muted)}"
    + "".join(f".stepscope path.{n}{{stroke:var(--{n})}}" for n in LIGHT)
    + "".join(f".stepscope text.{n}{{fill:var(--{n})}}" for n in LIGHT)
)


def figures(trace: Trace, outcomes: Sequence[Outcome] = ()) -> dict[str, go.Figure]:
    """Plotly figures of a run by name: ``loss``, ``lr``, ``loss-scale``, ``grad-norm`` and so on.

    Args:
        trace: the run.
        outcomes: steps that their findings cite survive thinning.
    """
    from stepscope.render.figures import all_figures

    model = build_model(trace, outcomes, rule_text=lambda name: {})
    return all_figures(model.charts, model.parameters.heats if model.parameters is not None else ())


def summary_html(trace: Trace) -> str:
    """The verdict that was stored with the run, its numbers and four static pictures, as an HTML fragment."""
    return str(_fragment(build_model(trace, outcomes_of(trace.verdict), rule_text=lambda name: {})))


def _fragment(model: ReportModel) -> Markup:
    from stepscope.render.svg import picture

    numbers = Markup("").join(
        Markup("<tr><th>{}</th><td>{}</td></tr>").format(n.label, n.text) for n in model.numbers if n.value is not None
    )
    findings = Markup("").join(
        Markup("<li>{} {}: {}</li>").format(f.severity, f.code, f.message) for f in model.findings
    )
    pictures = Markup("").join(
        Markup("<h4>{}</h4>{}<p>{}</p>").format(c.title, picture(c), c.caption)
        for c in model.charts
        if c.id in _SHOWN and not c.missing
    )
    return Markup(
        '<div class="stepscope" style="{}"><style>{}</style><h3>{}: {}</h3><p>{}</p><ul>{}</ul>'
        "<table>{}</table>{}</div>"
    ).format(
        css_variables(LIGHT),
        Markup(_STYLE),
        model.title,
        model.verdict.heading,
        model.verdict.line,
        findings,
        numbers,
        pictures,
    )
