import math
import os
import random

import numpy
import pytest
import torch
from torch import nn

from stepscope.errors import StepscopeError
from stepscope.reference import run
from stepscope.reference.checkpoint import (
    PARTS,
    capture,
    load_checkpoint,
    random_states,
    restore,
    restore_random,
    save_checkpoint,
)
from stepscope.reference.run import prepare


def same(left, right):
    """Equal bit for bit, through dicts and lists; NaN equals NaN."""
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.numpy().tobytes() == right.numpy().tobytes()
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    return left == right or (isinstance(left, float) and math.isnan(left) and math.isnan(right))


def final_state(config):
    """Train and read back the last checkpoint, without the options."""
    state = load_checkpoint(prepare(config).train().checkpoints[-1])
    return {part: state[part] for part in PARTS if part != "config"}


DROPOUT = {"dropout": 0.2, "save_every": 2}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("schedule", ["minimind-cosine", "warmup-cosine", "constant"])
def test_resumed_run_ends_bit_for_bit_as_the_uninterrupted_one(small, tmp_path, dtype, schedule):
    options = {**DROPOUT, "dtype": dtype, "schedule": schedule, "warmup_steps": 1, "steps": 4}
    whole = final_state(small(**options, out=str(tmp_path / "whole")))
    checkpoint = str(tmp_path / "whole/checkpoints/step-000002.pt")
    resumed = final_state(small(**options, out=str(tmp_path / "rest"), resume=checkpoint))
    assert same(whole, resumed)


def test_resume_in_the_middle_of_an_epoch_and_across_a_short_tail(small, tmp_path):
    """Five batches in an epoch, K = 2: windows of 2, 2 and 1; checkpoints after each optimizer step."""
    options = {**DROPOUT, "save_every": 1, "steps": None, "epochs": 2}
    done = prepare(small(**options, out=str(tmp_path / "whole"))).train()
    assert (done.micro_steps, done.windows, len(done.checkpoints)) == (10, 6, 6)
    positions = [tuple(load_checkpoint(path)["position"].values()) for path in done.checkpoints]
    assert positions == [(0, 2, 2), (0, 4, 4), (0, 5, 5), (1, 2, 7), (1, 4, 9), (1, 5, 10)]
    whole = load_checkpoint(done.checkpoints[-1])
    for checkpoint in done.checkpoints[:-1]:
        resumed = final_state(small(**options, out=str(tmp_path / "rest"), resume=str(checkpoint)))
        assert all(same(whole[part], resumed[part]) for part in resumed)


@pytest.mark.parametrize("fused", [True, False])
def test_resume_keeps_a_scale_that_has_moved(small, tmp_path, fused):
    """A first scale of 2**60 makes every window skip; the scale and the schedule's standstill are carried on."""
    options = {**DROPOUT, "dtype": "float16", "init_scale": 2.0**60, "schedule": "warmup-cosine", "steps": 4}
    whole = final_state(small(**options, fused=fused, out=str(tmp_path / "whole")))
    assert whole["scaler"]["scale"] == 2.0**56
    assert whole["scheduler"]["last_epoch"] == 0
    checkpoint = str(tmp_path / "whole/checkpoints/step-000002.pt")
    assert same(whole, final_state(small(**options, fused=fused, out=str(tmp_path / "rest"), resume=checkpoint)))


@pytest.mark.parametrize("part", ["optimizer", "random", "position"])
def test_a_state_that_is_not_restored_shows_in_the_end(small, tmp_path, monkeypatch, part):
    """The comparison above can fail: each of these states changes the weights when it is left behind."""
    options = {**DROPOUT, "schedule": "constant", "steps": 4}
    whole = final_state(small(**options, out=str(tmp_path / "whole")))
    checkpoint = tmp_path / "whole/checkpoints/step-000002.pt"
    if part == "random":
        monkeypatch.setattr(run, "restore_random", lambda states: None)
    state = load_checkpoint(checkpoint)
    if part == "optimizer":
        for moments in state["optimizer"]["state"].values():
            moments["exp_avg"].zero_()
    if part == "position":
        state["position"] = {"epoch": 0, "step": 2, "batches": 2}
    save_checkpoint(checkpoint, state)
    resumed = final_state(small(**options, out=str(tmp_path / "rest"), resume=str(checkpoint)))
    assert not same(whole["model"], resumed["model"])


