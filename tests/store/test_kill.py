"""``kill -9`` at any moment: the trace opens and holds all but the last rows that had not been handed over."""

from __future__ import annotations

import random
import re
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from stepscope.store.trace import Trace

SCRIPT = textwrap.dedent("""
    import torch
    import stepscope
    torch.set_num_threads(1)
    net = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with stepscope.watch(out={out!r}):
        for i in range(10**6):
            net(torch.randn(8, 4)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if i % 10 == 9:
                print(i + 1, flush=True)
""")


def kill_after(folder, micro_steps: int, pause: float) -> int:
    """Start the loop, kill it some time after it has said `micro_steps`; returns the last number that it said."""
    script = SCRIPT.format(out=str(folder))
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = 0
        for line in process.stdout:
            said = int(line)
            if said >= micro_steps:
                break
        time.sleep(pause)
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read()
    numbers = re.findall(r"\d+(?=\n)", rest)
    return int(numbers[-1]) if numbers else said


@pytest.mark.parametrize("seed", range(4))
def test_a_killed_run_leaves_a_readable_trace(tmp_path, seed):
    """Rows are contiguous from the first; at most the batch under way (64 rows) and the open row are lost."""
    chance = random.Random(seed)
    folder = tmp_path / "trace"
    said = kill_after(folder, chance.choice([10, 150, 400]), chance.random() / 20)

    trace = Trace.load(folder)
    steps = trace.values("micro_step")

    assert not trace.whole
    assert steps.tolist() == list(range(1, len(steps) + 1))
    assert len(steps) >= said - 64 - 11
    assert not [v for v in trace.values("loss") if v != v]


def test_a_journal_cut_at_any_byte_opens(tmp_path):
    """The same without luck: every length of file is a moment of death."""
    import torch

    import stepscope

    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with stepscope.watch(out=tmp_path / "whole"):
        for _ in range(200):
            net(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    path = next((tmp_path / "whole" / "journal").glob("rank0-steps-*.arrows"))
    data = path.read_bytes()
    counts = []
    for length in [0, 1, 7, 8, *range(100, len(data), 2311), len(data) - 9, len(data) - 1]:
        path.write_bytes(data[:length])
        trace = Trace.load(tmp_path / "whole")
        assert not trace.whole
        steps = trace.values("micro_step")
        assert steps.tolist() == list(range(1, len(steps) + 1))
        counts.append(len(steps))
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert counts[-1] == 200

    path.write_bytes(data)
    assert Trace.load(tmp_path / "whole").whole
