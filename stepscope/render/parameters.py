"""Parameters over the run: one row each, and heat maps of layers over steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from stepscope.render.words import counted, grouped, number, one_line

if TYPE_CHECKING:
    from stepscope.render.chart import Floats, Ints
    from stepscope.store.trace import Trace

HEAT_STEPS = 240
HEAT_PARAMETERS = 240
TABLE_PARAMETERS = 2000

_HEATS = (
    ("fig-heat-update", "update_ratio", "Update ratio of each parameter", "‖Δw‖ / ‖w‖ of the step"),
    ("fig-heat-grad", "grad_norm", "Gradient norm of each parameter", "L2 norm, unscaled, before the clip"),
)


@dataclass(frozen=True, slots=True)
class ParameterRow:
    """One parameter over all recorded optimizer steps.

    Attributes:
        name: as the model names it.
        shape: in words, empty if unknown.
        dtype: empty if unknown.
        group: number of its parameter group; None if unknown.
        cells: figures in the order of `CELLS`; None where not observed.
    """

    name: str
    shape: str
    dtype: str
    group: int | None
    cells: tuple[float | None, ...]

    @property
    def texts(self) -> tuple[str, ...]:
        """The figures as people read them."""
        return tuple("–" if c is None else number(c, digits=3) for c in self.cells)


CELLS = (
    ("grad norm, last", "grad_norm", "last"),
    ("grad norm, largest", "grad_norm", "max"),
    ("update ratio, median", "update_ratio", "median"),
    ("lost updates, largest share", "lost_update_frac", "max"),
    ("zero gradients, largest share", "grad_zero_frac", "max"),
    ("not finite, elements", "grad_nonfinite", "sum"),
)
"""Title, column of `params`, and how it is brought to one figure."""


@dataclass(frozen=True, slots=True)
class Heat:
    """A map of parameters (rows) over optimizer steps (columns).

    Attributes:
        id: anchor in the page.
        title: what it shows.
        unit: of the values, with the stage.
        names: parameters, shape ``(rows,)``.
        steps: micro-step that ends each column's stretch, shape ``(columns,)``.
        values: largest finite value of each stretch, NaN where there is none; shape ``(rows, columns)``.
        odd: whether a value in the stretch was not finite; shape ``(rows, columns)``.
        caption: the conclusion in words.
        reading: how to read it.
    """

    id: str
    title: str
    unit: str
    names: tuple[str, ...]
    steps: Ints
    values: Floats
    odd: npt.NDArray[np.bool_]
    caption: str
    reading: str = (
        "Each row is a parameter, each column an optimizer step. The colour is the logarithm of the value, dark for "
        "small and bright for large. A row that differs from all others at every step, or a column that does so in "
        "every row, is worth a look. A red cross (red in the static picture) is a value that is NaN or infinite; no "
        "colour is a value of exactly 0, such as the change in a skipped step, or one that was not recorded."
    )


@dataclass(frozen=True, slots=True)
class ParameterView:
    """The section on parameters."""

    rows: tuple[ParameterRow, ...]
    total: int
    heats: tuple[Heat, ...]


def parameter_view(trace: Trace) -> ParameterView | None:
    """Table and heat maps of the table `params`; None where it is empty."""
    table = trace.tables["params"]
    if not len(table) or "param" not in table.column_names:
        return None
    codes, names = _codes(table)
    order = np.argsort(codes, kind="stable")
    bounds = np.searchsorted(codes[order], np.arange(len(names) + 1))
    pieces = [order[bounds[i] : bounds[i + 1]] for i in range(len(names))]
    columns = {c: trace.values(c, table="params") for c in dict.fromkeys(column for _, column, _ in CELLS)}
    groups = trace.values("group", table="params")
    shown = enumerate(pieces[:TABLE_PARAMETERS])
    rows = tuple(
        _row(names[i], piece, columns, groups, _described(trace, names[i], int(piece[0]))) for i, piece in shown
    )
    heats = (_heat(trace, spec, codes, names) for spec in _HEATS if trace.has(spec[1], table="params"))
    return ParameterView(rows, len(names), tuple(heats))


def _described(trace: Trace, name: str, row: int) -> tuple[str, str]:
    """Shape and dtype of a parameter, from its first row, or else from the facts of the run."""
    table = trace.tables["params"]
    about = (trace.meta.get("parameters") or {}).get(name)
    about = about if isinstance(about, dict) else {}
    shape, dtype = (table[c][row].as_py() if c in table.column_names else about.get(c) for c in ("shape", "dtype"))
    shape = shape if isinstance(shape, list) else str(shape or "").split("x")
    return " × ".join(one_line(size) for size in shape), one_line(dtype or "").removeprefix("torch.")


def _codes(table: pa.Table) -> tuple[Ints, list[str]]:
    """The parameter of each row as a number, and the names, in order of first appearance."""
    encoded = table["param"].combine_chunks().cast(pa.string()).fill_null("?").dictionary_encode()
    return encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64), encoded.dictionary.to_pylist()


def _row(name: str, rows: Ints, columns: dict[str, Floats], groups: Floats, about: tuple[str, str]) -> ParameterRow:
    group = groups[rows[0]]
    cells = tuple(_figure(columns[column][rows], how) for _, column, how in CELLS)
    return ParameterRow(one_line(name), *about, int(group) if np.isfinite(group) else None, cells)


def _figure(values: Floats, how: str) -> float | None:
    finite = values[np.isfinite(values)]
    if not len(finite):
        return None
    match how:
        case "last":
            return float(finite[-1])
        case "max":
            return float(finite.max())
        case "median":
            return float(np.median(finite))
    return float(finite.sum())


def _heat(trace: Trace, spec: tuple[str, str, str, str], codes: Ints, names: list[str]) -> Heat:
    heat_id, column, title, unit = spec
    steps = np.nan_to_num(trace.values("micro_step", table="params")).astype(np.int64)
    values, seen = trace.values(column, table="params"), trace.valid(column, table="params")
    unique, place = np.unique(steps, return_inverse=True)
    stretch = np.arange(len(unique)) * min(HEAT_STEPS, len(unique)) // len(unique)
    cells = _largest(values, seen, codes, stretch[place], (len(names), int(stretch[-1]) + 1))
    chosen = _most_extreme(cells[0], cells[1])
    ends = unique[np.append(np.flatnonzero(np.diff(stretch)), len(unique) - 1)]
    caption = _heat_caption(column, cells[0][chosen], cells[1], names, len(chosen), len(unique), len(ends))
    return Heat(
        heat_id,
        title,
        unit,
        tuple(one_line(names[i]) for i in chosen),
        ends,
        cells[0][chosen],
        cells[1][chosen],
        caption,
    )


def _largest(
    values: Floats, seen: npt.NDArray[np.bool_], rows: Ints, columns: Ints, shape: tuple[int, int]
) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Largest finite value of each cell (NaN for none), and whether one in it was not finite."""
    finite = np.isfinite(values)
    largest = np.full(shape, -np.inf)
    np.maximum.at(largest, (rows[finite], columns[finite]), values[finite])
    odd = np.zeros(shape, dtype=np.bool_)
    odd[rows[seen & ~finite], columns[seen & ~finite]] = True
    return np.where(np.isinf(largest), np.nan, largest), odd


