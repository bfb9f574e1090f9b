"""The weight with which each loss enters backward, read from the autograd graph.

From the tensor on which backward is called, the graph leads back through the arithmetic of the loop (divisions by K, the
loss scale, sums of terms) to the nodes that compute a loss. A hook on such a node receives the gradient that arrives
there: for a mean or sum loss one number, the product of everything that was multiplied in between. Divided by the loss
scale it is the weight of that loss, however the script wrote it.

No value is read here: what arrives stays on the device (`Term.arrived`), and `weigh` turns the numbers into weights
later, on the host.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_REDUCTIONS = {0: "none", 1: "mean", 2: "sum"}

_LOSS_NODES = (
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

_PASS = (
    "MulBackward0", "DivBackward0", "NegBackward", "ToCopyBackward", "CopyBackwards", "CloneBackward", "AliasBackward",
    "ViewBackward", "UnsafeViewBackward", "ReshapeAliasBackward", "SqueezeBackward", "UnsqueezeBackward", "ExpandBackward",
    "SelectBackward", "SliceBackward", "IndexBackward", "MaskedSelectBackward", "MaskedFillBackward", "WhereBackward",
    "PermuteBackward", "TransposeBackward", "TBackward", "ClampBackward", "ClampMinBackward", "NanToNumBackward",
    "AddBackward", "SubBackward", "StackBackward", "CatBackward", "UnbindBackward", "SplitBackward", "GatherBackward",
    "SumBackward", "MeanBackward", "MulBackward1", "DivBackward1",
)  # fmt: skip
"""Arithmetic that may lie between a loss and the root of backward."""

_JOINS = ("AddBackward", "SubBackward", "StackBackward", "CatBackward")
"""Nodes where several terms meet: below them a term is not the root times a number."""

_MOST_NODES = 96
"""The walk ends here: what lies between a loss and the root is a handful of operations."""


@dataclass(slots=True)
class Term:
    """One loss that enters a backward pass.

    Attributes:
        kind: ``targets`` (a loss node that knows its targets), ``composite`` (a loss that torch computes from parts, such
            as one with label smoothing), ``returned`` (what a model or criterion returned) or ``reduction`` (a mean or
            sum that the script wrote).
        reduction: ``mean``, ``sum`` or ``none``; empty where unknown.
        count: targets or elements that the loss is taken over (number or device scalar); None where unknown.
        alone: the root is this loss times a number, with nothing added.
        value: the loss itself where a module returned it, a device scalar; else None.
        arrived: what arrived at the node: a device scalar, for ``none`` the sum over its elements.
        counted: for ``none`` the number of elements at which something other than zero arrived.
        name: the node's name, for the report.
    """

    kind: str
    reduction: str
    count: Any
    alone: bool
    name: str
    value: Tensor | None = None
    arrived: Tensor | None = None
    counted: Tensor | None = None


@dataclass(slots=True)
class LossTerms:
    """What one backward pass starts from: its terms, the hooks on them, and the scale that was multiplied in."""

    terms: list[Term] = field(default_factory=list)
    scale: Tensor | None = None
    scaled: bool = False
    handles: list[Any] = field(default_factory=list)
    nodes: int = 0

    def release(self) -> None:
        """Remove the hooks; a graph that is kept for a second backward must not carry them."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()


