"""A trace in a notebook: figures hold the recorded values, the summary needs no script and escapes names."""

import numpy as np
from bs4 import BeautifulSoup

from stepscope.render.notebook import figures, summary_html
from stepscope.store.trace import Trace


def test_figures_by_name_hold_the_recorded_values(factory):
    trace = factory.make(nan_loss=(7,))
    made = figures(trace)
    assert {"loss", "lr", "loss-scale", "grad-norm", "heat-update", "heat-grad"} <= set(made)
    rows = [r for r in trace.tables["steps"].to_pylist() if np.isfinite(r["loss"])]
    line = made["loss"].data[0]
    assert list(line.x) == [r["micro_step"] for r in rows]
    np.testing.assert_allclose(line.y, [r["loss"] for r in rows], rtol=1e-6)
    assert made["loss"].layout.title.text == "Loss"
    assert made["grad-norm"].layout.showlegend


def test_each_mark_is_drawn_at_its_step(factory):
    made = figures(factory.make(nan_loss=(7,)))
    (marks,) = [t for t in made["loss"].data if t.name.startswith("not finite")]
    assert [x for x in marks.x if x is not None] == [7]
    (skipped,) = [t for t in made["loss-scale"].data if t.name.startswith("optimizer step skipped")]
    assert [x for x in skipped.x if x is not None] == [4, 8]


def test_summary_shows_the_stored_verdict_numbers_and_pictures(factory, tmp_path):
    trace = Trace.load(factory.save(factory.make(), tmp_path / "run", factory.outcomes()))
    soup = BeautifulSoup(summary_html(trace), "html.parser")
    assert soup.h3.text == "train.py: This loop is wrong"
    assert soup.li.text.startswith("error ACC101: The loss weights")
    cells = {tr.th.text: tr.td.text for tr in soup.find_all("tr")}
    assert cells["micro-steps"] == "50"
    assert len(soup.find_all("svg")) == 4
    assert not soup.find_all("script")


def test_summary_escapes_names(factory):
    text = summary_html(factory.make(meta={"script": "<img src=x onerror=alert(1)>"}))
    assert not BeautifulSoup(text, "html.parser").find_all("img")
    assert "&lt;img" in text
