"""The folder that a trace is written to."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from stepscope.errors import StepscopeError
from stepscope.store.journal import FOLDER
from stepscope.store.trace import FINDINGS, META, REPORT

if TYPE_CHECKING:
    from pathlib import Path


def prepare_folder(folder: Path, *, force: bool = False, rank: int = 0) -> Path:
    """Make `folder` ready for a new trace.

    Args:
        folder: where the trace is to be written.
        force: replace a trace that is there. Only files that stepscope writes are removed.
        rank: with several processes, rank 0 decides whether the folder may be used; the others join.

    Raises:
        StepscopeError: it cannot be written, or it holds something and `force` is not given.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StepscopeError(
            f"cannot create {folder}: {error.strerror}", hint="choose another folder with --out"
        ) from error
    if not os.access(folder, os.W_OK):
        raise StepscopeError(f"cannot write to {folder}", hint="choose another folder with --out")
    if rank == 0 and not force and _ours(folder, None):
        raise StepscopeError(f"{folder} already holds a trace", hint="give --force to replace it, or another --out")
    for path in _ours(folder, None if rank == 0 else rank):
        path.unlink(missing_ok=True)
    return folder


def remove_trace(folder: Path) -> None:
    """Remove the files of a trace, and the folders that are empty then."""
    for path in _ours(folder, None):
        path.unlink(missing_ok=True)
    for place in (folder / FOLDER, folder):
        if place.is_dir() and not any(place.iterdir()):
            place.rmdir()


def free_folder(parent: Path, name: str) -> Path:
    """``parent/name``, or ``parent/name-2``, ``-3``, ... if a trace is there already."""
    number, folder = 1, parent / name
    while folder.exists() and any(folder.iterdir()):
        number += 1
        folder = parent / f"{name}-{number}"
    return folder


def _ours(folder: Path, rank: int | None) -> list[Path]:
    """Files of a trace in `folder`: those of one process, or of the first process and the whole."""
    if rank is not None:
        return [*folder.glob(f"rank{rank}.{META}"), *(folder / FOLDER).glob(f"rank{rank}-*.arrows")]
    whole = [folder / name for name in (META, FINDINGS, REPORT)]
    return [p for p in (*whole, folder / f"rank0.{META}", *(folder / FOLDER).glob("rank0-*.arrows")) if p.exists()]
