"""Several processes: whether DDP would reduce this backward, and what was reduced by hand."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from stepscope.probes.base import Context, Probe
from stepscope.schema import Column

if TYPE_CHECKING:
    from stepscope import events


class Ranks(Probe):
    """DDP decides when *forward* runs whether the backward reduces; so that is where its flag is read."""

    name = "ranks"
    columns = (
        Column("ddp_sync", "bool", "", "DDP's own forward ran with synchronisation on, so that this backward reduces", "no module is wrapped in DDP"),
        Column("ddp_bypassed", "bool", "", "a module wrapped in DDP was called directly, not through its wrapper", "no module is wrapped in DDP"),
        Column("all_reduce_calls", "int64", "calls", "all_reduce calls of the script between this backward and the next"),
    )  # fmt: skip

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._wrappers: list[tuple[Any, set[int]]] = []
        self._inner: set[int] = set()
        self._sync: bool | None = None
        self._bypassed: bool | None = None
        self._rows: list[Any] = []
        self._moved = False

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
            self._sync = bool(wrapper.require_backward_grad_sync)
            self._bypassed = bool(self._bypassed)
            self._look_for_moved(wrapper)
        elif id(event.module) in self._inner:
            self._bypassed = True
            self._sync = bool(self._sync)

    def _look_for_moved(self, wrapper: Any) -> None:
        known = next(k for ref, k in self._wrappers if ref() is wrapper)
        new = [n for n, p in wrapper.module.named_parameters() if p.requires_grad and id(p) not in known]
        if new and not self._moved:
            self._moved = True
            self.context.note("ddp_parameters_replaced", None, {"params": new[:20], "count": len(new)})

    def on_backward_begin(self, event: events.BackwardBegin) -> None:
        """What the forwards since the last backward said."""
        event.micro.cells["ddp_sync"], self._sync = self._sync, None
        event.micro.cells["ddp_bypassed"], self._bypassed = self._bypassed, None

    def on_backward_end(self, event: events.BackwardEnd) -> None:
        """Start counting."""
        self._rows = event.rows
        for row in event.rows:
            row.cells.setdefault("all_reduce_calls", 0)

    def on_called(self, event: events.Called) -> None:
        """A reduction by hand."""
        if event.name == "all_reduce":
            for row in self._rows:
                row.count("all_reduce_calls")
