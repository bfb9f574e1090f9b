"""Long runs: memory does not grow with the run, the journal grows linearly, every and max_steps are kept."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepscope
from stepscope.store.trace import Trace
from stepscope.watch import patches

ROOT = Path(__file__).parents[2]

SCRIPT = textwrap.dedent("""
    import json, pathlib, sys, tracemalloc
    import torch
    import stepscope
    torch.set_num_threads(1)
    folder = pathlib.Path(sys.argv[1])
    net = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    x, y = torch.ones(8, 4), torch.ones(8, 2)
    told = []
    tracemalloc.start()
    with stepscope.watch(out=folder) as watching:
        for i in range(1, {micro_steps} + 1):
            torch.nn.functional.mse_loss(net(x), y).backward()
            if i % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
            if i % {every} == 0:
                size = sum(p.stat().st_size for p in (folder / "journal").iterdir())
                told.append((i, tracemalloc.get_traced_memory()[0], size))
    print(json.dumps(told))
""")

BYTES_A_MICRO_STEP = 1500
"""Stated in docs/how-it-works.md; the journal may stay below it."""


def test_memory_and_bytes_of_a_long_run(tmp_path):
    """After the first quarter Python's memory stays where it is, and each quarter adds as many bytes as the one before."""
    every = 500
    text = SCRIPT.format(micro_steps=4 * every, every=every)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", text, str(tmp_path / "trace")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    told = json.loads(done.stdout)
    assert [i for i, _, _ in told] == [every * k for k in (1, 2, 3, 4)]
    memory = [held for _, held, _ in told]
    sizes = [size for _, _, size in told]
    assert memory[3] - memory[1] < 300_000  # a leak of a row of cells (a kilobyte) would be 1 000 000
    added = [b - a for a, b in itertools.pairwise(sizes)]
    assert max(added) <= 1.15 * min(added)
    assert max(added) / every < BYTES_A_MICRO_STEP


def train(micro_steps: int, model: nn.Module, window: int = 1) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for i in range(1, micro_steps + 1):
        F.mse_loss(model(torch.ones(2, 3)), torch.zeros(2, 1)).backward()
        if i % window == 0:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(("every", "expected"), [(3, [1, 4, 7, 10]), (1, list(range(1, 13))), (0, list(range(1, 13)))])
def test_rows_of_parameters_at_every_nth_window(every, expected):
    """Counted from the first; rows of steps are there for all."""
    with stepscope.watch(every=every) as watching:
        train(24, nn.Linear(3, 1), window=2)
    assert watching.trace.params["global_step"].unique().tolist() == expected
    assert watching.trace.steps["micro_step"].tolist() == list(range(1, 25))


def test_rows_of_parameters_thin_out_by_themselves():
    """All of the first 200 windows, then every tenth."""
    with stepscope.watch() as watching:
        train(230, nn.Linear(3, 1))
    assert watching.trace.params["global_step"].unique().tolist() == [*range(1, 201), 210, 220, 230]


def test_recording_stops_and_the_script_goes_on(tmp_path):
    """After max_steps the patches are gone, what was seen is written, and the trace is whole at the end."""
    model = nn.Linear(3, 1)
    with stepscope.watch(out=tmp_path / "trace", max_steps=5) as watching:
        train(5, model)
        assert patches.installed()
        before = model.weight.detach().clone()
        train(4, model)
        assert not patches.installed()
        assert len(watching.trace.steps) == 5
    assert not torch.equal(model.weight, before)

    trace = Trace.load(tmp_path / "trace")
    assert trace.whole
    assert trace.meta["status"] == "complete"
    assert (trace.meta["stopped_at"], trace.meta["micro_steps"]) == (5, 5)
    assert trace.steps["micro_step"].tolist() == [1, 2, 3, 4, 5]
    assert trace.steps["calls"].tolist() == ["FBSZ"] * 5
    assert trace.events["event"].tolist().count("recording_stopped") == 1


def test_max_steps_that_is_not_reached():
    """Nothing is said of a stop."""
    with stepscope.watch(max_steps=5) as watching:
        train(5, nn.Linear(3, 1))
    assert len(watching.trace.steps) == 5
    assert "stopped_at" not in watching.trace.meta


def test_events_without_any_backward_are_written_on_the_way(tmp_path):
    """Steps on gradients made by hand have no row that could carry their events to the file."""
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.001)
    with stepscope.watch(out=tmp_path / "trace") as watching:
        for _ in range(2000):
            weight.grad = torch.ones(2)
            optimizer.step()
        held = len(watching._recorder._events)
    assert held <= 1024
    trace = Trace.load(tmp_path / "trace")
    assert trace.events["event"].tolist().count("step_without_backward") == 2000
