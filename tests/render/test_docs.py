"""The chapter on charts says what the report says under each chart; ``--accept-gold`` writes it."""

from pathlib import Path

from stepscope.render.plots import PLOTS

PAGE = Path(__file__).parents[2] / "docs" / "reading-the-report.md"
START = "<!-- charts: written by tests/render/test_docs.py -->\n"
END = "<!-- end of charts -->\n"


def chapter():
    parts = [f"### {plot.title}\n\nPer {plot.per}; {plot.unit}.\n\n{plot.reading}\n" for plot in PLOTS]
    return START + "\n" + "\n".join(parts) + "\n" + END


def test_every_chart_is_explained_as_in_the_report(request):
    text = PAGE.read_text("utf-8")
    before, rest = text.split(START)
    after = rest.split(END)[1]
    if request.config.getoption("--accept-gold", default=False):
        PAGE.write_text(before + chapter() + after, "utf-8")
    assert PAGE.read_text("utf-8") == before + chapter() + after
