"""Gradient norms at their three stages: as backward left it, unscaled before the clip, as the step used it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from stepscope.probes.base import Context, Probe
from stepscope.schema import Column

if TYPE_CHECKING:
    from stepscope import events
    from stepscope.watch.ledger import Row, WatchedOptimizer

_LAST = "not the window's last row, or changed before it could be measured"
_BURN_IN = 32
"""Micro-steps of an optimizer in which everything is measured, before the usual window is known."""


class GradNorm(Probe):
    """L2 norms over the optimizer's parameters: one sweep after backward, one before the step; the clip's own is shared.

    The sweep after backward cannot be put off until it is known that a step follows: a script may divide gradients
    through ``.data``, which leaves no trace on the tensor, and the norm would be another.
    """

    name = "grad_norm"
    columns = (
        Column("grad_norm_before", "float64", "1", "L2 norm of what .grad held just before this backward, as it lay there; 0 where there was none", "held unchanged since the backward before"),
        Column("grad_norm_left", "float64", "1", "L2 norm of .grad just after this backward, as it lay there: scaled, summed up over the window", "no optimizer claimed the gradients"),
        Column("grad_norm_scaled", "float64", "1", "L2 norm as backward left it: scaled, before unscale and clip", _LAST),
        Column("grad_norm", "float64", "1", "L2 norm unscaled, before the clip", _LAST),
        Column("grad_norm_clipped", "float64", "1", "L2 norm unscaled, as the step used it (after the clip)", _LAST),
        Column("grad_factor", "float64", "1", "factor by which a script multiplied .grad itself after the window's last backward, unscaling left out: measured where the clip took its norm; where no clip was seen, at the step, so that a clip of the script's own is part of it", _LAST),
        Column("grad_params", "int64", "parameters", "parameters of the optimizer that have a gradient at the step", "not the window's last row"),
        Column("grad_nonfinite", "int64", "elements", "gradient elements that are NaN or infinite at the step", _LAST),
        Column("grad_zero_frac", "float64", "1", "share of gradient elements that are exactly zero at the step", "counted on every tenth window and the first three"),
    )  # fmt: skip
    param_columns = (
        Column(
            "grad_norm",
            "float64",
            "1",
            "L2 norm unscaled, before the clip",
            "not measured after the window's last backward",
        ),
        Column("grad_norm_clipped", "float64", "1", "L2 norm unscaled, as the step used it"),
        Column("grad_nonfinite", "int64", "elements", "elements that are NaN or infinite", "not counted at this step"),
        Column("grad_zero_frac", "float64", "1", "share of elements that are exactly zero", "not counted at this step"),
    )

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._held: dict[int, Any] = {}
        self._seen: dict[int, int] = {}
        self._closure: int | None = None

    def on_backward_begin(self, event: events.BackwardBegin) -> None:
        """What do gradients hold before this backward adds to them?"""
        self._held.clear()
        self._micro = event.micro

    def on_watched_begin(self, watched: WatchedOptimizer) -> None:
        """Told by the recorder for each optimizer at the beginning of a backward."""
        gradients = [p.grad for p in watched.params if p.grad is not None]
        if not gradients:
            self._held[watched.index] = 0.0
        elif not watched.window or watched.before != watched.stamps or self._seen.get(watched.index, 0) < _BURN_IN:
            measure = self.context.measure
            self._held[watched.index] = measure.total(measure.norms(gradients))

    def on_backward_end(self, event: events.BackwardEnd) -> None:
        """Measure what backward left, where a step may follow."""
        for row in event.rows:
            watched = row.optimizer
            if watched is None:
                continue
            row.cells["grad_norm_before"] = self._held.get(watched.index)
            self._seen[watched.index] = self._seen.get(watched.index, 0) + 1
            if not row.attempted:
                self._measure_left(watched, row)

    def _measure_left(self, watched: WatchedOptimizer, row: Row) -> None:
        measure = self.context.measure
        held = [(i, p.grad) for i, p in enumerate(watched.params) if p.grad is not None]
        norms = measure.norms([g for _, g in held])
        row.cells["_left"] = measure.total(norms)
        row.cells["_left_norms"] = norms
        row.cells["_left_places"] = [i for i, _ in held]

    def on_gradients_left(self, event: events.GradientsLeft) -> None:
        """Gradients that no backward wrote (master copies) are measured before anything happens to them."""
        if "_left" not in event.row.cells:
            self._measure_left(event.optimizer, event.row)

    def on_clip_end(self, event: events.ClipEnd) -> None:
        """The first clip of a window tells the norm before it: its own, if it covered the whole gradient."""
        row = event.row
        if row is None or row.attempted or "_clip_total" in row.cells or event.call.kind != "norm":
            return
        given = {id(g) for g in event.call.gradients}
        own = [p.grad for p in event.optimizer.params if p.grad is not None]
        covered = {id(g) for g in own} == given
        if covered and event.call.norm_type == 2.0 and event.call.total_norm is not None:
            row.cells["_clip_total"] = event.call.total_norm.detach().clone().reshape(())
            row.cells["_clip_scaled"] = bool(row.micro.cells.get("_scaled")) and "unscale_divisor" not in row.cells

    def on_step_begin(self, event: events.StepBegin) -> None:
        """What the step is about to use."""
        self._closure = event.optimizer.window.size if event.closure else None
        if event.closure:
            return  # the closure has yet to run: see on_step_end
        if event.row is not None:
            self._measure_used(event.optimizer, event.row)

    def on_step_end(self, event: events.StepEnd) -> None:
        """A closure that ran one backward leaves the gradient that the step used; one that ran several does not."""
        row = event.row
        if row is None or self._closure is None:
            return
        if event.optimizer.window.size - self._closure == 1:
            self._measure_used(event.optimizer, row)
        else:
            self.context.not_observed("grad_norm_clipped", "the step's closure ran several backward passes")

    def _measure_used(self, watched: WatchedOptimizer, row: Row) -> None:
        measure = self.context.measure
        held = [(i, p.grad) for i, p in enumerate(watched.params) if p.grad is not None]
        gradients = [g for _, g in held]
        row.cells["grad_params"] = len(held)
        norms = measure.norms(gradients)
        row.cells["_used"] = used = measure.total(norms)
        row.cells["_used_norms"], row.cells["_used_places"] = norms, [i for i, _ in held]
        row.cells["_numels"] = [g.numel() for g in gradients]
        self._count(row, gradients, used, watched.attempts + 1)

    def _count(self, row: Row, gradients: list[Any], used: Any, attempt: int) -> None:
        """Count elements where it costs nothing, or where something is wrong: a finite norm has no bad element."""
        measure = self.context.measure
        value = measure.peek(used)
        if value is None or not math.isfinite(value):
            row.cells["_nonfinite"] = measure.count_nonfinite(gradients)
        if value is None or attempt <= 3 or attempt % 10 == 0:
            row.cells["_nonzero"] = measure.count_nonzero(gradients)

    def resolve(self, row: Row, cells: dict[str, Any]) -> None:
        """Divide by the scale that the gradient carried, and only by that."""
        scale = cells.get("loss_scale_before") or 1.0
        left = cells.get("_left")
        if left is not None:
            cells["grad_norm_left"] = float(left)
        if row.attempted and left is not None:
            cells["grad_norm_scaled"] = float(left)
        used = cells.get("_used")
        if used is not None:
            divisor = cells.get("_step_divisor") or scale
            cells["grad_norm_clipped"] = float(used) / (divisor if cells.get("_scaled_at_step") else 1.0)
        clip = cells.get("_clip_total")
        if clip is not None and row.attempted:
            cells["grad_norm"] = float(clip) / (scale if cells.get("_clip_scaled") else 1.0)
        elif row.attempted and left is not None:
            cells["grad_norm"] = float(left) / (scale if cells.get("_scaled") else 1.0)
        if row.attempted and left:
            cells["grad_factor"] = self._factor(cells, float(left) / (scale if cells.get("_scaled") else 1.0))
        self._counts(cells)

    def _factor(self, cells: dict[str, Any], left: float) -> float | None:
        """What `.grad` was multiplied by after backward: measured where the clip took its norm, else at the step."""
        before = cells["grad_norm"] if cells.get("_clip_total") is not None else cells.get("grad_norm_clipped")
        if before is None or not (math.isfinite(before) and math.isfinite(left)):
            return None
        factor = before / left
        return 1.0 if math.isclose(factor, 1.0, rel_tol=1e-3) else factor

    def _counts(self, cells: dict[str, Any]) -> None:
        used, sizes = cells.get("_used"), cells.get("_numels") or []
        if cells.get("_nonfinite") is not None:
            cells["grad_nonfinite"] = int(sum(cells["_nonfinite"]))
        elif used is not None and math.isfinite(float(used)):
            cells["grad_nonfinite"] = 0
        if cells.get("_nonzero") is not None and sum(sizes):
            cells["grad_zero_frac"] = 1.0 - sum(cells["_nonzero"]) / sum(sizes)

    def param_cells(self, cells: dict[str, Any], place: int) -> dict[str, Any]:
        """The cells of one parameter (by its place in the optimizer) for the table of parameters."""
        out: dict[str, Any] = {}
        scale = cells.get("loss_scale_before") or 1.0
        left = _at(cells, "_left_places", place)
        if left is not None:
            out["grad_norm"] = cells["_left_norms"][left] / (scale if cells.get("_scaled") else 1.0)
        used = _at(cells, "_used_places", place)
        if used is not None:
            norm = cells["_used_norms"][used]
            out["grad_norm_clipped"] = norm / (scale if cells.get("_scaled_at_step") else 1.0)
            if cells.get("_nonfinite") is not None:
                out["grad_nonfinite"] = int(cells["_nonfinite"][used])
            elif math.isfinite(norm):
                out["grad_nonfinite"] = 0
            if cells.get("_nonzero") is not None and cells["_numels"][used]:
                out["grad_zero_frac"] = 1.0 - cells["_nonzero"][used] / cells["_numels"][used]
        return out


def _at(cells: dict[str, Any], places: str, place: int) -> int | None:
    held = cells.get(places)
    return held.index(place) if held is not None and place in held else None
