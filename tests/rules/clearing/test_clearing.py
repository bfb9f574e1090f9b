"""Rules of clearing: each fires on its fault in several shapes, and is silent on loops that look like it."""

from __future__ import annotations

import pytest
import torch

from tests.rules.loops import clearing as loops
from tests.rules.loops.clearing import cleared, empty_labels, gan, lbfgs, sam
from tests.rules.support import findings, loud

pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler.step:UserWarning")

FAULTS = {
    "never": ("zero-grad-missing", "error", cleared("never"), {}),
    "never, adam and pairs": ("zero-grad-missing", "error", cleared("never", k=2, optimizer=torch.optim.AdamW), {}),
    "never, scaler": ("zero-grad-missing", "error", cleared("never", scaler=True), {}),
    "only sometimes": ("zero-grad-missing", "error", cleared("sometimes", windows=12), {}),
    "by the model, which lacks a parameter": ("zero-grad-missing", "error", cleared("model", extra=True), {}),
    "discriminator never": ("zero-grad-missing", "error", gan("never"), {}),
    "before the step": ("zero-grad-before-step", "error", cleared("before step"), {}),
    "before the step to zeros": (
        "zero-grad-before-step",
        "error",
        cleared("before step", to_none=False, optimizer=torch.optim.AdamW),
        {},
    ),
    "before the step, pairs": (
        "zero-grad-before-step",
        "error",
        cleared("before step", k=2, optimizer=torch.optim.Adam),
        {},
    ),
    "generator leaks": ("grad-leak-other-optimizer", "error", gan("after"), {}),
    "generator leaks, scaler": ("grad-leak-other-optimizer", "error", gan("after", scaler=True), {}),
    "generator first": ("grad-leak-other-optimizer", "error", gan("first"), {}),
    "features learn from the discriminator": (
        "grad-leak-other-optimizer",
        "error",
        loops.adversarial_features(cleared=False),
        {},
    ),
    "student leaks": ("grad-leak-other-optimizer", "error", loops.distillation(detached=False), {}),
    "evaluations add up": ("closure-optimizer", "error", lbfgs("sums"), {}),
    "evaluations add up, never cleared": ("closure-optimizer", "error", lbfgs("never"), {}),
    "accumulated outside of the closure": ("closure-optimizer", "error", lbfgs("outside"), {}),
    "closure refused": ("closure-optimizer", "error", loops.sgd_closure(scaler="keyword"), {}),
    "nothing to divide by": ("loss-nan-empty-labels", "error", empty_labels("masked"), {}),
    "nothing to divide by, clip": ("loss-nan-empty-labels", "error", empty_labels("masked", clip=True), {}),
    "nothing to divide by, window": ("loss-nan-empty-labels", "error", empty_labels("masked", k=3), {}),
    "nothing to divide by, second term": ("loss-nan-empty-labels", "error", empty_labels("second"), {}),
    "all ignored": ("loss-nan-empty-labels", "notice", empty_labels("torch"), {}),
    "nothing selected": ("loss-nan-empty-labels", "notice", empty_labels("selected"), {}),
}

RIGHT = {
    **{
        f"cleared {place}": (cleared(place), {}) for place in ("after", "top", "after forward", "none", "data", "model")
    },
    "cleared to zeros, pairs": (cleared("top", k=2, to_none=False), {"accumulation_steps": 2}),
    "gan": (gan("right"), {}),
    "gan, scaler": (gan("right", scaler=True), {}),
    "gan, frozen": (gan("frozen", optimizer=torch.optim.SGD), {}),
    "adversarial features": (loops.adversarial_features(cleared=True), {}),
    "momentum in the gradient": (loops.momentum_in_the_gradient(), {}),
    "distillation": (loops.distillation(detached=True), {}),
    "shared backward": (loops.shared_backward(), {}),
    "shared backward, slow": (loops.shared_backward(slow=3), {}),
    "lbfgs": (lbfgs("right"), {}),
    "lbfgs over a window": (lbfgs("window"), {}),
    "sgd with a closure": (loops.sgd_closure(), {}),
    "sam": (sam(), {}),
    "sam, pairs": (sam(k=2), {"accumulation_steps": 2}),
    "sam, undivided": (sam(divide=False), {}),
    "clamped": (empty_labels("clamped"), {}),
    "skipped by the scaler": (empty_labels("masked", scaler=True), {}),
    "skipped by a guard": (empty_labels("masked", guard=True), {}),
    "emptied by a guard": (loops.ignored_gradient(), {}),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fires_on_the_fault_and_on_nothing_else(name: str) -> None:
    kind, severity, loop, declared = FAULTS[name]
    found = findings(loop, declared)
    assert {n: f.severity for n, f in found.items() if f.severity != "notice" or n == kind} == {kind: severity}


@pytest.mark.parametrize("name", RIGHT)
def test_silent_on_right_loops(name: str) -> None:
    loop, declared = RIGHT[name]
    assert loud(findings(loop, declared)) == {}
