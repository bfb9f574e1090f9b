"""The journal: Arrow streams that grow while a run is recorded and stay readable after a ``kill -9``.

One stream for each table and process, ``journal/rank0-steps-000.arrows``. A stream's schema is fixed, so a column that
appears later (a parameter group that was added) starts the next segment. Reading takes every complete batch and stops
at a torn tail.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa

from stepscope.schema import Column, DType, Table

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

_ARROW: dict[DType, pa.DataType] = {
    "int64": pa.int64(),
    "float64": pa.float64(),
    "bool": pa.bool_(),
    "string": pa.string(),
}


def arrow_schema(columns: Iterable[Column]) -> pa.Schema:
    """The Arrow schema of `columns`, with unit, meaning and null rule as metadata of each field."""
    return pa.schema(
        [
            pa.field(c.name, _ARROW[c.dtype], metadata={"unit": c.unit, "meaning": c.meaning, "null_when": c.null_when})
            for c in columns
        ]
    )


def record_batch(rows: Sequence[dict[str, Any]], schema: pa.Schema) -> pa.RecordBatch:
    """Rows as one Arrow batch. A value that its column cannot hold becomes null: a script may set ``lr`` to anything."""
    return pa.RecordBatch.from_arrays(
        [_array([row.get(f.name) for row in rows], f.type) for f in schema], schema=schema
    )


def warm_up() -> None:
    """Let pyarrow load what it loads at its first conversion (pandas, half a second): not in the middle of training."""
    pa.array([None, 1.0])


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    try:
        return pa.array(values, type=kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        return pa.array([v if _fits(v, kind) else None for v in values], type=kind)


def _fits(value: Any, kind: pa.DataType) -> bool:
    try:
        pa.scalar(value, type=kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        return False
    return True


def columns_of(schema: pa.Schema) -> tuple[Column, ...]:
    """The declarations that a stream's schema carries; the reverse of `arrow_schema`."""
    names: dict[pa.DataType, DType] = {v: k for k, v in _ARROW.items()}

    def column(field: pa.Field) -> Column:
        said = {k.decode(): v.decode() for k, v in (field.metadata or {}).items()}
        return Column(
            field.name,
            names.get(field.type, "string"),
            said.get("unit", ""),
            said.get("meaning", ""),
            said.get("null_when", ""),
        )

    return tuple(column(f) for f in schema)


class TableWriter:
    """Appends rows of one table to its stream; a new column starts a new segment.

    Args:
        folder: the journal folder, which exists.
        rank: process number, part of the file name.
        table: which table.
        columns: the columns known so far; `extend` adds more.
    """

    def __init__(self, folder: Path, rank: int, table: Table, columns: Sequence[Column]) -> None:
        self._stem = folder / f"rank{rank}-{table}"
        self._columns = list(columns)
        self._segment = 0
        self._file: Any = None
        self._writer: pa.RecordBatchStreamWriter | None = None

    def extend(self, columns: Iterable[Column]) -> None:
        """Declare further columns; rows written before hold null there."""
        new = [c for c in columns if c.name not in {known.name for known in self._columns}]
        if new:
            self._columns += new
            self.close()

    def append(self, rows: Sequence[dict[str, Any]]) -> None:
        """Write `rows` as one batch and hand it to the operating system; keys that no column declares raise KeyError."""
        if not rows:
            return
        names = {c.name for c in self._columns}
        if stray := {key for row in rows for key in row} - names:
            raise KeyError(f"undeclared columns: {', '.join(sorted(stray))}")
        if self._writer is None:
            self._open()
        assert self._writer is not None
        schema = self._writer_schema
        self._writer.write_batch(record_batch(rows, schema))
        self._file.flush()

    def _open(self) -> None:
        self._writer_schema = arrow_schema(self._columns)
        self._file = self._stem.with_name(f"{self._stem.name}-{self._segment:03d}.arrows").open("wb")
        self._writer = pa.ipc.new_stream(self._file, self._writer_schema)
        self._segment += 1

    def close(self) -> None:
        """End the current segment; a later `append` starts the next."""
        if self._writer is not None:
            self._writer.close()
            self._file.close()
            self._writer = self._file = None


def read_segments(folder: Path, rank: int, table: Table) -> tuple[pa.Table | None, bool]:
    """All complete batches of a table of one process, and whether every stream ended as it should.

    Returns:
        The rows (None where there is no file) and False where a stream has no proper end: the run was killed, or it is
        still being recorded.
    """
    pieces, whole = [], True
    for path in sorted(folder.glob(f"rank{rank}-{table}-*.arrows")):
        piece, ended = _read_stream(path)
        whole &= ended
        if piece is not None:
            pieces.append(piece)
    if not pieces:
        return None, whole
    return pa.concat_tables(pieces, promote_options="default"), whole


def _read_stream(path: Path) -> tuple[pa.Table | None, bool]:
    """The complete batches of one stream, and whether its end mark was there.

    The file is mapped, not read: a long trace costs the memory of the columns that are looked at.
    """
    if path.stat().st_size == 0:  # nothing to map
        return None, False
    source = pa.memory_map(str(path))
    batches: list[pa.RecordBatch] = []
    try:
        reader = pa.ipc.open_stream(source)
    except (pa.ArrowInvalid, OSError):
        return None, False
    ended = _has_end_mark(path)
    while True:
        try:
            batches.append(reader.read_next_batch())
        except StopIteration:
            break
        except (pa.ArrowInvalid, OSError):
            ended = False
            break
    return pa.Table.from_batches(batches, schema=reader.schema), ended


def _has_end_mark(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-min(len(_END_OF_STREAM), path.stat().st_size), 2)
        return file.read() == _END_OF_STREAM


_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
"""Arrow IPC streaming format: the continuation mark followed by a length of zero."""
