"""The page as a file: every link resolves, nothing is loaded, the same trace gives the same bytes, no script needed."""

import base64
import hashlib
import re

import pytest
from bs4 import BeautifulSoup

from stepscope.render.html import PLOTLY, asset, prose, render_html


@pytest.fixture(scope="module")
def soup(light_page):
    return BeautifulSoup(light_page, "html5lib")


def dangling(soup):
    """Links within the page that lead nowhere, and ids that are there twice."""
    ids = [e["id"] for e in soup.find_all(id=True)]
    targets = [a["href"][1:] for a in soup.find_all("a", href=True)]
    labels = [i for e in soup.find_all(attrs={"aria-labelledby": True}) for i in e["aria-labelledby"].split()]
    labels += [e["for"] for e in soup.find_all(attrs={"for": True})]
    return sorted(set(targets + labels) - set(ids)), sorted({i for i in ids if ids.count(i) > 1})


def test_every_link_and_label_resolves(soup):
    assert dangling(soup) == ([], [])


def test_the_check_of_links_sees_a_broken_one(light_page):
    broken = light_page.replace('href="#findings"', 'href="#nowhere"', 1).replace('id="windows"', 'id="overview"')
    assert dangling(BeautifulSoup(broken, "html5lib")) == (["nowhere", "windows"], ["overview"])


def test_nothing_is_loaded_from_anywhere(page):
    soup = BeautifulSoup(page.replace(asset(PLOTLY), ""), "html5lib")
    assert not soup.find_all(["link", "iframe", "img"])
    assert not soup.find_all(src=True)
    assert not re.search(r"@import|url\((?!data:)", asset("report.css"))
    assert soup.find_all("a", href=re.compile("^https?:")) == []
    policy = soup.find("meta", attrs={"http-equiv": "Content-Security-Policy"})["content"]
    assert policy.startswith("default-src 'none';")
    assert "unsafe-eval" not in policy
    assert "'unsafe-inline'" not in policy.split("script-src")[1]


def test_policy_allows_exactly_the_scripts_of_the_page(page):
    soup = BeautifulSoup(page, "html.parser")
    policy = soup.find("meta", attrs={"http-equiv": "Content-Security-Policy"})["content"]
    code = [s.string for s in soup.find_all("script") if s.get("type") != "application/json"]
    hashes = {base64.b64encode(hashlib.sha256(c.encode()).digest()).decode() for c in code}
    assert hashes == set(re.findall(r"'sha256-([^']+)'", policy))


def test_the_same_trace_gives_the_same_bytes(build, page):
    assert render_html(build(nan_loss=(7,))) == page


def test_size_of_a_usual_report(page):
    assert len(page.encode()) < 3_000_000


def test_findings_numbers_and_pictures_need_no_script(soup):
    for script in soup.find_all("script"):
        script.extract()
    text = soup.get_text(" ")
    assert "This loop is wrong" in text
    assert "The loss weights of a window add up to 4 instead of 1" in text
    assert "Divide the loss before backward:" in text
    assert "observed 4 expected 1" in " ".join(text.split())
    for figure in soup.find_all("figure"):
        assert figure.find(class_="static").find("svg"), figure["id"]
        assert figure.find("figcaption").get_text(strip=True), figure["id"]


def test_title_and_heading_hold_the_verdict(soup):
    assert (
        soup.title.text
        == "This loop is wrong: 1 error, 1 notice, 2 passed, 1 not judged; 50 micro-steps, 13 optimizer steps · train.py"
    )
    assert soup.h1.get_text(strip=True) == "This loop is wrong"


def test_each_cited_step_has_its_values(factory, soup):
    rows = {r["micro_step"]: r for r in factory.make(nan_loss=(7,)).tables["steps"].to_pylist()}
    table = soup.find(id="steps")
    headers = [th.text for th in table.find_all("th")]
    for step in (16, 20, 24):
        cells = dict(zip(headers, [td.text for td in soup.find(id=f"step-{step}").find_all("td")], strict=True))
        assert cells["loss"] == f"{rows[step]['loss']:.4g}"
        assert cells["lr"] == f"{rows[step]['lr']:.4g}"
        assert cells["loss_weight_sum"] == "1"
        assert cells["step_skipped"] == "no"


def test_what_limits_the_report_is_said_above_everything(build, factory):
    from stepscope.render.model import build_model

    trace = factory.make(every=4, meta={"stopped_at": 50, "probes_off": {"clip": "ValueError: x"}})
    trace.whole = False
    model = build_model(trace, ())
    assert [b.split(":")[0].split(" (")[0] for b in model.banners] == [
        "The recording was cut off after micro-step 50",
        "Recording ended after 50 micro-steps, as --max-steps asked; the run went on, and what came later was not seen.",
        "Single parameters have rows at 3 of 13 optimizer steps",
        "The probe clip was switched off",
        "Not observed",
    ]
    soup = BeautifulSoup(render_html(model, plotly=PLOTLY), "html5lib")
    assert len(soup.find("main").find_all(class_="banner", recursive=False)) == 5
    assert soup.h1.get_text(strip=True) == "Not judged"


@pytest.mark.parametrize("rows", [0, 1])
def test_an_empty_and_a_one_step_run_give_a_page(factory, rows):
    from stepscope.render.model import build_model
    from stepscope.store.trace import Trace

    trace = factory.make()
    short = Trace({"steps": trace.tables["steps"].slice(0, rows)}, {"format": 1})
    soup = BeautifulSoup(render_html(build_model(short, ()), plotly=PLOTLY), "html5lib")
    assert dangling(soup) == ([], [])
    said = "No micro-step was recorded" if rows == 0 else "1 micro-step, 0 optimizer steps"
    assert said in soup.get_text()


def test_bundle_can_lie_beside_the_page(model):
    text = render_html(model, plotly=PLOTLY)
    assert len(text) < 400_000
    assert f'<script src="{PLOTLY}"></script>' in text


def test_bundle_can_stand_inside_a_script():
    bundle = asset(PLOTLY)
    assert "</script" not in bundle.lower()
    assert "<!--" not in bundle
    assert "plotly.js (cartesian - minified) v4.1.1" in bundle[:200]


def test_prose_of_a_rule():
    assert prose("One `a<b` two\nlines.\n\n    x = 1\n    y = 2\n\nEnd.") == (
        "<p>One <code>a&lt;b</code> two lines.</p>\n<pre>x = 1\ny = 2</pre>\n<p>End.</p>"
    )


def test_a_run_whose_losses_are_all_nan_gives_marks_and_no_line(build):
    model = build(nan_loss=tuple(range(1, 51)), skips=tuple(range(1, 14)))
    loss = next(c for c in model.charts if c.id == "fig-loss")
    assert len(loss.series[0].x) == 0
    assert [m.spans for m in loss.marks] == [((1, 50),)]
    assert loss.caption == "50 values are not finite."
    assert 'id="fig-loss"' in render_html(model, plotly=PLOTLY)
