"""Charts show the observed cells at their steps, mark what is not finite or skipped, and say what they conclude."""

import numpy as np
import pytest

from stepscope.reference.schedules import SCHEDULES, ScheduleLength
from stepscope.render.chart import POINTS
from stepscope.render.formula import minimind_cosine, warmup_cosine


def chart_of(model, anchor):
    return next(c for c in model.charts if c.id == anchor)


def observed(trace, column):
    return [(r["micro_step"], r[column]) for r in trace.tables["steps"].to_pylist() if r[column] is not None]


@pytest.mark.parametrize(
    ("anchor", "column"),
    [("fig-loss", "loss"), ("fig-loss-scale", "loss_scale_before"), ("fig-grad-norm", "grad_norm"), ("fig-lr", "lr")],
)
def test_series_are_the_finite_cells_at_their_micro_steps(factory, model, anchor, column):
    cells = [(x, y) for x, y in observed(factory.make(nan_loss=(7,)), column) if np.isfinite(y)]
    series = chart_of(model, anchor).series[0]
    assert list(zip(series.x.tolist(), series.y.tolist(), strict=True)) == cells


@pytest.mark.parametrize(("aux", "names"), [(0.0, ["loss"]), (0.5, ["loss", "auxiliary loss"])])
def test_a_term_that_is_zero_throughout_is_not_drawn(factory, aux, names):
    from stepscope.render.model import build_model

    trace = factory.make()
    steps = trace.tables["steps"]
    trace.tables["steps"] = steps.append_column("aux_loss", [[aux] * len(steps)])
    series = chart_of(build_model(trace, []), "fig-loss").series
    assert [line.name for line in series] == names


def test_nan_is_a_mark_at_its_step(model):
    loss = chart_of(model, "fig-loss")
    assert [(m.kind, m.spans) for m in loss.marks] == [("nonfinite", ((7, 7),))]
    assert 7 not in loss.series[0].x


def test_skipped_steps_are_marked_at_the_end_of_their_window(model):
    marks = {m.kind: m.spans for m in chart_of(model, "fig-loss-scale").marks}
    assert marks == {"skipped": ((4, 4), (8, 8))}


def test_no_skipped_non_finite_or_cited_step_is_lost_in_a_long_run(factory, build):
    skips = tuple(range(1_000, 20_000, 777))
    cited = [4 * 12_345, 70_001]
    found = factory.outcomes(micro_steps=cited)
    model = build(outcomes=found, windows=20_000, skips=skips, nan_loss=(5, 60_001), params=())
    loss, norm = chart_of(model, "fig-loss"), chart_of(model, "fig-grad-norm")
    assert [m.spans for m in loss.marks] == [((5, 5), (60_001, 60_001))]
    skipped = next(m for m in norm.marks if m.kind == "skipped")
    assert skipped.spans == tuple((4 * s, 4 * s) for s in skips)
    assert set(cited) <= set(loss.series[0].x.tolist())
    assert len(loss.series[0].x) <= POINTS + 200
    assert loss.total == 20_000 * 4 + 2 - 2
    assert f"of {80_000:,}".replace(",", "\u202f") in loss.caption


def test_caption_of_the_clip_counts_bound_steps(factory, model):
    rows = [
        r["clip_bound"] for r in factory.make(nan_loss=(7,)).tables["steps"].to_pylist() if r["clip_bound"] is not None
    ]
    assert f"The clip bound in {sum(rows)} of {len(rows)} steps" in chart_of(model, "fig-grad-norm").caption


def test_caption_of_the_weights_counts_windows_off_one(build):
    assert "do not add up to 1 in 1 of 13 windows: between 0.5 and 1" in chart_of(build(), "fig-loss-weight").caption
    assert "add up to 1 in each of 12 windows" in chart_of(build(tail=0), "fig-loss-weight").caption
    assert "in 12 of 12 windows: 4 throughout" in chart_of(build(tail=0, weight=1.0), "fig-loss-weight").caption


def test_rate_is_held_against_its_formula(build, factory):
    assert "Equal to the formula at each of 50 micro-steps" in chart_of(build(), "fig-lr").caption
    shifted = chart_of(build(lr_offset=1e-5), "fig-lr")
    assert "Parts from the formula first at micro-step 1" in shifted.caption
    assert [s.name for s in shifted.series] == ["lr", "by the formula"]


@pytest.mark.parametrize("name", ["minimind-cosine", "warmup-cosine"])
def test_formulas_agree_with_the_reference_schedules(name):
    length = ScheduleLength(total_steps=40, warmup_steps=7, min_lr_ratio=0.1)
    steps = np.arange(0, 60, dtype=np.float64)
    ours = minimind_cosine(steps, 40, 3e-4) if name == "minimind-cosine" else warmup_cosine(steps, 7, 40, 0.1, 3e-4)
    theirs = [SCHEDULES[name].lr(int(s), length, 3e-4) for s in steps]
    np.testing.assert_allclose(ours, theirs, rtol=1e-12)


def test_a_column_without_values_gives_a_reason_and_no_chart(build):
    from stepscope.render.overview import why_missing
    from stepscope.render.rows import Rows

    model = build(meta={"not_observed": {"num_items": "labels did not reach the loss"}})
    lost = chart_of(model, "fig-lost-update")
    assert not lost.series
    assert lost.missing == "lost_update_frac is not in this trace: it was recorded without the probe that measures it."
    assert Rows is not None
    assert callable(why_missing)


def test_many_processes_are_drawn_as_smallest_median_and_largest(factory, build):
    model = build(ranks=9, params=(), tail=0, skips=())
    loss = chart_of(model, "fig-loss")
    assert [s.name.split(" (")[1].split()[0] for s in loss.series] == ["smallest", "median", "largest"]
    table = np.array(
        [[r["loss"] for r in factory.make(ranks=9, tail=0, skips=()).tables["steps"].to_pylist()]]
    ).reshape(9, -1)
    np.testing.assert_array_equal(loss.series[0].y, table.min(axis=0))
    np.testing.assert_array_equal(loss.series[1].y, np.median(table, axis=0))
    np.testing.assert_array_equal(loss.series[2].y, table.max(axis=0))


def test_axis_is_logarithmic_only_for_positive_values_over_three_decades(build):
    assert chart_of(build(skips=tuple(range(1, 13)), tail=0), "fig-loss-scale").log
    assert not chart_of(build(), "fig-loss-scale").log
    assert not chart_of(build(), "fig-update-ratio").log, "a ratio of 0 cannot stand on a logarithmic axis"


def test_processes_with_the_same_values_share_a_line_and_one_that_differs_has_its_own(build):
    model = build(ranks=3, lr_offset=1e-5, skips=(), tail=0, params=())
    assert [s.name for s in chart_of(model, "fig-lr").series] == [
        "lr (rank 0 and rank 1 alike)",
        "lr (rank 2)",
        "by the formula",
    ]
    assert len(chart_of(model, "fig-loss").series) == 3
