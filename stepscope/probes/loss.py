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

_ROUNDING = 1e-3
"""Weights of targets that add up to one may exceed it by this much: half-precision losses are divided in their own dtype."""


class Loss(Probe):
    """Hooks the loss nodes of each backward (see `watch.lossgraph`) and weighs what arrives there."""

    name = "loss"
    columns = (
        Column("loss", "float64", "loss", "unscaled, undivided loss as the model or criterion gave it; for a normalised sum, its mean over the micro-step's own targets", "backward started from something other than one number, or several terms of unequal weight were added"),
        Column("aux_loss", "float64", "loss", "auxiliary loss that the model returned", "the model returns none"),
        Column("loss_weight", "float64", "1", "factor with which the loss enters backward, loss scale excluded; for a sum over targets, the sum of their weights", "no loss was found in the graph"),
        Column("loss_weight_sum", "float64", "1", "sum of loss_weight over the window", _LAST),
        Column("loss_weight_used", "float64", "1", "the same over those micro-steps whose gradient was still there at the step, times what the script then multiplied .grad by (see grad_factor): one in a right window of mean losses", _LAST),
        Column("loss_scaled", "float64", "loss", "the value that backward was called on: scaled and divided", "backward started from something other than one number"),
        Column("num_items", "float64", "targets", "targets that counted in the loss (ignored and masked ones left out)", "the loss does not tell"),
        Column("target_weight", "float64", "1/targets", "weight of one target in backward, loss scale excluded", "the loss does not tell, or its targets weigh differently"),
        Column("loss_divisor", "float64", "1", "product of the numbers that the loss was divided by on its way to the root", "it was divided by none"),
        Column("loss_reduction", "string", "", "mean, sum or none: how the loss was reduced over its targets", "unknown"),
        Column("loss_kind", "string", "", "how the loss was found: targets (a loss node), composite, returned (by a module), reduction (a mean or sum in the script), custom (a function of the script's own), root (the value itself)", "not found"),
        Column("loss_terms", "int64", "terms", "losses found in the graph of this backward"),
        Column("loss_terms_alike", "int64", "terms", "those of loss_terms that stand for the loss together, all of one weight, which is loss_weight", "no loss was found in the graph"),
        Column("loss_terms_empty", "int64", "terms", "those of loss_terms in which no target counted, or that were divided by a count of zero"),
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
        parts = output if isinstance(output, tuple | list) else [output if loss is None else loss]
        for part in parts:
            if _is_scalar(part):
                self._graph.returned(part)
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
        cells["scale_left_out"] = found.left_out and not found.scaled

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
            _weigh(term, scale)
        cells["loss_terms_empty"] = sum(_is_empty(term) for term in terms)
        self._describe(cells, terms, root, scale)
        self._sum(row, cells)

    def _describe(self, cells: dict[str, Any], terms: list[dict[str, Any]], root: Any, scale: float) -> None:
        if len(terms) > 1:
            from stepscope.store.jsonio import dumps

            cells["loss_term_weights"] = dumps([float(f"{t['weight']:.9g}") for t in terms])
        main = _main(terms)
        if main is None:
            reason = "several losses of different weight enter backward" if terms else "the graph shows no loss"
            self.context.not_observed("loss_weight", reason)
            if root is not None:
                cells["loss"], cells["loss_kind"] = float(root) / scale, "root"
            return
        cells["loss_weight"], cells["loss_terms_alike"] = main["weight"], main.get("alike", 1)
        cells["loss_kind"], cells["loss_reduction"] = main["kind"], main["reduction"] or None
        cells["num_items"], cells["target_weight"] = main["count"], main["target_weight"]
        for column in ("num_items", "target_weight"):
            if cells[column] is None:
                self.context.not_observed(column, "the loss does not tell its targets, or weighs them differently")
        if main["divisors"]:
            cells["loss_divisor"] = math.prod(float(d) for d in main["divisors"])
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
            cells["loss_weight_used"] = sums[1] * _multiplied(cells)


def _multiplied(cells: dict[str, Any]) -> float:
    """The factor of `.grad` as far as it is surely no clip: seen before torch's own, or above one, which no clip is."""
    factor = cells.get("grad_factor")
    if factor is None or (cells.get("_clip_total") is None and factor < 1.0):
        return 1.0
    return float(factor)


def _raw(term: Term) -> dict[str, Any]:
    """A term as cells: device scalars that travel to the host."""
    over = term.over
    return {
        "kind": term.kind,
        "reduction": over.reduction,
        "count": over.count,
        "mass": over.mass,
        "per": over.per,
        "uniform": over.uniform,
        "alone": term.alone,
        "value": term.value,
        "divisors": list(term.divisors),
        "arrived": term.arrived,
        "counted": term.counted,
        "least": term.least,
        "most": term.most,
        "mean": _raw(term.mean) if term.mean is not None and term.mean.arrived is not None else None,
    }


def _weigh(term: dict[str, Any], scale: float) -> None:
    """Set the weight of a term, the number of its targets and the weight of one of them.

    A sum over targets is taken as normalised when the weights of its targets add up to no more than one (within
    rounding), as in ``sum(losses) / tokens_of_the_window``: its weight is then that sum, and else its factor.
    """
    arrived = float(term["arrived"]) / scale
    reduction = term["reduction"]
    if term["counted"] is not None:
        _weigh_elements(term, arrived, scale)
        if term["mean"] is not None:
            _weigh_as_mean(term, arrived, scale)
        return
    count, mass = _number(term["count"]), _number(term["mass"])
    if reduction == "sum" and term["uniform"] is None and count not in [float(d) for d in term["divisors"]]:
        count = mass = None  # a sum in the script, perhaps over elements that a mask deeper down has set to zero
    whole = arrived * mass if reduction == "sum" and mass else math.inf
    term["normalised"] = abs(whole) <= 1.0 + _ROUNDING
    term["weight"] = whole if term["normalised"] else arrived
    term["count"] = count
    divide = _number(term["per"]) or mass if reduction == "mean" else 1.0
    known = term["uniform"] is None or bool(term["uniform"])
    term["target_weight"] = (
        arrived / divide if known and divide and reduction and (count is None or count > 0) else None
    )


def _weigh_elements(term: dict[str, Any], arrived: float, scale: float) -> None:
    """A loss that is not reduced: every target's own weight arrived."""
    counted = float(term["counted"]) if math.isfinite(arrived) else None
    least, most = _number(term["least"]), _number(term["most"])
    term["count"] = counted
    term["normalised"] = abs(arrived) <= 1.0 + _ROUNDING
    average = arrived / counted if counted else None
    term["weight"] = arrived if term["normalised"] or average is None else average
    even = least is not None and most is not None and most - least <= 1e-3 * most and bool(term["uniform"])
    even = even and average is not None and math.isclose(abs(average), (most or 0.0) / scale, rel_tol=1e-2)
    term["target_weight"] = average if even else None


def _weigh_as_mean(term: dict[str, Any], arrived: float, scale: float) -> None:
    """A mean of sums enters with the weight of the mean, unless the weights of its elements add up to that anyhow."""
    mean = term["mean"]
    _weigh(mean, scale)
    if not math.isclose(arrived, mean["weight"], rel_tol=_ROUNDING):
        term.update(
            weight=mean["weight"], alone=mean["alone"], divisors=mean["divisors"], reduction="mean", normalised=True
        )


def _is_empty(term: dict[str, Any]) -> bool:
    return _number(term["count"]) == 0.0 or any(float(divisor) == 0.0 for divisor in term["divisors"])


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _main(terms: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The term that stands for the loss; None where several are equally good and weigh differently."""
    for kind in ("targets", "composite", "returned", "reduction", "custom"):
        chosen = [t for t in terms if t["kind"] == kind]
        if len(chosen) == 1:
            return chosen[0]
        if chosen and all(math.isclose(t["weight"], chosen[0]["weight"], rel_tol=1e-5) for t in chosen):
            one = {**chosen[0], "alone": False, "count": None, "target_weight": None, "value": None}
            return one | {"alike": len(chosen)}
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
    if math.isnan(float(root)):
        return math.nan
    return float(root) / (main["weight"] * scale) if main["weight"] else None


def _named(output: Any, name: str) -> Any:
    """``output.loss`` of an output object, ``output["loss"]`` of a dict, else None."""
    return output.get(name) if isinstance(output, dict) else getattr(output, name, None)


def _is_scalar(value: Any) -> bool:
    return bool(hasattr(value, "grad_fn") and value.requires_grad and value.numel() == 1)
