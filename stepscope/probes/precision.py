"""Autocast: the dtype of the forward, and whether backward or the step ran inside the region."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.probes.base import Context, Probe
from stepscope.schema import Column

if TYPE_CHECKING:
    from stepscope import events


class Precision(Probe):
    """Follows the regions of autocast from enter to exit."""

    name = "precision"
    columns = (
        Column("autocast_dtype", "string", "", "dtype of the autocast region that the forward ran in", "no autocast since the backward before"),
        Column("autocast_backward", "bool", "", "autocast was enabled when backward was called"),
        Column("autocast_step", "bool", "", "autocast was enabled when the optimizer stepped", "not the window's last row"),
        Column("autocast_stale", "bool", "", "this forward ran in an autocast region in which the optimizer had already stepped, so that cached casts of old weights may have been used", "no autocast region was open"),
    )  # fmt: skip

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._open: list[int] = []
        self._regions = 0
        self._dtype: str | None = None
        self._stepped_in: dict[int, int] = {}
        self._forward_region: int | None = None

    def on_called(self, event: events.Called) -> None:
        """Enter and exit of regions."""
        if event.name == "autocast_enter":
            instance = event.detail["instance"]
            if not self._open:
                self._regions += 1
            enabled = bool(getattr(instance, "_enabled", False))
            self._open.append(self._regions if enabled and getattr(instance, "_cache_enabled", True) else -1)
            if enabled:
                self._dtype = str(getattr(instance, "fast_dtype", "")).removeprefix("torch.")
        elif event.name == "autocast_exit" and self._open:
            self._open.pop()

    def _region(self) -> int | None:
        return self._open[-1] if self._open and self._open[-1] > 0 else None

    def on_forward(self, event: events.Forward) -> None:
        """The region of the forward that leads to the next backward."""
        if event.training:
            self._forward_region = self._region()

    def on_backward_begin(self, event: events.BackwardBegin) -> None:
        """What the forward ran in, and what backward runs in."""
        cells = event.micro.cells
        cells["autocast_dtype"], self._dtype = self._dtype, None
        cells["autocast_backward"] = self._region() is not None
        cells["_forward_region"] = self._forward_region

    def on_backward_end(self, event: events.BackwardEnd) -> None:
        """Stale if an optimizer of these parameters had stepped in the region of the forward."""
        for row in event.rows:
            region = event.micro.cells.get("_forward_region")
            if region is not None and row.optimizer is not None:
                row.cells["autocast_stale"] = self._stepped_in.get(row.optimizer.index) == region
        if self._region() is not None:
            self._dtype = event.micro.cells.get("autocast_dtype")

    def on_attempt(self, event: events.Attempt) -> None:
        """A step inside a region makes what the region has cached stale."""
        region = self._region()
        if event.row is not None:
            event.row.cells["autocast_step"] = region is not None
        if region is not None and event.ran:
            self._stepped_in[event.optimizer.index] = region
