from typing import NamedTuple

import pytest
import torch
from torch import nn

from stepscope.reference import loop
from stepscope.reference.config import ModelConfig
from stepscope.reference.loop import (
    scale_loss_for_accumulation,
    should_flush_tail,
    should_step_optimizer,
    to_device,
    train_one_epoch,
    window_size,
)
from stepscope.reference.model import CausalLM


def test_loss_is_divided_by_the_accumulation_steps():
    assert scale_loss_for_accumulation(torch.tensor(8.0), 4).item() == 2.0


def test_step_is_due_at_multiples_of_k():
    assert [step for step in range(1, 10) if should_step_optimizer(step, 4)] == [4, 8]
    assert [step for step in range(1, 4) if should_step_optimizer(step, 1)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("last_step", "start_step", "expected"),
    [(10, 0, True), (8, 0, False), (0, 0, False), (6, 6, False), (6, 4, True), (8, 4, False)],
)
def test_tail_is_flushed_where_gradients_are_left(last_step, start_step, expected):
    assert should_flush_tail(last_step, start_step, 4) is expected


def test_window_size_is_k_and_the_remainder_at_the_end():
    assert [window_size(step, 10, 4) for step in range(1, 11)] == [4] * 8 + [2] * 2
    assert [window_size(step, 8, 4) for step in range(1, 9)] == [4] * 8
    assert [window_size(step, 3, 4) for step in range(1, 4)] == [3] * 3