def _most_extreme(values: Floats, odd: npt.NDArray[np.bool_]) -> Ints:
    """Rows to draw, in their order: all, or those with values that are not finite, then largest and smallest."""
    if len(values) <= HEAT_PARAMETERS:
        return np.arange(len(values))
    level = np.nan_to_num(np.nanmax(np.where(np.isnan(values), -np.inf, values), axis=1), neginf=0.0)
    rank = np.abs(np.argsort(np.argsort(level)) - len(level) / 2)
    return np.sort(np.lexsort((-rank, ~odd.any(axis=1)))[:HEAT_PARAMETERS])


def _heat_caption(
    column: str, values: Floats, odd: npt.NDArray[np.bool_], names: list[str], shown: int, steps: int, stretches: int
) -> str:
    finite = values[np.isfinite(values)]
    said = (
        "No finite value."
        if not len(finite)
        else f"Between {number(float(finite.min()))} and {number(float(finite.max()))}."
    )
    still = int(np.count_nonzero((np.nan_to_num(values, nan=1.0) == 0).all(axis=1)))
    if still:
        said += f" {counted(still, 'parameter')} at 0 throughout."
    bad = [one_line(names[i]) for i in np.flatnonzero(odd.any(axis=1))]
    if bad:
        said += f" Not finite at some step: {', '.join(bad[:5])}" + (
            f" and {len(bad) - 5} more." if len(bad) > 5 else "."
        )
    if shown < len(names):
        said += f" Shown {grouped(shown)} of {counted(len(names), 'parameter')}: the most extreme."
    if stretches < steps:
        said += f" Each column is the largest of about {grouped(-(-steps // stretches))} steps."
    return said
