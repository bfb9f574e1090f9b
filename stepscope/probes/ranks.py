"""Several processes: whether DDP would reduce this backward, and what was reduced by hand."""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Any

from stepscope.probes.base import Context, Probe
from stepscope.schema import Column

if TYPE_CHECKING:
    from stepscope import events
    from stepscope.watch.ledger import Row

_NO_DDP = "no module is wrapped in DDP"


class Ranks(Probe):
    """DDP decides when *forward* runs whether the backward reduces; so that is where its flag is read."""

    name = "ranks"
    columns = (
        Column("ddp_sync", "bool", "", "DDP's own forwards ran with synchronisation on, all of them, so that this backward reduces", _NO_DDP),
        Column("ddp_sync_at_backward", "bool", "", "DDP's flag stood at synchronisation when backward began, where it is without effect", _NO_DDP),
        Column("ddp_bypassed", "bool", "", "a module wrapped in DDP was called directly, not through its wrapper", _NO_DDP),
        Column("all_reduce_calls", "int64", "calls", "all_reduce calls of the script between this backward and the next"),
        Column("reduced_by_hand", "bool", "", "the script all-reduced tensors of more than one element between this backward and the step", "not the window's last row"),
        Column("reduced_norm", "float64", "1", "L2 norm of the tensors that the script all-reduced between this backward and the step, where they are as large as the gradients together", "nothing of the gradients' size was reduced by hand, or without waiting for it"),
        Column("given_norm", "float64", "1", "L2 norm of the same tensors as they were given to the reduction", "as reduced_norm"),
        Column("reduced_mean", "bool", "", "that reduction averaged by itself (ReduceOp.AVG)", "as reduced_norm"),
    )  # fmt: skip

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._wrappers: list[tuple[Any, set[int]]] = []
        self._inner: set[int] = set()
        self._sync: bool | None = None
        self._bypassed: bool | None = None
        self._rows: list[Row] = []
        self._reduced: list[tuple[Any, Any, int, bool]] = []
        self._given: Any = None
        self._by_hand = False
        self._moved = False
        self._looks = 0

    def on_built(self, event: events.Built) -> None:
        """A wrapper knows the tensors it was given; those that come later are never reduced."""
        if event.what == "ddp":
            wrapper = event.instance
            known = {id(p) for p in wrapper.module.parameters()}
            self._wrappers.append((weakref.ref(wrapper), known))
            self._inner |= {id(m) for m in wrapper.module.modules()}

    def on_forward(self, event: events.Forward) -> None:
        """Through the wrapper, or past it."""
        if not self._wrappers or not event.training:
            return
        wrapper = next((w for ref, _ in self._wrappers if (w := ref()) is event.module), None)
        if wrapper is not None:
            self._sync = bool(wrapper.require_backward_grad_sync) and self._sync is not False
            self._bypassed = bool(self._bypassed)
            self._looks += 1
            if self._looks <= 10 or self._looks % 25 == 0:
                self._look_for_moved(wrapper)
        elif id(event.module) in self._inner:
            self._bypassed = True

    def _look_for_moved(self, wrapper: Any) -> None:
        known = next(k for ref, k in self._wrappers if ref() is wrapper)
        new = [n for n, p in wrapper.module.named_parameters() if p.requires_grad and id(p) not in known]
        if new and not self._moved:
            self._moved = True
            self.context.note("ddp_parameters_replaced", None, {"params": new[:20], "count": len(new)})

    def on_backward_begin(self, event: events.BackwardBegin) -> None:
        """What the forwards since the last backward said."""
        cells = event.micro.cells
        cells["ddp_sync"], self._sync = self._sync, None
        cells["ddp_bypassed"], self._bypassed = self._bypassed, None
        flags = [w.require_backward_grad_sync for ref, _ in self._wrappers if (w := ref()) is not None]
        if flags:
            cells["ddp_sync_at_backward"] = all(flags)

    def on_backward_end(self, event: events.BackwardEnd) -> None:
        """Start counting."""
        self._rows, self._reduced, self._by_hand = event.rows, [], False
        for row in event.rows:
            row.cells.setdefault("all_reduce_calls", 0)

    def on_called(self, event: events.Called) -> None:
        """A reduction by hand. What it gave is measured at once, unless it has only been started."""
        if event.name == "all_reduce_begin":
            self._given = self._norm(event.detail["tensor"])
        elif event.name == "all_reduce":
            self._reduction(event.detail)

    def _norm(self, tensor: Any) -> Any:
        """The norm of a tensor that may hold gradients on their way to a step, None for any other."""
        if not hasattr(tensor, "numel") or not tensor.is_floating_point() or all(r.attempted for r in self._rows):
            return None
        return self.context.measure.norms([tensor])[0]

    def _reduction(self, detail: dict[str, Any]) -> None:
        for row in self._rows:
            row.count("all_reduce_calls")
        tensor: Any = detail.get("tensor")
        self._by_hand |= hasattr(tensor, "numel") and int(tensor.numel()) > 1
        given, self._given = self._given, None
        if given is not None and not detail.get("async_op"):
            mean = "AVG" in str(detail.get("op"))
            self._reduced.append((given, self._norm(tensor), int(tensor.numel()), mean))

    def on_step_begin(self, event: events.StepBegin) -> None:
        """The reductions were for this step if they cover its gradients."""
        if event.row is not None:
            event.row.cells["reduced_by_hand"] = self._by_hand
        if event.row is None or not self._reduced:
            return
        size = sum(p.grad.numel() for p in event.optimizer.params if p.grad is not None)
        chosen = self._reduced
        if sum(r[2] for r in chosen) != size:  # counts of targets and the like were reduced too
            chosen = [r for r in chosen if r[2] > 1]
        if sum(r[2] for r in chosen) == size:
            event.row.cells["_given"] = [r[0] for r in chosen]
            event.row.cells["_reduced"] = [r[1] for r in chosen]
            event.row.cells["reduced_mean"] = all(r[3] for r in chosen)

    def resolve(self, row: Row, cells: dict[str, Any]) -> None:
        """The norms of all that was reduced together, without the loss scale that it carried."""
        scale = (cells.get("loss_scale_before") if cells.get("_scaled") else None) or 1.0
        for column, raw in (("reduced_norm", "_reduced"), ("given_norm", "_given")):
            if cells.get(raw):
                cells[column] = math.hypot(*map(float, cells[raw])) / scale
