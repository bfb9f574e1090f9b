"""The GradScaler's scale, what it divided, and whether a step was skipped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stepscope.probes.base import Context, Probe
from stepscope.schema import Column

if TYPE_CHECKING:
    from stepscope import events
    from stepscope.watch.ledger import Row, WatchedOptimizer

_NO_SCALER = "no enabled GradScaler scaled this loss"
_LAST = "not the window's last row"


class LossScale(Probe):
    """The truth about a skip is what the scaler itself found, fused or not; never a call count or a changed scale."""

    name = "loss_scale"
    columns = (
        Column("loss_scale_before", "float64", "1", "scale with which this micro-step's loss was multiplied", _NO_SCALER),
        Column("loss_scale_after", "float64", "1", "scale after the update that followed", "no update followed"),
        Column("scale_called", "bool", "", "scaler.scale was called since the backward before, whether or not this loss was seen to carry it"),
        Column("scale_left_out", "bool", "", "scaler.scale was given this loss, and backward was not called on what it returned"),
        Column("unscale_divisor", "float64", "1", "scale by which the gradients were divided: by unscale_, or inside a fused step", "nothing was unscaled"),
        Column("unscale_calls", "int64", "calls", "unscale_ calls of the script between this backward and the step"),
        Column("scale_divisions", "int64", "divisions", "times the gradients were divided by the scale between this backward and the step, by whomever"),
        Column("update_calls", "int64", "calls", "scaler updates between this backward and the next"),
        Column("early_updates", "int64", "calls", "those of update_calls that came before the step which used the gradients"),
        Column("early_update_between", "bool", "", "such an update came after another optimizer's step in the same iteration", "there was none"),
        Column("weights_norm", "float64", "1", "L2 norm of the optimizer's parameters at this backward, once they have moved between two backward passes of a window (SAM)", "they have not, or no scaler is used"),
        Column("found_inf", "bool", "", "the scaler found gradients that are not finite", "no enabled scaler stepped"),
        Column("step_skipped", "bool", "", "the attempted step was skipped", _LAST),
        Column("skip_reason", "string", "", "why it was skipped", "it was not"),
        Column("step_in_scaler", "bool", "", "the step was called by scaler.step", _LAST),
        Column("grad_scaled_at_step", "bool", "", "the gradients still carried the loss scale when the step began", _LAST),
        Column("fused_step_hooked", "bool", "", "the script hooks, or has replaced, the step of this fused optimizer", "the step is not fused, or not the scaler's"),
    )  # fmt: skip

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._unscaled: set[int] = set()
        self._scaler_of: dict[int, int] = {}
        self._scalers: set[int] = set()
        self._called = False
        self._versions: dict[int, int] = {}
        self._climbing: set[int] = set()

    def on_watched_begin(self, watched: WatchedOptimizer) -> None:
        """Two-phase optimizers move the weights between two backward passes of a window: from then on, where do they stand?

        In accumulation the weights stay put within a window and the gradients stay there: nothing is measured.
        """
        if not self._scalers or not watched.window:
            return
        versions = sum(p._version for p in watched.params)
        if versions != self._versions.get(watched.index) or not any(watched.before):
            self._climbing.add(watched.index)

    def on_scale_loss(self, event: events.ScaleLoss) -> None:
        """A scaler multiplied something."""
        self._called = self._called or event.scale is not None
        if event.scale is not None:
            self._scalers.add(id(event.scaler))

    def on_backward_begin(self, event: events.BackwardBegin) -> None:
        """Was anything scaled on the way to this backward?"""
        event.micro.cells["scale_called"], self._called = self._called, False

    def on_unscale(self, event: events.Unscale) -> None:
        """Gradients were divided."""
        self._unscaled.add(event.optimizer.index)
        self._scaler_of[event.optimizer.index] = id(event.scaler)
        row = event.row
        if row is not None and not row.attempted:
            row.cells["unscale_divisor"] = event.scale
            row.count("scale_divisions")
            if row.calls[-1:] == ["U"]:
                row.count("unscale_calls")

    def on_backward_end(self, event: events.BackwardEnd) -> None:
        """A backward adds scaled gradients to whatever is there."""
        for row in event.rows:
            self._measure_weights(row)
            for column in ("unscale_calls", "scale_divisions", "update_calls", "early_updates"):
                row.cells.setdefault(column, 0)
            if row.optimizer is not None and event.micro.cells.get("_scaled"):
                self._unscaled.discard(row.optimizer.index)

    def _measure_weights(self, row: Row) -> None:
        watched = row.optimizer
        if watched is None or not self._scalers:
            return
        self._versions[watched.index] = sum(p._version for p in watched.params)
        if watched.index in self._climbing and not row.attempted:
            measure = self.context.measure
            row.cells["weights_norm"] = measure.total(measure.norms(watched.params))

    def on_step_begin(self, event: events.StepBegin) -> None:
        """Note whether the gradients that this step is given are scaled."""
        row, optimizer = event.row, event.optimizer.optimizer
        if row is None:
            return
        scaled = bool(row.micro.cells.get("_scaled")) and event.optimizer.index not in self._unscaled
        row.cells["_scaled_at_step"] = scaled
        row.cells["step_in_scaler"] = event.in_scaler
        divides = event.in_scaler and bool(getattr(optimizer, "_step_supports_amp_scaling", False))
        row.cells["grad_scaled_at_step"] = scaled and not divides
        if divides:
            row.cells["fused_step_hooked"] = _hooked(optimizer)
        divisor = getattr(optimizer, "grad_scale", None) if divides else None
        if divisor is not None:
            row.cells["unscale_divisor"] = row.cells["_step_divisor"] = divisor.detach().clone().reshape(())
            row.count("scale_divisions")

    def on_attempt(self, event: events.Attempt) -> None:
        """The attempt is over: what the scaler found, and whether it let the optimizer run."""
        self._unscaled.discard(event.optimizer.index)
        if event.scaler is not None:
            self._scaler_of[event.optimizer.index] = id(event.scaler)
        if event.row is not None:
            event.row.cells["_found_inf"] = event.found_inf
            event.row.cells["_ran"] = event.ran
            event.row.cells.setdefault("step_in_scaler", event.scaler is not None)

    def on_scaler_update(self, event: events.ScalerUpdate) -> None:
        """The scale after this update, for every optimizer of this scaler whose last micro-step is still open."""
        mine = [row for row in event.rows if self._concerns(event.scaler, row)]
        for row in mine:
            row.count("update_calls")
            row.cells["loss_scale_after"] = event.after
            if not row.attempted:
                row.count("early_updates")
                row.cells["early_update_between"] = bool(row.cells.get("early_update_between")) or any(
                    other.attempted and other.micro.number >= row.micro.number for other in mine
                )

    def _concerns(self, scaler: Any, row: Row) -> bool:
        """Whether the gradients of `row` are this scaler's; before its optimizer's first step that is not known."""
        index = row.optimizer.index if row.optimizer is not None else -1
        known = self._scaler_of.get(index)
        return known == id(scaler) if known is not None else len(self._scalers) <= 1

    def on_called(self, event: events.Called) -> None:
        """A call of the scaler raised: what state was it in, and what did the optimizer hold?"""
        if event.name in ("scaler_step_failed", "unscale_failed", "scaler_update_failed"):
            self.context.note(event.name, event.optimizer, {**event.detail, **_held(event.optimizer)})

    def resolve(self, row: Row, cells: dict[str, Any]) -> None:
        """Skipped: the scaler did not call the optimizer, or the fused optimizer was told not to apply."""
        if cells.get("weights_norm") is not None:
            cells["weights_norm"] = float(cells["weights_norm"])
        found = cells.get("_found_inf")
        if found is not None:
            cells["found_inf"] = bool(found)
        if not row.attempted:
            return
        cells["step_skipped"] = cells.get("_ran") is False or bool(found)
        if cells["step_skipped"]:
            cells["skip_reason"] = "gradients not finite" if found else "the scaler did not call the optimizer"


def _hooked(optimizer: Any) -> bool:
    """Whether the script is told of each call of ``step``; schedulers wrap it too, and mark their wrapper."""
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return True
    own = optimizer.__dict__.get("step")
    return own is not None and not hasattr(own, "_wrapped_by_lr_sched")


def _held(watched: WatchedOptimizer | None) -> dict[str, Any]:
    """How many parameters of an optimizer have a gradient, and how many of those are float16."""
    if watched is None:
        return {}
    gradients = [p.grad for p in watched.params if p.grad is not None]
    half = sum(str(g.dtype) == "torch.float16" for g in gradients)
    return {"parameters": len(watched.params), "gradients": len(gradients), "float16_gradients": half}
