"""Modes, lost updates and averages: each fault in several shapes, and loops that look like it stay silent."""

import functools

import pytest

from tests.rules.loops import numbers as loops
from tests.rules.support import findings, loud, record

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("loop", loops.FAULTS, ids=lambda f: f.__name__)
def test_a_fault_is_named_and_nothing_else(loop):
    found = set(loud(findings(loop))) - {"fp16-no-scaler"}  # a float16 model without a scaler has that fault too
    assert found == {loops.FAULTS[loop]}


@pytest.mark.parametrize("loop", loops.RIGHT, ids=lambda f: f.__name__)
def test_a_right_loop_stays_silent(loop):
    assert loud(findings(loop)) == {}


@pytest.mark.parametrize("loop", loops.AVERAGES, ids=lambda f: f.__name__)
def test_an_average_that_moves_at_every_micro_step_is_named(loop):
    found = findings(functools.partial(loop, every_micro_step=True))
    assert set(loud(found)) == {"ema-per-microbatch"}
    assert found["ema-per-microbatch"].evidence["observed"] == 3


@pytest.mark.parametrize("loop", loops.AVERAGES, ids=lambda f: f.__name__)
def test_an_average_that_moves_once_a_step_is_right(loop):
    assert loud(findings(functools.partial(loop, every_micro_step=False))) == {}


def test_the_rate_of_an_average_is_one_minus_its_decay():
    """A decay of 0.8 takes a fifth of the way; once a step, so that two of three micro-steps leave the copy alone."""
    trace = record(functools.partial(loops.copied_module, every_micro_step=False, decay=0.8))
    rates = trace.values("average_rate")[4:17]
    assert rates == pytest.approx([0.0, 0.2, 0.0] * 4 + [0.0], abs=1e-4)


def test_steps_in_eval_mode_are_cited():
    """Two windows of two, then validation: the steps at micro-steps 6, 8 and 10 ran in eval mode."""
    finding = findings(loops.norms_left_in_eval_with_accumulation)["eval-mode-left-on"]
    assert finding.evidence["micro_steps"] == [6, 8, 10]
    assert finding.evidence["observed"] == 1


def test_the_stuck_norm_is_named_and_the_share_is_small():
    evidence = findings(loops.only_the_norm_is_stuck)["bf16-update-lost"].evidence
    assert evidence["params"] == ["1.weight"]
    assert evidence["observed"] < 0.5


def test_the_share_of_lost_updates_is_that_of_a_count_by_hand():
    """Weights of a bfloat16 model before and after each step, compared one by one."""
    import numpy as np
    import torch

    counts = []

    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            params = [p for g in self.param_groups for p in g["params"]]
            before, moved = [p.detach().clone() for p in params], [p.grad != 0 for p in params]
            super().step(closure)
            same = [(b == p) & m for b, p, m in zip(before, params, moved, strict=True)]
            counts.append([int(s.sum()) / max(1, int(m.sum())) for s, m in zip(same, moved, strict=True)])

    def loop():
        model = loops.half_net()
        loops.train_half(model, Counting(model.parameters(), lr=1e-4))

    sizes = np.array([96, 16, 16, 16, 48, 3])
    finding = findings(loop)["bf16-update-lost"]
    by_hand = (np.median(np.array(counts), axis=0) * sizes).sum() / sizes.sum()
    assert finding.evidence["observed"] == pytest.approx(by_hand, rel=1e-9)
