"""Autocast: the dtype of the forward, and whether backward or the step ran inside the region."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepscope.probes.base import Context, Probe
from stepscope.schema import Column

if TYPE_CHECKING:
    from typing import Any

    from stepscope import events


@dataclass(slots=True)
class _Region:
    """An open region of autocast.

    Attributes:
        number: of the outermost region it lies in, in whose cache casts are kept.
        dtype: low-precision dtype, None where autocast is switched off.
        caches: casts of weights are kept until the outermost region ends.
        graph: gradients were recorded when it began.
        trained: training forwards in it.
        evaluated: forwards without gradients in it.
    """

    number: int
    dtype: str | None
    caches: bool
    graph: bool
    trained: int = 0
    evaluated: int = 0

    @property
    def trains(self) -> bool:
        """Whether what ran in it leads to a backward, as far as calls of modules tell."""
        return self.graph and (self.trained > 0 or self.evaluated == 0)


class Precision(Probe):
    """Follows the regions of autocast from enter to exit."""

    name = "precision"
    columns = (
        Column("autocast_dtype", "string", "", "dtype of the autocast region that the forward ran in", "no autocast since the backward before"),
        Column("model_dtype", "string", "", "dtype of the first parameter of the module that training called", "no module was called since the backward before"),
        Column("autocast_backward", "bool", "", "autocast was enabled when backward was called"),
        Column("autocast_step", "bool", "", "autocast was enabled when the optimizer stepped", "not the window's last row"),
        Column("autocast_stale", "bool", "", "the optimizer had stepped in this forward's autocast region after a forward had filled its cache: casts of old weights were used", "no autocast region was open"),
    )  # fmt: skip

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        import torch

        self._torch = torch
        self._open: list[_Region] = []
        self._regions = 0
        self._dtype: str | None = None
        self._model: str | None = None
        self._stepped_in: dict[int, int] = {}
        self._forward_region: int | None = None
        self._called = False

    def on_called(self, event: events.Called) -> None:
        """Enter and exit of regions."""
        if event.name == "autocast_enter":
            self._open.append(self._region_of(event.detail["instance"]))
        elif event.name == "autocast_exit" and self._open:
            region = self._open.pop()
            if region.dtype is not None and region.trains:
                self._dtype = region.dtype

    def _region_of(self, instance: Any) -> _Region:
        if not self._open:
            self._regions += 1
        enabled = bool(getattr(instance, "_enabled", False))
        dtype = str(getattr(instance, "fast_dtype", "")).removeprefix("torch.") if enabled else None
        caches = enabled and bool(getattr(instance, "_cache_enabled", True))
        return _Region(self._regions, dtype, caches, self._torch.is_grad_enabled())

    def _cache(self) -> int | None:
        """The region in whose cache a forward would now find casts of weights."""
        return self._open[-1].number if self._open and self._open[-1].caches else None

    def _enabled(self) -> bool:
        """Whether autocast is on, also where it was switched on without a region."""
        if self._open and self._open[-1].dtype is not None:
            return True
        return bool(self._torch.is_autocast_enabled("cpu") or self._torch.is_autocast_enabled("cuda"))

    def on_forward(self, event: events.Forward) -> None:
        """The region of the forward that leads to the next backward."""
        if self._open:
            self._open[-1].trained += event.training
            self._open[-1].evaluated += not event.training
        if event.training:
            self._forward_region, self._called = self._cache(), True
            first = next(event.module.parameters(), None)
            if first is not None:
                self._model = str(first.dtype).removeprefix("torch.")

    def on_backward_begin(self, event: events.BackwardBegin) -> None:
        """What the forward ran in, and what backward runs in."""
        for region in self._open:
            if region.dtype is not None and region.trains:
                self._dtype = region.dtype
        if not self._called and self._open:  # a loss computed without calling a module, in the region that is open now
            self._forward_region = self._cache()
        self._called = False
        cells = event.micro.cells
        cells["autocast_dtype"], self._dtype = self._dtype, None
        cells["model_dtype"], self._model = self._model, None
        cells["autocast_backward"] = self._enabled()
        cells["_forward_region"] = self._forward_region

    def on_backward_end(self, event: events.BackwardEnd) -> None:
        """Stale if an optimizer of these parameters had stepped in the region of the forward."""
        region = event.micro.cells.get("_forward_region")
        for row in event.rows:
            if region is not None and row.optimizer is not None:
                row.cells["autocast_stale"] = self._stepped_in.get(row.optimizer.index) == region

    def on_attempt(self, event: events.Attempt) -> None:
        """A step inside a region makes stale what forwards of that region have cached."""
        if event.row is not None:
            event.row.cells["autocast_step"] = self._enabled()
        region = self._cache()
        cast = any(p.element_size() > 2 for p in event.optimizer.params)
        if region is not None and region == self._forward_region and event.ran and cast:
            self._stepped_in[event.optimizer.index] = region
