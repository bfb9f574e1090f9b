"""What the trace says of scaled steps, against a loop of its own in float64 and the scaler's rule on paper."""

from __future__ import annotations

import copy
import math
import warnings
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepscope

torch.set_num_threads(1)

INIT, INTERVAL, LIMIT, STEPS = 2.0**10, 3, 0.3, 10
OVERFLOWS = (0, 4, 8)
"""Steps whose loss is infinite: one at the start, one after three clean steps, one later."""

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "SGD foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, foreach=False),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(step)
    return torch.randn(8, 5, generator=g), torch.randint(0, 3, (8,), generator=g)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


@dataclass
class Paper:
    """The scaler's rule, written down again: halve on overflow, double after `interval` clean steps in a row."""

    scale: float = INIT
    clean: int = 0
    before: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)

    def update(self, overflow: bool) -> None:
        self.before.append(self.scale)
        self.clean = 0 if overflow else self.clean + 1
        if overflow:
            self.scale /= 2
        elif self.clean == INTERVAL:
            self.scale, self.clean = self.scale * 2, 0
        self.after.append(self.scale)


def true_norms(weights: list[dict[str, torch.Tensor]]) -> list[float]:
    """Norm of the gradient at each step, in float64, from the weights of that step."""
    norms = []
    for step, held in enumerate(weights):
        model = net().double()
        model.load_state_dict({k: v.double() for k, v in held.items()})
        x, y = data(step)
        F.cross_entropy(model(x.double()), y).backward()
        norms.append(math.sqrt(sum(float((p.grad**2).sum()) for p in model.parameters())))
    return norms


