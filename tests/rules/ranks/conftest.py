"""Every loop of two processes, recorded once by one torchrun."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def torchrun(*words, cwd=ROOT, check=True, **environment):
    """Two processes on this machine; returns the finished launcher."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"} | environment
    ran = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert not check or ran.returncode == 0, ran.stderr[-3000:]
    return ran


@pytest.fixture(scope="session")
def recorded(tmp_path_factory):
    """The folder that holds the trace of each loop."""
    out = tmp_path_factory.mktemp("ranks")
    torchrun("-m", "tests.rules.loops.ranks", str(out))
    return out
