import math

import pytest

from stepscope.reference.schedules import SCHEDULES, ScheduleLength, cosine_lr, warmup_cosine_factor


@pytest.mark.parametrize(
    ("step", "expected"),
    [(0, 5e-4), (50, 5e-4 * 0.55), (100, 5e-5)],  # cos 0, -1 at the ends; 0 in the middle: 0.1 + 0.45 = 0.55
)
def test_minimind_cosine_goes_from_the_peak_to_a_tenth(step, expected):
    assert cosine_lr(step, 100, 5e-4) == pytest.approx(expected, rel=1e-12)


def test_minimind_cosine_is_its_source_formula_bit_for_bit():
    for step in range(37):
        assert cosine_lr(step, 36, 3e-4) == 3e-4 * (0.1 + 0.45 * (1 + math.cos(math.pi * step / 36)))


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 0.0),
        (5, 0.5),
        (10, 1.0),  # the end of the warm-up is the peak
        (35, 0.1 + 0.9 * 0.5 * (1 + math.sqrt(0.5))),  # a quarter of the way down: cos(π/4)
        (60, 0.55),  # half-way: cos(π/2) = 0
        (110, 0.1),
        (111, 0.1),
        (10_000, 0.1),  # beyond the end it stays at the floor, where a bare cosine would rise again
    ],
)
def test_warmup_cosine_at_hand_computed_points(step, expected):
    assert warmup_cosine_factor(step, 10, 110, 0.1) == pytest.approx(expected, abs=1e-12)


def test_warmup_cosine_without_warmup_starts_at_the_peak():
    assert warmup_cosine_factor(0, 0, 10, 0.1) == 1.0


def test_warmup_cosine_that_is_all_warmup_does_not_divide_by_zero():
    assert [warmup_cosine_factor(s, 4, 4) for s in range(4)] == [0.0, 0.25, 0.5, 0.75]
    assert warmup_cosine_factor(5, 4, 4, 0.2) == pytest.approx(0.2)


@pytest.mark.parametrize(("given", "used"), [(-0.5, 0.0), (1.5, 1.0), (0.3, 0.3)])
def test_floor_is_clamped_to_a_share(given, used):
    assert warmup_cosine_factor(10, 0, 10, given) == pytest.approx(used, abs=1e-12)


def test_warmup_cosine_never_leaves_the_unit_interval():
    values = [warmup_cosine_factor(s, w, 20, r) for s in range(30) for w in (0, 1, 7, 20) for r in (-1, 0, 0.1, 2)]
    assert min(values) >= 0
    assert max(values) <= 1


def test_registry_names_units_and_first_steps():
    assert [(s.name, s.unit, s.first_step) for s in SCHEDULES.values()] == [
        ("minimind-cosine", "micro-step", 1),
        ("warmup-cosine", "optimizer-step", 0),
        ("constant", "optimizer-step", 0),
    ]


def test_registry_computes_what_the_formulas_say():
    length = ScheduleLength(total_steps=110, warmup_steps=10, min_lr_ratio=0.1)
    assert SCHEDULES["minimind-cosine"].lr(55, length, 2.0) == pytest.approx(1.1)
    assert SCHEDULES["warmup-cosine"].lr(60, length, 2.0) == pytest.approx(1.1)
    assert SCHEDULES["constant"].lr(60, length, 2.0) == 2.0
