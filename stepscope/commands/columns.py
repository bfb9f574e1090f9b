"""``stepscope columns``: every column that can be recorded, with its unit, its meaning and when it is null."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from stepscope.errors import EXIT_CLEAN, StepscopeError
from stepscope.schema import EVENT_COLUMNS, TABLES, Column

if TYPE_CHECKING:
    from stepscope.schema import Table


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("columns")(columns)


def columns(
    table: Annotated[
        str | None, typer.Option(metavar="TABLE", help="Only this table: steps, params or events.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> int:
    """List every column of a trace: its type, its unit, what it means and when it is null."""
    if table is not None and table not in TABLES:
        raise StepscopeError(f"no table {table!r}", hint=f"choose one of {', '.join(TABLES)}")
    chosen = {t: declared(t) for t in TABLES if table in (None, t)}
    sys.stdout.write(_json(chosen) if json else _text(chosen))
    return EXIT_CLEAN


def declared(table: Table) -> tuple[Column, ...]:
    """The columns of a table, in the order in which they are recorded."""
    if table == "events":
        return EVENT_COLUMNS
    from stepscope.probes import param_columns, step_columns

    return tuple(step_columns() if table == "steps" else param_columns())


def _json(chosen: dict[Table, tuple[Column, ...]]) -> str:
    import json

    listed = {table: [asdict(column) for column in found] for table, found in chosen.items()}
    return json.dumps(listed, indent=2, ensure_ascii=False) + "\n"


_ONE_ROW = {"steps": "a micro-step", "params": "an optimizer step and parameter", "events": "a call"}


def _text(chosen: dict[Table, tuple[Column, ...]]) -> str:
    lines = []
    for table, found in chosen.items():
        lines += [f"{table}: one row {_ONE_ROW[table]}", *(f"  {_described(column)}" for column in found), ""]
    return "\n".join(lines)


def _described(column: Column) -> str:
    unit = f" [{column.unit}]" if column.unit not in ("", "1") else ""
    null = f" Null when {column.null_when.rstrip('.')}." if column.null_when else ""
    return f"{column.name} ({column.dtype}){unit}: {column.meaning.rstrip('.')}.{null}"
