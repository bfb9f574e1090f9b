"""A recorded run as plain data: what every rule, report and comparison reads. Needs no torch."""

from __future__ import annotations

import importlib
import json
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stepscope.errors import StepscopeError
from stepscope.schema import EVENT_COLUMNS, FINDINGS, JOURNAL, KEYS, META, TABLES, TRACE_FORMAT, Column, Table
from stepscope.store.journal import arrow_schema, columns_of, read_segments

if TYPE_CHECKING:
    import pandas as pd


_EMPTY: dict[Table, tuple[Column, ...]] = {"steps": KEYS, "params": KEYS, "events": EVENT_COLUMNS}


class Trace:
    """One recorded run: `steps`, `params` and `events` as DataFrames, `findings`, and `meta`.

    Null and NaN are kept apart: null (``<NA>``) is "not observed", NaN is a value that was seen.

    Args:
        tables: Arrow tables by name; missing ones are empty.
        meta: facts of the run (versions, command, optimizers, parameters, what was not observed and why).
        path: the directory that it was read from, None for a trace built in memory.
        whole: False where the recording was cut off.
    """

    def __init__(
        self,
        tables: dict[Table, pa.Table],
        meta: dict[str, Any],
        *,
        path: Path | None = None,
        whole: bool = True,
    ) -> None:
        self.tables: dict[Table, pa.Table] = {t: tables.get(t, arrow_schema(_EMPTY[t]).empty_table()) for t in TABLES}
        self.meta = meta
        self.path = path
        self.whole = whole

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a trace directory, also one whose recording was cut off.

        Raises:
            StepscopeError: there is no trace at `path`, it is damaged, or a newer stepscope wrote it.
        """
        folder = Path(path)
        meta = _read_meta(folder)
        ranks = sorted(int(p.name.removeprefix("rank").split(".")[0]) for p in folder.glob("rank*.meta.json"))
        pieces: dict[Table, list[pa.Table]] = {t: [] for t in TABLES}
        whole = meta.get("status", "recording") != "recording"
        for rank in ranks or [0]:
            for table in TABLES:
                piece, ended = read_segments(folder / JOURNAL, rank, table)
                whole &= ended
                if piece is not None:
                    pieces[table].append(piece)
        if ranks:
            meta["ranks"] = {str(r): _read_json(folder / f"rank{r}.meta.json") for r in ranks}
            missing = len(ranks) < int(meta.get("world_size", len(ranks)))
            whole &= not missing and all(m.get("status") != "recording" for m in meta["ranks"].values())
        tables = {t: pa.concat_tables(p, promote_options="default") for t, p in pieces.items() if p}
        return cls(tables, meta, path=folder, whole=whole)

    @cached_property
    def steps(self) -> pd.DataFrame:
        """One row a micro-step (and optimizer); quantities of a window stand in its last row."""
        return self._frame("steps")

    @cached_property
    def params(self) -> pd.DataFrame:
        """One row per recorded optimizer step and parameter."""
        return self._frame("params")

    @cached_property
    def events(self) -> pd.DataFrame:
        """The ordered calls: rank, seq, micro_step, optimizer, event, detail (JSON text)."""
        return self._frame("events")

    @cached_property
    def findings(self) -> pd.DataFrame:
        """The findings: those of findings.json where the run was judged when it ended, else judged now."""
        import pandas as pd

        columns = ["code", "name", "severity", "message", "first_step", "last_step", "evidence"]
        return pd.DataFrame(self.verdict.get("findings", []), columns=columns)

    @cached_property
    def verdict(self) -> dict[str, Any]:
        """The envelope of findings.json: as it was judged when the run ended, else judged now (see `findings`)."""
        if self.path is not None and (self.path / FINDINGS).exists():
            return _read_json(self.path / FINDINGS)
        return dict(_later("stepscope.render.envelope").judged_now(self))

    @property
    def complete(self) -> bool:
        """Whether everything was seen: neither was the recording cut off nor did a probe fail."""
        return self.whole and not self.meta.get("probes_off")

    @property
    def columns(self) -> dict[Table, tuple[Column, ...]]:
        """The declared columns of each table: dtype, unit, meaning, when null."""
        return {t: columns_of(self.tables[t].schema) for t in TABLES}

    def has(self, *names: str, table: Table = "steps") -> bool:
        """Whether every one of `names` is a column with at least one value."""
        held = self.tables[table]
        return all(n in held.column_names and held[n].null_count < len(held) for n in names)

    def values(self, name: str, *, table: Table = "steps") -> npt.NDArray[Any]:
        """A column as a numpy array: float64 with NaN where null (bool and int as float64), object for strings.

        Returns:
            Shape ``(rows,)``; all NaN (or None for strings) where the column is absent.
        """
        held = self.tables[table]
        if name not in held.column_names:
            return np.full(len(held), np.nan)
        column = held[name].combine_chunks()
        if pa.types.is_string(held.schema.field(name).type):
            return np.array(column.to_pylist(), dtype=object)
        return np.asarray(column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False), dtype=np.float64)

    def valid(self, name: str, *, table: Table = "steps") -> npt.NDArray[np.bool_]:
        """Where a column was observed (a NaN that was seen counts). Shape ``(rows,)``."""
        held = self.tables[table]
        if name not in held.column_names:
            return np.zeros(len(held), dtype=np.bool_)
        return np.asarray(held[name].is_valid().to_numpy(), dtype=np.bool_)

    def details(self, *events: str) -> list[dict[str, Any]]:
        """Events of the given names in order, each as a dict of its columns with `detail` parsed."""
        held = self.tables["events"]
        if not len(held):
            return []
        import pyarrow.compute as pc

        chosen = held.filter(pc.is_in(held["event"], pa.array(events, pa.string()))).to_pylist()
        return [{**row, "detail": json.loads(row["detail"]) if row["detail"] else {}} for row in chosen]

    def _frame(self, table: Table) -> pd.DataFrame:
        import pandas as pd

        frame: pd.DataFrame = self.tables[table].to_pandas(types_mapper=pd.ArrowDtype)
        return frame

    def __repr__(self) -> str:
        where = self.path if self.path is not None else "memory"
        return f"Trace({where}: {len(self.tables['steps'])} rows of steps{'' if self.whole else ', cut off'})"

    def figures(self) -> dict[str, Any]:
        """Plotly figures by name (``loss``, ``lr``, ``loss-scale``, ``grad-norm``, ...), for a notebook."""
        return dict(_later("stepscope.render.notebook").figures(self))

    def _repr_html_(self) -> str:
        return str(_later("stepscope.render.notebook").summary_html(self))


def _read_meta(folder: Path) -> dict[str, Any]:
    """The facts of a run, after making sure that `folder` is a trace that this version can read."""
    if not folder.is_dir():
        raise StepscopeError(
            f"no trace directory at {folder}", hint="record one with `stepscope trace` or `stepscope run`"
        )
    path = next((p for p in (folder / META, folder / "rank0.meta.json") if p.exists()), None)
    if path is None:
        path = next(iter(sorted(folder.glob("rank*.meta.json"))), None)
    if path is None:
        raise StepscopeError(
            f"{folder} is not a trace directory: it has no {META}", hint="give the --out folder of a run"
        )
    meta = _read_json(path)
    number = meta.get("format")
    if not isinstance(number, int):
        raise StepscopeError(f"{path} was not written by stepscope: it has no format number")
    if number > TRACE_FORMAT:
        raise StepscopeError(
            f"{folder} has trace format {number}, this stepscope reads up to {TRACE_FORMAT}", hint="upgrade stepscope"
        )
    return meta


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise StepscopeError(
            f"cannot read {path}: {error}", hint="the file is damaged; record the run again"
        ) from error
    if not isinstance(value, dict):
        raise StepscopeError(f"cannot read {path}: it does not hold an object")
    return value


def _later(name: str) -> Any:
    """What judges and shows a trace; known here by name only, since the store depends on no rule and no renderer."""
    return importlib.import_module(name)
