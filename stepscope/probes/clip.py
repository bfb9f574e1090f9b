"""Gradient clipping: the limit given, the factor applied, whether it bound, and what it was applied to."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from stepscope.probes.base import Context, Probe
from stepscope.schema import Column

if TYPE_CHECKING:
    from stepscope import events
    from stepscope.watch.ledger import Row, WatchedOptimizer

_NONE = "no clip was seen"
_LAST = "no clip was seen, or not the window's last row"
_MOST_EVENTS = 100
"""Clips without effect that are told one by one; the columns count them all."""


class Clip(Probe):
    """Sees torch's own clips whatever name they were imported by; a hand-written one shows only in the norms.

    What a row says of a clip is said of those before the step; one that came after it counts in `clip_late`. A clip with
    an infinite limit is a measurement: its norm is noted, it does not count as a clip.
    """

    name = "clip"
    columns = (
        Column("clip_max_norm", "float64", "1", "limit given to the clip of the gradient's norm", _NONE),
        Column("clip_norm", "float64", "1", "norm that the clip found, as it stood: scaled if the gradients were", _NONE),
        Column("clip_coef", "float64", "1", "factor that the clip applied: min(1, limit / (norm + 1e-6))", _NONE),
        Column("clip_bound", "bool", "", "the norm was above the limit, in any clip of this row", _NONE),
        Column("clip_nonfinite", "bool", "", "a clip of this row found a norm that is NaN or infinite", _NONE),
        Column("clip_value", "float64", "1", "limit given to a clip of each element", "no clip by value was seen"),
        Column("clip_calls", "int64", "calls", "clip calls on this optimizer's gradients between this backward and the next"),
        Column("clip_late", "int64", "calls", "those of clip_calls that came after the step that used the gradients"),
        Column("clip_scaled", "bool", "", "the gradients still carried the loss scale when they were clipped", _NONE),
        Column("clip_after_step", "bool", "", "a clip came after the step that used the gradients", _NONE),
        Column("clip_covered", "float64", "1", "share of the optimizer's gradient tensors that the clips of this row were given", _LAST),
        Column("clip_overlap", "bool", "", "two clips of this row were given the same tensor", _NONE),
        Column("clip_empty", "int64", "calls", "clip calls that were given no tensor at all while this optimizer's gradients waited"),
        Column("clip_elsewhere", "int64", "calls", "clip calls that were given other tensors, none of which awaited a step, while this optimizer's gradients waited"),
        Column("scaled_norm_taken", "float64", "1", "norm that the script took (get_total_norm, or a clip with an infinite limit) of gradients which still carried the loss scale", "it took none of such"),
        Column("cleared_norm", "float64", "1", "L2 norm of the used gradients when they were cleared, where a script had written to them after the step", "nothing was written to them"),
    )  # fmt: skip

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._watched: list[WatchedOptimizer] = []
        self._told = 0

    def on_watched(self, watched: WatchedOptimizer) -> None:
        """Told by the recorder when an optimizer is seen for the first time."""
        self._watched.append(watched)

    def on_backward_end(self, event: events.BackwardEnd) -> None:
        """Start counting."""
        for row in event.rows:
            for column in ("clip_calls", "clip_late", "clip_empty", "clip_elsewhere"):
                row.cells.setdefault(column, 0)

    def on_clip_begin(self, event: events.ClipBegin) -> None:
        """Note the call and what it is given."""
        row, call = event.row, event.call
        if row is None:
            return
        if call.measures:
            self._measured(row, call)
            return
        if row.attempted:
            self._late(row, call)
            return
        row.count("clip_calls")
        cells = row.cells
        cells["clip_scaled"] = _scaled(row) or bool(cells.get("clip_scaled"))
        given = {id(g) for g in call.gradients}
        before = cells.setdefault("_clipped", set())
        cells["clip_overlap"] = bool(before & given) or bool(cells.get("clip_overlap"))
        before |= given
        if call.kind == "value":
            cells["clip_value"] = call.max_norm
            return
        cells["clip_max_norm"] = call.max_norm
        self._note_norm(row, call)

    def _measured(self, row: Row, call: events.ClipCall) -> None:
        """A clip without a limit tells the norm of what the step will use; after the step it tells nothing of that."""
        if row.attempted:
            return
        row.cells.setdefault("clip_max_norm", call.max_norm)
        held = self._note_norm(row, call)
        if held is not None and _scaled(row):
            row.cells["scaled_norm_taken"] = held

    def _note_norm(self, row: Row, call: events.ClipCall) -> Any:
        """Keep the norm that a clip found, on the device."""
        if call.total_norm is None:
            return None
        norm = call.total_norm
        held = norm.detach().clone().reshape(()) if hasattr(norm, "detach") else float(norm)
        row.cells.setdefault("_clip_norms", []).append((held, call.max_norm))
        return held

    def _late(self, row: Row, call: events.ClipCall) -> None:
        """A clip of gradients that a step has used: too late, or meant for other gradients that wait."""
        touched = {id(p) for p in call.parameters}
        waiting = [(w, r) for w, r in self._waiting() if r.micro.number > row.micro.number]
        if any(not touched.isdisjoint(map(id, w.params)) for w, _ in waiting):
            return
        for _, other in waiting:
            other.count("clip_elsewhere")
        if not waiting:
            row.count("clip_calls")
            row.count("clip_late")
            row.cells["clip_after_step"] = True
            row.cells.setdefault("clip_max_norm", call.max_norm if call.kind == "norm" else None)
            row.cells.setdefault("clip_value", call.max_norm if call.kind == "value" else None)

    def _waiting(self) -> list[tuple[WatchedOptimizer, Row]]:
        """Optimizers whose gradients await a step, each with its last micro-step."""
        return [(w, r) for w in self._watched if (r := w.window.last) is not None and w.optimizer is not None]

    def on_attempt(self, event: events.Attempt) -> None:
        """How much of the gradient that the step used had been given to clips?"""
        given = event.row.cells.get("_clipped") if event.row is not None else None
        if event.row is not None and given is not None:
            own = {id(p.grad) for p in event.optimizer.params if p.grad is not None}
            event.row.cells["clip_covered"] = len(own & given) / len(own) if own else 0.0

    def on_clip_nothing(self, event: events.ClipNothing) -> None:
        """A clip that matched no gradient of any optimizer: whose gradients waited for it?"""
        call = event.call
        given = {id(p) for p in call.parameters}
        waiting = self._waiting()
        for _, row in waiting:
            row.count("clip_elsewhere" if given else "clip_empty")
        if given and not waiting:
            for watched in self._watched:
                if watched.row is not None and not given.isdisjoint(map(id, watched.params)):
                    self._late(watched.row, call)
        self._told += 1
        if self._told <= _MOST_EVENTS:
            detail = {"gradients": len(call.gradients), "parameters": len(given), "max_norm": call.max_norm}
            self.context.note(
                "clip_matched_nothing",
                None,
                {**detail, "norm": call.total_norm, "waiting": [w.label for w, _ in waiting]},
            )

    def on_called(self, event: events.Called) -> None:
        """The script took a norm, or wrote to gradients between the step that used them and their end."""
        if event.name == "norm_taken":
            self._norm_taken({id(t) for t in event.detail["tensors"]}, event.detail["norm"])
        elif event.name == "gradients_written_after_step" and event.optimizer is not None:
            row, measure = event.optimizer.row, self.context.measure
            held = [p.grad for p in event.optimizer.params if p.grad is not None]
            if row is not None and held and not row.cells.get("clip_late"):
                row.cells["cleared_norm"] = measure.total(measure.norms(held))

    def _norm_taken(self, given: set[int], norm: Any) -> None:
        for watched, row in self._waiting():
            if _scaled(row) and any(id(p.grad) in given for p in watched.params):
                row.cells["scaled_norm_taken"] = norm.detach().clone().reshape(())

    def resolve(self, row: Row, cells: dict[str, Any]) -> None:
        """The factor that torch applies, from the norm and the limit."""
        cells.pop("_clipped", None)
        norms = cells.get("_clip_norms") or []
        found = [(float(norm), float(limit)) for norm, limit in norms if norm is not None]
        if len(found) < len(norms):
            self.context.not_observed("clip_norm", "the norm of sharded gradients is spread over processes")
        for column in ("cleared_norm", "scaled_norm_taken"):
            if cells.get(column) is not None:
                cells[column] = float(cells[column])
        if not found:
            return
        norm, limit = next((f for f in reversed(found) if f[1] != math.inf), found[-1])
        cells["clip_norm"] = norm
        ratio = limit / (norm + 1e-6) if not math.isnan(norm) else math.nan
        cells["clip_coef"] = math.nan if math.isnan(ratio) else min(1.0, ratio)
        cells["clip_bound"] = any(n > most for n, most in found)
        cells["clip_nonfinite"] = any(not math.isfinite(n) for n, _ in found)


def _scaled(row: Row) -> bool:
    """Whether the gradients of an open row still carry the loss scale."""
    return bool(row.micro.cells.get("_scaled")) and "unscale_divisor" not in row.cells
