"""Resume: bit-identical where everything is restored, and the dropped part is named where it is not."""

from __future__ import annotations

import sys
from collections import OrderedDict

import pytest
import torch

from stepscope.checks.resume import DROPPABLE, check_resume, check_resume_commands
from stepscope.checks.session import check_session
from stepscope.checks.states import differences, load_state, missing_parts, part_of
from stepscope.cli import main
from stepscope.errors import StepscopeError

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    """A small data file: the reference's own text takes a second to cut."""
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("\n\n".join(f"Paragraph {i}: a step is made of micro-steps, {i * i} of them." for i in range(60)))
    return str(path)


def test_the_reference_resumes_bit_for_bit(text: str) -> None:
    outcome = check_resume(4, options={"data": text})
    assert outcome.status == "passed"
    assert [row["step"] for row in outcome.details["rows"]] == [3, 4]
    assert all(row["loss_whole"] == row["loss_resumed"] for row in outcome.details["rows"])


@pytest.mark.parametrize("drop", ["optimizer", "sampler"])
def test_a_dropped_part_is_to_blame(drop: str, text: str) -> None:
    outcome = check_resume(4, drop, {"data": text})
    (found,) = outcome.findings
    assert found.name == DROPPABLE[drop]
    assert found.message.startswith("optimizer step 3 leaves other parameters")
    first_loss_differs = outcome.details["rows"][0]["loss_whole"] != outcome.details["rows"][0]["loss_resumed"]
    assert first_loss_differs is (drop == "sampler")  # the optimizer's state shows one step later


class Session:
    """A training run in which every part of the state matters; `forget` leaves parts out of what is saved."""

    def __init__(self, forget: tuple[str, ...] = ()) -> None:
        self.forget = forget
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.data = torch.arange(30, dtype=torch.float32).reshape(10, 3) / 30
        self.position = 0

    def step(self) -> float:
        loss = self.model(self.data[self.position % 10]).square().sum()
        self.position += 1
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss.item()

    def state_dict(self) -> dict:
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "rng": torch.get_rng_state(),
            "position": self.position,
        }
        return {name: part for name, part in state.items() if name not in self.forget}

    def load_state_dict(self, state: dict) -> None:
        for name in ("model", "optimizer", "scheduler"):
            if name in state:
                getattr(self, name).load_state_dict(state[name])
        self.position = state.get("position", 0)
        if "rng" in state:
            torch.set_rng_state(state["rng"])


def test_a_session_that_saves_everything_is_bit_identical() -> None:
    assert check_session(Session, 6).status == "passed"


@pytest.mark.parametrize("forgotten", ["optimizer", "scheduler", "rng", "position"])
def test_a_session_that_forgets_a_part_is_found(forgotten: str) -> None:
    outcome = check_session(lambda: Session((forgotten,)), 6)
    assert outcome.status == "failed"
    assert "something is missing in the state" in outcome.findings[0].message


def test_a_part_that_is_saved_and_not_restored_is_named() -> None:
    class Careless(Session):
        def load_state_dict(self, state: dict) -> None:
            super().load_state_dict({**state, "optimizer": Session().optimizer.state_dict()})

    (found,) = check_session(Careless, 6).findings
    assert found.name == "resume-optim-state-lost"
    assert "the load did not restore optimizer.state.0" in found.message


def test_differences_are_found_bit_for_bit() -> None:
    left = {"a": {"b": torch.ones(2)}, "c": [1, 2.0], "d": float("nan"), "same": torch.tensor([1.0, float("nan")])}
    right = {"a": {"b": torch.tensor([1.0, 1.0 + 2**-23])}, "c": [1, 2.5], "d": float("nan"), "new": None}
    right["same"] = left["same"].clone()
    found = {d.path: d.size for d in differences(left, right)}
    assert found == {"a.b": 2**-23, "c.1": 0.5, "new": None}
    assert list(differences(left, left)) == []
    assert [d.path for d in differences(torch.ones(2), torch.ones(2).double(), "x")] == ["x"]


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("optimizer_state_dict.state.0.exp_avg", "optimizer"),
        ("lr_scheduler.last_epoch", "scheduler"),
        ("model_state_dict.weight", "model"),
        ("scaler._growth_tracker", "scaler"),
        ("rng_state", "rng"),
        ("epoch", "sampler"),
        ("banana", "other"),
    ],
)
def test_keys_tell_the_part_of_the_run(path: str, part: str) -> None:
    assert part_of(path) == part


def test_parts_that_no_key_names_are_missing() -> None:
    assert missing_parts({"model": {}, "optimizer": {}, "epoch": 1}) == ["scheduler", "scaler", "rng"]
    assert "model" not in missing_parts(OrderedDict(w=torch.ones(1)))


def test_command_lines_are_run_and_their_checkpoints_compared(tmp_path, capsys) -> None:
    script = tmp_path / "train.py"
    script.write_text("import shutil, sys\nshutil.copy(sys.argv[1], sys.argv[2])\n")
    files = [tmp_path / "whole.pt", tmp_path / "resumed.pt"]
    for name, value in (("right", 6.0), ("wrong", 6.25)):
        torch.save({"model": {"w": torch.full((3,), value)}, "optimizer": {"step": 4}}, tmp_path / name)

    def check(resumed: str) -> int:
        commands = [
            f"{sys.executable} {script} {tmp_path / n} {f}" for n, f in zip(("right", resumed), files, strict=True)
        ]
        options = [
            word for c, f in zip(commands, files, strict=True) for word in ("--command", c, "--checkpoint", str(f))
        ]
        return main(["check", "resume", *options])

    assert check("right") == 0
    assert "bit-identical" in capsys.readouterr().out
    assert check("wrong") == 1
    text = capsys.readouterr().out
    assert "1 values of the checkpoints differ, in model, first model.w" in text
    assert "No key of the checkpoint names scheduler, scaler, rng, sampler" in text


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (lambda path: None, "no such checkpoint"),
        (lambda path: path.write_bytes(b"not a checkpoint"), "holds more than tensors|is damaged"),
        (lambda path: torch.save([1], path), "holds a list"),
        (lambda path: torch.save({"f": test_differences_are_found_bit_for_bit}, path), "more than tensors"),
    ],
    ids=["missing", "garbage", "list", "function"],
)
def test_a_checkpoint_that_cannot_be_compared_is_one_line(tmp_path, write, says: str) -> None:
    path = tmp_path / "a.pt"
    write(path)
    with pytest.raises(StepscopeError, match=says) as caught:
        load_state(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: check_resume(1), "no half"),
        (lambda: check_resume(4, "luck"), "unknown part 'luck'"),
        (lambda: check_resume(4, options={"heads": 3}), "a run of the resume check failed: .*heads"),
        (lambda: check_resume_commands(["/no/such/program"], ["a", "b"]), "cannot be run"),
        (lambda: check_resume_commands([f"{sys.executable} -c 'raise SystemExit(3)'"], ["a", "b"]), "ended with 3"),
        (lambda: check_resume_commands([], ["a"]), "1 checkpoints"),
        (lambda: check_session(lambda: 3), "returned a int without step"),
        (lambda: check_session(Session, 1), "no half"),
    ],
)
def test_bad_input_is_one_line(call, says: str) -> None:
    with pytest.raises(StepscopeError, match=says) as caught:
        call()
    assert "\n" not in str(caught.value)
