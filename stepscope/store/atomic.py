"""Files that are there whole or not at all."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def write_bytes(path: Path, data: bytes) -> None:
    """Write `data` to `path` so that a reader, or a crash, sees the old file or the new one and nothing between."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8, as `write_bytes` does."""
    write_bytes(path, text.encode("utf-8", "backslashreplace"))
