"""The GradScaler's scale, and whether a step was skipped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepscope.probes.base import Context, Probe
from stepscope.schema import Column

if TYPE_CHECKING:
    from stepscope import events
    from stepscope.watch.ledger import Row

_NO_SCALER = "no enabled GradScaler scaled this loss"
_LAST = "not the window's last row"


class LossScale(Probe):
    """The truth about a skip is what the scaler itself found, fused or not; never a call count or a changed scale."""

    name = "loss_scale"
    columns = (
        Column("loss_scale_before", "float64", "1", "scale with which this micro-step's loss was multiplied", _NO_SCALER),
        Column("loss_scale_after", "float64", "1", "scale after the update that followed", "no update followed"),
        Column("unscale_divisor", "float64", "1", "scale by which unscale_ divided the gradients", "nothing was unscaled"),
        Column("unscale_calls", "int64", "calls", "unscale_ calls of the script between this backward and the next"),
        Column("update_calls", "int64", "calls", "scaler updates between this backward and the next"),
        Column("found_inf", "bool", "", "the scaler found gradients that are not finite", "no enabled scaler stepped"),
        Column("step_skipped", "bool", "", "the attempted step was skipped", _LAST),
        Column("skip_reason", "string", "", "why it was skipped", "it was not"),
        Column("step_in_scaler", "bool", "", "the step was called by scaler.step", _LAST),
        Column("grad_scaled_at_step", "bool", "", "the gradients still carried the loss scale when the step began", _LAST),
    )

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._unscaled: set[int] = set()

    def on_unscale(self, event: events.Unscale) -> None:
        """Gradients were divided."""
        self._unscaled.add(event.optimizer.index)
        if event.row is not None:
            event.row.cells["unscale_divisor"] = event.scale
            if event.row.calls[-1:] == ["U"]:
                event.row.count("unscale_calls")

    def on_backward_end(self, event: events.BackwardEnd) -> None:
        """A backward adds scaled gradients to whatever is there."""
        for row in event.rows:
            row.cells.setdefault("unscale_calls", 0)
            row.cells.setdefault("update_calls", 0)
            if row.optimizer is not None and event.micro.cells.get("_scaled"):
                self._unscaled.discard(row.optimizer.index)

    def on_step_begin(self, event: events.StepBegin) -> None:
        """Note whether the gradients that this step is given are scaled."""
        if event.row is not None:
            scaled = bool(event.row.micro.cells.get("_scaled")) and event.optimizer.index not in self._unscaled
            event.row.cells["_scaled_at_step"] = scaled
            event.row.cells["step_in_scaler"] = event.in_scaler
            handles_scale = getattr(event.optimizer.optimizer, "_step_supports_amp_scaling", False)
            event.row.cells["grad_scaled_at_step"] = scaled and not (event.in_scaler and handles_scale)

    def on_attempt(self, event: events.Attempt) -> None:
        """The attempt is over: what the scaler found, and whether it let the optimizer run."""
        self._unscaled.discard(event.optimizer.index)
        if event.row is not None:
            event.row.cells["_found_inf"] = event.found_inf
            event.row.cells["_ran"] = event.ran
            event.row.cells.setdefault("step_in_scaler", event.scaler is not None)

    def on_scaler_update(self, event: events.ScalerUpdate) -> None:
        """The scale after this update, for every optimizer whose last micro-step is still open."""
        for row in event.rows:
            row.count("update_calls")
            row.cells["loss_scale_after"] = event.after

    def resolve(self, row: Row, cells: dict[str, Any]) -> None:
        """Skipped: the scaler did not call the optimizer, or the fused optimizer was told not to apply."""
        found = cells.get("_found_inf")
        if found is not None:
            cells["found_inf"] = bool(found)
        if not row.attempted:
            return
        cells["step_skipped"] = cells.get("_ran") is False or bool(found)
        if cells["step_skipped"]:
            cells["skip_reason"] = "gradients not finite" if found else "the scaler did not call the optimizer"
