"""A probe that raises is switched off and reported, and training goes on."""

from __future__ import annotations

import pytest
import torch

import stepscope
from stepscope.probes.clip import Clip
from stepscope.watch.listeners.clipping import ClipListener
from tests.watch import loops


def watched_run():
    net = loops.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with stepscope.watch() as watching:
        loops.train(net, optimizer, torch.amp.GradScaler("cpu", enabled=False))
    return [p.detach().clone() for p in net.parameters()], watching.trace


def test_a_probe_that_raises_in_the_loop(monkeypatch):
    """Its columns are null with the reason; the others and the parameters are as ever."""
    healthy, before = watched_run()

    def broken(self, event):
        raise ValueError("a fault of ours")

    monkeypatch.setattr(Clip, "on_clip_begin", broken)
    params, trace = watched_run()

    assert all(torch.equal(a, b) for a, b in zip(healthy, params, strict=True))
    assert trace.meta["probes_off"] == {"clip": "ValueError: a fault of ours"}
    assert "a fault of ours" in trace.meta["not_observed"]["clip_coef"]
    assert trace.steps["clip_coef"].isna().all()
    assert trace.steps["grad_norm_clipped"].equals(before.steps["grad_norm_clipped"])
    assert trace.events["event"].tolist().count("probe_switched_off") == 1
    assert before.complete
    assert not trace.complete, "what was not seen cannot be called clean"
    assert trace.verdict["verdict"] != "clean"


def test_a_probe_that_raises_while_rows_are_resolved(monkeypatch):
    """The rows are written without its cells."""

    def broken(self, row, cells):
        raise KeyError("gone")

    monkeypatch.setattr(Clip, "resolve", broken)
    _, trace = watched_run()

    assert "gone" in trace.meta["probes_off"]["clip"]
    assert len(trace.steps) == 12
    assert trace.steps["loss"].notna().all()


def test_a_listener_that_raises_does_not_reach_the_loop(monkeypatch):
    """Even a fault in the watcher itself leaves training alone and is written down."""
    healthy, _ = watched_run()

    def broken(self, args, kwargs):
        raise RuntimeError("listener")

    monkeypatch.setattr(ClipListener, "before_clip", broken)
    params, trace = watched_run()

    assert all(torch.equal(a, b) for a, b in zip(healthy, params, strict=True))
    assert trace.meta["probes_off"]["before_clip"] == "RuntimeError: listener"
    assert len(trace.steps) == 12


def test_an_error_of_the_loop_itself_passes_through():
    """What the user's code raises is raised, and the trace says how the recording ended."""
    net = loops.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    watching = stepscope.watch(out=None)

    def failing_loop():
        with watching:
            loops.train(net, optimizer, torch.amp.GradScaler("cpu", enabled=False), micro_steps=3)
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        failing_loop()

    assert watching.trace.meta["status"] == "failed"
    assert watching.trace.meta["error"] == "ZeroDivisionError: mine"
    assert len(watching.trace.steps) == 3


def test_a_rate_that_is_no_number_is_null():
    """A script may set anything; the row is written all the same, and nothing is switched off."""
    net = loops.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with stepscope.watch() as watching:
        loops.train(net, optimizer, torch.amp.GradScaler("cpu", enabled=False), micro_steps=3)
        optimizer.param_groups[0]["lr"] = "fast"
        net(torch.ones(1, 6)).sum().backward()

    assert watching.trace.steps["lr"].tolist()[:3] == [0.1] * 3
    assert watching.trace.steps["lr"].isna().tolist() == [False] * 3 + [True]
    assert watching.trace.meta["probes_off"] == {}


def test_a_closure_of_one_backward_shows_the_gradient_that_the_step_used():
    """As Lightning steps: forward, backward and clip inside the closure."""
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    told = []

    def closure():
        optimizer.zero_grad()
        loss = net(torch.randn(4, 3)).pow(2).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        told.append(sum(float((p.grad.double() ** 2).sum()) for p in net.parameters()) ** 0.5)
        return loss

    with stepscope.watch() as watching:
        for _ in range(3):
            optimizer.step(closure)
    seen = watching.trace.steps["grad_norm_clipped"].tolist()

    assert len(seen) == 3
    assert all(abs(a - b) < 1e-5 for a, b in zip(seen, told, strict=True))
