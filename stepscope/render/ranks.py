"""The processes of a run side by side: where they differ though data parallelism keeps them equal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from stepscope.render.words import grouped, number

if TYPE_CHECKING:
    import numpy.typing as npt

    from stepscope.render.chart import Floats, Ints
    from stepscope.render.rows import Points, Rows, Track

EQUAL = ("lr", "loss_scale_before", "step_skipped", "applied_steps", "grad_norm", "grad_norm_clipped", "param_norm")
"""Columns that data-parallel processes share at every optimizer step."""

TOLERANCE = 1e-5
"""Relative; reductions of the same float32 gradients in another order differ by less."""


@dataclass(frozen=True, slots=True)
class RankRow:
    """One process: number, figures as text, and the columns in which it stands alone."""

    rank: int
    cells: tuple[str, ...]
    differs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RankView:
    """All processes.

    Attributes:
        headers: titles of the cells.
        rows: one for each process.
        partings: for each column that differs, a sentence with the first step and the values.
    """

    headers: tuple[str, ...]
    rows: tuple[RankRow, ...]
    partings: tuple[str, ...]


def rank_view(rows: Rows) -> RankView | None:
    """The table of processes; None for a run of one process."""
    if len(rows.processes) < 2:
        return None
    odd: dict[int, list[str]] = {track.rank: [] for track in rows.processes}
    partings = [said for column in EQUAL if rows.has(column) and (said := _parting(rows, column, odd))]
    headers = ("micro-steps", "applied", "skipped", "first loss", "last loss", "targets", "mean grad norm")
    table = tuple(RankRow(t.rank, _cells(rows, t), tuple(odd[t.rank])) for t in rows.processes)
    return RankView(headers, table, tuple(partings))


def _cells(rows: Rows, track: Track) -> tuple[str, ...]:
    loss = rows.points("loss", track).finite().y
    norms = rows.points("grad_norm", track).finite().y
    skipped = rows.points("step_skipped", track).y
    applied = rows.points("applied_steps", track).y
    items = rows.points("num_items", track).y
    return (
        grouped(len(track.index)),
        number(float(applied[-1]) if len(applied) else None),
        number(float(skipped.sum()) if len(skipped) else None),
        number(float(loss[0]) if len(loss) else None),
        number(float(loss[-1]) if len(loss) else None),
        number(float(items.sum()) if len(items) else None),
        number(float(norms.mean()) if len(norms) else None),
    )


def _parting(rows: Rows, column: str, odd: dict[int, list[str]]) -> str:
    """Where a column first differs between processes, in a sentence; notes in `odd` who is not at the median."""
    by_rank = {t.rank: rows.points(column, t) for t in rows.processes}
    steps, table = _aligned(list(by_rank.values()))
    if not len(steps):
        return ""
    apart = ~_equal(table, table[0]).all(axis=0)
    if not apart.any():
        return ""
    for rank, values in zip(by_rank, table, strict=True):
        if not _equal(values, _usual(table)).all():
            odd[rank].append(column)
    at = int(np.flatnonzero(apart)[0])
    each = zip(by_rank, table[:, at].tolist(), strict=True)
    values = ", ".join(f"rank {rank} {number(value, digits=7)}" for rank, value in each)
    count = int(apart.sum())
    return (
        f"{column} differs first at micro-step {grouped(int(steps[at]))} ({values}); "
        f"in all at {grouped(count)} of {grouped(len(steps))} steps."
    )


def _usual(table: Floats) -> Floats:
    """The middle value of the processes at each step; NaN for two, of which neither is the usual one."""
    return np.sort(table, axis=0)[(len(table) - 1) // 2] if len(table) > 2 else np.full(table.shape[1], np.nan)


def _equal(a: Floats, b: Floats) -> npt.NDArray[np.bool_]:
    return np.isclose(a, b, rtol=TOLERANCE, atol=0.0, equal_nan=True)


def _aligned(each: list[Points]) -> tuple[Ints, Floats]:
    """Steps that every process has, and the values there, shape ``(processes, steps)``."""
    steps = each[0].x
    for points in each[1:]:
        steps = np.intersect1d(steps, points.x)
    return steps, np.array([p.y[np.searchsorted(p.x, steps)] for p in each])
