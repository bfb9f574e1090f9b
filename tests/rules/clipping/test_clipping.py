"""Rules about clipping: they fire on their fault in every shape, with the right numbers, and are silent beside it."""

from __future__ import annotations

import math

import pytest
import torch

from stepscope.rules.clipping.gradients import hand_limit
from tests.rules.loops import clipping as loops
from tests.rules.support import findings, loud, record

torch.set_num_threads(1)

FAULTS = {
    "clip-after-step": [
        ("norm", lambda: loops.plain(loops.norm, late=True)),
        ("value", lambda: loops.plain(loops.value, late=True)),
        ("own", lambda: loops.plain(loops.own, late=True)),
        ("zeros kept", lambda: loops.plain(loops.norm, late=True, set_to_none=False)),
        ("before backward", loops.at_loop_top),
        ("before backward, zeros kept", lambda: loops.at_loop_top(set_to_none=False)),
    ],
    "clip-before-unscale": [
        ("norm", lambda: loops.scaled(loops.norm)),
        ("value", lambda: loops.scaled(loops.value)),
        ("own", lambda: loops.scaled(loops.own)),
        ("own, fused", lambda: loops.scaled(loops.own, optimizer=loops.fused)),
        ("two calls", lambda: loops.scaled(loops.two_calls)),
    ],
    "clip-nonfinite": [
        ("NaN", lambda: loops.nonfinite(loops.norm)),
        ("infinite", lambda: loops.nonfinite(loops.norm, bad=math.inf)),
        ("own", lambda: loops.nonfinite(loops.own)),
        ("measured", lambda: loops.nonfinite(loops.measure)),
    ],
    "clip-empty-params": [
        (kind, lambda kind=kind: loops.exhausted(kind)) for kind in ("filter", "generator", "counted", "value")
    ],
    "clip-per-microbatch": [
        ("norm", lambda: loops.accumulate(loops.tight, inside=True)),
        ("value", lambda: loops.accumulate(loops.value, inside=True)),
        ("own", lambda: loops.accumulate(loops.own_tight, inside=True)),
    ],
    "clip-per-group": [("layers", lambda: loops.plain(loops.by_layer))],
    "clip-wrong-params": [
        ("model of masters", lambda: loops.masters("model")),
        ("copied model", loops.rebuilt),
        ("a part", lambda: loops.plain(loops.first_layer)),
        ("the other network", lambda: loops.two_networks("aa")),
        ("the network on the way", lambda: loops.through_the_other("other")),
    ],
    "gradnorm-logged-scaled": [
        ("infinite limit", lambda: loops.scaled(loops.measure)),
        ("limit never reached", lambda: loops.scaled(loops.never_bound)),
        ("taken on its own", lambda: loops.scaled(loops.taken)),
        ("before a right clip", lambda: loops.scaled(loops.norm, unscale="scaler", first=loops.measure)),
        ("taken before a right clip", lambda: loops.scaled(loops.norm, unscale="scaler", first=loops.taken)),
    ],
}

RIGHT = {
    "clipped": lambda: loops.plain(loops.norm),
    "clipped by value": lambda: loops.plain(loops.value),
    "own clip": lambda: loops.plain(loops.own),
    "two calls": lambda: loops.plain(loops.two_calls),
    "measured after the step": lambda: loops.plain(loops.measure, late=True),
    "clip in a closure": loops.in_closure,
    "two networks": lambda: loops.two_networks("ab"),
    "through another network": lambda: loops.through_the_other("own"),
    "measured, then clipped": lambda: loops.plain(loops.measured_and_clipped),
    "one clip for two optimizers": loops.shared_clip,
    "an optimizer for each tensor": loops.per_tensor,
    "an idle network": loops.some_idle,
    "guard against NaN": lambda: loops.nonfinite(loops.norm, guard=True),
    "NaN repaired": lambda: loops.nonfinite(loops.norm, repair=True),
    "NaN skipped by the scaler": lambda: loops.nonfinite(loops.norm, scaler=True),
    "one clip a window": lambda: loops.accumulate(loops.tight, inside=False),
    "own clip, once a window": lambda: loops.accumulate(loops.own_tight, inside=False),
    "dropped batches": loops.guarded,
    "masters clipped": lambda: loops.masters("copies"),
    "unscaled, then clipped": lambda: loops.scaled(loops.norm, unscale="scaler"),
    "unscaled by hand": lambda: loops.scaled(loops.norm, unscale="hand"),
    "unscaled, own clip": lambda: loops.scaled(loops.own, unscale="scaler"),
    "unscaled, clipped, fused": lambda: loops.scaled(loops.norm, unscale="scaler", optimizer=loops.fused),
    "measured after unscaling": lambda: loops.scaled(loops.measure, unscale="scaler"),
}


