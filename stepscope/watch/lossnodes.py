"""What single nodes of an autograd graph tell of a loss: how it is reduced, over how many targets, with which weights.

Nothing is computed twice and nothing is unpacked that a hook has packed (activation checkpointing would recompute a whole
segment): what such a node saved stays unknown. Counts stay on the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_REDUCTIONS = {0: "none", 1: "mean", 2: "sum"}

LOSS_NODES = (
    "NllLossBackward",
    "NllLoss2DBackward",
    "MseLossBackward",
    "BinaryCrossEntropyBackward",
    "BinaryCrossEntropyWithLogitsBackward",
    "HuberLossBackward",
    "SmoothL1LossBackward",
    "SoftMarginLossBackward",
    "MultiMarginLossBackward",
    "MultilabelMarginLossBackward",
    "MultilabelMarginLossForwardBackward",
)
"""Nodes that compute a loss and save how they reduce it."""

_PER_SAMPLE = ("MultiMarginLoss", "MultilabelMarginLoss")
"""Losses whose targets are the rows of their input, not its elements."""


@dataclass(slots=True)
class Targets:
    """What a loss is taken over. Numbers, or device scalars; None where it cannot be known.

    Attributes:
        reduction: ``mean``, ``sum`` or ``none``; empty where unknown.
        count: targets that count.
        mass: sum of the weights that the loss itself gives to its targets; equals `count` where it gives none.
        per: what a mean divides by, where that is not `mass`: elements, masked ones too.
        uniform: the loss itself gives all targets that count the same weight.
        valid: for ``none``: which elements are targets, shape of the node's output; None for all.
    """

    reduction: str
    count: Any = None
    mass: Any = None
    per: Any = None
    uniform: Any = True
    valid: Tensor | None = None


def name_of(node: Any) -> str:
    """A node's name without its namespace."""
    return str(node.name()).rsplit("::", 1)[-1]


def children_of(node: Any) -> list[Any]:
    """The nodes that a node passes gradients on to."""
    return [n for n, _ in node.next_functions if n is not None]


def saved(node: Any, what: str) -> Any:
    """What a node saved for its backward; None where it did not, or where a hook packed it, or it was changed since."""
    raw = getattr(node, f"_raw_saved_{what}", None)
    if raw is not None and getattr(raw, "unpack_hook", None) is not None:
        return None
    try:
        return getattr(node, f"_saved_{what}", None)
    except RuntimeError:  # freed, or written to in place since
        return None


def is_loss(node: Any) -> bool:
    """Whether the node computes one of torch's own losses."""
    return name_of(node).startswith(LOSS_NODES)


def is_reduction(node: Any) -> bool:
    """Whether the node is a mean or a sum, or the negative of one."""
    name = name_of(node)
    if name.startswith("NegBackward"):
        return any(name_of(c).startswith(("MeanBackward", "SumBackward")) for c in children_of(node))
    return name.startswith(("MeanBackward", "SumBackward"))


def is_composite(node: Any) -> bool:
    """Whether torch itself built this from parts.

    Its C++ code multiplies by plain numbers (``MulBackward1``), which Python's operators never do. Label smoothing is a
    sum of two such parts, soft targets a quotient of one.
    """
    name = name_of(node)
    if name == "DivBackward1":
        return _soft_sum(node) is not None
    below = children_of(node)
    return name.startswith("AddBackward") and len(below) == 2 and all(name_of(c) == "MulBackward1" for c in below)


def describe(node: Any) -> Targets:
    """What the loss at a node is taken over."""
    if is_loss(node):
        return _nll(node) if name_of(node).startswith("NllLoss") else _elements(node)
    if is_composite(node):
        return _composite(node)
    return _reduction(node)


def divisor(node: Any) -> Tensor | None:
    """The single number by which a node divides, as a scalar tensor; None for any other node."""
    if not name_of(node).startswith("DivBackward"):
        return None
    other = saved(node, "other")
    return other.detach().reshape(()) if isinstance(other, Tensor) and other.numel() == 1 else None


def _nll(node: Any) -> Targets:
    reduction = _REDUCTIONS.get(int(node._saved_reduction), "")
    target = saved(node, "target")
    weighted = getattr(node, "_raw_saved_weight", None) is not None and saved(node, "weight") is not None
    if reduction != "none":
        mass = saved(node, "total_weight")
        mass = mass.detach() if mass is not None else None
        count = mass if not weighted else _count(target, node)
        return Targets(reduction, count, mass, uniform=not weighted)
    valid = None if target is None else target.detach() != _ignored(node)
    return Targets("none", None if valid is None else valid.sum(), uniform=not weighted, valid=valid)


def _count(target: Any, node: Any) -> Any:
    return None if target is None else (target.detach() != _ignored(node)).sum()


