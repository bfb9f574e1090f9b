"""Host time of forward, backward and step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.probes.base import Context, Probe
from stepscope.schema import Column

if TYPE_CHECKING:
    from stepscope import events

_HOST = "host time; on an asynchronous device that is the time to launch"


class Timing(Probe):
    """Wall time on the host, the probes' own work left out."""

    name = "timing"
    columns = (
        Column(
            "forward_ms",
            "float64",
            "ms",
            f"training forwards since the backward before; {_HOST}",
            "no module was called",
        ),
        Column("backward_ms", "float64", "ms", f"this backward; {_HOST}"),
        Column(
            "step_ms", "float64", "ms", f"the optimizer's step; {_HOST}", "not the window's last row, or not called"
        ),
    )

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._forward: float | None = None

    def on_forward(self, event: events.Forward) -> None:
        """Add up training forwards."""
        if event.training:
            self._forward = (self._forward or 0.0) + event.milliseconds

    def on_backward_begin(self, event: events.BackwardBegin) -> None:
        """They belong to this backward."""
        event.micro.cells["forward_ms"], self._forward = self._forward, None

    def on_backward_end(self, event: events.BackwardEnd) -> None:
        """Note its time."""
        event.micro.cells["backward_ms"] = event.milliseconds

    def on_step_end(self, event: events.StepEnd) -> None:
        """Note the step's time."""
        if event.row is not None:
            event.row.cells["step_ms"] = event.milliseconds
