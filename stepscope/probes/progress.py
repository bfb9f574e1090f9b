"""Where in the run a row stands: epoch, window, attempts and applied steps, and the order of calls."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any

from stepscope.probes.base import Context, Probe, per_optimizer
from stepscope.schema import KEYS, Column

if TYPE_CHECKING:
    from stepscope import events
    from stepscope.watch.ledger import Row, WatchedOptimizer

CALLS = {
    "F": "forward (training)",
    "B": "backward",
    "U": "unscale_",
    "u": "unscale_ by scaler.step",
    "C": "clip by norm",
    "V": "clip by value",
    "S": "optimizer step",
    "K": "step skipped by the scaler",
    "P": "scaler.update",
    "L": "scheduler.step",
    "Z": "zero_grad",
    "E": "averaged model updated",
    "R": "all_reduce",
}
"""The letters of the column `calls`."""


class Progress(Probe):
    """Counts windows, attempts and applied steps, and learns the usual window size."""

    name = "progress"
    columns = (
        *KEYS,
        Column(
            "epoch", "int64", "epochs", "times the DataLoader of this batch has been started", "no DataLoader was used"
        ),
        Column(
            "loader_pass",
            "int64",
            "1",
            "number of the DataLoader pass that this batch came from, over all loaders, from 1",
            "no DataLoader was used",
        ),
        Column("optimizer", "string", "", "class and index of the optimizer", "no optimizer claimed the gradients"),
        Column("window_step", "int64", "micro-steps", "place in the window, from 1"),
        Column("window_size", "int64", "micro-steps", "micro-steps in the window", "not the window's last row"),
        Column("global_step", "int64", "optimizer steps", "attempts of the optimizer up to and with this row's window"),
        Column("applied_steps", "int64", "optimizer steps", "attempts up to here that were not skipped"),
        Column("sync_gradients", "bool", "", "an optimizer step was attempted after this micro-step"),
        Column(
            "used_elsewhere",
            "bool",
            "",
            "no step of this optimizer followed: another one that holds the same parameters used the window's gradients",
            "not the window's last row, or this optimizer attempted a step",
        ),
        Column("tail", "bool", "", "the window is shorter than the declared or usual K", "not the window's last row"),
        Column(
            "calls",
            "string",
            "",
            "calls up to the next micro-step, a letter each: " + ", ".join(f"{k} {v}" for k, v in CALLS.items()),
        ),
        Column("closure", "bool", "", "the step evaluated a closure", "not the window's last row"),
        Column(
            "before_closure",
            "int64",
            "micro-steps",
            "micro-steps of the window that ran before a step with a closure, outside of it",
            "the step evaluated no closure",
        ),
        Column("step_in_backward", "bool", "", "the step ran inside backward", "not the window's last row"),
        Column(
            "attempted_at",
            "int64",
            "micro-steps",
            "backward passes begun when the step was attempted, other optimizers' too",
            "not the window's last row",
        ),
        Column(
            "params_moved",
            "bool",
            "",
            "parameters were written to between this optimizer's backward before and this one; writes through .data leave no trace",
            "the first micro-step",
        ),
    )

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._epochs: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._iterators: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._epoch: int | None = None
        self._pass: int | None = None
        self._passes = 0
        self._sizes: dict[int, Counter[int]] = {}
        self._applied: Counter[int] = Counter()
        self._rowless: dict[int, list[Any]] = {}
        self._versions: dict[int, int] = {}
        self._now: dict[int, int] = {}
        self._begun = 0
        self._begin: dict[int, tuple[bool, bool, int]] = {}

    def on_called(self, event: events.Called) -> None:
        """Follow the DataLoaders: a batch belongs to the epoch in which its iterator was started."""
        if event.name == "loader_iter":
            self._passes += 1
            loader = event.detail["loader"]
            if loader is not None:
                self._epochs[loader] = self._epochs.get(loader, 0) + 1
                self._iterators[event.detail["iterator"]] = (self._epochs[loader], self._passes)
        elif event.name == "loader_next":
            self._epoch, self._pass = self._iterators.get(event.detail["iterator"], (None, None))

    def on_backward_begin(self, event: events.BackwardBegin) -> None:
        """Note the epoch of the batch."""
        event.micro.cells["epoch"], event.micro.cells["loader_pass"] = self._epoch, self._pass
        self._begun = event.micro.number
        self._now.clear()

    def on_watched_begin(self, watched: WatchedOptimizer) -> None:
        """Told for each optimizer at the beginning of a backward: sum up the versions of its parameters."""
        self._now[watched.index] = sum(p._version for p in watched.params)

    def on_backward_end(self, event: events.BackwardEnd) -> None:
        """Versions that grew since the backward before tell that parameters were written to."""
        for row in event.rows:
            key = per_optimizer(row)
            self._add_rowless(row)
            if key in self._now:
                if key in self._versions:
                    row.cells["params_moved"] = self._now[key] != self._versions[key]
                self._versions[key] = self._now[key]

    def on_step_begin(self, event: events.StepBegin) -> None:
        """Note how the step is called, and how much of the window came before it."""
        done = event.row.window_step if event.row is not None else 0
        self._begin[event.optimizer.index] = (event.closure, event.in_backward, done)

    def on_step_end(self, event: events.StepEnd) -> None:
        """The window's last row is known now: a closure runs its backward passes inside the step."""
        if event.row is not None:
            closure, in_backward, done = self._begin[event.optimizer.index]
            event.row.cells["closure"] = closure
            event.row.cells["step_in_backward"] = in_backward
            event.row.cells["before_closure"] = done if closure else None

    def on_attempt(self, event: events.Attempt) -> None:
        """An attempt without a backward has no row of its own: it becomes an event."""
        if event.row is not None:
            event.row.cells["attempted_at"] = self._begun
            self._add_rowless(event.row)
        else:
            found = event.found_inf if event.found_inf is not None else not event.ran
            self._rowless.setdefault(event.optimizer.index, []).append(found)
            self.context.note("step_without_backward", event.optimizer, {"attempt": event.optimizer.attempts})

    def _add_rowless(self, row: Row) -> None:
        """Attempts without a row count in the next one."""
        skipped = self._rowless.pop(per_optimizer(row), None)
        if skipped:
            row.cells["_rowless"] = [*row.cells.get("_rowless", []), *skipped]

    def resolve(self, row: Row, cells: dict[str, Any]) -> None:
        """Fill in counts that depend on the rows before."""
        key = per_optimizer(row)
        cells["micro_step"] = row.micro.number
        cells["optimizer"] = row.optimizer.label if row.optimizer is not None else None
        cells["window_step"] = row.window_step
        cells["global_step"] = row.global_step
        cells["sync_gradients"] = row.attempted
        cells["calls"] = "".join(row.calls)
        self._applied[key] += sum(not skipped for skipped in cells.get("_rowless", ()))
        if row.attempted:
            if not cells.get("step_skipped"):
                self._applied[key] += 1
            cells["tail"] = self._is_tail(key, cells["window_size"])
        cells["applied_steps"] = self._applied[key]

    def _is_tail(self, key: int, size: int) -> bool:
        declared = self.context.settings.declared.get("accumulation_steps")
        sizes = self._sizes.setdefault(key, Counter())
        usual = int(declared) if declared else sizes.most_common(1)[0][0] if sizes else size
        sizes[size] += 1
        return size < usual
