"""The folder that a trace is written to."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from stepscope.errors import StepscopeError
from stepscope.schema import FINDINGS, JOURNAL, META, REPORT

if TYPE_CHECKING:
    from pathlib import Path


def prepare_folder(folder: Path, *, force: bool = False, rank: int = 0, world_size: int = 1) -> Path:
    """Make `folder` ready for a new trace.

    Args:
        folder: where the trace is to be written.
        force: replace a trace that is there. Only files that stepscope writes are removed.
        rank: the process. Each looks at what it would overwrite itself, whichever of them comes first; rank 0 also at
            the files of the whole and at parts of processes that this run does not have.
        world_size: number of processes.

    Raises:
        StepscopeError: it cannot be written, or it holds a trace and `force` is not given.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StepscopeError(
            f"cannot create {folder}: {error.strerror}", hint="choose another folder with --out"
        ) from error
    if not os.access(folder, os.W_OK):
        raise StepscopeError(f"cannot write to {folder}", hint="choose another folder with --out")
    held = _part(folder, rank) + ([*_whole(folder), *_beyond(folder, world_size)] if rank == 0 else [])
    if not force and (held or (folder / META).exists()):
        raise StepscopeError(f"{folder} already holds a trace", hint="give --force to replace it, or another --out")
    for path in held:
        path.unlink(missing_ok=True)
    return folder


def remove_trace(folder: Path) -> None:
    """Remove the files of a trace, and the folders that are empty then."""
    for path in (*_whole(folder), *_beyond(folder, 0)):
        path.unlink(missing_ok=True)
    for place in (folder / JOURNAL, folder):
        if place.is_dir() and not any(place.iterdir()):
            place.rmdir()


def free_folder(parent: Path, name: str) -> Path:
    """``parent/name``, or ``parent/name-2``, ``-3``, ... if a trace is there already."""
    number, folder = 1, parent / name
    while folder.exists() and any(folder.iterdir()):
        number += 1
        folder = parent / f"{name}-{number}"
    return folder


def _whole(folder: Path) -> list[Path]:
    """Files that belong to no single process."""
    return [p for name in (META, FINDINGS, REPORT) if (p := folder / name).exists()]


def _part(folder: Path, rank: int) -> list[Path]:
    """Files of one process."""
    return [*folder.glob(f"rank{rank}.{META}"), *(folder / JOURNAL).glob(f"rank{rank}-*.arrows")]


def _beyond(folder: Path, world_size: int) -> list[Path]:
    """Files of processes with a number that this run does not have: an earlier run had more."""
    found = [*folder.glob(f"rank*.{META}"), *(folder / JOURNAL).glob("rank*-*.arrows")]
    return [p for p in found if (n := _NUMBER.match(p.name)) is not None and int(n[1]) >= world_size]


_NUMBER = re.compile(r"rank(\d+)")
