"""Several processes of one run: which folder they share, who waits for whom, and who judges."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_WAIT = 60.0
"""Seconds that rank 0 waits for the others' parts before it judges what is there."""

_WAIT_AFTER_FAILURE = 3.0
"""The same where its own script failed: the others may hang in a collective until this process is gone."""


@dataclass(frozen=True, slots=True)
class Processes:
    """This process among those of its run, as torchrun's environment variables tell.

    Attributes:
        rank: its number.
        world_size: how many there are.
        run_id: the same in all of them and no other run; empty where there is one process.
    """

    rank: int = 0
    world_size: int = 1
    run_id: str = ""

    @property
    def several(self) -> bool:
        """Whether there is more than one."""
        return self.world_size > 1

    def share_folder(self, parent: Path, name: str) -> Path:
        """``parent/name``, or ``-2``, ``-3``, ... where another run has it; every process comes to the same one."""
        number, folder = 1, parent / name
        while any(_run_id(path) != self.run_id for path in folder.glob("*meta.json")):
            number += 1
            folder = parent / f"{name}-{number}"
        return folder

    def wait_for_parts(self, folder: Path, *, failed: bool) -> None:
        """Wait until every process has ended its part of the trace, or time is up."""
        deadline = time.monotonic() + (_WAIT_AFTER_FAILURE if failed else _WAIT)
        while not all(self._ended(folder, rank) for rank in range(self.world_size)) and time.monotonic() < deadline:
            time.sleep(0.05)

    def judges(self, folder: Path, *, failed: bool) -> bool:
        """Whether this process judges the run: rank 0 does.

        So does one whose script failed while rank 0 is still at work: the launcher may end rank 0 before it can. If
        it does not, rank 0 judges once more, with all there is.
        """
        return self.rank == 0 or (failed and not self._ended(folder, 0))

    def _ended(self, folder: Path, rank: int) -> bool:
        meta = _read(folder / f"rank{rank}.meta.json")
        return meta.get("run_id") == self.run_id and meta.get("status", "recording") != "recording"


def this_process() -> Processes:
    """What the environment says."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world_size < 2:
        return Processes()
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "MASTER_ADDR", "MASTER_PORT")
    return Processes(rank, world_size, ":".join(os.environ.get(name, "") for name in names))


@contextmanager
def undisturbed() -> Iterator[None]:
    """Let SIGTERM wait: the launcher sends it when another process ends badly, also after all training is done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)


def _run_id(path: Path) -> str | None:
    value = _read(path).get("run_id")
    return value if isinstance(value, str) else None


def _read(path: Path) -> dict[str, Any]:
    """A meta file, empty where there is none (yet)."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
