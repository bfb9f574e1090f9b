"""The calls of a faulty window stand beside those of a good one, or beside the textbook's."""

import pyarrow as pa

from stepscope.render.rows import Rows
from stepscope.render.timeline import window_pairs
from stepscope.rules.outcome import Finding
from stepscope.store.trace import Trace


def with_calls(trace, changed):
    """`trace` with the letters of some micro-steps replaced."""
    steps = trace.tables["steps"]
    calls = [changed.get(row["micro_step"], row["calls"]) for row in steps.to_pylist()]
    place = steps.column_names.index("calls")
    steps = steps.set_column(place, steps.schema.field("calls"), pa.array(calls, pa.string()))
    return Trace({**trace.tables, "steps": steps}, trace.meta)


def finding(first, last=None):
    return Finding("CLP101", "clip-before-unscale", "error", "…", first, last)


def test_a_call_that_only_one_window_makes_is_marked(factory):
    trace = with_calls(factory.make(), {24: "FBCUSPZ"})
    (pair,) = window_pairs(Rows(trace), [finding(24)])
    assert (pair.faulty.first, pair.faulty.last) == (21, 24)
    labels = [c.label for c in pair.faulty.calls]
    assert labels == ["forward", "backward"] * 4 + [
        "clip_grad_norm_",
        "unscale_",
        "optimizer.step",
        "scaler.update",
        "zero_grad",
    ]
    assert pair.good.first not in range(21, 25)
    marked = [c.label for c in (*pair.faulty.calls, *pair.good.calls) if c.mark]
    assert set(marked) <= {"unscale_", "clip_grad_norm_"}
    assert marked


def test_notes_carry_the_values_of_the_step(factory):
    trace = factory.make()
    (pair,) = window_pairs(Rows(trace), [finding(24)])
    row = next(r for r in trace.tables["steps"].to_pylist() if r["micro_step"] == 24)
    notes = {c.label: c.note for c in pair.faulty.calls}
    assert notes["backward"] == "loss weight 0.25"
    assert notes["optimizer.step"] == f"lr {row['lr']:.4g}"
    assert notes["scaler.update"] == "to 16\u202f384"
    assert notes["clip_grad_norm_"] == "limit 1"


def test_a_skipped_step_never_serves_as_the_good_window(factory):
    pairs = window_pairs(Rows(factory.make(skips=(1, 2, 4))), [finding(9)])
    assert [c.label for c in pairs[0].good.calls if "step" in c.label] == ["optimizer.step"]


def test_where_every_window_is_faulty_the_textbook_stands_beside_it(factory):
    (pair,) = window_pairs(Rows(factory.make(skips=())), [finding(1, 50)])
    assert pair.good.title == "the textbook's order"
    assert [c.label for c in pair.good.calls] == ["forward", "backward"] * 4 + [
        "unscale_",
        "clip_grad_norm_",
        "optimizer.step",
        "scaler.update",
        "zero_grad",
    ]


def test_without_findings_one_window_is_shown(factory):
    (pair,) = window_pairs(Rows(factory.make()), [])
    assert pair.faulty is None
    assert [c.kind for c in pair.good.calls].count("backward") == 4


def test_a_long_window_is_cut_in_the_middle(factory):
    (pair,) = window_pairs(Rows(factory.make(K=64, windows=3, tail=0, skips=())), [])
    assert len(pair.good.calls) == 61
    assert pair.good.calls[30].label == f"… {2 * 64 + 5 - 60} more calls …"


def test_the_textbook_has_as_many_forwards_as_the_loop(factory):
    trace = with_calls(factory.make(skips=(), tail=0, K=1, windows=4), dict.fromkeys(range(1, 5), "FFBS"))
    (pair,) = window_pairs(Rows(trace), [finding(1, 4)])
    assert [c.label for c in pair.good.calls] == ["forward", "forward", "backward", "optimizer.step", "zero_grad"]
    assert [c.label for c in pair.good.calls if c.mark] == ["zero_grad"]
