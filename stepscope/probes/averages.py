"""Running averages of the weights: torch's own, and shadow copies that a script keeps by hand."""

from __future__ import annotations

import math
import weakref
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Any

from stepscope.probes.base import Context, Probe
from stepscope.schema import Column

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from stepscope import events
    from stepscope.watch.ledger import Micro, Row, WatchedOptimizer

_SMALL = 1 << 16
"""Elements that the parameter may have by which copies are followed."""

_MOST_COPIES = 3
_PATIENCE = 200
"""Micro-steps for which copies are followed: by then it is clear when they are updated."""

_TOLERANCE = 0.02
"""Share of a copy's squared motion that may point elsewhere than to the weights (rounding, a step in between)."""


class Averages(Probe):
    """Follows copies of the weights through one small parameter of theirs.

    Copies are looked for only where windows have several micro-steps: among the modules, dicts and lists that exist,
    one that holds tensors as the model does. A copy that takes the share r of the way from its old value to the weights
    is an average, whatever the code that moved it looked like.
    """

    name = "averages"
    columns = (
        Column("averaged", "int64", "calls", "updates of an AveragedModel between this backward and the next, whichever optimizer has the row"),
        Column("average_rate", "float64", "1", "share of the way to the weights that a copy of them took between this backward and the next: 1 - decay; 0 where it stayed", "no copy of the weights was found, or it moved elsewhere"),
    )  # fmt: skip

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._models: list[weakref.ref[Any]] = []
        self._micro: Micro | None = None
        self._parameter: weakref.ref[Any] | None = None
        self._copies: list[Callable[[], Any]] = []
        self._old: list[Any] = []
        self._windows = 0
        self._since = 0

    def on_forward(self, event: events.Forward) -> None:
        """A model that is called in training is none of the copies."""
        if event.training and not any(ref() is event.module for ref in self._models):
            self._models = [ref for ref in self._models if ref() is not None]
            self._models.append(weakref.ref(event.module))

    def on_called(self, event: events.Called) -> None:
        """Averages of torch itself say when they are updated."""
        if event.name == "average_updated" and self._micro is not None:
            cells = self._micro.cells
            cells["averaged"] = cells.get("averaged", 0) + 1

    def on_attempt(self, event: events.Attempt) -> None:
        """Look for copies after the first and the fourth window of several micro-steps."""
        if event.row is None or event.row.cells.get("window_size", 0) < 2 or event.row.cells.get("closure"):
            return
        self._windows += 1
        if self._windows in (1, 4) and not self._copies:
            self._search(event.optimizer, event.row)

    def on_backward_begin(self, event: events.BackwardBegin) -> None:
        """How far have the copies gone since the backward before?"""
        if self._copies and self._micro is not None:
            self._measure(self._micro)
        event.micro.cells.setdefault("averaged", 0)
        self._micro = event.micro

    def resolve(self, row: Row, cells: dict[str, Any]) -> None:
        """The greatest share that any copy took."""
        rates = [rate for parts in cells.get("_averages") or [] if (rate := _rate(*parts)) is not None]
        if rates:
            cells["average_rate"] = max(rates)

    # ---- measuring --------------------------------------------------------------------------------------------------

    def _measure(self, micro: Micro) -> None:
        import torch

        parameter = self._parameter() if self._parameter is not None else None
        if parameter is None or micro.number - self._since > _PATIENCE:
            self._copies, self._old = [], []
            return
        weights = parameter.detach().reshape(-1).float()
        now = [c.detach().reshape(-1).float().clone() if (c := copy()) is not None else None for copy in self._copies]
        parts = []
        for old, new in zip(self._old, now, strict=True):
            if old is not None and new is not None and old.shape == new.shape == weights.shape:
                moved, way = new - old, weights - old
                parts.append(torch.stack([moved @ way, way @ way, moved @ moved, old @ old]))
        self._old = now
        micro.cells["_averages"] = parts

    # ---- searching --------------------------------------------------------------------------------------------------

    def _search(self, watched: WatchedOptimizer, row: Row) -> None:
        chosen = [watched.params[i] for i in row.received if i < len(watched.params)]
        models = [_bare(m) for ref in self._models if (m := ref()) is not None]
        for parameter in sorted(
            (p for p in chosen if 4 <= p.numel() <= _SMALL), key=lambda p: (p.dim() < 2, p.numel())
        ):
            for model in models:
                names = [n for n, p in model.named_parameters() if p is parameter]
                if names and parameter.is_floating_point():
                    self._parameter = weakref.ref(parameter)
                    self._copies = list(_copies(model, names[0], parameter, watched))[:_MOST_COPIES]
                    self._old = [None] * len(self._copies)
                    self._since = row.micro.number
                    return


def _copies(model: Any, name: str, parameter: Any, watched: WatchedOptimizer) -> Iterator[Callable[[], Any]]:
    """Getters for the tensors that stand for `parameter` in copies of `model` that exist."""
    import gc

    params = list(model.parameters())
    trainable = [p for p in params if p.requires_grad]
    places = {len(part): next(i for i, p in enumerate(part) if p is parameter) for part in (trainable, params)}
    keys = dict.fromkeys((name, f"module.{name}", name.replace(".", ""), name.replace(".", "_")))
    owned = {id(p) for p in watched.params}

    def stands_in(value: Any) -> bool:
        shape = getattr(value, "shape", None) if hasattr(type(value), "data_ptr") else None
        if shape != parameter.shape or value.device != parameter.device or not value.is_floating_point():
            return False
        return id(value) not in owned and value.data_ptr() != parameter.data_ptr()

    for thing in gc.get_objects():
        kind = type(thing)
        if kind is dict or kind is OrderedDict:
            for key in keys if "." in name else ():
                if key in thing and stands_in(thing[key]):
                    yield partial(_item, thing, key)
        elif kind is list:
            place = places.get(len(thing))
            if place is not None and stands_in(thing[place]):
                yield partial(_item, thing, place)
        elif kind is type(model) and thing is not model and "_parameters" in thing.__dict__:
            held = dict(thing.named_parameters()).get(name)
            if held is not None and stands_in(held):
                yield partial(_named, weakref.ref(thing), name)


def _item(held: Any, place: Any) -> Any:
    try:
        return held[place]
    except LookupError:
        return None


def _named(ref: weakref.ref[Any], name: str) -> Any:
    module = ref()
    return dict(module.named_parameters()).get(name) if module is not None else None


def _bare(model: Any) -> Any:
    """The model inside of its wrappers."""
    for _ in range(3):
        inner = getattr(model, "_orig_mod", None) or model._modules.get("module")
        if inner is None:
            return model
        model = inner
    return model


def _rate(along: float, way: float, moved: float, size: float) -> float | None:
    """The share of the way that was taken; None where the motion does not point to the weights, or cannot be told."""
    if moved == 0.0:
        return 0.0
    if not all(map(math.isfinite, (along, way, moved, size))) or way <= 1e-14 * size or way == 0.0:
        return None
    rate = along / way
    elsewhere = moved - rate * along
    return rate if 0.0 < rate <= 1.0 + 1e-6 and elsewhere <= _TOLERANCE * moved else None
