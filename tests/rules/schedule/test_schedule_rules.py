"""Rules of schedules: each fires on its fault in several shapes, and is silent on loops that look like it."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch.optim import lr_scheduler as schedulers

from tests.rules.loops import schedule as loops
from tests.rules.support import findings, loud

pytestmark = [
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning"),
    pytest.mark.filterwarnings("ignore:Seems like `optimizer.step:UserWarning"),
    pytest.mark.filterwarnings("ignore:To get the last learning rate:UserWarning"),
]


def cosine_lr(total: int):
    return lambda optimizer: schedulers.CosineAnnealingLR(optimizer, total)


def warm_then(total_warm: int, after):
    def make(optimizer):
        parts = [schedulers.LinearLR(optimizer, 0.1, 1.0, total_iters=total_warm), after(optimizer)]
        return schedulers.SequentialLR(optimizer, parts, milestones=[total_warm])

    return make


def one_cycle(total: int):
    return lambda optimizer: schedulers.OneCycleLR(optimizer, max_lr=0.01, total_steps=total)


FAULTS = {
    "per-micro cosine": ("sched-per-microbatch", loops.stepped(cosine_lr(12), windows=12, k=4, per="micro")),
    "per-micro linear lambda": ("sched-per-microbatch", loops.stepped(loops.lambda_lr(loops.linear(20, 4)), windows=20, k=4, per="micro")),
    "per-micro StepLR": ("sched-per-microbatch", loops.stepped(lambda o: schedulers.StepLR(o, 5, 0.5), windows=20, k=3, per="micro")),
    "per-micro by hand": ("sched-per-microbatch", loops.by_hand(loops.cosine(16, low=0.01, clamp=True), windows=16, k=4, per="micro")),
    "four times a step, cosine": ("sched-times-world", loops.stepped(cosine_lr(24), times=4)),
    "four times a step, linear": ("sched-times-world", loops.stepped(loops.lambda_lr(loops.linear(24, 2)), times=4)),
    "twice a step, floor": ("sched-times-world", loops.stepped(loops.lambda_lr(lambda s: max(0.1, 1 - s / 24)), times=2)),
    "four times a step, cosine lambda": ("sched-times-world", loops.stepped(loops.lambda_lr(loops.cosine(24, 1.0)), windows=24, times=4)),
    "per-micro cosine lambda, K odd": ("sched-per-microbatch", loops.stepped(loops.lambda_lr(loops.cosine(16, 1.0)), windows=16, k=3, per="micro")),
    "one-cycle too short": ("sched-total-steps", loops.stepped(one_cycle(20))),
    "cosine by hand too short": ("sched-total-steps", loops.by_hand(loops.cosine(16), windows=30)),
    "cosine lambda too short": ("sched-total-steps", loops.stepped(loops.lambda_lr(loops.cosine(12, 1.0)), windows=30)),
    "linear below zero": ("sched-total-steps", loops.stepped(loops.lambda_lr(loops.linear(20, clamp=False)), windows=30)),
    "linear zero early": ("sched-total-steps", loops.stepped(loops.lambda_lr(loops.linear(15, 3)), windows=30)),
    "T_max in epochs, stepped per step": ("sched-total-steps", loops.stepped(cosine_lr(3), windows=24)),
    "T_max in batches, stepped per epoch": ("sched-total-steps", loops.epochs_over(10, 4, lambda o, n: schedulers.CosineAnnealingLR(o, n))),
    "T_max in all batches, stepped per epoch": ("sched-total-steps", loops.epochs_over(6, 5, lambda o, n: schedulers.CosineAnnealingLR(o, 5 * n))),
    "warm-up, then cosine too short": ("sched-total-steps", loops.stepped(warm_then(5, lambda o: schedulers.CosineAnnealingLR(o, 10)), windows=30)),
    "skips in the warm-up": ("sched-advance-on-skip", loops.scaled(infinite=(0, 1, 2), guarded=False)),
    "skips, rate by hand": ("sched-advance-on-skip", loops.scaled(infinite=(0, 1, 2), guarded=False, by_hand=True)),
    "skips, fused": ("sched-advance-on-skip", loops.scaled(infinite=(0, 1, 9), guarded=False, fused=True)),
    "one-cycle built last": ("sched-initial-lr", loops.two_schedulers(lambda o: (schedulers.LinearLR(o, 0.1, total_iters=6), one_cycle(40)(o)))),
    "cyclic built last": ("sched-initial-lr", loops.two_schedulers(lambda o: (schedulers.LambdaLR(o, lambda s: (s + 1) / 7), schedulers.CyclicLR(o, 0.004, 0.02, cycle_momentum=False)))),
    "warm-up written after the step": ("sched-initial-lr", loops.by_hand(lambda s: 0.1 * min(1.0, s / 10), after=True)),
    "added group, by hand": ("sched-new-group", loops.unfrozen("first")),
    "added group, own scheduler": ("sched-new-group", loops.unfrozen("truncating")),
    "one maximum, CyclicLR": ("sched-group-lr-lost", loops.grouped(lambda o: schedulers.CyclicLR(o, 1e-4, 1e-3, step_size_up=8, cycle_momentum=False))),
    "one rate by hand": ("sched-group-lr-lost", loops.grouped(lambda o: lambda step, group: 0.01 * (1 - step / 16))),
    "scheduler of a replaced optimizer": ("sched-optimizer-mismatch", loops.rebuilt("new")),
    "scheduler of a copied optimizer": ("sched-optimizer-mismatch", loops.rebuilt("copy")),
    "optimizer switched midway": ("sched-optimizer-mismatch", loops.rebuilt("switched")),
    "wrapper with groups of its own": ("sched-optimizer-mismatch", loops.wrapped(shares=False)),
    "inner scheduler of another optimizer": ("sched-optimizer-mismatch", loops.nested(other=True)),
    "mode max on a loss": ("sched-plateau", loops.plateau([1 / (1 + e) for e in range(9)], "max")),
    "mode min on an accuracy": ("sched-plateau", loops.plateau([1 - 1 / (2 + e) for e in range(9)], "min")),
    "mode min on an accuracy, until nothing moves": (
        "sched-plateau",
        loops.plateau([0.2, 0.25, 0.28, 0.298, 0.298, 0.297, 0.298, 0.297], "min", patience=0, factor=0.3),
    ),
    "mode min on a negated loss": (
        "sched-plateau",
        loops.plateau([-2.0, -1.5, -1.2, -1.0, -0.8, -0.7], "min", patience=0),
    ),
    "metric of each batch": ("sched-plateau", loops.plateau_per_batch()),
    "evaluation in train mode": ("schedulefree-mode", loops.averaged(switch=False)),
    "weights saved in train mode": ("schedulefree-mode", loops.averaged(switch=False, evaluate="never", save=True)),
}  # fmt: skip


@pytest.mark.parametrize("shape", FAULTS)
def test_fault_is_named_alone(shape):
    name, loop = FAULTS[shape]
    found = findings(loop)
    assert name in found, f"reported {sorted(found)}"
    assert not [n for n in loud(found) if n.startswith("sched") and n != name]


@pytest.mark.parametrize(("windows", "k"), [(12, 4), (24, 2)])
def test_a_length_in_micro_batches_is_named_from_both_sides(windows, k):
    """Either the pace is wrong or the length: which of the two was meant cannot be known."""
    found = findings(loops.stepped(cosine_lr(48), windows=windows, k=k))
    assert sorted(n for n in loud(found) if n.startswith("sched")) == ["sched-per-microbatch", "sched-total-steps"]
    length = found["sched-total-steps"]
    assert (length.severity, length.evidence["observed"], length.evidence["expected"]) == ("warning", 48, windows)


def triangular(step: int) -> float:
    return 0.1 * abs((step % 10) / 5 - 1) + 1e-5


def restarts_by_hand(step: int) -> float:
    return 0.05 * (1 + math.cos(math.pi * (step % 8) / 8))


RIGHT = {
    "constant": loops.by_hand(lambda _: 0.1),
    "cosine once a window": loops.stepped(cosine_lr(12), windows=12, k=4),
    "cosine over micro-steps": loops.stepped(cosine_lr(48), windows=12, k=4, per="micro"),
    "linear over micro-steps": loops.stepped(loops.lambda_lr(loops.linear(80, 8)), windows=20, k=4, per="micro"),
    "by hand over micro-steps": loops.by_hand(loops.cosine(64, low=0.01), windows=16, k=4, per="micro"),
    "by hand, early floor per window": loops.by_hand(loops.cosine(8, low=0.01, clamp=True), windows=24, k=2),
    "cosine per epoch": loops.stepped(cosine_lr(4), per="epoch"),
    "exponential per epoch": loops.stepped(lambda o: schedulers.ExponentialLR(o, 0.9), per="epoch", k=2),
    "StepLR": loops.stepped(lambda o: schedulers.StepLR(o, 8, 0.1)),
    "inverse square root": loops.stepped(loops.lambda_lr(lambda s: min((s + 1) / 5, (5 / (s + 1)) ** 0.5))),
    "warm restarts": loops.stepped(lambda o: schedulers.CosineAnnealingWarmRestarts(o, 6), windows=30),
    "growing warm restarts": loops.stepped(lambda o: schedulers.CosineAnnealingWarmRestarts(o, 4, 2), windows=30),
    "triangular cycles": loops.stepped(lambda o: schedulers.CyclicLR(o, 1e-5, 0.01, step_size_up=5, cycle_momentum=False), windows=30),
    "shrinking cycles": loops.stepped(lambda o: schedulers.CyclicLR(o, 1e-6, 0.01, step_size_up=6, mode="triangular2", cycle_momentum=False), windows=40),
    "triangular by hand": loops.by_hand(triangular, windows=30),
    "restarts by hand": loops.by_hand(restarts_by_hand, windows=30),
    "one-cycle": loops.stepped(one_cycle(25)),
    "warm-up, then cosine": loops.stepped(warm_then(5, lambda o: schedulers.CosineAnnealingLR(o, 19))),
    "warm-up, then step": loops.stepped(warm_then(4, lambda o: schedulers.StepLR(o, 6, 0.5))),
    "chained": loops.stepped(lambda o: schedulers.ChainedScheduler([schedulers.LinearLR(o, 0.1, total_iters=6), schedulers.ExponentialLR(o, 0.95)])),
    "linear to zero at the end": loops.stepped(loops.lambda_lr(loops.linear(24, 4))),
    "warm-up by hand, then decay": loops.by_hand(lambda s: 0.1 * min((s + 1) / 6, 0.98**s)),
    "several ticks for a long schedule": loops.stepped(loops.lambda_lr(loops.linear(96, 8)), times=4),
    "several ticks, one-cycle": loops.stepped(one_cycle(97), times=4),
    "plateau on a log-likelihood that falls": loops.plateau([-0.5, -0.8, -1.0, -1.0, -0.99, -1.0], "min"),
    "wrapper that shares its groups": loops.wrapped(shares=True),
    "guarded skips, rate by hand": loops.scaled(infinite=(0, 1, 2, 9), guarded=True, by_hand=True),
    "one calibration skip, rate by hand": loops.scaled(infinite=(0,), guarded=False, by_hand=True),
    "guarded skips": loops.scaled(infinite=(0, 1, 2, 9), guarded=True),
    "one calibration skip": loops.scaled(infinite=(0,), guarded=False),
    "warm-up built last": loops.two_schedulers(lambda o: tuple(reversed((schedulers.LambdaLR(o, lambda s: 0.93**s), schedulers.LambdaLR(o, lambda s: (s + 1) / 6))))),
    "two chainable, warm-up first": loops.two_schedulers(lambda o: (schedulers.LinearLR(o, 0.1, total_iters=6), schedulers.ExponentialLR(o, 0.95))),
    "added group, StepLR": loops.unfrozen("StepLR"),
    "added group, all by hand": loops.unfrozen("all"),
    "maximum per group": loops.grouped(lambda o: schedulers.OneCycleLR(o, max_lr=[1e-3, 1e-2], total_steps=17)),
    "group rates by factor": loops.grouped(lambda o: lambda step, group: group.setdefault("base", group["lr"]) * (1 - step / 17)),
    "inner scheduler of the same optimizer": loops.nested(other=False),
    "two optimizers, one of them slower": loops.gan(),
    "plateau on a loss that stalls": loops.plateau([1.0, 0.5, 0.3, 0.3, 0.31, 0.3, 0.3, 0.32], "min"),
    "plateau on an accuracy": loops.plateau([0.5, 0.6, 0.7, 0.7, 0.7, 0.69, 0.7], "max"),
    "plateau on a loss that overfits": loops.plateau([0.9, 0.6, 0.5, 0.55, 0.6, 0.65, 0.7, 0.8], "min"),
    "switched averages": loops.averaged(switch=True, save=True),
    "forward without gradients in each step": loops.averaged(switch=False, evaluate="always"),
}  # fmt: skip


@pytest.mark.parametrize("shape", RIGHT)
def test_right_schedule_is_silent(shape):
    assert not loud(findings(RIGHT[shape]))


def test_per_microbatch_counts_both_sides():
    """Twelve windows of four: 48 scheduler steps where 12 belong."""
    found = findings(loops.stepped(cosine_lr(12), windows=12, k=4, per="micro"))["sched-per-microbatch"]
    assert (found.severity, found.evidence["observed"], found.evidence["expected"]) == ("error", 48, 12)
    assert found.evidence["micro_steps"][:4] == [1, 2, 3, 5]  # the last of each window is no sign


def test_schedule_past_its_end_says_where():
    """T_max 10, 24 steps: the 12th step is the first above its predecessor (cos is 0 at position 10, step 11)."""
    found = findings(loops.stepped(cosine_lr(10), windows=24))["sched-total-steps"]
    assert found.first_step == 12
    assert (found.evidence["observed"], found.evidence["expected"]) == (10, 24)


def test_zero_early_says_from_which_step():
    """linear(15) is 0 at schedule position 15, the rate of step 16; 15 of 30 steps are left."""
    found = findings(loops.stepped(loops.lambda_lr(loops.linear(15)), windows=30))["sched-total-steps"]
    assert (found.first_step, found.last_step, found.evidence["count"]) == (16, 30, 15)


def test_declared_total_is_compared_with_the_length():
    loop = loops.stepped(cosine_lr(100), windows=20)
    assert "sched-total-steps" not in loud(findings(loop))
    found = findings(loop, {"total_steps": 20})["sched-total-steps"]
    assert (found.evidence["observed"], found.evidence["expected"]) == (100, 20)


@pytest.mark.parametrize("factor", [loops.linear(200), loops.cosine(200, 1.0)], ids=["linear", "cosine"])
def test_declared_total_is_compared_with_the_curve_of_an_unknown_schedule(factor):
    """A lambda of 200 steps in a run of 20: the curve, drawn on, ends at 200."""
    loop = loops.stepped(loops.lambda_lr(factor), windows=20)
    assert not loud(findings(loop))
    found = findings(loop, {"total_steps": 20})["sched-total-steps"]
    assert found.evidence["observed"] == pytest.approx(200, rel=1e-3)


@pytest.mark.parametrize(
    "factor", [loops.linear(24), loops.linear(25, 4), loops.cosine(24, 1.0)], ids=["linear", "warm-up", "cosine"]
)
def test_declared_total_that_fits_the_curve_is_silent(factor):
    assert not loud(findings(loops.stepped(loops.lambda_lr(factor)), {"total_steps": 24}))


def test_advance_on_skip_counts_the_drift():
    """Three of 24 steps are skipped: 24 scheduler steps for 21 executed ones."""
    found = findings(loops.scaled(infinite=(0, 1, 2), guarded=False))["sched-advance-on-skip"]
    assert (found.evidence["observed"], found.evidence["expected"]) == (24, 21)
    assert found.evidence["micro_steps"] == [1, 2, 3]


def test_initial_rate_names_what_should_have_been():
    """LambdaLR((s + 1) / 7) wrote 0.01 / 7; CyclicLR wrote the optimizer's initial rate over it."""
    found = findings(FAULTS["cyclic built last"][1])["sched-initial-lr"]
    assert found.evidence["observed"] == pytest.approx(0.01)
    assert found.evidence["expected"] == pytest.approx(0.01 / 7)


