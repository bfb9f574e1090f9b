"""A probe that raises is switched off and reported, and training goes on."""

from __future__ import annotations

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
    try:
        with watching:
            loops.train(net, optimizer, torch.amp.GradScaler("cpu", enabled=False), micro_steps=3)
            raise ZeroDivisionError("mine")
    except ZeroDivisionError as error:
        assert str(error) == "mine"

    assert watching.trace.meta["status"] == "failed"
    assert watching.trace.meta["error"] == "ZeroDivisionError: mine"
    assert len(watching.trace.steps) == 3
