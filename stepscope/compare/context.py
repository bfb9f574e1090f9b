"""What led to a parting: both runs just before it, the parameters that part first, and what to know."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from stepscope.compare.align import Pair, cell, micro_steps
from stepscope.compare.tolerance import compute_dtype, relative

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stepscope.store.trace import Trace

CONTEXT = 3
"""Micro-steps before the parting that are shown."""

PARAM_COLUMNS = ("grad_norm", "grad_norm_clipped", "update_norm", "param_norm")


def before(pairs: Sequence[Pair], track: str, micro_step: int, parted: Sequence[str]) -> Iterable[dict[str, Any]]:
    """Both runs at the steps before and at the first parting, for the columns that part and those that explain."""
    pair = next(p for p in pairs if p.label == track)
    at = int(np.searchsorted(pair.steps, micro_step))
    named = dict.fromkeys([*parted, "loss", "lr", "loss_scale_before", "grad_norm"])
    columns = [c for c in named if all(run.has(c) for run in pair.runs)]
    for place in range(max(0, at - CONTEXT), at + 1):
        for column in columns:
            a, b = (cell(pair, which, column, place) for which in (0, 1))
            if a is not None or b is not None:
                yield {
                    "micro_step": int(pair.steps[place]),
                    "column": column,
                    "first": a,
                    "other": b,
                    "same": _same(a, b),
                }


def _same(a: Any, b: Any) -> bool:
    return a == b or (a is not None and b is not None and a != a and b != b)


def parameters(first: Trace, other: Trace, shift: int, allowed: float) -> Iterable[dict[str, Any]]:
    """The parameters that differ at the first optimizer step at which any does, largest difference first."""
    cells = [_param_cells(run) for run in (first, other)]
    shifted = {(step + shift, *key): row for (step, *key), row in cells[1].items()}
    common = sorted(cells[0].keys() & shifted.keys())
    if not common:
        return
    rows = np.array([(cells[0][key], shifted[key]) for key in common])
    for column in PARAM_COLUMNS:
        if not (first.has(column, table="params") and other.has(column, table="params")):
            continue
        a, b = (run.values(column, table="params")[rows[:, i]] for i, run in enumerate((first, other)))
        difference = relative(a, b)
        apart = np.flatnonzero(difference > allowed)
        if not len(apart):
            continue
        step = common[int(apart[0])][0]
        there = sorted((i for i in apart.tolist() if common[i][0] == step), key=lambda i: -difference[i])[:5]
        for i in there:
            yield {
                "micro_step": step,
                "param": common[i][2],
                "column": column,
                "first": float(a[i]),
                "other": float(b[i]),
            }
        return


def _param_cells(run: Trace) -> dict[tuple[Any, ...], int]:
    """Row of each (micro-step, rank, parameter)."""
    held = run.tables["params"]
    if "param" not in held.column_names:
        return {}
    steps, ranks = (
        np.nan_to_num(run.values(c, table="params")).astype(np.int64).tolist() for c in ("micro_step", "rank")
    )
    return {key: row for row, key in enumerate(zip(steps, ranks, held["param"].to_pylist(), strict=True))}


def notes(first: Trace, other: Trace, shift: int, steps: npt.NDArray[np.int64]) -> Iterable[str]:
    """What a reader of the comparison should know, in sentences."""
    counts = [len(np.unique(micro_steps(run))) for run in (first, other)]
    if shift:
        yield f"The other run's micro-step 1 is the first one's {1 + shift}: it continues that run."
    if counts[0] != counts[1]:
        yield f"The runs have {counts[0]} and {counts[1]} micro-steps; the {len(steps)} that both have were compared."
    dtypes = [compute_dtype(run) for run in (first, other)]
    if dtypes[0] != dtypes[1]:
        yield f"They computed in {dtypes[0]} and {dtypes[1]}; the coarser one sets the tolerance."
    for run, rival, which in ((first, other, "first"), (other, first, "other")):
        only = [c for c in run.tables["steps"].column_names if run.has(c) and not rival.has(c)]
        if only:
            yield f"Only the {which} run observed {', '.join(only)}."
    for run, which in ((first, "first"), (other, "other")):
        if not run.whole:
            yield f"The recording of the {which} run was cut off."