@pytest.mark.parametrize(
    ("name", "loop"),
    [pytest.param(name, loop, id=f"{name}: {shape}") for name, shapes in FAULTS.items() for shape, loop in shapes],
)
def test_fault_is_named(name, loop):
    """The rule fires, and no other rule about clipping does."""
    found = findings(loop)

    assert name in found, found
    assert not [n for n in found if n.startswith(("clip-", "gradnorm-")) and n != name]


@pytest.mark.parametrize("loop", [pytest.param(loop, id=name) for name, loop in RIGHT.items()])
def test_right_loop_is_silent(loop):
    """Neither a warning nor an error of any rule, and no notice of these."""
    found = findings(loop)

    assert not loud(found)
    assert not [n for n in found if n in FAULTS]


def test_numbers_of_a_late_clip():
    """Eight steps ran unclipped; the norm cited is the one that the step used."""
    finding = findings(lambda: loops.plain(loops.norm, late=True))["clip-after-step"]

    model = loops.net()
    x, y = loops.batches(1)[0]
    torch.nn.functional.cross_entropy(model(x), y).backward()
    norm = math.sqrt(sum(float((p.grad.double() ** 2).sum()) for p in model.parameters()))
    assert finding.evidence["count"] == 8
    assert finding.evidence["observed"] == pytest.approx(norm, rel=1e-5)
    assert finding.evidence["expected"] == loops.LIMIT


def test_numbers_of_a_clip_before_unscale():
    """The norm compared is the scale times the true one, and the step gets limit / scale."""
    finding = findings(lambda: loops.scaled(loops.norm, interval=1000))["clip-before-unscale"]

    assert finding.evidence["observed"] / finding.evidence["expected"] == pytest.approx(2.0**10)
    steps = record(lambda: loops.scaled(loops.norm, interval=1000)).steps
    assert steps["grad_norm_clipped"].to_numpy() == pytest.approx(loops.LIMIT / 2.0**10, rel=1e-3)


def test_numbers_of_a_nonfinite_step():
    """The bad batch is the seventh; it and the three after it (NaN weights) ran."""
    finding = findings(lambda: loops.nonfinite(loops.norm))["clip-nonfinite"]

    assert finding.first_step == 7
    assert finding.evidence["count"] == 4


def test_clip_of_a_generator_still_clips():
    """Looking at a generator must not exhaust it: the clip does under watch what it does alone."""

    def used(watched: bool) -> list[float]:
        out = []

        def clip(model):
            torch.nn.utils.clip_grad_value_((p for p in model.parameters()), 1e-3)
            total = torch.nn.utils.get_total_norm(p.grad for p in model.parameters())
            torch.nn.utils.clip_grads_with_norm_((p for p in model.parameters()), 1e-4, total)
            out.append(math.sqrt(sum(float(p.grad.norm()) ** 2 for p in model.parameters())))

        findings(lambda: loops.plain(clip)) if watched else loops.plain(clip)
        return out

    assert used(watched=True) == used(watched=False)


def test_limit_told_from_norms():
    """Three different norms that come down to one; not three that are halved, not two, not equal ones."""
    import numpy as np

    among = np.ones(5, dtype=bool)
    before = np.array([3.0, 0.5, 7.0, 2.0, 5.0])

    limit, bound = hand_limit(np.array([1.0, 0.5, 1.0, 1.0, 1.0]), before, among)
    assert limit == 1.0
    assert bound.tolist() == [True, False, True, True, True]
    assert math.isnan(hand_limit(before / 2, before, among)[0])
    assert math.isnan(hand_limit(np.array([1.0, 0.5, 1.0, 2.0, 5.0]), before, among)[0])
    assert math.isnan(hand_limit(np.full(5, 1.0), np.full(5, 3.0), among)[0])
