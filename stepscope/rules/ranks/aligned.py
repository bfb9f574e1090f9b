"""Steps of one optimizer in all processes side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.rules.view import Array, Mask, Rows, View

_SAME = 1e-6
"""Relative difference up to which a value counts as the same in all processes: reduced gradients are equal bit for bit."""


@dataclass(frozen=True)
class Aligned:
    """The steps that every process attempted, in order.

    Attributes:
        label: the optimizer.
        rows: its rows in each process.
        ends: positions of the windows' last rows, for each process. Shape ``(processes, steps)``.
    """

    label: str
    rows: tuple[Rows, ...]
    ends: Array

    def __len__(self) -> int:
        return int(self.ends.shape[1])

    @property
    def world(self) -> int:
        """Number of processes."""
        return len(self.rows)

    def at(self, column: str) -> Array:
        """A column at the windows' last rows. Shape ``(processes, steps)``."""
        return np.stack([rows[column][ends] for rows, ends in zip(self.rows, self.ends, strict=True)])

    def true(self, column: str) -> Mask:
        """Where a boolean column is true in every process. Shape ``(steps,)``."""
        return np.asarray((self.at(column) == 1.0).all(axis=0))

    def over_window(self, values: list[Array], how: str = "sum") -> Array:
        """A row quantity of each process summed up (or its maximum, minimum) per window. ``(processes, steps)``."""
        out = []
        for rows, ends, held in zip(self.rows, self.ends, values, strict=True):
            out.append(rows.per_window(held, how)[np.searchsorted(rows.ends, ends)])
        return np.stack(out)

    def differs(self, column: str) -> Mask:
        """Steps at which processes hold different values. Shape ``(steps,)``; unknown counts as the same."""
        values = self.at(column)
        spread = np.ptp(values, axis=0)
        with np.errstate(invalid="ignore"):
            return np.asarray(spread > _SAME * np.abs(values).max(axis=0))


def aligned(view: View) -> Iterator[Aligned]:
    """For each optimizer that stepped in all processes its common steps."""
    ranks = sorted({rows.rank for rows in view.everyone})
    labels = dict.fromkeys(rows.optimizer for rows in view.stepping if rows.optimizer is not None)
    for label in labels:
        found = {rows.rank: rows for rows in view.stepping if rows.optimizer == label}
        if len(found) < 2 or len(found) < len(ranks):
            continue
        group = tuple(found[r] for r in ranks)
        steps = [rows.windows("global_step") for rows in group]
        common = steps[0]
        for other in steps[1:]:
            common = np.intersect1d(common, other)
        if len(common):
            yield Aligned(
                label, group, np.stack([rows.ends[np.isin(s, common)] for rows, s in zip(group, steps, strict=True)])
            )


def uses_ddp(steps: Aligned) -> bool:
    """Whether a module was called that is wrapped in DistributedDataParallel."""
    return any(rows.seen("ddp_bypassed").any() or rows.seen("ddp_sync").any() for rows in steps.rows)
