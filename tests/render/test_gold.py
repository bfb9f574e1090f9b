"""Every text format of one fixture trace against the file that was last looked at; ``--accept-gold`` writes them."""

import difflib
import re
from pathlib import Path

import pytest

from stepscope.render.formats import render

GOLD = Path(__file__).parents[1] / "gold"


def shown(model, name):
    if name == "html":
        text = render(model, "html", plotly="plotly.js")
        text = re.sub(r"<style>.*?</style>", "<style></style>", text, flags=re.DOTALL)
        text = re.sub(r"'sha256-[^']+'", "'sha256-'", text)
        text = re.sub(
            r'(<script type="application/json" id="[a-z-]+">).*?</script>', r"\1</script>", text, flags=re.DOTALL
        )
        text = re.sub(r"<script>.*?</script>", "<script></script>", text, flags=re.DOTALL)
        return re.sub(r"data:image/png;base64,[^\"]+", "data:image/png", text)
    return render(model, name)


@pytest.mark.parametrize(
    ("name", "suffix"), [("html", "html"), ("text", "txt"), ("json", "json"), ("junit", "xml"), ("github", "github")]
)
def test_format_is_as_it_was_last_accepted(model, name, suffix, request):
    path = GOLD / f"report.{suffix}"
    text = shown(model, name)
    if request.config.getoption("--accept-gold", default=False):
        path.write_text(text, "utf-8")
    gold = path.read_text("utf-8")
    difference = "\n".join(difflib.unified_diff(gold.splitlines(), text.splitlines(), "gold", "now", lineterm="", n=1))
    assert text == gold, f"if this is meant, run pytest tests/render --accept-gold\n{difference[:4000]}"
