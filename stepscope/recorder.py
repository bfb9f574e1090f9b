"""Events -> probes -> rows -> journal. The only place that knows all three."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

from stepscope import probes
from stepscope.events import Attempt, BackwardBegin, Event, Forward, handler_name
from stepscope.probes.base import Context, Probe, Settings
from stepscope.probes.transfer import Transfer
from stepscope.schema import EVENT_COLUMNS
from stepscope.store.journal import warm_up
from stepscope.store.jsonio import dumps
from stepscope.watch import measure
from stepscope.watch.ledger import plain_settings
from stepscope.watch.naming import Names
from stepscope.watch.watcher import Watcher

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

    from stepscope.store.writer import Store
    from stepscope.watch.ledger import Row, WatchedOptimizer

_BATCH = 64
"""Rows that travel to the host, and to the journal, together."""

_MOST_EVENTS = 1024
"""Events that wait for a row at most; beyond, they travel without one."""

_PATIENCE = 2.0
"""Seconds after which rows are handed over even if there are few: what a ``kill -9`` may take along."""


class Recorder:
    """Records one run, from `start` to `stop`.

    Args:
        store: where rows go (a directory, or memory).
        settings: what the user asked for.
        models: models whose parameter names are to be used.
        optimizers: the optimizers to watch; None for every one that appears.
        meta: facts of the run, written beside the journal.
        on_rows: told the finished rows of steps, in order, as they are written.

    Attributes:
        open: it has been started and not stopped, whether or not it still records (`Settings.max_steps`).
    """

    def __init__(
        self,
        store: Store,
        settings: Settings,
        *,
        models: Iterable[Any] = (),
        optimizers: Iterable[torch.optim.Optimizer] | None = None,
        meta: dict[str, Any] | None = None,
        on_rows: Callable[[list[dict[str, Any]]], None] | None = None,
    ) -> None:
        self._on_rows = on_rows
        self.store = store
        self.settings = settings
        self.meta = meta if meta is not None else {}
        self.meta.setdefault("not_observed", {})
        self.meta.setdefault("probes_off", {})
        self.names = Names()
        for model in models:
            self.names.add_model(model)
        chosen = None if optimizers is None else list(optimizers)
        self.meta["chosen_optimizers"] = chosen is not None
        self.watcher = Watcher(self._hear, self._sealed, self._watcher_failed, chosen)
        for optimizer in chosen or ():
            self.watcher.watched(optimizer)
        self._probes = self._make_probes()
        self._handlers: dict[type, list[tuple[Probe, Any]]] = {}
        self._off: set[Probe] = set()
        self._known: set[int] = set()
        self._rows: list[Row] = []
        self._events: list[dict[str, Any]] = []
        self._flights: deque[tuple[Transfer, list[Row]]] = deque()
        self._seq = 0
        self._flushed = time.monotonic()
        self._recording = False
        self.open = False
        self.rows_written = 0

    def _make_probes(self) -> list[Probe]:
        context = Context(self._note, self._not_observed, self.names, measure, self.settings, self.meta)
        return [probe(context) for probe in probes.ALL]

    # ---- life -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to watch."""
        warm_up()
        self.store.open(probes.step_columns(), probes.param_columns(), EVENT_COLUMNS)
        self._write_meta("recording")
        self._recording = self.open = True
        self.watcher.start()

    def adopt(self, things: Iterable[Any]) -> None:
        """Take note of optimizers, scalers and schedulers that were built before the recording began."""
        for thing in things:
            if hasattr(thing, "param_groups"):
                self.watcher.found(thing)
            self._tell_each("on_existing", [thing])

    def hand_over(self) -> None:
        """Write everything that is sealed, so that a trace read now holds it."""
        if self._recording:
            self._flush(wait=True)

    def note(self, event: str, optimizer: WatchedOptimizer | None = None, detail: dict[str, Any] | None = None) -> None:
        """Add an event to the table of events."""
        self._note(event, optimizer, detail)

    def stop(self, status: str = "complete", **facts: Any) -> None:
        """Stop watching, write what is left, and close the journal."""
        if not self.open:
            return
        self._end(status)
        self.open = False
        self.store.close()
        self.meta.update(facts)
        self._write_meta(status)

    def _end(self, status: str) -> None:
        """Nothing more is recorded: the patches are removed and all that was seen is written."""
        if self._recording:
            self._tell_each("on_end", [status])
            self.watcher.stop()
            self._recording = False
            self._flush(wait=True)

    def _write_meta(self, status: str) -> None:
        self.meta["status"] = status
        self.meta["micro_steps"] = self.meta.get("stopped_at", self.watcher.micro_steps)
        self.meta["optimizers"] = [_describe(w) for w in self.watcher.all_optimizers]
        self.meta["bytes_written"] = self.store.bytes_written
        self.store.write_meta(self.meta)

    # ---- hearing ----------------------------------------------------------------------------------------------------

    def _hear(self, event: Event) -> None:
        if not self._recording:
            return
        kind = type(event)
        if isinstance(event, Forward) and event.training and next(event.module.parameters(), None) is not None:
            self.names.add_model(event.module)
        if kind is BackwardBegin:
            self._begin_backward()
            if not self._recording:
                return
        handlers = self._handlers.get(kind)
        if handlers is None:
            name = handler_name(kind)
            handlers = [(p, getattr(p, name)) for p in self._probes if hasattr(p, name)]
            self._handlers[kind] = handlers
        for probe, handler in handlers:
            if probe not in self._off:
                self._guarded(probe, handler, event)
        if len(self._events) >= _MOST_EVENTS:  # a loop without backward passes seals no row
            self._flush()
        if isinstance(event, Attempt) and event.row is not None and self._due(event.row.global_step):
            event.row.params = self._described(event.optimizer)
        if kind is BackwardBegin:
            self._tell_each(
                "on_watched_begin", [w for w in self.watcher.optimizers.values() if w.optimizer is not None]
            )

    def _begin_backward(self) -> None:
        limit = self.settings.max_steps
        if limit and self.watcher.micro_steps > limit:
            self._note("recording_stopped", None, {"max_steps": limit})
            self.meta["stopped_at"] = limit
            self._end("stopped")
            return
        new = [w for w in self.watcher.optimizers.values() if w.index not in self._known]
        self._known.update(w.index for w in new)
        self._tell_each("on_watched", new)

    def _tell_each(self, method: str, watched: list[Any]) -> None:
        for probe in self._probes:
            heard = getattr(probe, method, None)
            if heard is not None and probe not in self._off:
                for one in watched:
                    self._guarded(probe, heard, one)

    def _guarded(self, probe: Probe, call: Any, *args: Any) -> Any:
        """Call a probe; one that raises is switched off and reported, and training goes on."""
        try:
            return call(*args)
        except Exception as error:
            self._off.add(probe)
            reason = f"{type(error).__name__}: {error}"
            self.meta["probes_off"][probe.name] = reason
            for column in probe.columns:
                self._not_observed(column.name, f"the probe {probe.name} failed: {reason}")
            self._note("probe_switched_off", None, {"probe": probe.name, "reason": reason})
            return None

    def _watcher_failed(self, method: str, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}"
        if method not in self.meta["probes_off"]:
            self.meta["probes_off"][method] = reason
            self._note("watcher_failed", None, {"method": method, "reason": reason})

    def _not_observed(self, column: str, reason: str) -> None:
        self.meta["not_observed"].setdefault(column, reason)

    def _note(self, event: str, optimizer: WatchedOptimizer | None, detail: dict[str, Any] | None = None) -> None:
        self._seq += 1
        self._events.append(
            {
                "rank": self.store.rank,
                "seq": self._seq,
                "micro_step": self.watcher.micro_steps,
                "optimizer": optimizer.label if optimizer is not None else None,
                "event": event,
                "detail": detail,
            }
        )

    # ---- writing ----------------------------------------------------------------------------------------------------

    def _sealed(self, row: Row) -> None:
        self._rows.append(row)
        if len(self._rows) >= _BATCH or time.monotonic() - self._flushed > _PATIENCE:
            self._flush()

    def _flush(self, *, wait: bool = False) -> None:
        """Send what is there on its way to the host, and write what has arrived."""
        rows, self._rows = self._rows, []
        events, self._events = self._events, []
        cells = [{**row.micro.cells, **row.cells} for row in rows]
        for row in rows:
            row.cells = {}
        self._flights.append((Transfer([cells, events]), rows))
        self._flushed = time.monotonic()
        on_host = not any(t.in_flight for t, _ in self._flights)
        while self._flights and (wait or on_host or len(self._flights) > 1):
            transfer, landed = self._flights.popleft()
            host_cells, host_events = transfer.result()
            self._write(landed, host_cells, host_events)

    def _write(self, rows: list[Row], cells: list[dict[str, Any]], events: list[dict[str, Any]]) -> None:
        for row, held in zip(rows, cells, strict=True):
            held["rank"] = self.store.rank
            for probe in self._probes:
                if probe not in self._off:
                    self._guarded(probe, probe.resolve, row, held)
        steps = [{k: v for k, v in c.items() if k[0] != "_"} for c in cells]
        self.store.append("steps", steps)
        if self._on_rows is not None and steps:
            self._on_rows(steps)
        self.store.append("params", [p for row, c in zip(rows, cells, strict=True) for p in self._param_rows(row, c)])
        for event in events:
            event["detail"] = dumps(event["detail"]) if event["detail"] is not None else None
        self.store.append("events", events)
        self.rows_written += len(rows)
        self.store.flush()

    def _param_rows(self, row: Row, cells: dict[str, Any]) -> list[dict[str, Any]]:
        """The rows of the table of parameters that belong to an attempt."""
        out = []
        for place, fixed in enumerate(row.params):
            found: dict[str, Any] = {}
            for probe in self._probes:
                method = getattr(probe, "param_cells", None)
                if method is not None and probe not in self._off:
                    found.update(self._guarded(probe, method, cells, place) or {})
            if found:
                keys = {"rank": self.store.rank, "micro_step": row.micro.number, "global_step": row.global_step}
                out.append({**keys, **fixed, **found})
        return out

    def _due(self, attempt: int) -> bool:
        return self._probes[0].context.detailed(attempt)

    def _described(self, watched: WatchedOptimizer) -> list[dict[str, Any]]:
        """What the table says of an optimizer's parameters whatever the step: as they are now, for both may go."""
        names = self.names.of(watched)
        key = (watched.layout, names, tuple((p.shape, p.dtype) for p in watched.params))
        if watched.described is not None and watched.described[0] == key:
            return watched.described[1]
        groups = {id(p): n for n, g in enumerate(watched.groups, start=1) for p in g["params"]}
        described = [
            {
                "optimizer": watched.label,
                "param": name,
                "group": groups.get(id(p), 0),
                "shape": "x".join(map(str, p.shape)),
                "dtype": str(p.dtype).removeprefix("torch."),
            }
            for name, p in zip(names, watched.params, strict=True)
        ]
        watched.described = (key, described)
        return described


def _describe(watched: WatchedOptimizer) -> dict[str, Any]:
    """What meta.json says of an optimizer."""
    groups = plain_settings(watched.groups) or watched.settings
    return {
        "name": watched.label,
        "class": watched.kind,
        "fused": any(bool(g.get("fused")) for g in groups),
        "groups": groups,
        "attempts": watched.attempts,
    }
