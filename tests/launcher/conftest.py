"""Runs one program twice, by the interpreter alone and by the launcher, each in a process of its own."""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

DRIVER = Path(__file__).with_name("driver.py")
ROOT = DRIVER.parents[2]
SWITCHES = {"script": [], "module": ["-m"], "code": ["-c"]}


@dataclass(frozen=True)
class Ran:
    code: int
    stdout: str
    stderr: str


def run(command, cwd):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        command,
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    # The interpreter ends itself with SIGINT after a KeyboardInterrupt; a shell shows that as 130.
    code = 128 + signal.SIGINT if done.returncode == -signal.SIGINT else done.returncode
    return Ran(code, done.stdout, done.stderr)


@pytest.fixture
def natively(tmp_path):
    """``natively(kind, name, *args, options=())``: what the interpreter alone makes of the program."""

    def natively(kind, name, *args, options=()):
        return run([sys.executable, *options, *SWITCHES[kind], name, *args], tmp_path)

    return natively


@pytest.fixture
def launched(tmp_path):
    """``launched(kind, name, *args, options=())``: what the launcher makes of it."""

    def launched(kind, name, *args, options=()):
        return run([sys.executable, *options, str(DRIVER), kind, name, *args], tmp_path)

    return launched


@pytest.fixture
def watched(tmp_path):
    """``watched(kind, name, *args)``: the program under ``stepscope run``, its trace in the folder ``trace``."""

    def watched(kind, name, *args):
        options = ["--out", "trace", "--no-report", "--quiet", "--fail-on", "never"]
        return run([sys.executable, "-m", "stepscope", "run", *options, *SWITCHES[kind], name, *args], tmp_path)

    return watched


@pytest.fixture
def same(natively, launched):
    """Require the same exit code, stdout and stderr, byte for byte; return them for a look at what they say."""

    def same(kind, name, *args, options=()):
        native = natively(kind, name, *args, options=options)
        assert launched(kind, name, *args, options=options) == native
        return native

    return same


@pytest.fixture
def write(tmp_path):
    """``write(name, text)``: a file in the folder in which programs run."""

    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write
