"""Which layer lets the rows of a batch influence each other: the reason why micro-batches cannot add up to a batch."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from stepscope.checks.passes import Laboratory

_AGREEMENT = 1e-6
"""Relative distance of outputs in float64 below which two forwards are the same: far above float64's rounding through
any depth, far below what batch statistics do. It names a layer; no verdict hangs on it."""

Calls = dict[str, list[tuple[list[Tensor], list[Tensor]]]]


def coupling_modules(laboratory: Laboratory, batch: Any, micro_batches: list[Any]) -> list[str]:
    """Names of the modules whose inputs agree between the batch and its micro-batches and whose outputs do not.

    BatchNorm layers in training mode are always named, for the ones behind the first one have other inputs already.
    """
    whole = _record(laboratory, batch)
    pieces = [_record(laboratory, micro_batch) for micro_batch in micro_batches]
    found = [name for name in whole if _couples(whole[name], [piece.get(name, []) for piece in pieces])]
    norms = batch_norms(laboratory.model)
    inner = [name for name in found if not any(_inside(other, name) for other in found + norms)]
    return list(dict.fromkeys(norms + inner))


def _inside(name: str, outer: str) -> bool:
    return name != outer and name.startswith(f"{outer}." if outer else "")


def batch_norms(model: nn.Module) -> list[str]:
    """BatchNorm layers that normalise with the statistics of the batch."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and (module.training or not module.track_running_stats)
    ]


def freezable(model: nn.Module, names: list[str]) -> list[str]:
    """The modules among `names` that stop coupling in eval mode: BatchNorm layers with running statistics."""
    modules = dict(model.named_modules())
    return [name for name in names if isinstance(modules[name], _BatchNorm) and modules[name].track_running_stats]


def describe(model: nn.Module, names: list[str]) -> str:
    """``bn1 (BatchNorm2d)``, at most three of them."""
    modules = dict(model.named_modules())
    listed = [f"{name or 'the model'} ({type(modules[name]).__name__})" for name in names[:3]]
    return ", ".join(listed) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _record(laboratory: Laboratory, batch: Any) -> Calls:
    """Inputs and outputs of every module call of one forward."""
    calls: Calls = defaultdict(list)
    handles = []
    for name, module in laboratory.model.named_modules():

        def keep(_: nn.Module, inputs: Any, named: Any, output: Any, name: str = name) -> None:
            calls[name].append((_detached((inputs, named)), _detached(output)))

        handles.append(module.register_forward_hook(keep, with_kwargs=True))
    try:
        laboratory.loss(batch, "a micro-batch")
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _detached(tree: Any) -> list[Tensor]:
    leaves = tree_leaves(dict(tree) if isinstance(tree, dict) else tree)
    return [leaf.detach().clone() for leaf in leaves if isinstance(leaf, Tensor)]


def _couples(whole: list[tuple[list[Tensor], list[Tensor]]], pieces: list[Any]) -> bool:
    if any(len(piece) != len(whole) for piece in pieces):
        return False
    calls = [(call, [piece[place] for piece in pieces]) for place, call in enumerate(whole)]
    return any(_same(c[0], [p[0] for p in ps]) and not _same(c[1], [p[1] for p in ps]) for c, ps in calls)


def _same(whole: list[Tensor], pieces: list[list[Tensor]]) -> bool:
    if any(len(piece) != len(whole) for piece in pieces):
        return True
    return all(_agree(tensor, [piece[place] for piece in pieces]) for place, tensor in enumerate(whole))


def _agree(whole: Tensor, pieces: list[Tensor]) -> bool:
    """Whether the pieces, joined along some dimension, are the whole; True where the shapes do not tell.

    A scalar agrees if it is the mean or the sum of the pieces'.
    """
    if whole.dim() == 0:
        stacked = torch.stack(pieces).double()
        return _close(stacked.mean(), whole) or _close(stacked.sum(), whole)
    joined = [_join(pieces, dim) for dim in range(whole.dim())]
    comparable = [j for j in joined if j is not None and j.shape == whole.shape]
    return not comparable or any(_close(j, whole) for j in comparable)


def _join(pieces: list[Tensor], dim: int) -> Tensor | None:
    try:
        return torch.cat(pieces, dim=dim)
    except (RuntimeError, IndexError):
        return None


def _close(left: Tensor, right: Tensor) -> bool:
    if not right.is_floating_point():
        return bool(torch.equal(left, right))
    return float((left - right).norm()) <= _AGREEMENT * (float(right.norm()) or 1.0)
