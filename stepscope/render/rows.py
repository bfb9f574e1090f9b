"""Columns of `steps` as points over micro-steps, one track per process and optimizer; numpy and Arrow only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from stepscope.render.chart import distinct
from stepscope.render.words import one_line

if TYPE_CHECKING:
    from stepscope.render.chart import Floats, Ints
    from stepscope.store.trace import Trace


class Points(NamedTuple):
    """Observed cells of a column in order of the step: micro-steps and values, NaN and infinities included."""

    x: Ints
    y: Floats

    def finite(self) -> Points:
        """Without what is not finite."""
        fine = np.isfinite(self.y)
        return Points(self.x[fine], self.y[fine])


@dataclass(frozen=True, slots=True)
class Track:
    """Rows of one process, or of one optimizer in it.

    Attributes:
        rank: process.
        optimizer: name of the optimizer, None where the track is of the process.
        label: how a legend tells it from the others; empty if it is the only one.
        index: row numbers in order of the micro-step.
    """

    rank: int
    optimizer: str | None
    label: str
    index: Ints


class Rows:
    """Access to the steps of a trace for everything that draws or sums them.

    Args:
        trace: the recorded run.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.micro_step: Ints = np.nan_to_num(trace.values("micro_step")).astype(np.int64)
        self._columns: dict[str, tuple[Floats, npt.NDArray[np.bool_]]] = {}

    def __len__(self) -> int:
        return len(self.micro_step)

    def has(self, *names: str) -> bool:
        """Whether each of `names` was observed at least once."""
        return self.trace.has(*names)

    def column(self, name: str) -> tuple[Floats, npt.NDArray[np.bool_]]:
        """Values (NaN where null) and where the column was observed; both of shape ``(rows,)``."""
        if name not in self._columns:
            self._columns[name] = (self.trace.values(name), self.trace.valid(name))
        return self._columns[name]

    def group_columns(self, name: str) -> tuple[str, ...]:
        """`name`, ``name/pg2``, ``name/pg3``, … as far as they have values, in order of the group."""
        held = [c for c in self.trace.tables["steps"].column_names if c == name or c.startswith(f"{name}/pg")]
        return tuple(sorted(filter(self.has, held), key=lambda c: (len(c), c)))

    def points(self, name: str, track: Track) -> Points:
        """The observed cells of `name` in `track`."""
        values, valid = self.column(name)
        index = track.index[valid[track.index]]
        return Points(self.micro_step[index], values[index])

    def text(self, name: str, row: int) -> str:
        """One cell of a column of texts; empty where it is null."""
        return str(self.trace.tables["steps"][name][row].as_py() or "")

    def steps_where(self, name: str) -> Ints:
        """Micro-steps at which the truth value `name` was observed to be true, over all tracks."""
        values, valid = self.column(name)
        return distinct(self.micro_step[valid & (values != 0)])

    @cached_property
    def steps(self) -> Ints:
        """The micro-steps of the run, ascending."""
        return distinct(self.micro_step)

    @cached_property
    def ranks(self) -> Ints:
        """Process of each row; 0 where it was not recorded."""
        ranks: Ints = np.nan_to_num(self.trace.values("rank")).astype(np.int64)
        return ranks

    @cached_property
    def processes(self) -> tuple[Track, ...]:
        """A track per process with one row a micro-step, for what does not depend on the optimizer."""
        numbers = distinct(self.ranks).tolist()
        return tuple(self._process(rank, several=len(numbers) > 1) for rank in numbers)

    def _process(self, rank: int, *, several: bool) -> Track:
        index = self._ordered(np.flatnonzero(self.ranks == rank))
        steps = self.micro_step[index]
        first = np.append(True, steps[1:] != steps[:-1])[: len(steps)]
        return Track(rank, None, f"rank {rank}" if several else "", index[first])

    @cached_property
    def optimizers(self) -> tuple[Track, ...]:
        """A track per process and optimizer."""
        codes, names = self._optimizer_codes
        several_ranks, several_optimizers = len(self.processes) > 1, len(names) > 1
        tracks = []
        for process in self.processes:
            mine = self.ranks == process.rank
            for code in np.unique(codes[mine]).tolist():
                label = [process.label] if several_ranks else []
                label += [one_line(names[code])] if several_optimizers else []
                index = self._ordered(np.flatnonzero(mine & (codes == code)))
                tracks.append(Track(process.rank, names[code], ", ".join(label), index))
        return tuple(tracks)

    @cached_property
    def _optimizer_codes(self) -> tuple[Ints, list[str]]:
        table = self.trace.tables["steps"]
        if "optimizer" not in table.column_names or not len(table):
            return np.zeros(len(table), dtype=np.int64), ["optimizer"]
        encoded = table["optimizer"].combine_chunks().cast(pa.string()).dictionary_encode()
        codes = pc.fill_null(encoded.indices, -1).to_numpy(zero_copy_only=False).astype(np.int64)
        names = [*encoded.dictionary.to_pylist()] or ["optimizer"]
        if len(names) == 1:
            codes = np.zeros_like(codes)
        return np.where(codes < 0, len(names), codes), ([*names, "no optimizer"] if (codes < 0).any() else names)

    def _ordered(self, index: Ints) -> Ints:
        return index[np.argsort(self.micro_step[index], kind="stable")]
