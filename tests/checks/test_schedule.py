"""The schedule check: which formula, in which unit, up to where; and the safe evaluation of a user's formula."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from stepscope.checks.expression import evaluate
from stepscope.checks.schedule import Rates, check_schedule
from stepscope.errors import StepscopeError
from stepscope.reference.schedules import cosine_lr, warmup_cosine_factor

L = torch.optim.lr_scheduler
K = 4


def driven(make, steps: int = 40) -> Rates:
    """Rates that a torch scheduler leaves in the groups, one per optimizer step."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = make(optimizer)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return Rates.of_steps(rates)


def micro_steps(rate_of_micro_step, count: int = 40, skipped: tuple[int, ...] = ()) -> Rates:
    """Rates per micro-step in windows of K; `skipped` are optimizer steps (from 0) that were not applied."""
    micro = np.arange(1, count + 1, dtype=np.float64)
    attempts = (micro - 1) // K
    applied = np.array([a - sum(s < a for s in skipped) for a in attempts])
    rates = [rate_of_micro_step(int(m), int(a), int(b)) for m, a, b in zip(micro, attempts, applied, strict=True)]
    return Rates(np.array(rates), micro, attempts, applied)


@pytest.mark.parametrize(
    ("make", "name", "values"),
    [
        (lambda o: L.ConstantLR(o, 1.0), "constant", {"lr": 0.1}),
        (lambda o: L.CosineAnnealingLR(o, 70, eta_min=0.02), "cosine", {"lr": 0.1, "T": 70, "r": 0.2}),
        (lambda o: L.LinearLR(o, 1.0, 0.25, 20), "linear", {"lr": 0.1, "T": 20, "r": 0.25}),
        (lambda o: L.StepLR(o, 7, 0.5), "step", {"lr": 0.1, "T": 7, "g": 0.5}),
        (lambda o: L.ExponentialLR(o, 0.9), "step", {"lr": 0.1, "T": 1, "g": 0.9}),
        (lambda o: L.OneCycleLR(o, 0.5, total_steps=40), "one-cycle", {"lr": 0.5, "T": 40, "w": 12}),
        (
            lambda o: L.LambdaLR(o, lambda s: warmup_cosine_factor(s, 5, 40, 0.1)),
            "warmup-cosine",
            {"lr": 0.1, "T": 40, "w": 5, "r": 0.1},
        ),
    ],
    ids=["constant", "cosine", "linear", "step", "exponential", "one-cycle", "warmup-cosine"],
)
def test_a_known_schedule_is_recognised_with_its_parameters(make, name: str, values: dict[str, float]) -> None:
    outcome = check_schedule(driven(make))
    assert (outcome.status, outcome.details["formula"]) == ("passed", name)
    assert outcome.details["values"] == pytest.approx(values, rel=1e-5)


def test_minimind_counts_micro_steps_from_one() -> None:
    outcome = check_schedule(micro_steps(lambda m, a, b: cosine_lr(m, 40, 5e-4)))
    assert (outcome.details["formula"], outcome.details["unit"], outcome.details["first"]) == (
        "minimind-cosine",
        "micro-step",
        1,
    )


def test_a_schedule_stepped_at_every_micro_step_runs_k_times_too_fast() -> None:
    rates = micro_steps(lambda m, a, b: 0.1 * warmup_cosine_factor(m - 1, 6, 40))
    (found,) = check_schedule(rates, "warmup-cosine", {"T": 40, "w": 6}).findings
    assert found.name == "sched-per-microbatch"
    assert "4 times too fast" in found.message


def test_a_schedule_that_advances_at_skipped_steps_is_named() -> None:
    def rates(m: int, attempts: int, applied: int) -> float:
        return 0.1 * warmup_cosine_factor(attempts, 2, 10)

    (found,) = check_schedule(micro_steps(rates, skipped=(0, 3)), "warmup-cosine").findings
    assert found.name == "sched-advance-on-skip"
    right = micro_steps(lambda m, a, b: 0.1 * warmup_cosine_factor(b, 2, 10), skipped=(0, 3))
    assert check_schedule(right, "warmup-cosine", {"T": 10}).status == "passed"


