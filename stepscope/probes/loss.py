"""The loss of a micro-step and the weight with which it enters backward."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from stepscope.probes.base import Context, Probe, per_optimizer
from stepscope.schema import Column

if TYPE_CHECKING:
    from stepscope import events
    from stepscope.watch.ledger import Row
    from stepscope.watch.lossgraph import Term

_LAST = "not the window's last row"


class Loss(Probe):
    """Hooks the loss nodes of each backward (see `watch.lossgraph`) and weighs what arrives there."""

    name = "loss"
    columns = (
        Column("loss", "float64", "loss", "unscaled, undivided loss as the model or criterion gave it; for a normalised sum, its mean over the micro-step's own targets", "backward started from something other than one number, or several terms of unequal weight were added"),
        Column("aux_loss", "float64", "loss", "auxiliary loss that the model returned", "the model returns none"),
        Column("loss_weight", "float64", "1", "factor with which the loss enters backward, loss scale excluded; for a sum over targets, the sum of their weights", "no loss was found in the graph"),
        Column("loss_weight_sum", "float64", "1", "sum of loss_weight over the window", _LAST),
        Column("loss_weight_used", "float64", "1", "the same over those micro-steps of the window whose gradient was still there at the step", _LAST),
        Column("loss_scaled", "float64", "loss", "the value that backward was called on: scaled and divided", "backward started from something other than one number"),
        Column("num_items", "float64", "targets", "targets that counted in the loss (ignored ones left out)", "the loss does not tell"),
        Column("target_weight", "float64", "1/targets", "weight of one target in backward, loss scale excluded", "the loss does not tell"),
        Column("loss_reduction", "string", "", "mean, sum or none: how the loss was reduced over its targets", "unknown"),
        Column("loss_kind", "string", "", "how the loss was found: targets (a loss node), composite, returned (by a module), reduction (a mean or sum in the script), root", "not found"),
        Column("loss_terms", "int64", "terms", "losses found in the graph of this backward"),
        Column("loss_term_weights", "string", "1", "weight of each term found, loss scale excluded, JSON", "fewer than two terms"),
    )  # fmt: skip

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        from stepscope.watch.lossgraph import LossGraph

        self._graph = LossGraph()
        self._sums: dict[int, list[float]] = {}
        self._aux: Any = None
        self._found: Any = None

    def on_forward(self, event: events.Forward) -> None:
        """Remember the losses that modules return."""
        if not event.training:
            return
        output = event.output
        loss = _named(output, "loss")
        if loss is None and _is_scalar(output):
            loss = output
        if loss is not None and _is_scalar(loss):
            self._graph.returned(loss)
        aux = _named(output, "aux_loss")
        if aux is not None and hasattr(aux, "detach") and aux.numel() == 1:
            self._aux = aux.detach().clone().reshape(())

    def on_scale_loss(self, event: events.ScaleLoss) -> None:
        """Remember which loss carries which scale."""
        if event.scale is not None:
            self._graph.scaled(event.outputs, event.scale)

    def on_backward_begin(self, event: events.BackwardBegin) -> None:
        """Find the terms and keep the value that backward is called on."""
        roots = [r for r in event.roots if hasattr(r, "grad_fn")]
        found = self._graph.find(roots)
        self._found = found
        cells = event.micro.cells
        if len(roots) == 1 and roots[0].numel() == 1 and (not event.gradients or event.gradients[0] is None):
            cells["_root"] = roots[0].detach().clone().reshape(())
        elif event.gradients:
            self.context.not_observed("loss_scaled", "backward was called with a gradient of its own")
        cells["aux_loss"], self._aux = self._aux, None
        cells["loss_scale_before"] = found.scale
        cells["_scaled"] = found.scaled

    def on_backward_end(self, event: events.BackwardEnd) -> None:
        """Collect what arrived."""
        found, self._found = self._found, None
        if found is None:
            return
        found.release()
        cells = event.micro.cells
        cells["loss_terms"] = len(found.terms)
        cells["_terms"] = [_raw(t) for t in found.terms]

    def resolve(self, row: Row, cells: dict[str, Any]) -> None:
        """Weigh the terms, and sum the weights of the window."""
        scale = cells.get("loss_scale_before") or 1.0
        root = cells.get("_root")
        if root is not None:
            cells["loss_scaled"] = float(root)
        terms = [t for t in cells.get("_terms") or [] if t["arrived"] is not None]
        for term in terms:
            term["weight"] = _weight(term, scale)
        self._describe(cells, terms, root, scale)
        self._sum(row, cells)

    def _describe(self, cells: dict[str, Any], terms: list[dict[str, Any]], root: Any, scale: float) -> None:
        if len(terms) > 1:
            from stepscope.store.jsonio import dumps

            cells["loss_term_weights"] = dumps([round(t["weight"], 9) for t in terms])
        main = _main(terms)
        if main is None:
            if not terms:
                self.context.not_observed("loss_weight", "no loss node was found between the root of backward and the model")
            if root is not None:
                cells["loss"], cells["loss_kind"] = float(root) / scale, "root"
            return
        cells["loss_weight"] = main["weight"]
        cells["loss_kind"], cells["loss_reduction"] = main["kind"], main["reduction"] or None
        if main["count"] is not None:
            cells["num_items"] = float(main["count"])
            per_target = main["arrived"] / scale if main["reduction"] == "sum" else _ratio(main["weight"], float(main["count"]))
            cells["target_weight"] = per_target
        cells["loss"] = _value(main, terms, root, scale)

    def _sum(self, row: Row, cells: dict[str, Any]) -> None:
        """Sum over the window; a gradient that was gone before this backward takes its weights along."""
        key = per_optimizer(row)
        sums = self._sums.setdefault(key, [0.0, 0.0])
        if row.window_step == 1:
            sums[:] = [0.0, 0.0]
        elif cells.get("grad_norm_before") == 0.0:
            sums[1] = 0.0
        weight = cells.get("loss_weight")
        weight = math.nan if weight is None else weight
        sums[0] += weight
        sums[1] += weight
        if row.attempted and not math.isnan(sums[0]):
            cells["loss_weight_sum"] = sums[0]
        if row.attempted and not math.isnan(sums[1]):
            cells["loss_weight_used"] = sums[1]


def _raw(term: Term) -> dict[str, Any]:
    return {
        "kind": term.kind,
        "reduction": term.reduction,
        "count": term.count,
        "alone": term.alone,
        "value": term.value,
        "arrived": term.arrived,
        "counted": term.counted,
    }


def _weight(term: dict[str, Any], scale: float) -> float:
    """The weight of a term: what arrived for a mean; the sum over targets for a normalised sum.

    A sum over targets is taken as normalised when the weights of its targets add up to no more than one (within
    rounding): ``sum(losses) / tokens_of_the_window``. Otherwise it is a plain sum, whose weight is its factor.
    """
    arrived = float(term["arrived"]) / scale
    if term["reduction"] == "sum" and term["kind"] == "targets" and term["count"]:
        whole = arrived * float(term["count"])
        if abs(whole) <= 1.0 + 1e-6:
            term["normalised"] = True
            return whole
    return arrived


def _main(terms: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The term that stands for the loss; None where several are equally good and weigh differently."""
    for kind in ("targets", "composite", "returned", "reduction"):
        chosen = [t for t in terms if t["kind"] == kind]
        if len(chosen) == 1:
            return chosen[0]
        if chosen and all(math.isclose(t["weight"], chosen[0]["weight"], rel_tol=1e-5) for t in chosen):
            return {**chosen[0], "alone": False, "count": None, "value": None}
        if chosen:
            return None
    return None


def _value(main: dict[str, Any], terms: list[dict[str, Any]], root: Any, scale: float) -> float | None:
    """The loss itself: what the module returned, or the root divided by the factor on the way."""
    if main["value"] is not None and not main.get("normalised"):
        return float(main["value"])
    equal = all(math.isclose(t["weight"], main["weight"], rel_tol=1e-5) for t in terms)
    if root is None or not (main["alone"] or equal):
        return None
    return _ratio(float(root), main["weight"] * scale)


def _ratio(a: float, b: float) -> float:
    return a / b if b else math.nan


def _named(output: Any, name: str) -> Any:
    """``output.loss`` of an output object, ``output["loss"]`` of a dict, else None."""
    return output.get(name) if isinstance(output, dict) else getattr(output, name, None)


def _is_scalar(value: Any) -> bool:
    return bool(hasattr(value, "grad_fn") and value.requires_grad and value.numel() == 1)
