"""Parameters and what a step did to them: norms, the largest change, the ratio, and updates lost to rounding."""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Any

from stepscope.probes.base import Context, Probe
from stepscope.schema import Column

if TYPE_CHECKING:
    from stepscope import events
    from stepscope.watch.ledger import Row, WatchedOptimizer

_LAST = "not the window's last row, or the scaler did not call the optimizer"
_LOST = "counted at every step for parameters in half precision, for others on the first three windows and every tenth"


class Updates(Probe):
    """Copies the parameters before a step and subtracts after it; the copy is the price, one sweep the rest."""

    name = "updates"
    columns = (
        Column("param_norm", "float64", "1", "L2 norm of the optimizer's parameters before the step", _LAST),
        Column("update_norm", "float64", "1", "L2 norm of their change in this step", _LAST),
        Column("update_max", "float64", "1", "largest absolute change of an element in this step", _LAST),
        Column("update_ratio", "float64", "1", "update_norm / param_norm", _LAST),
        Column("lost_update_frac", "float64", "1", "share of elements with a gradient that is not zero and no change", _LOST),
        Column("frozen_moved", "int64", "parameters", "parameters that do not require a gradient and that the step changed although this window gave them none: theirs is absent, zero, or left from before they were frozen", _LAST),
        Column("frozen_update_norm", "float64", "1", "L2 norm of the change of those parameters in this step", _LAST),
        Column("optimizer_state_step", "float64", "steps", "largest step counter in the optimizer's state before the step; 0 for an empty state", "the optimizer keeps no step counter"),
    )  # fmt: skip
    param_columns = (
        Column("param_norm", "float64", "1", "L2 norm before the step", "the scaler did not call the optimizer"),
        Column("update_norm", "float64", "1", "L2 norm of the change in this step", "as param_norm"),
        Column("update_max", "float64", "1", "largest absolute change of an element", "as param_norm"),
        Column("update_ratio", "float64", "1", "update_norm / param_norm", "as param_norm, or the parameter is zero"),
        Column("lost_update_frac", "float64", "1", "share of elements with a gradient and no change", _LOST),
        Column(
            "frozen_moved",
            "bool",
            "",
            "the step changed it although it does not require a gradient and got none",
            "it requires a gradient, or got one by hand",
        ),
    )

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._snapshots: dict[int, tuple[WatchedOptimizer, Any]] = {}
        self._models: list[weakref.ref[Any]] = []
        self._received: dict[int, set[int]] = {}
        self._described: set[int] = set()

    def on_forward(self, event: events.Forward) -> None:
        """Parameters of models that training calls are no master copies."""
        if event.training and not any(ref() is event.module for ref in self._models):
            self._models = [ref for ref in self._models if ref() is not None]
            self._models.append(weakref.ref(event.module))

    def on_backward_end(self, event: events.BackwardEnd) -> None:
        """Remember which parameters have ever received a gradient from a backward."""
        for row in event.rows:
            if row.optimizer is not None:
                self._received.setdefault(row.optimizer.index, set()).update(row.received)

    def on_step_begin(self, event: events.StepBegin) -> None:
        """Copy the parameters."""
        watched = event.optimizer
        if watched.index not in self._snapshots:
            self._snapshots = {i: (w, s) for i, (w, s) in self._snapshots.items() if w.optimizer is not None}
            self._snapshots[watched.index] = (watched, self.context.measure.Snapshot())
        self._snapshots[watched.index][1].take(watched.params)
        self._gradients = [p.grad for p in watched.params] if self._count_lost(event) else None
        if event.row is not None:
            event.row.cells["optimizer_state_step"] = _state_step(watched.optimizer)
            if not event.closure:
                event.row.cells["_frozen"] = self._frozen(event)

    def _frozen(self, event: events.StepBegin) -> tuple[list[int], list[int]]:
        """Places of parameters that do not require a gradient: those without one to use, those with one to be judged.

        A gradient that a script assigned by hand to a tensor of no called model feeds a master copy, which is right. A
        parameter that once received gradients from backward, and did not in this window, holds one from before.
        """
        watched = event.optimizer
        places = [i for i, p in enumerate(watched.params) if not p.requires_grad]
        if not places:
            return [], []
        received = self._received.get(watched.index, set()) - watched.window.received
        called = {id(p) for ref in self._models if (m := ref()) is not None for p in m.parameters()}
        params = watched.params
        without = [i for i in places if i in received or params[i].grad is None]
        return without, [i for i in places if i not in without and id(params[i]) in called]

    def _count_lost(self, event: events.StepBegin) -> bool:
        if event.closure:
            return False
        attempt = event.optimizer.attempts + 1
        half = any(p.element_size() < 4 and p.is_floating_point() for p in event.optimizer.params)
        return half or attempt <= 3 or attempt % 10 == 0

    def on_step_end(self, event: events.StepEnd) -> None:
        """Measure the change."""
        watched = event.optimizer
        change = self._snapshots[watched.index][1].measure(watched.params, self._gradients)
        self._gradients = None
        cells = event.row.cells if event.row is not None else {}
        cells["_before"], cells["_change"] = change.before, change.change
        cells["_low"], cells["_high"] = change.low, change.high
        cells["_lost"], cells["_with_gradient"] = change.lost, change.with_gradient
        if event.row is None:
            total = self.context.measure.total
            detail = {"update_norm": total(change.change), "param_norm": total(change.before)}
            self.context.note("parameters_stepped_without_backward", watched, detail)
        if watched.index not in self._described:
            self._described.add(watched.index)
            self._describe_state(watched)

    def _describe_state(self, watched: WatchedOptimizer) -> None:
        """What an optimizer of half-precision parameters keeps: a master copy or a compensation saves small updates."""
        half = next((p for p in watched.params if p.is_floating_point() and p.element_size() < 4), None)
        optimizer = watched.optimizer
        if half is None or optimizer is None:
            return
        state = optimizer.state.get(half, {})
        kept = {
            k: str(v.dtype).removeprefix("torch.") for k, v in state.items() if getattr(v, "shape", None) == half.shape
        }
        self.context.note(
            "half_precision_state", watched, {"dtype": str(half.dtype).removeprefix("torch."), "state": kept}
        )

    def resolve(self, row: Row, cells: dict[str, Any]) -> None:
        """Sum up over the parameters."""
        if cells.get("optimizer_state_step") is not None:
            cells["optimizer_state_step"] = float(cells["optimizer_state_step"])
        if cells.get("_change") is None:
            return
        cells["param_norm"] = _root_sum(cells["_before"])
        cells["update_norm"] = _root_sum(cells["_change"])
        cells["update_max"] = _peak(cells["_low"] + cells["_high"])
        cells["update_ratio"] = _ratio(cells["update_norm"], cells["param_norm"])
        self._resolve_frozen(cells)
        if cells.get("_lost") is not None:
            cells["lost_update_frac"] = _ratio(sum(cells["_lost"]), sum(cells["_with_gradient"]), empty=None)

    def _resolve_frozen(self, cells: dict[str, Any]) -> None:
        if "_frozen" not in cells:
            return
        without, judged = cells["_frozen"]
        used = dict(zip(cells.get("_used_places") or [], cells.get("_used_norms") or [], strict=False))
        zero = [i for i in judged if used.get(i, 0.0) == 0.0]
        change = cells["_change"]
        moved = [i for i in (*without, *zero) if i < len(change) and change[i] != 0.0]
        cells["frozen_moved"] = len(moved)
        cells["frozen_update_norm"] = _root_sum([change[i] for i in moved])
        cells["_frozen_moved"] = set(moved)
        cells["_frozen_places"] = {*without, *zero}

    def param_cells(self, cells: dict[str, Any], place: int) -> dict[str, Any]:
        """The cells of one parameter for the table of parameters."""
        if cells.get("_change") is None or place >= len(cells["_change"]):
            return {}
        before, change = cells["_before"][place], cells["_change"][place]
        out = {
            "param_norm": before,
            "update_norm": change,
            "update_max": _peak([cells["_low"][place], cells["_high"][place]]),
            "update_ratio": _ratio(change, before, empty=None),
        }
        if place in cells.get("_frozen_places", ()):
            out["frozen_moved"] = place in cells["_frozen_moved"]
        if cells.get("_lost") is not None:
            out["lost_update_frac"] = _ratio(cells["_lost"][place], cells["_with_gradient"][place], empty=None)
        return out


def _root_sum(norms: list[float]) -> float:
    """L2 norm of a whole from the norms of its parts; ``math.hypot`` turns a NaN beside an infinity into one."""
    return math.nan if any(math.isnan(n) for n in norms) else math.hypot(*norms)


def _peak(values: list[float]) -> float:
    return math.nan if any(math.isnan(v) for v in values) else max((abs(v) for v in values), default=0.0)


def _ratio(a: float, b: float, empty: float | None = math.nan) -> float | None:
    return a / b if b else empty


def _state_step(optimizer: Any) -> Any:
    """The largest ``state["step"]``; a device counter is copied, not read. None where there is no such counter."""
    steps = [s["step"] for s in optimizer.state.values() if isinstance(s, dict) and "step" in s][:1]
    if not optimizer.state:
        return 0.0
    if not steps:
        return None
    return steps[0].detach().clone().reshape(()) if hasattr(steps[0], "detach") else float(steps[0])
