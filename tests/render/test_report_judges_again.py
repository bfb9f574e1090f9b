"""``stepscope report`` and `Trace.findings` judge a recorded trace again, as the project's settings say."""

import json

import pytest
import torch
from torch.nn import functional as F

import stepscope
from stepscope.config import parse_declarations
from stepscope.errors import StepscopeError


def train(model, optimizer, windows=3, divisor=1):
    generator = torch.Generator().manual_seed(0)
    for _ in range(windows):
        for _ in range(4):
            x = torch.randn(6, 5, generator=generator)
            (F.mse_loss(model(x), x[:, :1]) / divisor).backward()
        optimizer.step()
        optimizer.zero_grad()


def parts():
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 1)
    return model, torch.optim.Adam(model.parameters(), lr=1e-3)


@pytest.fixture
def undivided(tmp_path, monkeypatch):
    """A run whose losses were not divided, judged by a project in the same folder."""
    monkeypatch.chdir(tmp_path)
    model, optimizer = parts()
    with stepscope.watch(model, optimizer, out=tmp_path / "run"):
        train(model, optimizer)
    return tmp_path / "run"


def verdict(run_command, folder, capsys, *options):
    code = run_command("report", folder, "--format", "json", *options)
    content = json.loads(capsys.readouterr().out)
    return (
        code,
        {f["name"]: f["severity"] for f in content["findings"]},
        {s["name"]: s["reason"] for s in content["skipped"]},
    )


@pytest.mark.parametrize(
    ("settings", "code", "severity"),
    [
        ("", 0, "notice"),
        ("declare = {accumulation_steps = 4}", 1, "error"),
        ('declare = {accumulation_steps = 4}\nfail-on = "never"', 0, "error"),
        ('fail-on = "notice"', 1, "notice"),
        ('ignore = ["accum-missing-divide"]', 0, None),
        ('select = ["clip-empty-params"]', 0, None),
    ],
)
def test_settings_of_the_project_hold(run_command, undivided, capsys, settings, code, severity):
    (undivided.parent / "pyproject.toml").write_text(f"[tool.stepscope]\n{settings}\n")
    ended, found, _ = verdict(run_command, undivided, capsys)
    assert (ended, found.get("accum-missing-divide")) == (code, severity)


def test_an_accepted_finding_is_skipped_with_its_reason(run_command, undivided, capsys):
    (undivided.parent / "pyproject.toml").write_text(
        '[tool.stepscope.accept]\naccum-missing-divide = "lr is tuned to it"\n'
    )
    ended, found, skipped = verdict(run_command, undivided, capsys, "--declare", "accumulation_steps=4")
    assert ended == 0
    assert "accum-missing-divide" not in found
    assert skipped["accum-missing-divide"] == "accepted in the configuration: lr is tuned to it"


def test_options_are_laid_over_the_settings(run_command, undivided, capsys):
    (undivided.parent / "pyproject.toml").write_text("[tool.stepscope]\ndeclare = {accumulation_steps = 2}\n")
    assert verdict(run_command, undivided, capsys, "--declare", "accumulation_steps=4")[0] == 1
    assert verdict(run_command, undivided, capsys, "--declare", "accumulation_steps=4", "--fail-on", "never")[0] == 0


def test_findings_of_a_run_that_was_not_judged_are_judged_now(undivided):
    model, optimizer = parts()
    with stepscope.watch(model, optimizer, declare={"accumulation_steps": 4}) as in_memory:
        train(model, optimizer)
    for trace, severity in ((in_memory.trace, "error"), (stepscope.Trace.load(undivided), "notice")):
        found = dict(zip(trace.findings["name"], trace.findings["severity"], strict=True))
        assert found["accum-missing-divide"] == severity
    with stepscope.watch(model, optimizer) as right:
        train(model, optimizer, divisor=4)
    assert right.trace.findings.empty
    assert right.trace.verdict["verdict"] == "clean"


def test_a_resumed_run_is_judged_with_the_one_it_named_when_it_ran(run_command, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, optimizer = parts()
    with stepscope.watch(model, optimizer, out=tmp_path / "first"):
        train(model, optimizer, divisor=4)
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "checkpoint.pt")
    with stepscope.watch(out=tmp_path / "second", meta={"after": str(tmp_path / "first")}):
        model, optimizer = parts()
        model.load_state_dict(torch.load(tmp_path / "checkpoint.pt", weights_only=True)["model"])
        train(model, optimizer, divisor=4)
    assert "resume-optim-state-lost" in verdict(run_command, tmp_path / "second", capsys)[1]
    (tmp_path / "first").rename(tmp_path / "moved")
    found, skipped = verdict(run_command, tmp_path / "second", capsys)[1:]
    assert "resume-optim-state-lost" not in found
    assert "--after DIR" in skipped["resume-optim-state-lost"]
    assert (
        "resume-optim-state-lost" in verdict(run_command, tmp_path / "second", capsys, "--after", tmp_path / "moved")[1]
    )


def test_declarations_are_json_or_text():
    pairs = ["accumulation_steps=4", "frozen=encoder.*", "logged_loss=loss=(.*)", "x=[1, 2]"]
    expected = {"accumulation_steps": 4, "frozen": "encoder.*", "logged_loss": "loss=(.*)", "x": [1, 2]}
    assert parse_declarations(pairs) == expected
    with pytest.raises(StepscopeError, match="--declare accumulation_steps=0 must be a whole number"):
        parse_declarations(["accumulation_steps=0"])
