"""Where a recorder puts its rows: a trace directory on disk, or memory for a notebook."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from stepscope.schema import JOURNAL, META, TRACE_FORMAT, Column, Table
from stepscope.store.folder import remove_trace
from stepscope.store.journal import TableWriter, arrow_schema, record_batch
from stepscope.store.jsonio import write_json
from stepscope.store.trace import Trace

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


class Store(ABC):
    """Takes rows of the three tables and the facts of the run.

    Attributes:
        rank: number of this process.
        bytes_written: size of the journal so far.
    """

    rank: int = 0
    bytes_written: int = 0

    @abstractmethod
    def open(self, steps: Sequence[Column], params: Sequence[Column], events: Sequence[Column]) -> None:
        """Get ready for rows with these columns."""

    @abstractmethod
    def append(self, table: Table, rows: Sequence[dict[str, Any]]) -> None:
        """Take rows; every key must be a declared column."""

    def flush(self) -> None:  # noqa: B027 - memory has nothing to flush
        """Make sure that a killed process loses none of what was appended."""

    @abstractmethod
    def close(self) -> None:
        """End the journal."""

    @abstractmethod
    def write_meta(self, meta: dict[str, Any]) -> None:
        """Keep the facts of the run."""

    def discard(self) -> None:  # noqa: B027 - memory is let go of by itself
        """Remove what was written."""

    @abstractmethod
    def trace(self) -> Trace:
        """What has been written so far."""


class DirectoryStore(Store):
    """A trace directory. With several processes each writes its own files."""

    def __init__(self, folder: Path, rank: int = 0, world_size: int = 1) -> None:
        self.folder = folder
        self.rank = rank
        self._ranked = world_size > 1
        self._writers: dict[Table, TableWriter] = {}

    def open(self, steps: Sequence[Column], params: Sequence[Column], events: Sequence[Column]) -> None:
        """Create the journal folder and the writers."""
        journal = self.folder / JOURNAL
        journal.mkdir(parents=True, exist_ok=True)
        named: tuple[tuple[Table, Sequence[Column]], ...] = (("steps", steps), ("params", params), ("events", events))
        self._writers = {table: TableWriter(journal, self.rank, table, columns) for table, columns in named}

    def append(self, table: Table, rows: Sequence[dict[str, Any]]) -> None:
        """Write one batch."""
        self._writers[table].append(rows)

    def close(self) -> None:
        """End the streams."""
        for writer in self._writers.values():
            writer.close()
        self.bytes_written = sum(p.stat().st_size for p in (self.folder / JOURNAL).glob(f"rank{self.rank}-*"))

    def write_meta(self, meta: dict[str, Any]) -> None:
        """Write meta.json; with several processes ``rankN.meta.json``."""
        name = f"rank{self.rank}.{META}" if self._ranked else META
        write_json(self.folder / name, {"format": TRACE_FORMAT, **meta})

    def discard(self) -> None:
        """Remove the trace, and the folders that are empty then."""
        remove_trace(self.folder)

    def trace(self) -> Trace:
        """Read it back."""
        return Trace.load(self.folder)


class MemoryStore(Store):
    """Keeps everything in memory as Arrow batches."""

    def __init__(self) -> None:
        self._schemas: dict[Table, pa.Schema] = {}
        self._batches: dict[Table, list[pa.RecordBatch]] = {}
        self._meta: dict[str, Any] = {}

    def open(self, steps: Sequence[Column], params: Sequence[Column], events: Sequence[Column]) -> None:
        """Note the schemas."""
        self._schemas = {"steps": arrow_schema(steps), "params": arrow_schema(params), "events": arrow_schema(events)}
        self._batches = {table: [] for table in self._schemas}

    def append(self, table: Table, rows: Sequence[dict[str, Any]]) -> None:
        """Keep one batch."""
        if rows:
            schema = self._schemas[table]
            batch = record_batch(rows, schema)
            self._batches[table].append(batch)
            self.bytes_written += batch.nbytes

    def close(self) -> None:
        """Nothing to end."""

    def write_meta(self, meta: dict[str, Any]) -> None:
        """Keep a copy."""
        self._meta = {"format": TRACE_FORMAT, **meta}

    def trace(self) -> Trace:
        """The rows so far as a trace."""
        tables = {t: pa.Table.from_batches(b, schema=self._schemas[t]) for t, b in self._batches.items()}
        return Trace(tables, dict(self._meta), whole=self._meta.get("status") != "recording")
