"""Runs each script of ``scripts/`` once alone and once watched, and keeps what both left behind."""

import functools
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).with_name("scripts")
ROOT = SCRIPTS.parents[2]

NEEDS = {
    "hf_trainer": ("transformers", "accelerate"),
    "trl_sft": ("trl", "transformers", "datasets"),
    "accelerate_loop": ("accelerate",),
    "lightning_trainer": ("lightning",),
    "fabric_loop": ("lightning",),
    "globals_config": (),
    "micro_step_schedule": (),
}
"""The scripts, and the libraries without which each is skipped."""


@dataclass(frozen=True)
class Ran:
    """One run: its exit code, its stdout, and its folder with ``final.pt``, ``log.json`` and, if watched, ``trace``."""

    code: int
    stdout: str
    stderr: str
    folder: Path

    @property
    def logged(self):
        """What the script logged at each optimizer step: ``loss``, ``learning_rate``, ``grad_norm``."""
        return json.loads((self.folder / "log.json").read_text("utf-8"))


def _run(folder, words):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=240
    )
    return Ran(done.returncode, done.stdout, done.stderr, folder)


@pytest.fixture(scope="session")
def both(tmp_path_factory):
    """``both(name)``: the pair of runs, native and watched, of one script; made once."""

    @functools.cache
    def both(name):
        missing = [library for library in NEEDS[name] if importlib.util.find_spec(library) is None]
        if missing:
            pytest.skip(f"{', '.join(missing)} is not installed (dependency group frameworks)")
        folder, script = tmp_path_factory.mktemp(name), str(SCRIPTS / f"{name}.py")
        watched = ["-m", "stepscope", "run", "--out", "trace", "--no-report", "--fail-on", "never", script]
        return _run(folder / "native", [script]), _run(folder / "watched", watched)

    return both


@pytest.fixture
def script():
    """``script(name)``: the path of a script."""
    return lambda name: str(SCRIPTS / f"{name}.py")