def test_training_longer_than_the_saved_run(small, tmp_path):
    prepare(small(save_every=2, steps=2)).train()
    checkpoint = str(tmp_path / "out/checkpoints/step-000002.pt")
    done = prepare(small(steps=3, resume=checkpoint)).train()
    assert (done.micro_steps, done.windows) == (2, 1)
    with pytest.raises(StepscopeError, match="at micro-step 4 and this run ends at 4: nothing is left"):
        prepare(small(steps=2, resume=checkpoint))


def test_checkpoints_come_at_intervals_and_at_the_end(small):
    done = prepare(small(save_every=2, steps=5)).train()
    assert [path.name for path in done.checkpoints] == ["step-000002.pt", "step-000004.pt", "step-000005.pt"]
    assert prepare(small(save_every=0)).train().checkpoints == []


def test_own_data_and_dropout_resume_bit_for_bit(small, tmp_path):
    path = tmp_path / "own_loader.py"
    path.write_text(
        "import torch\n"
        "from torch import nn\n"
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "def make():\n"
        "    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))\n"
        "    x = torch.arange(60.0).view(20, 3)\n"
        "    data = DataLoader(TensorDataset(x, x[:, :1]), batch_size=2, shuffle=True)\n"
        "    return {'model': model, 'data': data, 'loss_fn': lambda m, b: (m(b[0]) - b[1]).square().mean()}\n"
    )
    options = {"factory": f"{path}:make", "save_every": 2, "steps": 4}
    whole = final_state(small(**options, out=str(tmp_path / "whole")))
    checkpoint = str(tmp_path / "whole/checkpoints/step-000002.pt")
    assert same(whole, final_state(small(**options, out=str(tmp_path / "rest"), resume=checkpoint)))


def draw():
    return random.random(), numpy.random.rand(), torch.rand(2).tolist()


def test_random_states_of_all_generators_come_back():
    random.gauss(0, 1)  # leaves a second value in the generator, which is part of its state
    numpy.random.standard_normal()
    states = random_states()
    first = (*draw(), random.gauss(0, 1), numpy.random.standard_normal())
    assert (*draw(), random.gauss(0, 1), numpy.random.standard_normal()) != first
    restore_random(states)
    assert (*draw(), random.gauss(0, 1), numpy.random.standard_normal()) == first


