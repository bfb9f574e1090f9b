"""A trace as rules look at it: columns as arrays, one optimizer at a time, windows, and what the user declared.

Everything is an array over rows or windows: a trace of a million micro-steps is judged without a Python loop over it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from stepscope.rules.base import Skip
from stepscope.rules.outcome import Finding, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stepscope.store.trace import Trace

Array = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]

MOST_CITED = 50
"""Micro-steps that a finding cites at most."""


class Rows:
    """Rows of one optimizer in one process, in order.

    Args:
        trace: the trace.
        index: positions of its rows in the table of steps.
        optimizer: label such as ``AdamW/0``; None for rows that no optimizer claimed.
        rank: the process.
    """

    def __init__(self, trace: Trace, index: Array, optimizer: str | None, rank: int) -> None:
        self.trace = trace
        self.index = index
        self.optimizer = optimizer
        self.rank = rank
        self._cache: dict[str, Array] = {}

    def own(self) -> Rows:
        """These rows without the windows that another optimizer used."""
        elsewhere = self.true("used_elsewhere")
        if not elsewhere.any():
            return self
        ends = np.flatnonzero(elsewhere | self.true("sync_gradients"))
        window = np.searchsorted(ends, np.arange(len(self)))
        kept = ~np.append(elsewhere[ends], False)[window]
        return Rows(self.trace, self.index[kept], self.optimizer, self.rank)

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, column: str) -> Array:
        """Values of a column: float64 with NaN where null, objects with None for strings. Shape ``(rows,)``."""
        if column not in self._cache:
            self._cache[column] = self.trace.values(column)[self.index]
        return self._cache[column]

    def seen(self, column: str) -> Mask:
        """Where the column was observed; a NaN that was seen counts. Shape ``(rows,)``."""
        return self.trace.valid(column)[self.index]

    def true(self, column: str) -> Mask:
        """Where a boolean column is true. Shape ``(rows,)``."""
        return np.asarray(self[column] == 1.0)

    def at(self, rows: Mask | Array) -> list[int]:
        """Micro-steps of the chosen rows, the first `MOST_CITED` of them."""
        return [int(m) for m in self["micro_step"][rows][:MOST_CITED]]

    @cached_property
    def ends(self) -> Array:
        """Positions (within these rows) of the last row of each attempted window."""
        return np.flatnonzero(self.true("sync_gradients"))

    @cached_property
    def window_of(self) -> Array:
        """For each row the number of its window from 0; rows after the last attempt get the number of windows."""
        return np.searchsorted(self.ends, np.arange(len(self)))

    def windows(self, column: str) -> Array:
        """Values of a column in the last row of each window. Shape ``(windows,)``."""
        return self[column][self.ends]

    def per_window(self, values: Array, how: str = "sum") -> Array:
        """Sum, maximum or minimum of a row quantity over each attempted window. Shape ``(windows,)``."""
        if not len(self.ends):
            return np.zeros(0)
        starts = np.concatenate([[0], self.ends[:-1] + 1])
        reduce = {"sum": np.add, "max": np.maximum, "min": np.minimum}[how]
        return np.asarray(reduce.reduceat(values[: self.ends[-1] + 1], starts))

    @property
    def pending(self) -> int:
        """Micro-steps after the last attempt: backward passes whose gradient no step has used."""
        return len(self) - (int(self.ends[-1]) + 1 if len(self.ends) else 0)


@dataclass
class View:
    """What a rule is given.

    Attributes:
        trace: the run to judge.
        declared: intents stated by the user.
        after: the trace that this run resumes, None if it resumes none.
    """

    trace: Trace
    declared: dict[str, Any] = field(default_factory=dict)
    after: Trace | None = None

    @cached_property
    def optimizers(self) -> list[Rows]:
        """Rows of each optimizer (and process), those of no optimizer left out."""
        return [rows for rows in self.everyone if rows.optimizer is not None]

    @cached_property
    def everyone(self) -> list[Rows]:
        """Rows of each optimizer and process, and those that no optimizer claimed.

        Windows whose gradients another optimizer of the same parameters used are the other's, and left out here.
        """
        labels, ranks = self.trace.values("optimizer"), self.trace.values("rank")
        keys = sorted({(int(r), o) for r, o in zip(ranks, labels, strict=True)}, key=lambda k: (k[0], k[1] or ""))
        same = {key: np.flatnonzero((ranks == key[0]) & np.equal(labels, key[1])) for key in keys}
        order = self.trace.values("micro_step")
        found = [Rows(self.trace, i[np.argsort(order[i], kind="stable")], o, r) for (r, o), i in same.items()]
        return [rows.own() for rows in found]

    @cached_property
    def stepping(self) -> list[Rows]:
        """Optimizers that attempted at least one step after a backward."""
        return [rows for rows in self.optimizers if len(rows.ends)]

    def usual_k(self, rows: Rows) -> int | None:
        """Micro-steps of a usual window: as declared, else the commonest size; None where there is no window."""
        declared = self.declared.get("accumulation_steps")
        if declared:
            return int(declared)
        sizes = rows.windows("window_size")
        if not len(sizes):
            return None
        values, counts = np.unique(sizes, return_counts=True)
        return int(values[np.argmax(counts)])

    def events(self, *names: str) -> Iterator[dict[str, Any]]:
        """Events of the given names, in order, with `detail` parsed."""
        yield from self.trace.details(*names)

    def need(self, condition: object, reason: str) -> None:
        """Skip the rule with a reason unless `condition` holds."""
        if not condition:
            raise Skip(reason)


def finding(
    code: str,
    name: str,
    severity: Severity,
    message: str,
    rows: Rows | None = None,
    where: Mask | Array | None = None,
    **evidence: Any,
) -> Finding:
    """A finding whose steps are the chosen rows of an optimizer.

    Args:
        code: the rule's code.
        name: the rule's name.
        severity: of this finding.
        message: one sentence with the numbers.
        rows: the optimizer's rows; None where the finding belongs to the whole run.
        where: which of them show it (a mask over rows or positions).
        **evidence: further keys of `Finding.evidence`.
    """
    steps = rows["micro_step"][where] if rows is not None and where is not None else np.zeros(0)
    if rows is not None and rows.optimizer is not None:
        evidence.setdefault("optimizer", rows.optimizer)
    if len(steps):
        evidence.setdefault("micro_steps", [int(s) for s in steps[:MOST_CITED]])
        evidence.setdefault("count", len(steps))
    first, last = (int(steps[0]), int(steps[-1])) if len(steps) else (None, None)
    return Finding(code, name, severity, message, first, last, evidence)
