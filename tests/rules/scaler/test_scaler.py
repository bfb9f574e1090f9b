"""Rules about the loss scaler and autocast: they fire on their fault in every shape, and are silent beside it."""

from __future__ import annotations

import pytest
import torch

from tests.rules.loops import scaler as loops
from tests.rules.support import findings, loud

torch.set_num_threads(1)


def fused(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


FAULTS = {
    "scaler-unscale-twice": [
        ("each micro-batch, update between", lambda: loops.unscale_each(update=True)),
        ("each micro-batch, raises", lambda: loops.unscale_each(update=False)),
        ("update before step", loops.unscale_then_update),
        ("by hand and by the scaler", loops.unscale_by_hand_too),
        ("a skip without update", loops.skipped_update),
    ],
    "scaler-collapse": [
        ("eighteen steps", lambda: loops.collapse("gradient", steps=18)),
        ("loss", lambda: loops.collapse("loss")),
        ("gradient", lambda: loops.collapse("gradient")),
    ],
    "scaler-update-twice": [
        ("grows between", lambda: loops.two_optimizers(between=True)),
        ("fused", lambda: loops.two_optimizers(between=True, fused=True)),
        ("never grew", lambda: loops.two_optimizers(between=True, interval=1000)),
    ],
    "scaler-update-order": [
        ("update", lambda: loops.order("update")),
        ("fused", lambda: loops.order("update", fused)),
        ("a new scale", lambda: loops.order("new scale")),
        ("within the window", lambda: loops.order("window")),
        ("own scale", lambda: loops.own_scale(late=True)),
    ],
    "scaler-bypassed": [
        (kind, lambda kind=kind: loops.bypassed(kind))
        for kind in ("scaled", "fused", "reverse", "left out", "some", "infinite")
    ],
    "scaler-no-inf-checks": [
        ("update alone", loops.nothing_stepped),
        ("frozen", lambda: loops.no_gradient("frozen")),
        ("detached", lambda: loops.no_gradient("detached")),
    ],
    "scaler-fp16-params": [(kind, lambda kind=kind: loops.half_weights(kind)) for kind in ("step", "unscale", "fused")],
    "scaler-skip-misdetected": [("calls of a fused step", lambda: loops.hooked(fused))]
    + [
        (action, lambda action=action: loops.misdetected(action))
        for action in ("scheduler", "rate", "average", "clearing")
    ],
    "scaler-update-missing": [("raises", loops.no_update), ("caught", lambda: loops.no_update(caught=True))],
    "scaler-growth-inf": [("zero gradients", lambda: loops.growth(cap=False))],
    "fp16-no-scaler": [
        ("autocast", lambda: loops.no_scaler(torch.float16)),
        ("a disabled scaler", lambda: loops.right(enabled=False)),
        ("float16 weights with masters", lambda: loops.masters(scale=False)),
    ],
    "sam-amp": [
        ("stepped outside", lambda: loops.sam_outside("outside")),
        ("unscaled twice", lambda: loops.sam_outside("twice")),
        ("left up by a skipped step", lambda: loops.sam_climbing_in_float32("inside")),
    ]
    + [(kind, lambda kind=kind: loops.sam(kind)) for kind in ("unguarded", "data", "left up")]
    + [("scaled", lambda: loops.sam("scaled", init=2.0**10))],
    "autocast-cache-stale": [
        ("no modules", loops.functional_region),
        ("an epoch in one region", lambda: loops.region("epoch")),
    ],
    "scaler-fused-semantics": [
        ("moves on overflow", lambda: loops.broken_fused("moves")),
        ("divides twice", lambda: loops.broken_fused("twice")),
    ],
    "autocast-too-wide": [
        ("no cache", lambda: loops.region("no cache")),
        ("switched on", lambda: loops.region("switched on")),
    ],
}

RIGHT = {
    "plain": lambda: loops.right(),
    "accumulated": lambda: loops.right(k=3, unscale=True),
    "first skips": lambda: loops.right(init=2.0**24, steps=16),
    "first skips, fused": lambda: loops.right(init=2.0**24, steps=16, optimizer=fused),
    "later skips": lambda: loops.right(inf_at=(5, 11)),
    "later skips, fused, unscaled": lambda: loops.right(inf_at=(5, 11), optimizer=fused, unscale=True),
    "disabled, bfloat16": lambda: loops.right(enabled=False, dtype=torch.bfloat16),
    "bfloat16 without": lambda: loops.no_scaler(torch.bfloat16),
    "own scale": lambda: loops.no_scaler(torch.float16, by_hand=True),
    "own scale that grows": lambda: loops.own_scale(late=False),
    "float16 teacher": lambda: loops.no_scaler(torch.float16, teacher=True),
    "masters with a scale": lambda: loops.masters(scale=True),
    "dropped batches": loops.dropped_batches,
    "two optimizers": lambda: loops.two_optimizers(between=False),
    "GAN, one update": lambda: loops.gan(1),
    "GAN, two updates": lambda: loops.gan(2),
    "own scalers": loops.own_scalers,
    "own scales": loops.new_scales,
    "divided by hand, stepped outside": lambda: loops.bypassed("divided"),
    "unscaled, stepped outside": lambda: loops.bypassed("unscaled"),
    "growth capped": lambda: loops.growth(cap=True),
    "SAM": lambda: loops.sam("right"),
    "SAM that climbs in float32": lambda: loops.sam_climbing_in_float32("outside"),
    "SAM in float32": lambda: loops.sam("unguarded", scaler=False),
    "regions for forwards": lambda: loops.region("accumulated"),
    "one region for two forwards": lambda: loops.region("two phases"),
    "calls of a step that is not fused": lambda: loops.hooked(loops.sgd),
    "a fused step of its own": lambda: loops.broken_fused(""),
    "step in the region": lambda: loops.region("step"),
} | {
    f"right skips, {a}": (lambda a=a: loops.misdetected(a, fault=False))
    for a in ("scheduler", "rate", "average", "clearing")
}


@pytest.mark.parametrize(
    ("name", "loop"),
    [pytest.param(name, loop, id=f"{name}: {shape}") for name, shapes in FAULTS.items() for shape, loop in shapes],
)
def test_fault_is_named(name, loop):
    """The rule fires, and no other rule about scalers, autocast or clipping does."""
    found = findings(loop)

    assert name in found, found
    others = [n for n in found if n in FAULTS or n.startswith(("clip-", "gradnorm-"))]
    assert others == [name]


@pytest.mark.parametrize("loop", [pytest.param(loop, id=name) for name, loop in RIGHT.items()])
def test_right_loop_is_silent(loop):
    """Neither a warning nor an error of any rule."""
    assert not loud(findings(loop))