def test_warm_up_from_zero_is_a_notice():
    found = findings(loops.stepped(loops.lambda_lr(lambda s: min(1.0, s / 6))))
    assert found["warmup-off-by-one"].severity == "notice"
    assert found["warmup-off-by-one"].first_step == 1


def test_spike_at_the_hand_over_is_a_notice():
    rate = [0.02, 0.04, 0.06, 0.08, 0.1, *(0.05 * 0.98**i for i in range(19))]
    found = findings(loops.by_hand(lambda s: rate[s]))
    assert found["warmup-off-by-one"].severity == "notice"
    assert found["warmup-off-by-one"].first_step == 5


def test_get_lr_outside_of_a_step_is_a_notice():
    def loop():
        model = loops.net()
        optimizer = loops.adam(model)
        scheduler = schedulers.MultiStepLR(optimizer, [6], gamma=0.1)
        for step in range(10):
            x, y = loops.batch(step)
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            scheduler.get_lr()

    found = findings(loop)["sched-lr-log-wrong"]
    assert (found.severity, found.evidence["observed"], found.evidence["expected"]) == (
        "notice",
        pytest.approx(1e-4),
        pytest.approx(1e-3),
    )


def test_several_ticks_without_a_visible_end_are_a_notice():
    found = findings(loops.stepped(lambda o: schedulers.ExponentialLR(o, 0.999), times=4))
    assert found["sched-times-world"].severity == "notice"


def test_real_schedule_free_optimizer():
    schedulefree = pytest.importorskip("schedulefree")
    make = functools.partial(loops.averaged, real=schedulefree.AdamWScheduleFree)
    assert "schedulefree-mode" in findings(make(switch=False))
    assert not loud(findings(make(switch=True)))