class Slope(nn.Module):
    """loss(x) = w · mean(x): the gradient is mean(x) wherever w is, so that every step can be computed by hand."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))


def slope_loss(model, batch):
    return model.weight * batch.mean()


def run_slope(values, *, tail_divisor, accumulation_steps=4):
    """Weights after each window under plain descent with rate 1."""
    model = Slope()
    weights = []
    train_one_epoch(
        model,
        [torch.tensor([v], dtype=torch.float64) for v in values],
        torch.optim.SGD(model.parameters(), lr=1.0),
        iters=len(values),
        accumulation_steps=accumulation_steps,
        tail_divisor=tail_divisor,
        grad_clip=0.0,
        loss_fn=slope_loss,
        on_step=lambda _: weights.append(model.weight.item()),
    )
    return weights


def test_tail_divided_by_its_own_size_takes_the_mean_gradient():
    assert run_slope([1, 2, 3, 4, 5, 9], tail_divisor="remainder") == [-2.5, -2.5 - 7.0]


def test_tail_divided_by_k_takes_r_over_k_of_the_mean_gradient():
    first, second = run_slope([1, 2, 3, 4, 5, 9], tail_divisor="full")
    assert first == -2.5
    assert (second - first) / -7.0 == 2 / 4


def test_epoch_shorter_than_a_window_still_steps():
    assert run_slope([3, 5], tail_divisor="remainder") == [-4.0]


def test_empty_loader_steps_nothing_and_says_where_it_is():
    model = Slope()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    assert train_one_epoch(model, [], optimizer, iters=8, start_step=4, accumulation_steps=4) == 4
    assert model.weight.item() == 0


def test_resumed_epoch_keeps_the_absolute_windows():
    model = Slope()
    ends = []
    last = train_one_epoch(
        model,
        [torch.ones(1, dtype=torch.float64)] * 6,
        torch.optim.SGD(model.parameters(), lr=1.0),
        iters=10,
        start_step=4,
        accumulation_steps=4,
        loss_fn=slope_loss,
        on_step=lambda end: ends.append((end.step, end.window_size)),
    )
    assert (last, ends) == (10, [(8, 4), (10, 2)])


def test_learning_rate_is_that_of_the_global_micro_step_counted_from_one():
    model = Slope()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    asked, seen = [], []

    def lr_at(step):
        asked.append(step)
        return step / 100

    train_one_epoch(
        model,
        [torch.ones(1)] * 3,
        optimizer,
        iters=3,
        epoch=2,
        lr_at=lr_at,
        loss_fn=slope_loss,
        on_micro_step=lambda _: seen.append(optimizer.param_groups[0]["lr"]),
    )
    assert asked == [7, 8, 9]
    assert seen == [0.07, 0.08, 0.09]


@pytest.mark.parametrize("use_moe", [False, True])
def test_accumulated_gradient_is_the_large_batch_gradient(use_moe):
    """Descent with rate 1 makes the change of a parameter its gradient; float64 leaves only the mechanics.

    The load-balance loss is switched off: a product of batch means, it differs between K = 1 and K = 4 in right code.
    """
    config = ModelConfig(vocab_size=11, hidden_size=8, num_attention_heads=2, use_moe=use_moe, router_aux_loss_coef=0.0)
    ids = torch.randint(0, 11, (8, 6), generator=torch.Generator().manual_seed(0))

    def change(micro_batches):
        torch.manual_seed(1)
        model = CausalLM(config).double()
        before = [p.detach().clone() for p in model.parameters()]
        train_one_epoch(
            model,
            [(part, part) for part in micro_batches],
            torch.optim.SGD(model.parameters(), lr=1.0),
            iters=len(micro_batches),
            accumulation_steps=len(micro_batches),
            grad_clip=0.0,
        )
        return torch.cat([(b - p.detach()).flatten() for b, p in zip(before, model.parameters(), strict=True)])

    large, accumulated = change([ids]), change(ids.chunk(4))
    assert large.norm() > 0.1
    assert torch.linalg.vector_norm(accumulated - large) / large.norm() < 1e-13


class Recorder:
    """Stands in for every collaborator of the loop and writes down who was called."""

    def __init__(self, *, skip_steps=()):
        self.calls = []
        self.scale_value = 8.0
        self.skip_steps = skip_steps
        self.steps = 0

    # the scaler
    def scale(self, loss):
        self.calls.append("scale")
        loss.register_hook(lambda grad: self.calls.append("backward"))
        return loss * 1.0

    def unscale_(self, optimizer):
        self.calls.append("unscale_")

    def get_scale(self):
        return self.scale_value

    def step(self, optimizer=None):
        if optimizer is None:
            self.calls.append("scheduler.step")
            return
        self.steps += 1
        self.calls.append("scaler.step")

    def update(self):
        self.calls.append("update")
        if self.steps in self.skip_steps:
            self.scale_value /= 2


class Output(NamedTuple):
    loss: torch.Tensor
    aux_loss: torch.Tensor


def record_epoch(monkeypatch, recorder, *, batches=2, accumulation_steps=2, scheduler=None):
    class Model(nn.Linear):
        def forward(self, input_ids, labels):
            recorder.calls.append(f"forward at lr {optimizer.param_groups[0]['lr']:g}")
            return Output(super().forward(input_ids).mean(), torch.zeros(()))

    class Optimizer(torch.optim.SGD):
        def zero_grad(self, set_to_none=False):
            recorder.calls.append(f"zero_grad(set_to_none={set_to_none})")
            super().zero_grad(set_to_none)

    class Autocast:
        def __enter__(self):
            recorder.calls.append("autocast")

        def __exit__(self, *error):
            recorder.calls.append("end of autocast")

    monkeypatch.setattr(loop, "clip_grad_norm_", lambda ps, limit: recorder.calls.append(f"clip {limit} of {len(ps)}"))
    model = Model(3, 1).eval()
    optimizer = Optimizer(model.parameters(), lr=1.0)
    train_one_epoch(
        model,
        [(torch.ones(1, 3), torch.ones(1, 3))] * batches,
        optimizer,
        iters=batches,
        accumulation_steps=accumulation_steps,
        scaler=recorder,
        scheduler=scheduler,
        autocast_ctx=Autocast(),
        grad_clip=0.5,
        lr_at=lambda step: step / 10,
    )
    return model


MICRO = ["autocast", "forward at lr {}", "end of autocast", "scale", "backward"]
STEP = ["unscale_", "clip 0.5 of 2", "scaler.step", "update"]
CLEAR = ["zero_grad(set_to_none=True)"]


def micro(lr):
    return [call.format(lr) for call in MICRO]


def test_calls_come_in_the_order_of_the_textbook(monkeypatch):
    recorder = Recorder()
    model = record_epoch(monkeypatch, recorder, batches=3)
    assert recorder.calls == [*micro("0.1"), *micro("0.2"), *STEP, *CLEAR, *micro("0.3"), *STEP, *CLEAR]
    assert model.training


def test_scheduler_moves_after_the_scaler_and_only_if_the_step_was_applied(monkeypatch):
    recorder = Recorder(skip_steps=(1,))
    record_epoch(monkeypatch, recorder, batches=2, accumulation_steps=1, scheduler=recorder)
    assert recorder.calls == [*micro("0.1"), *STEP, *CLEAR, *micro("0.2"), *STEP, "scheduler.step", *CLEAR]


@pytest.mark.parametrize("fused", [False, True])
def test_float16_overflow_keeps_weights_and_schedule_in_place(fused):
    torch.manual_seed(0)
    model = CausalLM(ModelConfig(vocab_size=11, hidden_size=8, num_attention_heads=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60, growth_interval=1000)
    ids = torch.randint(0, 11, (2, 6))
    before = [p.detach().clone() for p in model.parameters()]
    positions, unchanged = [], []

    def look(_):
        positions.append(scheduler.last_epoch)
        unchanged.append(all(torch.equal(b, p) for b, p in zip(before, model.parameters(), strict=True)))

    train_one_epoch(
        model,
        [(ids, ids)] * 2,
        optimizer,
        iters=2,
        scaler=scaler,
        scheduler=scheduler,
        autocast_ctx=torch.autocast("cpu", dtype=torch.float16),
        on_step=look,
    )
    assert positions == [0, 0]
    assert unchanged == [True, True]
    assert scaler.get_scale() == 2.0**58

    scaler.update(2.0**8)
    positions.clear()
    train_one_epoch(
        model,
        [(ids, ids)],
        optimizer,
        iters=1,
        scaler=scaler,
        scheduler=scheduler,
        autocast_ctx=torch.autocast("cpu", dtype=torch.float16),
        on_step=look,
    )
    assert positions == [1]
    assert unchanged[-1] is False


def test_clip_limits_the_unscaled_gradient_and_zero_switches_it_off():
    """One micro-step with gradient 3 in each of four weights: norm 6, clipped to 1 it is 0.5 each."""

    class Four(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, dtype=torch.float64))

    def move(grad_clip):
        model = Four()
        train_one_epoch(
            model,
            [torch.full((4,), 3.0, dtype=torch.float64)],
            torch.optim.SGD(model.parameters(), lr=1.0),
            iters=1,
            grad_clip=grad_clip,
            scaler=torch.amp.GradScaler("cpu", init_scale=1024.0),
            loss_fn=lambda m, x: (m.weight * x).sum(),
        )
        return model.weight.detach()

    torch.testing.assert_close(move(1.0), torch.full((4,), -0.5, dtype=torch.float64), rtol=1e-6, atol=0)
    assert torch.equal(move(0.0), torch.full((4,), -3.0, dtype=torch.float64))


def test_batches_of_any_structure_move_to_the_device():
    class Pair(NamedTuple):
        x: torch.Tensor
        note: str

    batch = {"a": [torch.ones(1)], "b": (torch.ones(1), 3), "c": Pair(torch.ones(1), "kept")}
    moved = to_device(batch, "meta")
    assert moved["a"][0].device.type == "meta"
    assert moved["b"][0].device.type == "meta"
    assert moved["b"][1] == 3
    assert moved["c"].x.device.type == "meta"
    assert moved["c"].note == "kept"
    assert to_device(batch, None)["a"][0] is batch["a"][0]
