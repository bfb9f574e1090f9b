"""Where two runs part: the first step and column, within rounding, also when one continues the other."""

import math

import numpy as np
import pyarrow as pa
import pytest

from stepscope.compare import compare
from stepscope.compare.align import find_offset
from stepscope.compare.tolerance import relative, tolerance
from stepscope.errors import StepscopeError
from stepscope.store.trace import Trace


def changed(trace, column, micro_step, value, table="steps"):
    """`trace` with one cell replaced."""
    held = trace.tables[table]
    cells = held[column].to_pylist()
    cells[held["micro_step"].to_pylist().index(micro_step)] = value
    place = held.column_names.index(column)
    field = held.schema.field(column)
    held = held.set_column(place, field, pa.array(cells, field.type, from_pandas=False))
    return Trace({**trace.tables, table: held}, trace.meta)


def cell(trace, column, micro_step):
    held = trace.tables["steps"]
    return held[column][held["micro_step"].to_pylist().index(micro_step)].as_py()


def part(trace, first, last):
    """The rows of some micro-steps."""
    steps = trace.tables["steps"].slice(first - 1, last - first + 1)
    return Trace({**trace.tables, "steps": steps}, trace.meta)


def renumbered(trace, by):
    """`trace` with its micro-steps counted from another start."""
    steps = trace.tables["steps"]
    numbers = pa.array([n + by for n in steps["micro_step"].to_pylist()], pa.int64())
    steps = steps.set_column(steps.column_names.index("micro_step"), steps.schema.field("micro_step"), numbers)
    return Trace({**trace.tables, "steps": steps}, trace.meta)


def test_a_run_equals_itself_bit_by_bit(factory):
    found = compare(factory.make(nan_loss=(7,)), factory.make(nan_loss=(7,)), exact=True)
    assert found.same
    assert found.partings == ()
    assert len(found.aligned) == 50
    assert "loss" in found.compared
    assert "backward_ms" not in found.compared, "times never agree"


@pytest.mark.parametrize("step", [1, 24, 50])
def test_one_changed_cell_is_found_at_its_step(factory, step):
    trace = factory.make()
    value = cell(trace, "loss", step)
    (parting,) = compare(trace, changed(trace, "loss", step, value * 1.01)).partings
    assert (parting.column, parting.micro_step, parting.steps) == ("loss", step, 1)
    assert parting.values == (value, value * 1.01)
    assert parting.difference == pytest.approx(1 - 1 / 1.01)


def test_rounding_is_allowed_and_exact_forbids_it(factory):
    trace = factory.make()
    nudged = changed(trace, "loss", 9, cell(trace, "loss", 9) * (1 + 1e-7))
    assert compare(trace, nudged).same
    assert [p.micro_step for p in compare(trace, nudged, exact=True).partings] == [9]
    assert [p.micro_step for p in compare(trace, nudged, rtol=1e-8).partings] == [9]


def test_a_rate_and_a_count_have_no_share_in_the_rounding_of_layers(factory):
    trace = factory.make()
    assert not compare(trace, changed(trace, "lr", 9, cell(trace, "lr", 9) * (1 + 1e-7))).same
    assert compare(trace, changed(trace, "lr", 9, cell(trace, "lr", 9) * (1 + 1e-12))).same
    assert not compare(trace, changed(trace, "num_items", 9, cell(trace, "num_items", 9) + 1), rtol=0.5).same


def test_nan_equals_nan_and_differs_from_a_number_and_from_null(factory):
    trace = factory.make(nan_loss=(7,))
    assert compare(trace, factory.make(nan_loss=(7,))).same
    assert compare(trace, changed(trace, "loss", 7, 5.0)).partings[0].difference == math.inf
    found = compare(trace, changed(trace, "loss", 7, None)).partings[0]
    assert found.values[1] is None


def test_at_one_step_the_column_nearer_the_cause_comes_first(factory):
    found = compare(factory.make(), factory.make(clip=0.01))
    assert [(p.micro_step, p.column) for p in found.partings] == [
        (4, "clip_max_norm"),
        (12, "clip_bound"),
        (12, "grad_norm_clipped"),
    ]
    assert found.before[-1]["micro_step"] == 4
    assert {b["micro_step"] for b in found.before} == {1, 2, 3, 4}
    last = {b["column"]: b for b in found.before if b["micro_step"] == 4}
    assert (last["clip_max_norm"]["first"], last["clip_max_norm"]["other"]) == (1.0, 0.01)
    assert last["loss"]["same"]
    assert not last["clip_max_norm"]["same"]


