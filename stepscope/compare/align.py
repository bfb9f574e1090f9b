"""Which rows of two runs belong together, also where one continues the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from stepscope.compare.tolerance import HOST_RTOL

if TYPE_CHECKING:
    from collections.abc import Iterable

    from stepscope.store.trace import Trace


@dataclass(frozen=True, slots=True)
class Pair:
    """The rows of one process and optimizer in both runs, at the steps that both have."""

    label: str
    steps: npt.NDArray[np.int64]
    runs: tuple[Trace, Trace]
    rows: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]


def find_offset(first: Trace, other: Trace, allowed: float) -> int:
    """What to add to the other run's micro-steps: 0, or the shift at which a resumed run continues the first one.

    A shift is taken only if the loss and the rate of the other run's first micro-steps agree with the first run's there
    and do not at 0.
    """
    a, b = (_signature(run) for run in (first, other))
    if not len(a[0]) or not len(b[0]):
        return 0
    length = min(8, len(b[0]))
    place = {int(step): i for i, step in enumerate(a[0].tolist())}

    def agrees(shift: int) -> bool:
        start = place.get(int(b[0][0]) + shift)
        if start is None or start + length > len(a[0]):
            return False
        return all(
            np.allclose(x[start : start + length], y[:length], rtol=max(r, HOST_RTOL), atol=0, equal_nan=True)
            for x, y, r in zip(a[1:], b[1:], (allowed, HOST_RTOL), strict=True)
        )

    shifts = (int(step) - int(b[0][0]) for step in a[0].tolist())
    return 0 if agrees(0) else next((s for s in shifts if agrees(s)), 0)


def _signature(run: Trace) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Micro-step, loss and rate of the first process, one row a step."""
    mine = np.flatnonzero(np.nan_to_num(run.values("rank")) == 0)
    steps, first = np.unique(np.nan_to_num(run.values("micro_step"))[mine].astype(np.int64), return_index=True)
    return steps, run.values("loss")[mine][first], run.values("lr")[mine][first]


def tracks(first: Trace, other: Trace, shift: int) -> Iterable[Pair]:
    """The common rows of each process and optimizer."""
    ours, theirs = _by_track(first), _by_track(other)
    common = [key for key in ours if key in theirs]
    for key in common:
        a, b = ours[key], theirs[key]
        steps, i, j = np.intersect1d(micro_steps(first)[a], micro_steps(other)[b] + shift, return_indices=True)
        label = f"rank {key[0]}, {key[1]}" if len(common) > 1 else ""
        yield Pair(label, steps, (first, other), (a[i], b[j]))


def _by_track(run: Trace) -> dict[tuple[int, str], npt.NDArray[np.int64]]:
    ranks = np.nan_to_num(run.values("rank")).astype(np.int64)
    held = run.tables["steps"]
    encoded = (
        held["optimizer"].combine_chunks().fill_null("").dictionary_encode()
        if "optimizer" in held.column_names
        else None
    )
    codes = np.zeros(len(held), np.int64) if encoded is None else encoded.indices.to_numpy(zero_copy_only=False)
    names = [""] if encoded is None else encoded.dictionary.to_pylist()
    keys = {(int(r), int(c)) for r, c in np.unique(np.stack([ranks, codes]), axis=1).T} if len(held) else set()
    return {(r, str(names[c])): np.flatnonzero((ranks == r) & (codes == c)) for r, c in sorted(keys)}


def micro_steps(run: Trace) -> npt.NDArray[np.int64]:
    """The micro-step of each row of steps."""
    return np.asarray(np.nan_to_num(run.values("micro_step")), dtype=np.int64)


def cell(pair: Pair, which: int, column: str, place: int) -> Any:
    """The value of one run at the `place`-th common row; None where null."""
    return pair.runs[which].tables["steps"][column][int(pair.rows[which][place])].as_py()
