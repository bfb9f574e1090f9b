"""Gradient clipping: the limit given, the factor applied, whether it bound, and what it was applied to."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from stepscope.probes.base import Probe
from stepscope.schema import Column

if TYPE_CHECKING:
    from stepscope import events
    from stepscope.watch.ledger import Row, WatchedOptimizer

_NONE = "no clip was seen"


class Clip(Probe):
    """Sees torch's own clips whatever name they were imported by; a hand-written one shows only in the norms."""

    name = "clip"
    columns = (
        Column("clip_max_norm", "float64", "1", "limit given to the clip of the gradient's norm", _NONE),
        Column("clip_norm", "float64", "1", "norm that the clip found, as it stood: scaled if the gradients were", _NONE),
        Column("clip_coef", "float64", "1", "factor that the clip applied: min(1, limit / (norm + 1e-6))", _NONE),
        Column("clip_bound", "bool", "", "the norm was above the limit", _NONE),
        Column("clip_value", "float64", "1", "limit given to a clip of each element", "no clip by value was seen"),
        Column("clip_calls", "int64", "calls", "clip calls on this optimizer's gradients between this backward and the next"),
        Column("clip_scaled", "bool", "", "the gradients still carried the loss scale when they were clipped", _NONE),
        Column("clip_after_step", "bool", "", "the clip came after the step that used the gradients", _NONE),
        Column("clip_covered", "float64", "1", "share of the optimizer's gradient tensors that the clips of this row were given", _NONE),
        Column("clip_overlap", "bool", "", "two clips of this row were given the same tensor", _NONE),
    )  # fmt: skip

    def on_backward_end(self, event: events.BackwardEnd) -> None:
        """Start counting."""
        for row in event.rows:
            row.cells.setdefault("clip_calls", 0)

    def on_clip_begin(self, event: events.ClipBegin) -> None:
        """Note the call and what it is given."""
        row, call = event.row, event.call
        if row is None:
            return
        row.count("clip_calls")
        cells = row.cells
        cells["clip_after_step"] = row.attempted or bool(cells.get("clip_after_step"))
        scaled = bool(row.micro.cells.get("_scaled")) and "unscale_divisor" not in cells and not row.attempted
        cells["clip_scaled"] = scaled or bool(cells.get("clip_scaled"))
        given = {id(g) for g in call.gradients}
        before = cells.setdefault("_clipped", set())
        cells["clip_overlap"] = bool(before & given) or bool(cells.get("clip_overlap"))
        before |= given
        own = {id(p.grad) for p in event.optimizer.params if p.grad is not None}
        cells["clip_covered"] = len(own & before) / len(own) if own else 0.0
        if call.kind == "value":
            cells["clip_value"] = call.max_norm
            return
        cells["clip_max_norm"] = call.max_norm
        if call.total_norm is not None:
            norm = call.total_norm
            cells["clip_norm"] = norm.detach().clone().reshape(()) if hasattr(norm, "detach") else float(norm)
        self._note_foreign(event.optimizer, call, given, own)

    def _note_foreign(self, watched: WatchedOptimizer, call: events.ClipCall, given: set[int], own: set[int]) -> None:
        foreign = len(given - own)
        if foreign and foreign < len(given):
            self.context.meta.setdefault("clip_foreign", {})[watched.label] = foreign

    def on_clip_nothing(self, event: events.ClipNothing) -> None:
        """A clip that matched no gradient of any optimizer is worth an event."""
        call = event.call
        detail = {"gradients": len(call.gradients), "parameters": len(call.parameters), "max_norm": call.max_norm}
        self.context.note("clip_matched_nothing", None, {**detail, "norm": call.total_norm})

    def resolve(self, row: Row, cells: dict[str, Any]) -> None:
        """The factor that torch applies, from the norm and the limit."""
        cells.pop("_clipped", None)
        norm, limit = cells.get("clip_norm"), cells.get("clip_max_norm")
        if norm is None or limit is None:
            return
        norm = cells["clip_norm"] = float(norm)
        ratio = limit / (norm + 1e-6) if not math.isnan(norm) else math.nan
        cells["clip_coef"] = math.nan if math.isnan(ratio) else min(1.0, ratio)
        cells["clip_bound"] = norm > limit