def test_other_calls_are_the_first_thing_to_differ(factory):
    trace = factory.make()
    found = compare(trace, changed(changed(trace, "calls", 24, "FBCUSPZ"), "grad_norm", 24, 9.0))
    assert [(p.micro_step, p.column) for p in found.partings] == [(24, "calls"), (24, "grad_norm")]
    assert found.partings[0].values == ("FBUCSPZ", "FBCUSPZ")


def test_runs_of_different_length_are_compared_where_both_are(factory):
    trace = factory.make()
    found = compare(trace, part(trace, 1, 30))
    assert found.same
    assert len(found.aligned) == 30
    assert any("50 and 30 micro-steps; the 30 that both have" in note for note in found.notes)


def test_a_resumed_run_that_counts_on_is_aligned(factory):
    trace = factory.make()
    found = compare(trace, part(trace, 25, 50))
    assert found.same
    assert found.aligned.tolist() == list(range(25, 51))


def test_a_resumed_run_that_counts_from_one_is_aligned_and_says_so(factory):
    trace = factory.make()
    later = renumbered(part(trace, 25, 50), -24)
    assert find_offset(trace, later, 1e-6) == 24
    found = compare(trace, later)
    assert found.same
    assert found.offset == 24
    assert found.notes[0] == "The other run's micro-step 1 is the first one's 25: it continues that run."


def test_a_resumed_run_that_goes_wrong_is_told_at_its_step_of_the_first_run(factory):
    trace = factory.make()
    later = changed(renumbered(part(trace, 25, 50), -24), "lr", 12, 1e-3)
    (parting,) = compare(trace, later).partings
    assert (parting.column, parting.micro_step) == ("lr", 36)


def test_runs_without_a_common_step_are_refused(factory):
    trace = factory.make()
    with pytest.raises(StepscopeError, match="no micro-step in common"):
        compare(trace, renumbered(factory.make(seed=1), 1000))


def test_the_parameter_that_parts_first_is_named(factory):
    trace = factory.make()
    other = changed(changed(trace, "grad_norm", 24, 9.0), "grad_norm", 24, 123.0, table="params")
    (row,) = compare(trace, other).parameters
    assert (row["micro_step"], row["param"], row["column"], row["other"]) == (24, "embed.weight", "grad_norm", 123.0)


def test_processes_are_compared_one_by_one(factory):
    a = factory.make(ranks=2)
    b = factory.make(ranks=2, lr_offset=1e-4)
    found = compare(a, b)
    assert {p.track for p in found.partings} == {"rank 1, AdamW:0"}


def test_relative_difference():
    a = np.array([1.0, 0.0, np.nan, np.inf, np.inf, 1.0])
    b = np.array([1.1, 0.0, np.nan, np.inf, -np.inf, np.nan])
    np.testing.assert_allclose(relative(a, b), [0.1 / 1.1, 0, 0, 0, np.inf, np.inf])


def test_tolerance_follows_the_dtype_and_the_longest_sum(factory):
    def run(dtype, width):
        shape = {"w": {"shape": [4, width]}}
        return factory.make(params=(), meta={"settings": {"dtype": dtype}, "parameters": shape})

    u32 = 2.0**-24
    assert tolerance(run("float32", 256)) == pytest.approx(8 * (u32 + 16 * u32))
    assert tolerance(run("bfloat16", 256)) == pytest.approx(8 * (2.0**-8 + 16 * u32))
    assert tolerance(run("float64", 256)) == pytest.approx(8 * (2.0**-53 + 16 * 2.0**-53))
    assert tolerance(run("float16", 256), run("float32", 1024)) == pytest.approx(8 * (2.0**-11 + 32 * u32))


def test_reordering_a_float32_sum_stays_within_the_tolerance_and_a_float16_sum_does_not(factory):
    allowed = tolerance(factory.make(params=(), meta={"parameters": {"w": {"shape": [4096]}}}))
    rng = np.random.default_rng(0)
    worst = 0.0
    for _ in range(50):
        terms = rng.standard_normal(4096).astype(np.float32) ** 2
        forward = np.add.accumulate(terms)[-1]
        shuffled = np.add.accumulate(rng.permutation(terms))[-1]
        worst = max(worst, abs(float(forward) - float(shuffled)) / float(forward))
    assert worst < allowed
    half = np.add.accumulate(terms.astype(np.float16))[-1]
    assert abs(float(half) - float(forward)) / float(forward) > allowed


def test_large_counts_are_compared_exactly(factory):
    """Fingerprints use all 64 bits; as float64 these two would be one number."""
    trace = factory.make()
    a = changed(trace, "num_items", 9, 2**60)
    b = changed(trace, "num_items", 9, 2**60 + 1)
    assert float(2**60) == float(2**60 + 1)
    assert [p.values for p in compare(a, b, rtol=0.5).partings] == [(2**60, 2**60 + 1)]
    assert compare(a, changed(trace, "num_items", 9, 2**60), exact=True).same
