"""``stepscope run`` on scripts that do not end well: the trace that there is, one clear line, and the right exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from stepscope import Trace

if TYPE_CHECKING:
    from pathlib import Path

LOOP = """
import os, signal, sys
import torch
torch.set_num_threads(1)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train(steps):
    for _ in range(steps):
        model(torch.ones(3, 2)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""

NOTHING = "no training step was recorded: no backward pass of a watched model ran in this process"

ENDS = {
    # what the script does: exit code, micro-steps that are recorded at least, status, verdict, a line on stderr
    "trains": ("train(4)", 0, 4, "complete", "clean", "nothing wrong found"),
    "never steps": (
        "for _ in range(4): model(torch.ones(3, 2)).mean().backward()",
        0,
        4,
        "complete",
        "findings",
        "warning ACC107 accum-tail-dropped: 4 backward passes gave gradients to the parameters of SGD/0, which never stepped",
    ),
    "raises": ("train(4)\nraise ValueError('bad batch')", 1, 4, "failed", "clean", "ValueError: bad batch"),
    "exits": ("train(4)\nsys.exit(7)", 7, 4, "failed", "clean", "nothing wrong found"),
    "is interrupted": ("train(4)\nraise KeyboardInterrupt", 130, 4, "interrupted", "clean", "KeyboardInterrupt"),
    "is killed": ("train(200)\nos.kill(os.getpid(), signal.SIGKILL)", -9, 100, "recording", None, ""),
    "lacks a library": ("import library_that_is_not_there", 1, 0, "failed", "incomplete", "ModuleNotFoundError"),
    "trains nothing": ("model(torch.ones(3, 2))", 2, 0, "complete", "incomplete", NOTHING),
}


@pytest.mark.parametrize("end", ENDS)
def test_what_is_left_of_a_script_that(end: str, tmp_path: Path) -> None:
    body, code, micro_steps, status, verdict, line = ENDS[end]
    (tmp_path / "script.py").write_text(LOOP + body + "\n")
    command = [sys.executable, "-m", "stepscope", "run", "--out", "trace", "--no-report", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    said = " ".join(done.stderr.split())
    assert done.returncode == code, done.stderr
    assert line in said
    assert "internal error" not in said
    trace = Trace.load(tmp_path / "trace")
    assert len(trace.steps) >= micro_steps
    assert trace.meta["status"] == status
    assert trace.whole == (end != "is killed")
    findings = tmp_path / "trace" / "findings.json"
    assert findings.exists() == (verdict is not None)
    assert verdict is None or json.loads(findings.read_text())["verdict"] == verdict


def test_a_script_that_never_imports_torch(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('hello')\n")
    command = [sys.executable, "-m", "stepscope", "run", "--out", "trace", "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (2, "hello\n")
    assert NOTHING in done.stderr
    assert (tmp_path / "trace" / "report.html").exists()
