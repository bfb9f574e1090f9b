import pytest
import torch

from stepscope.errors import StepscopeError
from stepscope.reference.build import RunLength, build, precision, resolve_device
from stepscope.reference.run import prepare, run_reference
from stepscope.reference.schedules import cosine_lr, warmup_cosine_factor


def test_shapes_of_the_first_forward_are_told_before_the_second(small):
    told, windows = [], []
    result = run_reference(
        small(steps=2),
        on_start=lambda shapes, parts: told.append((dict(shapes), parts.optimizer.state == {})),
        on_window=lambda end: windows.append((end.epoch, end.step, end.window_size)),
    )
    expected = {"input_ids": (2, 16), "labels": (2, 16), "logits": (2, 16, 259)}
    assert told == [(expected, True)]
    assert result.shapes == expected
    assert windows == [(0, 2, 2), (0, 4, 2)]
    assert (result.micro_steps, result.windows) == (4, 2)


def test_no_hook_is_left_on_the_model(small):
    prepared = prepare(small())
    prepared.train()
    assert not prepared.parts.model._forward_hooks


def test_rates_follow_the_minimind_cosine_by_micro_step(small):
    prepared = prepare(small(steps=3, learning_rate=1e-3))
    seen = []
    prepared.train(on_micro_step=lambda _: seen.append([g["lr"] for g in prepared.parts.optimizer.param_groups]))
    assert seen == [[cosine_lr(s, 6, 1e-3)] * 2 for s in range(1, 7)]


def test_rates_follow_the_warmup_cosine_by_optimizer_step(small):
    prepared = prepare(small(steps=3, learning_rate=1e-3, schedule="warmup-cosine", warmup_steps=1, min_lr_ratio=0.2))
    seen = []
    prepared.train(on_micro_step=lambda _: seen.append(prepared.parts.optimizer.param_groups[0]["lr"]))
    expected = [1e-3 * warmup_cosine_factor(s, 1, 3, 0.2) for s in (0, 0, 1, 1, 2, 2)]
    assert seen == pytest.approx(expected, rel=1e-12)


def test_constant_rate_stays(small):
    prepared = prepare(small(schedule="constant", learning_rate=1e-3))
    prepared.train()
    assert [g["lr"] for g in prepared.parts.optimizer.param_groups] == [1e-3, 1e-3]


def test_epochs_run_over_the_data_and_flush_their_tails(small):
    ends = []
    run_reference(
        small(steps=None, epochs=2, accumulation_steps=3),
        on_window=lambda end: ends.append((end.epoch, end.step, end.window_size)),
    )
    assert ends == [(0, 3, 3), (0, 5, 2), (1, 3, 3), (1, 5, 2)]


def test_steps_run_on_over_the_end_of_the_data(small):
    windows = []
    run_reference(small(steps=4, accumulation_steps=2), on_window=lambda end: windows.append(end.window_size))
    assert windows == [2, 2, 2, 2]  # eight micro-steps over five batches: the third window spans the restart


@pytest.mark.parametrize(("tail", "divisor"), [("right", 2), ("minimind", 3)])
def test_tail_option_decides_the_divisor_of_a_short_last_window(small, tail, divisor):
    """Five batches in the epoch and K = 3: the last window has two micro-steps."""
    raw, entered = [], []
    prepared = prepare(small(steps=None, epochs=1, accumulation_steps=3, tail=tail))
    prepared.parts.model.register_forward_hook(lambda *call: raw.append(call[2].loss.item()))
    prepared.train(on_micro_step=lambda info: entered.append(info.loss.item()))
    assert [loss / part for loss, part in zip(raw, entered, strict=True)] == pytest.approx([3, 3, 3, divisor, divisor])


def test_same_seed_gives_the_same_run_and_another_seed_another(small):
    def weights(**options):
        prepared = prepare(small(dropout=0.1, **options))
        prepared.train()
        return torch.cat([p.detach().flatten() for p in prepared.parts.model.parameters()])

    assert torch.equal(weights(), weights())
    assert not torch.equal(weights(), weights(seed=1))


@pytest.mark.parametrize("moe", [False, True])
def test_training_lowers_the_loss(small, moe):
    prepared = prepare(small(steps=60, learning_rate=1e-2, schedule="constant", accumulation_steps=1, moe=moe))
    losses = []
    prepared.train(on_micro_step=lambda info: losses.append(info.loss.item()))
    assert losses[0] == pytest.approx(5.56, abs=0.1)  # log 259: it knows nothing yet; the router adds 0.02
    assert sum(losses[-5:]) / 5 < 4.2


@pytest.mark.parametrize(("dtype", "enabled"), [("float32", False), ("bfloat16", False), ("float16", True)])
def test_precision_of_each_dtype(dtype, enabled):
    scaler, autocast_ctx = precision(dtype, torch.device("cpu"), 1024.0)
    assert scaler.is_enabled() is enabled
    assert scaler.get_scale() == (1024.0 if enabled else 1.0)
    with autocast_ctx:
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    assert product.dtype == getattr(torch, dtype)


def test_lengths_of_a_run():
    length = RunLength(epochs=2, iters=10, accumulation_steps=4)
    assert (length.micro_steps, length.windows, length.optimizer_steps) == (20, 3, 6)
    assert [length.global_step(e, s) for e, s in [(0, 4), (0, 8), (0, 10), (1, 4), (1, 10)]] == [1, 2, 3, 4, 6]


@pytest.mark.parametrize(
    ("name", "message"),
    [("gpu", "'gpu' is no torch device"), ("meta", "--device meta cannot be used"), ("cpu:x", "is no torch device")],
)
def test_device_that_is_not_there(name, message):
    with pytest.raises(StepscopeError, match=message) as caught:
        resolve_device(name)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_that_is_not_there():
    with pytest.raises(StepscopeError, match="--device cuda was asked for, and torch sees no CUDA device"):
        resolve_device("cuda")
    assert resolve_device("auto") == torch.device("cpu")


FACTORY = """
import torch
from torch import nn

def make():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    return {"model": model, "data": [{"x": torch.ones(3, 2)}], "optimizer": optimizer, "scheduler": scheduler,
            "loss_fn": lambda m, b: m(b["x"]).square().mean()}
"""


def test_own_parts_run_with_their_own_optimizer_and_schedule(small, tmp_path):
    path = tmp_path / "own_run.py"
    path.write_text(FACTORY)
    prepared = prepare(small(factory=f"{path}:make", steps=3))
    seen = []
    result = prepared.train(on_window=lambda _: seen.append(prepared.parts.optimizer.param_groups[0]["lr"]))
    assert seen == [0.125, 0.0625, 0.03125]  # after each window's step the scheduler has halved it
    assert result.shapes == {"input": (3, 2), "output": (3, 1)}


def test_own_model_without_an_optimizer_gets_the_reference_adamw(small, tmp_path):
    path = tmp_path / "own_plain.py"
    path.write_text(FACTORY.replace('"optimizer": optimizer, "scheduler": scheduler,', ""))
    parts = build(small(factory=f"{path}:make", learning_rate=0.125, beta2=0.5))
    assert isinstance(parts.optimizer, torch.optim.AdamW)
    assert [group["betas"] for group in parts.optimizer.param_groups] == [(0.9, 0.5)] * 2
    assert parts.lr_at(4) == pytest.approx(0.0125)  # the end of two windows of two: a tenth of the peak
