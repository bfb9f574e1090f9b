"""Each format says the same: JSON, JUnit, annotations, text."""

import json
import re
from xml.etree import ElementTree as ET

import pytest

from stepscope.errors import StepscopeError
from stepscope.render.formats import chosen_format, render
from stepscope.render.outcomes import render_outcomes
from stepscope.rules.outcome import Finding, failed, passed


def test_json_holds_the_envelope_and_the_numbers(model):
    content = json.loads(render(model, "json"))
    assert content["verdict"] == "findings"
    assert [f["code"] for f in content["findings"]] == ["ACC101", "SCL301"]
    assert content["numbers"]["micro_steps"] == 50
    assert content["limits"] == list(model.banners)


def test_junit_has_a_case_for_each_rule(model):
    root = ET.fromstring(render(model, "junit"))
    suite = root.find("testsuite")
    assert {k: root.get(k) for k in ("tests", "failures", "skipped")} == {"tests": "5", "failures": "1", "skipped": "1"}
    assert root.attrib == {k: v for k, v in suite.attrib.items() if k != "name"}
    cases = {c.get("name"): c for c in suite}
    failure = cases["accum-missing-divide"].find("failure")
    assert failure.get("type") == "error"
    assert failure.text.startswith("micro-steps 13 to 24: The loss weights")
    assert cases["scaler-first-skips"].find("failure") is None, "a notice is no failure"
    assert cases["scaler-first-skips"].find("system-out").text.startswith("notice: ")
    assert cases["ddp-token-mean"].find("skipped").get("message") == "needs at least two processes"
    assert len(cases["clip-before-unscale"]) == 0


def test_annotations_escape_what_would_end_them():
    found = Finding("X,1", "a:b", "error", "100%\nnext::line", 3)
    line = render_outcomes([failed("X,1", "a:b", found)], "github", title="t").splitlines()[0]
    assert line == "::error title=X%2C1 a%3Ab::micro-step 3: 100%25%0Anext::line"


def test_text_shows_verdict_findings_fix_and_reasons(model):
    text = render(model, "text")
    lines = text.splitlines()
    assert lines[0] == "✕ This loop is wrong"
    assert "1 error, 1 notice, 2 passed, 1 not judged; 50 micro-steps, 13 optimizer steps" in lines[1]
    assert "fix: Divide the loss before backward:" in text
    assert "ddp-token-mean: needs at least two processes" in text
    assert re.search(r"loss +█", text)
    assert "\x1b" not in text
    assert "\x1b[" in render(model, "text", colour=True)


def test_text_has_a_form_in_ascii(model):
    text = render(model, "text", ascii_only=True)
    assert text.isascii()
    assert text.startswith("x This loop is wrong")
    assert re.search(r"loss +[#*+=:.x_-]{20}", text)


def test_sparkline_puts_a_cross_where_a_value_is_not_finite(model):
    from stepscope.render.sparkline import sparkline

    chart = next(c for c in model.charts if c.id == "fig-loss")
    line = sparkline(chart.series[0], chart, 50)
    assert len(line) == 50
    assert [i for i, c in enumerate(line, 1) if c == "✕"] == [7]
    y = chart.series[0].y
    assert line[int(y.argmin()) + (int(y.argmin()) >= 6)] == "▁"
    assert line[int(y.argmax())] == "█"


def test_checks_show_their_measurements():
    outcome = passed("CHK1", "accumulation", "equal in float64", rows=[{"part": "w", "ratio": 1.0}], factor=4.0)
    text = render_outcomes([outcome], "text", title="make.py")
    assert "equal in float64" in text
    assert "factor: 4" in text
    assert re.search(r"part +ratio\n +w +1\n", text)
    page = render_outcomes([outcome], "html", title="make.py")
    assert '<h1><span class="symbol" aria-hidden="true"></span>Nothing wrong found</h1>' in page
    assert 'id="overview"' not in page


@pytest.mark.parametrize(
    ("name", "output", "expected"),
    [
        (None, None, "html"),
        (None, "x.json", "json"),
        (None, "x.XML", "junit"),
        (None, "-", "html"),
        ("text", "x.json", "text"),
    ],
)
def test_format_is_guessed_from_the_suffix(name, output, expected):
    assert chosen_format(name, output, default="html") == expected


def test_unknown_format_is_one_clear_line():
    with pytest.raises(StepscopeError, match="no format 'pdf'"):
        chosen_format("pdf", None, default="html")
    with pytest.raises(StepscopeError, match="no format 'csv'"):
        render_outcomes([passed("A", "b")], "csv", title="t")
