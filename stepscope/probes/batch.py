"""A fingerprint of the batch that a micro-step trained on, so that repeated and skipped data can be told."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from stepscope.probes.base import Context, Probe
from stepscope.schema import Column

if TYPE_CHECKING:
    from stepscope import events
    from stepscope.watch.ledger import Row

_MOST_ELEMENTS = 1 << 16


class Batch(Probe):
    """Fingerprints the tensors given to the first module that is called in training since the backward before."""

    name = "batch"
    columns = (
        Column(
            "batch_fingerprint",
            "int64",
            "1",
            "changes when any (sampled) bit of the model's inputs does",
            "no module was called with a tensor",
        ),
        Column(
            "batch_size",
            "int64",
            "samples",
            "first dimension of the model's first input tensor",
            "no module was called with a tensor",
        ),
    )

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._seen: tuple[list[Any], int] | None = None
        self._loaders: weakref.WeakSet[Any] = weakref.WeakSet()

    def on_called(self, event: events.Called) -> None:
        """Say, once for each DataLoader, how many batches an epoch has and whether it shuffles."""
        loader = event.detail.get("loader") if event.name == "loader_iter" else None
        if loader is not None and loader not in self._loaders:
            self._loaders.add(loader)
            sampler = getattr(loader, "sampler", None)
            detail = {"batches": _length(loader), "sampler": type(sampler).__name__, "shuffles": _shuffles(sampler)}
            self.context.note("loader_started", None, detail)

    def on_forward(self, event: events.Forward) -> None:
        """Look at the inputs of the first training forward."""
        if not event.training or self._seen is not None:
            return
        tensors = [t for t in (*event.args, *event.kwargs.values()) if hasattr(t, "element_size") and t.numel()]
        tensors = [t for t in tensors if not t.requires_grad]
        if tensors:
            size = int(tensors[0].shape[0]) if tensors[0].dim() else 1
            self._seen = ([self.context.measure.fingerprint(t, _MOST_ELEMENTS) for t in tensors], size)

    def on_backward_begin(self, event: events.BackwardBegin) -> None:
        """They belong to this backward."""
        if self._seen is not None:
            event.micro.cells["_fingerprints"], event.micro.cells["batch_size"] = self._seen
        self._seen = None

    def resolve(self, row: Row, cells: dict[str, Any]) -> None:
        """Mix the fingerprints of several inputs; FNV's prime keeps their order apart."""
        prints = cells.get("_fingerprints")
        if prints:
            mixed = 0
            for value in prints:
                mixed = (mixed * 1099511628211 + int(value)) % (1 << 64)
            cells["batch_fingerprint"] = mixed - (1 << 64) if mixed >= 1 << 63 else mixed


def _length(loader: Any) -> int | None:
    """Batches of an epoch, None for data that does not know its length."""
    try:
        return len(loader)
    except TypeError:
        return None


def _shuffles(sampler: Any) -> bool | None:
    """Whether a sampler draws another order in each epoch; None where its class does not tell."""
    name = type(sampler).__name__
    if name in ("RandomSampler", "WeightedRandomSampler", "SubsetRandomSampler"):
        return True
    if name == "SequentialSampler":
        return False
    shuffle = getattr(sampler, "shuffle", None)
    return shuffle if isinstance(shuffle, bool) else None
