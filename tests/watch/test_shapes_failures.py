"""Loops in which something raises and that go on; recordings that overlap; numbers that are not finite."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepscope
from stepscope.errors import StepscopeError
from stepscope.store.trace import Trace
from stepscope.watch import patches
from tests.watch.shapes import ABSENT, Story, check, norm64


class Boom(Exception):  # noqa: N818
    """What the loops below raise and catch."""


class Fragile(nn.Module):
    """A model whose forward can be told to fail after its work is done."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        self.fails = False

    def forward(self, x):
        out = self.inner(x)
        if self.fails:
            raise Boom
        return out


class BrokenBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise Boom


def batch(n: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 3), torch.randn(n, 2)


def failing() -> int:
    raise Boom


@pytest.mark.parametrize("where", ["forward", "backward", "step"])
def test_an_error_that_the_loop_catches(where):
    """The batch is dropped; every window before and after is as ever. A backward that raised has a number and no row."""

    def loop():
        story, model = Story(), Fragile()
        optimizer = story.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for i in range(5):
            x, y = batch()
            model.fails = where == "forward" and i == 2
            try:
                loss = F.mse_loss(model(x), y)
                if where == "backward" and i == 2:
                    story.micro_steps += 1
                    BrokenBackward.apply(loss).backward()
                story.backward(loss, optimizer, cells={"loss": loss.item(), "loss_weight": 1.0})
                if where == "step" and i == 2:
                    optimizer.step(failing)
                story.step(optimizer, grad_norm=ABSENT)
            except Boom:
                pass
            optimizer.zero_grad()
        story.keep(model, optimizer)
        return story

    trace = check(loop)
    sizes = trace.steps["window_size"].dropna().tolist()
    assert sizes == ([1, 1, 2, 1] if where == "step" else [1, 1, 1, 1])


def test_a_step_that_raised_does_not_hide_the_next_optimizer():
    """torch calls no hook after a step that raises: the other optimizer's step is not inside it."""

    def loop():
        story, model = Story(), Fragile()
        a = story.optimizer(torch.optim.SGD(model.inner[0].parameters(), lr=0.1))
        b = story.optimizer(torch.optim.SGD(model.inner[2].parameters(), lr=0.1))
        for i in range(4):
            x, y = batch()
            story.backward(F.mse_loss(model(x), y), a, b)
            if i == 1:
                with pytest.raises(Boom):
                    a.step(failing)
            else:
                story.step(a)
            story.step(b)
            a.zero_grad()
            b.zero_grad()
        story.keep(model)
        return story

    check(loop)


def test_a_step_that_calls_its_base_class_is_one_step():
    """Both are wrapped by torch; what the outer one does after the inner one belongs to the update."""

    class Clamped(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            super().step(closure)
            for group in self.param_groups:
                for p in group["params"]:
                    p.clamp_(-0.1, 0.1)

    def loop():
        story, model = Story(), Fragile()
        optimizer = story.optimizer(Clamped(model.parameters(), lr=0.1))
        for _ in range(3):
            x, y = batch()
            story.backward(F.mse_loss(model(x), y), optimizer)
            story.step(optimizer, calls="FBSZ")
            optimizer.zero_grad()
        story.keep(model)
        return story

    check(loop)


def test_calls_of_a_scaler_that_raise():
    """unscale_ twice, step twice: both raise, the loop goes on, and the attempts are those that were made."""

    def loop():
        story, model = Story(), Fragile()
        optimizer = story.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for i in range(5):
            x, y = batch()
            cells = {"loss_weight": 1.0, "loss_scale_before": 8.0}
            story.backward(scaler.scale(F.mse_loss(model(x), y)), optimizer, cells=cells)
            scaler.unscale_(optimizer)
            if i == 2:
                with pytest.raises(RuntimeError):
                    scaler.unscale_(optimizer)
            story.step(optimizer, call=lambda: scaler.step(optimizer), unscale_calls=1)
            if i == 3:
                with pytest.raises(RuntimeError):
                    scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        story.keep(model, optimizer)
        return story

    trace = check(loop)
    named = trace.events["event"].tolist()
    assert (named.count("unscale_failed"), named.count("scaler_step_failed")) == (1, 1)


def test_losses_gradients_and_parameters_that_are_not_finite(tmp_path):
    """An infinite and a NaN loss, and what they leave: recorded as such, also after a way through the files."""

    def loop():
        story = Story()
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        optimizer = story.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for i, factor in enumerate((1.0, float("inf"), float("nan"))):
            value = model(torch.ones(1, 2)).sum() * factor
            story.backward(value, optimizer, cells={"loss_scaled": value.item()})
            found = norm64(p.grad for p in model.parameters())
            params = norm64(model.parameters())
            story.step(optimizer, grad_norm=found, grad_nonfinite=0 if i == 0 else 3, param_norm=params)
            optimizer.zero_grad()
        story.keep(model)
        return story

    trace = check(loop)
    assert [str(v) for v in trace.steps["grad_norm"][1:]] == ["inf", "nan"]
    with stepscope.watch(out=tmp_path / "trace"):
        _kept = loop()
    loaded = Trace.load(tmp_path / "trace")
    for column in ("loss_scaled", "grad_norm", "param_norm", "update_norm"):
        assert list(map(str, loaded.steps[column])) == list(map(str, trace.steps[column]))
    ended = [json.loads(d) for d in loaded.events["detail"][loaded.events["event"] == "ended"]]
    assert set(ended[0]["norms"].values()) == {"NaN"}
    json.loads((tmp_path / "trace" / "meta.json").read_text("utf-8"), parse_constant=pytest.fail)


def test_a_recording_begins_once():
    """A second start does nothing, a second stop neither; one that has ended cannot be begun again."""
    model = Fragile()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        x, y = batch()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    watching = stepscope.watch()
    watching.start().start()
    step()
    watching.stop()
    watching.stop()
    step()

    assert watching.trace.steps["calls"].tolist() == ["FBSZ"]
    with pytest.raises(StepscopeError, match="this recording has ended"):
        watching.start()
    assert not patches.installed()


def test_recordings_that_overlap():
    """Begun one after the other and ended in the same order: each holds what happened between its ends."""
    model = Fragile()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scales = iter((1.0, 2.0, 3.0, 4.0))

    def step():
        F.mse_loss(model(torch.ones(1, 3)), torch.full((1, 2), next(scales))).backward()
        optimizer.step()
        optimizer.zero_grad()

    first = stepscope.watch().start()
    step()
    second = stepscope.watch().start()
    step()
    first.stop()
    step()
    second.stop()
    step()

    assert first.trace.steps["micro_step"].tolist() == second.trace.steps["micro_step"].tolist() == [1, 2]
    assert first.trace.steps["loss"].tolist()[1] == second.trace.steps["loss"].tolist()[0]
    assert first.trace.steps["update_norm"].tolist()[1] == second.trace.steps["update_norm"].tolist()[0]


def test_a_recording_that_begins_in_the_middle_of_a_window():
    """It counts what it saw; that gradients were there before is told."""
    model = Fragile()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = batch()
    F.mse_loss(model(x), y).backward()
    held = norm64(p.grad for p in model.parameters())
    with stepscope.watch() as watching:
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    row = watching.trace.steps.iloc[0]
    assert (row["window_step"], row["window_size"]) == (1, 1)
    assert row["grad_norm_before"] == pytest.approx(held)