@pytest.mark.parametrize("formula", ["", "minimind-cosine", "lr*(0.1 + 0.45*(1 + cos(pi*s/T)))"])
def test_where_the_rates_depart_is_said(formula: str) -> None:
    rates = micro_steps(lambda m, a, b: cosine_lr(m, 40, 5e-4) * (0.9 if m > 30 else 1.0))
    values = {"lr": 5e-4} if formula.startswith("lr") else {}
    (found,) = check_schedule(rates, formula, values).findings
    assert found.name == "schedule-differs"
    assert found.message.startswith("micro-step 31 has the rate")
    assert found.evidence["observed"] == pytest.approx(0.9 * cosine_lr(31, 40, 5e-4))


def test_rates_of_no_known_formula_are_called_unknown() -> None:
    noise = np.random.default_rng(0).random(20)
    (found,) = check_schedule(Rates.of_steps(noise.tolist())).findings
    assert found.name == "schedule-unknown"


def test_a_rate_one_part_in_a_million_off_is_seen() -> None:
    rates = [cosine_lr(s, 20, 1.0) for s in range(20)]
    rates[10] *= 1 + 1e-6
    assert check_schedule(Rates.of_steps(rates), "minimind-cosine", {"T": 20}).status == "failed"


def test_formula_arithmetic() -> None:
    s = np.array([0.0, 1.0, 4.0])
    values = {"s": s, "T": 8.0, "lr": 2.0, "w": 2.0}
    expected = [2 * min(x / 2, 1) * (0.5 + 0.5 * math.cos(math.pi * x / 8)) - math.sqrt(x) ** 2 for x in s]
    found = evaluate("lr*min(s/w, 1)*(0.5 + 0.5*cos(pi*s/T)) - sqrt(s)**2", values)
    assert found.tolist() == pytest.approx(expected)
    assert evaluate("-max(exp(0), sin(0)) + +2", {"s": s}).tolist() == [1.0] * 3


@pytest.mark.parametrize(
    "formula",
    [
        "__import__('os').system('true')",
        "(1).__class__",
        "lr if s else 0",
        "[s for s in (1,)]",
        "lambda: 1",
        "s.T",
        "abs(s)",
        "cos(s, s)",
        "min(s)",
        "True",
        "'a'",
        "s @ s",
        "s <",
        "x",
        "eval('1')",
        "max(*s)",
        "cos(x=s)",
        "1" * 501,
    ],
)
def test_a_formula_that_is_no_arithmetic_is_refused(formula: str) -> None:
    with pytest.raises(StepscopeError) as caught:
        evaluate(formula, {"s": np.zeros(2), "lr": 1.0})
    assert "\n" not in str(caught.value)


def test_a_name_without_a_value_is_said() -> None:
    with pytest.raises(StepscopeError, match="uses T, which has no value"):
        evaluate("s/T", {"s": np.zeros(2)})


@pytest.mark.parametrize(
    ("rates", "options", "says"),
    [
        ([], {}, "no learning rate"),
        ([0.1, math.nan], {}, "not finite"),
        ([0.1], {"values": {"gamma": 1.0}}, "unknown parameter 'gamma'"),
        ([0.1], {"unit": "epoch"}, "unknown unit"),
    ],
)
def test_bad_input_is_one_line(rates: list[float], options: dict, says: str) -> None:
    with pytest.raises(StepscopeError, match=says):
        check_schedule(Rates.of_steps(rates), **options)


def test_a_warm_up_whose_first_steps_were_skipped_is_no_strange_cosine() -> None:
    rates = micro_steps(lambda m, a, b: 5e-4 * b / 2, count=32, skipped=(0, 1, 2, 3, 4))
    outcome = check_schedule(rates)
    assert (outcome.status, outcome.details["formula"]) == ("passed", "warmup-cosine")
    assert outcome.details["values"]["lr"] == pytest.approx(5e-4)
    assert outcome.details["values"]["w"] == 2
