"""The cells of `steps` at the micro-steps that findings cite: what a link to a step leads to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from stepscope.render.words import number

if TYPE_CHECKING:
    from stepscope.render.chart import Ints
    from stepscope.render.rows import Rows

COLUMNS = (
    "window_step",
    "window_size",
    "loss",
    "loss_weight",
    "loss_weight_sum",
    "lr",
    "loss_scale_before",
    "step_skipped",
    "grad_norm",
    "grad_norm_clipped",
    "update_ratio",
)
MOST_ROWS = 300
_TRUTH = ("step_skipped",)


@dataclass(frozen=True, slots=True)
class StepRow:
    """One row of `steps` as texts; `first` for the first one of its micro-step."""

    step: int
    first: bool
    cells: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StepTable:
    """The cited rows under the names of their columns."""

    headers: tuple[str, ...]
    rows: tuple[StepRow, ...]


def step_table(rows: Rows, cited: Ints) -> StepTable | None:
    """The rows of the cited micro-steps in order, at most `MOST_ROWS`; None if no step is cited or recorded."""
    index = np.flatnonzero(np.isin(rows.micro_step, cited))
    index = index[np.lexsort((rows.ranks[index], rows.micro_step[index]))][:MOST_ROWS]
    if not len(index):
        return None
    columns = [c for c in COLUMNS if rows.has(c)]
    labels = _labels(rows, index)
    steps = rows.micro_step[index].tolist()
    made = []
    for n, (step, place) in enumerate(zip(steps, index.tolist(), strict=True)):
        of = [labels[n]] if labels else []
        cells = (str(step), *of, *(_text(rows, c, place) for c in columns))
        made.append(StepRow(step, n == 0 or steps[n - 1] != step, cells))
    return StepTable(("micro_step", *(["of"] if labels else []), *columns), tuple(made))


def _labels(rows: Rows, index: Ints) -> list[str]:
    """Whose row each one is, where there are several processes or optimizers."""
    if len(rows.optimizers) < 2:
        return []
    labels = [""] * len(index)
    for track in rows.optimizers:
        for n in np.flatnonzero(np.isin(index, track.index)).tolist():
            labels[n] = track.label
    return labels


def _text(rows: Rows, column: str, place: int) -> str:
    values, valid = rows.column(column)
    if not valid[place]:
        return "–"
    value = float(values[place])
    return number(bool(value)) if column in _TRUTH else number(value)
