"""The lesson's alignment test: the right functions pass, each usual mistake is explained."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch

from stepscope.checks.mechanics import check_mechanics, load_functions, reference_functions
from stepscope.cli import main
from stepscope.errors import StepscopeError


def findings(**replaced) -> list:
    outcome = check_mechanics(reference_functions() | replaced)
    return list(outcome.findings)


def test_the_reference_prints_what_the_lesson_prints(capsys) -> None:
    assert main(["check", "mechanics"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "lr_step_0_diff=0.000000000000" in lines
    assert "lr_step_1_diff=0.000000000000" in lines
    assert "scaled_loss=2.000000" in lines
    assert "optimizer_step_micro_steps=[4, 8]" in lines
    assert lines[-1] == "train_loop_mechanics=passed"


@pytest.mark.parametrize(
    ("replaced", "name", "says"),
    [
        ({"cosine_lr": lambda s, T, lr: lr * 0.5 * (1 + math.cos(math.pi * s / T))}, "mechanics-lr", "decays to 0"),
        ({"cosine_lr": lambda s, T, lr: lr}, "mechanics-lr", "stays at 1 times"),
        ({"scale_loss_for_accumulation": lambda loss, k: loss}, "mechanics-loss-scaling", "gives 8 where 2"),
        ({"scale_loss_for_accumulation": lambda loss, k: loss * k}, "mechanics-loss-scaling", "multiplied"),
        ({"scale_loss_for_accumulation": lambda loss, k: loss.detach() / k}, "mechanics-loss-scaling", "cuts the loss"),
        ({"should_step_optimizer": lambda s, k: (s + 1) % k == 0}, "mechanics-step-condition", "[3, 7]"),
        ({"should_step_optimizer": lambda s, k: s % k != 0}, "mechanics-step-condition", "should after [4, 8]"),
        ({"should_flush_tail": lambda last, start, k: last % k != 0}, "mechanics-tail-condition", "last_step=7"),
        ({"should_flush_tail": lambda last, start, k: False}, "mechanics-tail-condition", "last_step=10"),
    ],
)
def test_each_mistake_is_explained(replaced: dict, name: str, says: str) -> None:
    (found,) = findings(**replaced)
    assert found.name == name
    assert says in found.message


def test_what_is_not_implemented_yet_is_said() -> None:
    def later(*_):
        raise NotImplementedError

    messages = [found.message for found in findings(cosine_lr=later, should_flush_tail=later)]
    assert messages == ["cosine_lr is not implemented yet", "should_flush_tail is not implemented yet"]


def loop(
    *, divisor=lambda k: k, order=("unscale", "clip", "step"), flush=True, lr_from=1, tail_divisor=None, zero=True
):
    """A learner's loop with one thing changed."""

    def train_one_epoch(
        model, loader, optimizer, device, learning_rate, accumulation_steps, grad_clip, scaler=None, autocast_ctx=None
    ):
        loader = list(loader)

        def end():
            for name in order:
                if name == "unscale":
                    scaler.unscale_(optimizer)
                if name == "clip":
                    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
                if name == "step":
                    scaler.step(optimizer)
            scaler.update()
            if zero:
                optimizer.zero_grad(set_to_none=True)

        for step, (x, y) in enumerate(loader, 1):
            s = step - 1 + lr_from
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * s / len(loader))))
            tail = step > len(loader) - len(loader) % accumulation_steps
            with autocast_ctx or contextlib.nullcontext():
                outputs = model(x.to(device), labels=y.to(device))
                loss = outputs.loss + outputs.aux_loss
                k = tail_divisor if tail and tail_divisor else accumulation_steps
                loss = loss / divisor(k)
            scaler.scale(loss).backward()
            if step % accumulation_steps == 0:
                end()
        if flush and len(loader) % accumulation_steps:
            end()

    return train_one_epoch


def test_a_right_loop_passes_and_minimind_tail_is_a_notice() -> None:
    assert findings(train_one_epoch=loop(tail_divisor=2)) == []
    (found,) = findings(train_one_epoch=loop())
    assert (found.name, found.severity) == ("mechanics-tail-weight", "notice")
    assert found.evidence["observed"] == pytest.approx(2 / 4)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"divisor": lambda k: 1}, "is 4 times the mean over micro-steps [1, 2, 3, 4]: the loss is not divided"),
        ({"divisor": lambda k: k * k}, "is 0.25 times the mean"),
        ({"order": ("clip", "unscale", "step")}, "still multiplied by the loss scale"),
        ({"order": ("unscale", "step")}, "without clip"),
        ({"flush": False}, "the last 2 micro-batches are dropped"),
        ({"lr_from": 0}, "counts micro-steps from 0"),
        ({"zero": False}, "old gradients are still in it"),
    ],
)
def test_each_fault_of_a_loop_is_named(changed: dict, says: str) -> None:
    (found,) = (f for f in findings(train_one_epoch=loop(**changed)) if f.severity == "error")
    assert says in found.message


def test_a_learners_file_is_loaded(tmp_path, capsys) -> None:
    file = tmp_path / "train_loop.py"
    file.write_text("def cosine_lr(s, T, lr):\n    raise NotImplementedError\n")
    assert main(["check", "mechanics", "--impl", str(file)]) == 1
    text = capsys.readouterr().out
    assert "cosine_lr is not implemented yet" in text
    assert "should_step_optimizer is not defined" in text
    assert "train_loop_mechanics=failed" in text


def test_a_file_without_any_of_the_functions_is_one_line(tmp_path) -> None:
    file = tmp_path / "empty.py"
    file.write_text("")
    with pytest.raises(StepscopeError, match="defines none of cosine_lr"):
        load_functions(str(file))


def test_a_parameter_whose_meaning_is_not_known_is_named() -> None:
    def train_one_epoch(model, frobnicate):
        pass

    with pytest.raises(StepscopeError, match="'frobnicate'"):
        findings(train_one_epoch=train_one_epoch)