def parts(width=3):
    model = nn.Linear(width, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {"model": model, "optimizer": optimizer, "scheduler": None, "scaler": torch.amp.GradScaler(enabled=False)}


def saved(path, **changes):
    state = capture(**parts(), position={"epoch": 0, "step": 2, "batches": 2}, config={"heads": 2})
    save_checkpoint(path, {**state, **changes})
    return path


def test_failed_write_leaves_the_old_checkpoint_and_no_debris(tmp_path, monkeypatch):
    path = saved(tmp_path / "a.pt")
    before = path.read_bytes()

    def full(state, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(StepscopeError, match=r"a\.pt cannot be written: No space left on device"):
        saved(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_write_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    order = []
    fsync, replace = os.fsync, type(tmp_path).replace
    monkeypatch.setattr(os, "fsync", lambda fd: (order.append("fsync"), fsync(fd)))
    monkeypatch.setattr(type(tmp_path), "replace", lambda a, b: (order.append("replace"), replace(a, b)))
    saved(tmp_path / "a.pt")
    assert order == ["fsync", "replace"]


class Attack:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


def test_code_in_a_checkpoint_is_not_run(tmp_path):
    path, trace = tmp_path / "evil.pt", tmp_path / "executed"
    torch.save({"format": "stepscope-checkpoint", "model": Attack(str(trace))}, path)
    with pytest.raises(StepscopeError, match="damaged, or no checkpoint at all"):
        load_checkpoint(path)
    assert not trace.exists()


def foreign(tmp_path):
    torch.save({"model_state_dict": {}}, tmp_path / "bad.pt")


def tensor_only(tmp_path):
    torch.save(torch.ones(2), tmp_path / "bad.pt")


def truncated(tmp_path):
    saved(tmp_path / "bad.pt")
    content = (tmp_path / "bad.pt").read_bytes()
    (tmp_path / "bad.pt").write_bytes(content[: len(content) // 2])


def empty(tmp_path):
    (tmp_path / "bad.pt").write_bytes(b"")


def text(tmp_path):
    (tmp_path / "bad.pt").write_text("not a checkpoint")


def later_version(tmp_path):
    saved(tmp_path / "bad.pt", version=99)


def without_optimizer(tmp_path):
    saved(tmp_path / "bad.pt")
    state = torch.load(tmp_path / "bad.pt", weights_only=True)
    del state["optimizer"], state["random"]
    torch.save(state, tmp_path / "bad.pt")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda tmp_path: None, "no such checkpoint"),
        (lambda tmp_path: (tmp_path / "bad.pt").mkdir(), "no such checkpoint"),
        (foreign, "is not a checkpoint written by stepscope"),
        (tensor_only, "is not a checkpoint written by stepscope"),
        (truncated, "damaged, or no checkpoint at all"),
        (empty, "damaged, or no checkpoint at all"),
        (text, "damaged, or no checkpoint at all"),
        (later_version, "checkpoint format 99; this version reads 1"),
        (without_optimizer, "lacks optimizer, random"),
    ],
)
def test_bad_checkpoint_is_one_line_that_names_it(tmp_path, spoil, message):
    spoil(tmp_path)
    with pytest.raises(StepscopeError, match=message) as caught:
        load_checkpoint(tmp_path / "bad.pt")
    assert "bad.pt" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_shapes_that_do_not_fit_name_the_first_parameter_and_both_shapes(tmp_path):
    state = load_checkpoint(saved(tmp_path / "a.pt"))
    with pytest.raises(StepscopeError, match=r"weight has shape \(2, 3\) in the checkpoint and \(2, 5\) in this model"):
        restore(state, **parts(width=5))


def test_parameters_of_another_model_are_named(tmp_path):
    state = load_checkpoint(saved(tmp_path / "a.pt"))
    with pytest.raises(StepscopeError, match=r"checkpoint has no parameter 0\.weight"):
        restore(state, **{**parts(), "model": nn.Sequential(nn.Linear(3, 2))})
    with pytest.raises(StepscopeError, match="checkpoint's parameter bias is not in this model"):
        restore(state, **{**parts(), "model": nn.Linear(3, 2, bias=False)})


def test_parts_that_do_not_fit_are_named(tmp_path):
    state = load_checkpoint(saved(tmp_path / "a.pt"))
    other = parts()
    other["optimizer"] = torch.optim.SGD([{"params": [p]} for p in other["model"].parameters()], lr=0.1)
    with pytest.raises(StepscopeError, match="checkpoint's optimizer does not fit this run"):
        restore(state, **other)
    other = parts()
    other["scheduler"] = torch.optim.lr_scheduler.ConstantLR(other["optimizer"])
    with pytest.raises(StepscopeError, match="do not both have a scheduler"):
        restore(state, **other)
    with pytest.raises(StepscopeError, match="checkpoint's scaler does not fit this run"):
        restore(state, **{**parts(), "scaler": torch.amp.GradScaler("cpu")})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 1}, "saved with --batch-size 2, this run has 1"),
        ({"seed": 7}, "saved with --seed 42, this run has 7"),
        ({"heads": 4}, "saved with --heads 2, this run has 4"),
        ({"accumulation_steps": 1}, "saved with --accumulation-steps 2, this run has 1"),
        ({"dtype": "bfloat16"}, "saved with --dtype float32, this run has bfloat16"),
        ({"steps": None, "epochs": 1}, "not both measured in --steps"),
        ({"hidden_size": 32}, r"embed_tokens.weight has shape \(259, 16\) in the checkpoint and \(259, 32\)"),
        ({"schedule": "warmup-cosine"}, "do not both have a scheduler"),
    ],
)
def test_resume_with_other_options_is_refused_by_name(small, tmp_path, changes, message):
    prepare(small(save_every=1, steps=1)).train()
    options = {"steps": 3, "resume": str(tmp_path / "out/checkpoints/step-000001.pt"), **changes}
    with pytest.raises(StepscopeError, match=message):
        prepare(small(**options))
