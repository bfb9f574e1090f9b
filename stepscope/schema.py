"""What a column is, and the format numbers of the files. No torch, no pyarrow.

Probes declare their columns with `Column`; the journal writes the declaration into the Arrow schema, so that a trace
describes itself and nothing that reads one needs the probes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TRACE_FORMAT = 1
"""Format number of the trace directory; raised when an older reader could misread a newer trace."""

FINDINGS_FORMAT = 1
"""Format number of findings.json."""

JOURNAL = "journal"
META = "meta.json"
FINDINGS = "findings.json"
REPORT = "report.html"
"""What lies in a trace directory: the folder of the streams, and the files beside it."""

DType = Literal["int64", "float64", "bool", "string"]
Table = Literal["steps", "params", "events"]

TABLES: tuple[Table, ...] = ("steps", "params", "events")


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a trace table.

    Attributes:
        name: the column's name; per-group columns of groups beyond the first add ``/pg2``, ``/pg3``, ...
        dtype: ``int64``, ``float64``, ``bool`` or ``string``.
        unit: ``1`` for pure numbers, ``ms``, ``targets``, ``micro-steps``, ...
        meaning: one sentence that names the stage (scaled or unscaled, before or after the clip).
        null_when: when a cell is null; empty if never.
    """

    name: str
    dtype: DType
    unit: str
    meaning: str
    null_when: str = ""


KEYS = (
    Column("rank", "int64", "1", "process that recorded the row"),
    Column("micro_step", "int64", "micro-steps", "number of the backward pass, from 1 over the run"),
)
"""Columns that identify a row in every table; written by the recorder itself."""

EVENT_COLUMNS = (
    KEYS[0],
    Column("seq", "int64", "1", "order of the event in its process, from 1"),
    Column("micro_step", "int64", "micro-steps", "backward passes begun when the event happened"),
    Column("optimizer", "string", "", "optimizer concerned", "the event concerns none"),
    Column("event", "string", "", "what happened"),
    Column("detail", "string", "JSON", "what else is known of it", "nothing else is known"),
)
"""The table of events has fixed columns; what differs between events is in `detail`."""


def group_column(name: str, group: int) -> str:
    """Name of a per-group column: ``lr`` for group 1, ``lr/pg2`` for group 2 (Lightning's numbering)."""
    return name if group <= 1 else f"{name}/pg{group}"
