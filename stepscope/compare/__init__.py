"""Two recorded runs side by side: the first micro-step and column in which they part, and what led there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from stepscope.compare.align import Pair, cell, find_offset, tracks
from stepscope.compare.context import before, notes, parameters
from stepscope.compare.tolerance import HOST_RTOL, relative, tolerance
from stepscope.errors import StepscopeError

if TYPE_CHECKING:
    from stepscope.store.trace import Trace

ORDER = (
    "calls",
    "num_items",
    "loss",
    "aux_loss",
    "loss_weight",
    "loss_scale_before",
    "loss_scaled",
    "grad_norm_scaled",
    "grad_norm",
    "grad_nonfinite",
    "clip_max_norm",
    "clip_coef",
    "clip_bound",
    "grad_norm_clipped",
    "found_inf",
    "step_skipped",
    "lr",
    "update_norm",
    "update_ratio",
    "param_norm",
    "loss_scale_after",
)
"""In which order a step computes its values: of columns that part at one step, the earlier is nearer the cause."""

POSITION = ("rank", "micro_step", "optimizer", "epoch", "global_step", "applied_steps", "bytes_written")
"""Columns that say where a row stands; they shift in a resumed run and are not compared."""


@dataclass(frozen=True, slots=True)
class Parting:
    """Where a column first differs by more than its tolerance.

    Attributes:
        column: of `steps`.
        micro_step: of the first run.
        track: process and optimizer, empty if there is one.
        values: in the first run and in the other; None where null, texts for texts.
        difference: relative, infinite where only one is finite; None for counts, truth values and texts.
        tolerance: relative difference that was allowed.
        steps: micro-steps at which it differs.
    """

    column: str
    micro_step: int
    track: str
    values: tuple[Any, Any]
    difference: float | None
    tolerance: float
    steps: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """What two runs have in common and where they part.

    Attributes:
        same: whether nothing parts.
        aligned: micro-steps of the first run that both have.
        offset: what is added to the other run's micro-step to give the first one's.
        tolerance: relative difference allowed for measured values.
        partings: by step, then in the order in which a step computes its values.
        before: values of both runs at the steps before and at the first parting: micro-step, column, both values.
        parameters: parameters that part first, with their step, column and values.
        notes: what to know: different lengths, a resumed run, columns that only one has.
        compared: names of the columns compared.
    """

    same: bool
    aligned: npt.NDArray[np.int64]
    offset: int
    tolerance: float
    partings: tuple[Parting, ...] = ()
    before: tuple[dict[str, Any], ...] = ()
    parameters: tuple[dict[str, Any], ...] = ()
    notes: tuple[str, ...] = ()
    compared: tuple[str, ...] = ()


def compare(
    first: Trace, other: Trace, *, exact: bool = False, rtol: float | None = None, offset: int | None = None
) -> Comparison:
    """Compare two runs step by step.

    Args:
        first: the run that the other is held against.
        other: the other run.
        exact: whether every bit must agree.
        rtol: relative difference to allow in measured values instead of the derived one.
        offset: added to the other run's micro-steps; found by itself where None.

    Raises:
        StepscopeError: the runs have no micro-step in common.
    """
    allowed = 0.0 if exact else tolerance(first, other) if rtol is None else rtol
    shift = find_offset(first, other, allowed) if offset is None else offset
    pairs = list(tracks(first, other, shift))
    steps = np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *(p.steps for p in pairs)]))
    if not len(steps):
        raise StepscopeError(
            "the runs have no micro-step in common", hint="give --offset if one of them resumes the other"
        )
    columns = _columns(first, other)
    found = [p for pair in pairs for c in columns if (p := _parting(pair, c, 0.0 if exact else _allowed(c, allowed)))]
    partings = tuple(sorted(found, key=lambda p: (p.micro_step, _causal(p.column))))
    return Comparison(
        same=not partings,
        aligned=steps,
        offset=shift,
        tolerance=allowed,
        partings=partings,
        before=tuple(before(pairs, partings[0].track, partings[0].micro_step, [p.column for p in partings[:4]]))
        if partings
        else (),
        parameters=tuple(parameters(first, other, shift, allowed)) if partings else (),
        notes=tuple(notes(first, other, shift, steps)),
        compared=tuple(columns),
    )


def _columns(first: Trace, other: Trace) -> list[str]:
    """Columns that both runs observed and that must agree: no positions, no times."""
    timed = {c.name for run in (first, other) for c in run.columns["steps"] if c.unit == "ms"}
    names = first.tables["steps"].column_names
    return [n for n in names if n not in POSITION and n not in timed and first.has(n) and other.has(n)]


def _causal(column: str) -> int:
    base = column.partition("/")[0]
    return ORDER.index(base) if base in ORDER else len(ORDER)


def _allowed(column: str, measured: float) -> float:
    return min(HOST_RTOL, measured) if column.partition("/")[0] == "lr" else measured


def _parting(pair: Pair, column: str, allowed: float) -> Parting | None:
    """Where `column` first differs in a pair of tracks, None where it does not."""
    measured = any(pa.types.is_floating(run.tables["steps"].schema.field(column).type) for run in pair.runs)
    apart, difference = _numbers_apart(pair, column, allowed) if measured else (_cells_apart(pair, column), None)
    places = np.flatnonzero(apart)
    if not len(places):
        return None
    at = int(places[0])
    return Parting(
        column,
        int(pair.steps[at]),
        pair.label,
        (cell(pair, 0, column, at), cell(pair, 1, column, at)),
        None if difference is None else float(difference[at]),
        allowed if measured else 0.0,
        len(places),
    )


def _cells_apart(pair: Pair, column: str) -> npt.NDArray[np.bool_]:
    """Where counts, truth values or texts differ, which rounding does not touch; a null differs from every value."""
    a, b = (
        run.tables["steps"][column].combine_chunks().take(pa.array(rows))
        for run, rows in zip(pair.runs, pair.rows, strict=True)
    )
    if a.type != b.type:
        a, b = a.cast(pa.string()), b.cast(pa.string())
    nulls = pc.xor(a.is_null(), b.is_null())
    return np.asarray(pc.or_(pc.fill_null(pc.not_equal(a, b), False), nulls).to_numpy(zero_copy_only=False))


def _numbers_apart(pair: Pair, column: str, allowed: float) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.float64]]:
    """Where numbers differ, and the relative differences; a null differs from every value, NaN equals NaN."""
    a, b = (run.values(column)[rows] for run, rows in zip(pair.runs, pair.rows, strict=True))
    there = [run.valid(column)[rows] for run, rows in zip(pair.runs, pair.rows, strict=True)]
    difference = relative(a, b)
    apart = (difference > allowed) & there[0] & there[1]
    return apart | (there[0] != there[1]), np.where(there[0] == there[1], difference, np.inf)