def _ignored(node: Any) -> int:
    """The label that is ignored; the graph keeps it as an unsigned number."""
    value = int(node._saved_ignore_index)
    return value - (1 << 64) if value >= (1 << 63) else value


def _elements(node: Any) -> Targets:
    """Losses over elements; a weight given for each element may be a mask."""
    reduction = _REDUCTIONS.get(int(node._saved_reduction), "")
    own = saved(node, "self")
    if own is None:
        return Targets(reduction)
    size = own.shape[0] if name_of(node).startswith(_PER_SAMPLE) and own.dim() > 1 else own.numel()
    weight = saved(node, "weight")
    if not isinstance(weight, Tensor) or name_of(node).startswith(_PER_SAMPLE):
        return Targets(reduction, size, size, size, uniform=weight is None)
    mask = weight.detach()
    valid = (mask != 0).expand_as(own) if reduction == "none" else None
    count, mass = _of_mask(mask, size)
    return Targets(reduction, count, mass, per=size, uniform=_is_mask(mask), valid=valid)


def _of_mask(mask: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Targets that count and their weight together, of a mask that is broadcast to `size` elements."""
    times = size // mask.numel() if mask.numel() else 0
    wide = mask.to(torch.float64 if mask.dtype is torch.float64 else torch.float32)
    return torch.count_nonzero(mask) * times, wide.sum() * times


def _is_mask(mask: Tensor) -> Any:
    """Whether the constant only selects: all its elements are 0 or 1."""
    return True if mask.dtype is torch.bool else ((mask == 0) | (mask == 1)).all()


def _composite(node: Any) -> Targets:
    if name_of(node) == "DivBackward1":
        sizes = _sizes(_soft_sum(node))
        if not sizes:
            return Targets("")
        rows = math.prod(sizes) // sizes[1 if len(sizes) > 1 else 0]
        return Targets("mean", rows, rows, rows)
    part = next((c for m in children_of(node) for c in children_of(m) if name_of(c).startswith("NllLoss")), None)
    return _nll(part) if part is not None else Targets("")


def _soft_sum(node: Any) -> Any:
    """The sum over samples and classes of which soft targets' mean is a quotient."""
    below = children_of(node)
    if len(below) == 1 and name_of(below[0]).startswith("NegBackward"):
        below = children_of(below[0])
    return below[0] if len(below) == 1 and name_of(below[0]).startswith("SumBackward0") and _sizes(below[0]) else None


def _reduction(node: Any) -> Targets:
    """A mean or sum that the script wrote, perhaps with a mask."""
    if name_of(node).startswith("NegBackward"):
        node = children_of(node)[0]
    mean = name_of(node).startswith("MeanBackward")
    sizes = _sizes(node)
    if sizes is None:
        return Targets("mean" if mean else "sum")
    size = math.prod(sizes)
    mask = _mask(node)
    if mask is not None and mask.numel() and size % mask.numel() == 0:
        soft = None if mean else _class_sum(node, mask)
        count, mass = soft if soft is not None else _of_mask(mask, size)
        uniform = True if soft is not None else _is_mask(mask)
        return Targets("mean" if mean else "sum", count, mass, per=size, uniform=uniform)
    if mean:
        return Targets("mean", size, size, size)
    return Targets("sum", size, size, size, uniform=None)


def _sizes(node: Any) -> tuple[int, ...] | None:
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    return None if sizes is None else tuple(int(s) for s in sizes)


def _mask(node: Any) -> Tensor | None:
    """The constant that a sum's terms are multiplied by, or the selection among them."""
    below = children_of(node)
    if len(below) != 1:
        return None
    name = name_of(below[0])
    if name.startswith("MulBackward0"):
        first = below[0].next_functions[0][0] is None
        constant = saved(below[0], "self" if first else "other")
        return constant.detach() if isinstance(constant, Tensor) and len(children_of(below[0])) == 1 else None
    if name.startswith("MaskedFillBackward"):
        mask = saved(below[0], "mask")
        return ~mask if isinstance(mask, Tensor) else None
    if name.startswith("WhereBackward") and len(children_of(below[0])) == 1:
        condition = saved(below[0], "condition")
        if isinstance(condition, Tensor):
            return condition if below[0].next_functions[0][0] is not None else ~condition
    return None


def _class_sum(node: Any, mask: Tensor) -> tuple[Tensor, Tensor] | None:
    """Soft targets times log-probabilities: a target is a row over the classes, not an element."""
    inner = children_of(children_of(node)[0])
    if not inner or not name_of(inner[0]).startswith("LogSoftmaxBackward") or mask.dim() < 1:
        return None
    axis = int(inner[0]._saved_dim)
    axis -= (1 << 64) if axis >= (1 << 63) else 0
    rows = mask.sum(dim=axis)
    return torch.count_nonzero(rows), rows.sum()
