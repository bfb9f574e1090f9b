"""Thinning loses no extreme and no step that must stay; joined runs of steps cover every step."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.render.chart import spans, thin


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=400), st.integers(4, 60))
@settings(max_examples=60, deadline=None)
def test_thin_keeps_first_last_smallest_and_largest(values, limit):
    y = np.array(values)
    chosen = thin(y, limit)
    assert np.all(np.diff(chosen) > 0)
    assert chosen[0] == 0
    assert chosen[-1] == len(y) - 1
    assert y[chosen].min() == y.min()
    assert y[chosen].max() == y.max()
    if len(y) <= limit:
        assert len(chosen) == len(y)
    else:
        assert len(chosen) <= limit + 4


def test_thin_keeps_the_steps_it_is_told_to_keep():
    y = np.sin(np.arange(100_000) / 50)
    keep = np.zeros(len(y), dtype=bool)
    keep[[17, 4_321, 99_998]] = True
    chosen = thin(y, 500, keep)
    assert {17, 4_321, 99_998} <= set(chosen.tolist())
    assert {17, 4_321, 99_998} - set(thin(y, 500).tolist()), "the steps would be lost without being named"


def test_spans_are_exact_while_there_is_room():
    assert spans(np.array([3, 4, 5, 9, 11])) == ((3, 5), (9, 9), (11, 11))
    assert spans(np.array([], dtype=np.int64)) == ()


@given(st.sets(st.integers(1, 5000), min_size=1, max_size=300), st.integers(1, 20))
@settings(max_examples=80, deadline=None)
def test_joined_spans_cover_every_step_and_keep_to_the_limit(steps, limit):
    ordered = np.array(sorted(steps))
    found = spans(ordered, limit)
    assert len(found) <= max(limit, 1)
    assert all(any(a <= s <= b for a, b in found) for s in steps)
    assert all(a in steps and b in steps for a, b in found)


@pytest.mark.parametrize("limit", [1, 2, 7])
def test_joining_takes_the_smallest_gaps_first(limit):
    steps = np.array([1, 2, 10, 11, 100, 101, 1000])
    assert (
        spans(steps, limit)
        == {1: ((1, 1000),), 2: ((1, 101), (1000, 1000)), 7: ((1, 2), (10, 11), (100, 101), (1000, 1000))}[limit]
    )