class LossGraph:
    """Finds the loss terms of each backward pass.

    It remembers, by node name and sequence number and without keeping any graph alive, which losses modules returned
    and which losses a scaler multiplied.
    """

    def __init__(self) -> None:
        self._returned: dict[tuple[str, int], tuple[Tensor, int]] = {}
        self._scaled: dict[tuple[str, int], Tensor | None] = {}

    def returned(self, loss: Tensor) -> None:
        """A module returned a scalar that requires a gradient."""
        if loss.grad_fn is not None:
            _remember(self._returned, _key(loss.grad_fn), (loss.detach().clone(), loss.output_nr))

    def scaled(self, outputs: Any, scale: Tensor | None) -> None:
        """A scaler multiplied one or several losses by `scale`."""
        for output in [outputs] if isinstance(outputs, Tensor) else list(outputs):
            if isinstance(output, Tensor) and output.grad_fn is not None:
                _remember(self._scaled, _key(output.grad_fn), scale)

    def find(self, roots: list[Tensor]) -> LossTerms:
        """The terms that lead to `roots`, with a hook on each node; call `LossTerms.release` after the backward."""
        found = LossTerms()
        for root in roots:
            if root.grad_fn is not None:
                self._walk(root.grad_fn, found, alone=len(roots) == 1)
        return found

    def _walk(self, root: Any, found: LossTerms, *, alone: bool) -> None:
        """Depth first from the root. Each branch carries the outermost node that would do as its term."""
        stack: list[tuple[Any, Any, bool]] = [(root, None, alone)]
        seen: set[tuple[str, int]] = set()
        claimed: set[tuple[str, int]] = set()
        fallbacks: list[tuple[Any, bool]] = []
        while stack and found.nodes < _MOST_NODES:
            node, fallback, single = stack.pop()
            key = _key(node)
            if key in seen:
                if fallback is not None:
                    fallbacks.append(fallback)
                continue
            seen.add(key)
            found.nodes += 1
            if key in self._scaled:
                found.scaled, found.scale = True, self._scaled[key]
            if _is_loss(node):
                self._take(node, _target_term(node, single), found)
                if fallback is not None:
                    claimed.add(_key(fallback[0]))
                continue
            if _is_composite(node):
                self._take(node, Term("composite", "mean", None, single, _name(node)), found)
                if fallback is not None:
                    claimed.add(_key(fallback[0]))
                continue
            if fallback is None and (key in self._returned or _is_reduction(node)):
                fallback = (node, single)
            children = [n for n, _ in node.next_functions if n is not None]
            if not children or not _name(node).startswith(_PASS):
                if fallback is not None:
                    fallbacks.append(fallback)
                continue
            joined = _name(node).startswith(_JOINS) and len(children) > 1
            both = _name(node) == "MulBackward0" and len(children) > 1
            below = single and not joined and not both
            stack.extend((child, fallback, below) for child in reversed(children))
        for node, single in dict.fromkeys(fallbacks):
            if _key(node) not in claimed:
                claimed.add(_key(node))
                self._take(node, self._fallback_term(node, single), found)

    def _fallback_term(self, node: Any, single: bool) -> Term:
        known = self._returned.get(_key(node))
        if known is not None:
            return Term("returned", "", None, single, _name(node), value=known[0])
        return _reduction_term(node, single)

    def _take(self, node: Any, term: Term, found: LossTerms) -> None:
        known = self._returned.get(_key(node))
        place = 0
        if known is not None:
            term.value, place = known
        found.terms.append(term)
        found.handles.append(node.register_prehook(_Arrival(term, place)))


class _Arrival:
    """The hook on a loss node: keeps what arrives, returns nothing."""

    __slots__ = ("place", "term")

    def __init__(self, term: Term, place: int) -> None:
        self.term = term
        self.place = place

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> None:
        gradient = gradients[self.place] if self.place < len(gradients) else None
        if gradient is None or self.term.arrived is not None:
            return
        gradient = gradient.detach()
        if gradient.dim():
            self.term.counted = torch.count_nonzero(gradient)
            gradient = gradient.sum(dtype=torch.float64 if gradient.dtype is torch.float64 else torch.float32)
        self.term.arrived = gradient.clone()


def _name(node: Any) -> str:
    return str(node.name()).rsplit("::", 1)[-1]


def _key(node: Any) -> tuple[str, int]:
    """Name and sequence number identify a node of this thread without keeping it alive."""
    number = getattr(node, "_sequence_nr", None)
    return (_name(node), number() if callable(number) else id(node))


def _remember(book: dict[tuple[str, int], Any], key: tuple[str, int], value: Any) -> None:
    book.pop(key, None)
    book[key] = value
    while len(book) > 64:
        del book[next(iter(book))]


def _is_loss(node: Any) -> bool:
    return _name(node).startswith(_LOSS_NODES)


def _is_reduction(node: Any) -> bool:
    return _name(node).startswith(("MeanBackward", "SumBackward"))


def _is_composite(node: Any) -> bool:
    """Whether torch itself built this from parts: its C++ code multiplies by plain numbers (``MulBackward1``), which
    Python's operators never do. Label smoothing is a sum of two such parts, soft targets a quotient of one.
    """
    name = _name(node)
    if name == "DivBackward1":
        return True
    children = [n for n, _ in node.next_functions if n is not None]
    return name.startswith("AddBackward") and len(children) == 2 and all(_name(c) == "MulBackward1" for c in children)


def _target_term(node: Any, single: bool) -> Term:
    reduction = _REDUCTIONS.get(int(getattr(node, "_saved_reduction", -1)), "")
    return Term("targets", reduction, _target_count(node, reduction), single, _name(node))


def _target_count(node: Any, reduction: str) -> Any:
    """How many targets count: for class targets those not ignored, else all elements."""
    try:
        if not _name(node).startswith("NllLoss"):
            return int(node._saved_self.numel())
        if reduction != "none" and getattr(node, "_saved_weight", None) is None:
            return node._saved_total_weight.detach()
        ignored = node._saved_ignore_index
        ignored -= (1 << 64) if ignored >= (1 << 63) else 0
        return (node._saved_target != ignored).sum()
    except (RuntimeError, AttributeError):  # freed, or changed in place since: then it is not known
        return None


def _reduction_term(node: Any, single: bool) -> Term:
    name = _name(node)
    reduction = "mean" if name.startswith("MeanBackward") else "sum"
    count: int | None = None
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    if sizes is not None:
        count = 1
        for size in sizes:
            count *= int(size)
    return Term("reduction", reduction, count, single, name)