@pytest.mark.parametrize("unscale", [True, False], ids=["unscale_", "left to step"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_skips_scales_and_norms(kind, unscale):
    """Every cell about the scale, the skip and the norms' stages, for every way in which an optimizer may step."""
    model = net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=INIT, growth_interval=INTERVAL)
    weights = []
    with stepscope.watch(model, optimizer, scaler=scaler) as watching:
        for step in range(STEPS):
            weights.append(copy.deepcopy(model.state_dict()))
            x, y = data(step)
            loss = F.cross_entropy(model(x), y)
            scaler.scale(loss * math.inf if step in OVERFLOWS else loss).backward()
            if unscale:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    steps = watching.trace.steps
    overflow = [step in OVERFLOWS for step in range(STEPS)]
    paper = Paper()
    for bad in overflow:
        paper.update(bad)

    assert steps["step_skipped"].tolist() == overflow
    assert steps["found_inf"].tolist() == overflow
    assert steps["loss_scale_before"].tolist() == paper.before
    assert steps["loss_scale_after"].tolist() == paper.after
    assert steps["unscale_divisor"].tolist() == paper.before
    assert steps["scale_divisions"].tolist() == [1] * STEPS
    assert steps["unscale_calls"].tolist() == [int(unscale)] * STEPS
    assert steps["applied_steps"].tolist() == [step + 1 - sum(overflow[: step + 1]) for step in range(STEPS)]
    true = true_norms(weights)
    for step in range(STEPS):
        row = steps.iloc[step]
        if overflow[step]:
            assert not math.isfinite(row["grad_norm"])
            continue
        used = min(true[step], LIMIT) if unscale else true[step]
        assert row["grad_norm_scaled"] == pytest.approx(true[step] * paper.before[step], rel=1e-4)
        assert row["grad_norm"] == pytest.approx(true[step], rel=1e-4)
        assert row["grad_norm_clipped"] == pytest.approx(used, rel=1e-4)
        if unscale:
            assert row["clip_norm"] == pytest.approx(true[step], rel=1e-4)
            assert not bool(row["clip_scaled"])


@pytest.mark.parametrize("fused", [False, True])
def test_a_skip_moves_nothing(fused):
    """Where the trace says skipped the weights are bit-identical, where it does not they moved."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=INIT)
    moved = []
    with stepscope.watch(model, optimizer, scaler=scaler) as watching:
        for step in range(STEPS):
            x, y = data(step)
            before = copy.deepcopy(model.state_dict())
            loss = F.cross_entropy(model(x), y)
            scaler.scale(loss * math.inf if step in OVERFLOWS else loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            moved.append(any(not torch.equal(v, before[k]) for k, v in model.state_dict().items()))

    assert (~watching.trace.steps["step_skipped"]).tolist() == moved


def test_two_optimizers_on_one_scaler():
    """An overflow in one part only: that part's step is skipped, the other's is not, the scale falls once for both."""
    model = net()
    parts = [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.SGD(model[2].parameters(), lr=0.1)]
    scaler = torch.amp.GradScaler("cpu", init_scale=INIT, growth_interval=100)
    with stepscope.watch(model, parts, scaler=scaler) as watching:
        for step in range(4):
            x, y = data(step)
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            if step == 2:
                model[2].bias.grad[0] = math.inf
            for optimizer in parts:
                scaler.step(optimizer)
            scaler.update()
            model.zero_grad()
    steps = watching.trace.steps
    by = dict(list(steps.groupby("optimizer")))

    assert by["SGD/0"]["step_skipped"].tolist() == [False] * 4
    assert by["SGD/1"]["step_skipped"].tolist() == [False, False, True, False]
    for rows in by.values():
        assert rows["loss_scale_before"].tolist() == [INIT, INIT, INIT, INIT / 2]
        assert rows["loss_scale_after"].tolist() == [INIT, INIT, INIT / 2, INIT / 2]
        assert rows["early_updates"].tolist() == [0] * 4
        assert rows["update_calls"].tolist() == [1] * 4


@pytest.mark.parametrize("make", ["torch.amp", "torch.cuda.amp"])
def test_disabled_scaler_scales_nothing(make):
    """A disabled scaler is a plain step: no scale, no skip, and the norm is the true one."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.cuda.amp is deprecated, and in use
        scaler = (
            torch.cuda.amp.GradScaler(enabled=False)
            if make == "torch.cuda.amp"
            else torch.amp.GradScaler("cpu", enabled=False)
        )
    weights = []
    with stepscope.watch(model, optimizer, scaler=scaler) as watching:
        for step in range(3):
            weights.append(copy.deepcopy(model.state_dict()))
            x, y = data(step)
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    steps = watching.trace.steps

    for column in ("loss_scale_before", "loss_scale_after", "unscale_divisor", "found_inf"):
        assert steps[column].isna().all(), column
    assert steps["step_skipped"].tolist() == [False] * 3
    assert steps["grad_scaled_at_step"].tolist() == [False] * 3
    assert steps["clip_scaled"].tolist() == [False] * 3
    assert steps["grad_norm"].tolist() == pytest.approx(true_norms(weights), rel=1e-5)
    assert (steps["grad_norm_clipped"] <= LIMIT * 1.001).all()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA: without it this class switches itself off")
def test_enabled_scaler_of_torch_cuda_amp():
    """The old class inherits its methods from the new one: the same calls are heard."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scaler = torch.cuda.amp.GradScaler(init_scale=INIT)
    assert scaler.is_enabled()
    assert type(scaler).step is torch.amp.GradScaler.step


def test_positional_closure_uses_scaled_gradients():
    """``scaler.step(optimizer, closure)`` escapes torch's check; the closure's gradients are used with their scale."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    scaler = torch.amp.GradScaler("cpu", init_scale=INIT, growth_interval=100)
    with stepscope.watch(model, optimizer, scaler=scaler) as watching:
        for step in range(3):
            x, y = data(step)

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = scaler.scale(F.cross_entropy(model(x), y))
                loss.backward()
                return loss

            closure()
            held = [p.detach().clone() for p in model.parameters()]
            scaler.step(optimizer, closure)
            scaler.update()
            moved = math.sqrt(
                sum(
                    float(((p.detach() - h).double() ** 2).sum()) for p, h in zip(model.parameters(), held, strict=True)
                )
            )
    ends = watching.trace.steps[watching.trace.steps["sync_gradients"]]

    assert ends["closure"].tolist() == [True] * 3
    assert ends["window_size"].tolist() == [2] * 3
    assert ends["step_skipped"].tolist() == [False] * 3
    # lr times the scaled norm: the last backward of the window is the closure's
    assert moved == pytest.approx(1e-6 * float(ends["grad_norm_scaled"].iloc[-1]), rel=1e-2)
    assert ends["grad_norm_scaled"].iloc[-1] > 100


def test_failing_calls_say_in_which_state():
    """A second ``unscale_`` and a step without gradients each leave an event with the scaler's stage."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=INIT)
    with stepscope.watch(model, optimizer, scaler=scaler) as watching:
        x, y = data(0)
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        scaler.unscale_(optimizer)
        with pytest.raises(RuntimeError):
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        with pytest.raises(RuntimeError):
            scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        with pytest.raises(AssertionError):
            scaler.step(optimizer)
    events = watching.trace.details("unscale_failed", "scaler_step_failed")

    assert [(e["event"], e["detail"]["stage"], e["detail"]["gradients"]) for e in events] == [
        ("unscale_failed", "UNSCALED", 4),
        ("scaler_step_failed", "STEPPED", 4),
        ("scaler_step_failed", "UNSCALED", 0),
    ]
