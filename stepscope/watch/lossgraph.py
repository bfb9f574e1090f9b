"""The weight with which each loss enters backward, read from the autograd graph.

From the tensor on which backward is called, the graph leads back through the arithmetic of the loop (divisions by K, the
loss scale, sums of terms) to the nodes that compute a loss. A hook on such a node receives the gradient that arrives
there: for a mean or sum loss one number, the product of everything that was multiplied in between. Divided by the loss
scale it is the weight of that loss, however the script wrote it.

No value is read here: what arrives stays on the device (`Term.arrived`), and `probes.loss` turns the numbers into weights
later, on the host.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from stepscope.watch.lossnodes import (
    Targets,
    children_of,
    describe,
    divisor,
    is_composite,
    is_loss,
    is_reduction,
    name_of,
)

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

_RANKS = {"targets": 3, "composite": 3, "reduction": 2, "returned": 2, "custom": 1}
"""How well a kind of term is known. Terms that are known less well than the best are left out where they are many."""

_MOST_NODES = 96
"""The walk ends here: what lies between a loss and the root is a handful of operations."""


@dataclass(slots=True)
class Term:
    """One loss that enters a backward pass.

    Attributes:
        kind: ``targets`` (a loss node that knows its targets), ``composite`` (a loss that torch computes from parts, such
            as one with label smoothing), ``returned`` (what a module returned), ``reduction`` (a mean or sum that the
            script wrote) or ``custom`` (something else that the script multiplied, such as a function of its own).
        over: what it is taken over.
        alone: the root is this loss times a number, with nothing added.
        name: the node's name, for the report.
        divisors: the numbers that it was divided by on the way to the root, outermost first; scalar tensors.
        value: the loss itself where a module returned it, a device scalar; else None.
        arrived: what arrived at the node: a device scalar, for several elements their sum.
        counted: for several elements, how many received something other than zero.
        least, most: the least and the largest magnitude among those.
        mean: the mean that the script took of sums over parts of this loss (``loss.sum(1).mean()``); None without one.
    """

    kind: str
    over: Targets
    alone: bool
    name: str
    divisors: tuple[Tensor, ...] = ()
    value: Tensor | None = None
    arrived: Tensor | None = None
    counted: Tensor | None = None
    least: Tensor | None = None
    most: Tensor | None = None
    mean: Term | None = None


@dataclass(slots=True)
class LossTerms:
    """What one backward pass starts from: its terms, the hooks on them, and the scale that was multiplied in.

    `left_out` tells that a scaler was given a loss that leads to the root, and that what it returned does not.
    """

    terms: list[Term] = field(default_factory=list)
    scale: Tensor | None = None
    scaled: bool = False
    left_out: bool = False
    handles: list[Any] = field(default_factory=list)
    nodes: int = 0

    def release(self) -> None:
        """Remove the hooks; a graph that is kept for a second backward must not carry them."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()


@dataclass(slots=True)
class _Branch:
    """A place that the walk has yet to look at, and what it passed on the way.

    `fallback` is the outermost node that would do as the term of this branch, and its kind; `summed` tells that a sum
    lies between it and the branch's node.
    """

    node: Any
    alone: bool
    divisors: tuple[Tensor, ...] = ()
    fallback: tuple[Any, str] | None = None
    fallback_alone: bool = False
    fallback_divisors: tuple[Tensor, ...] = ()
    summed: bool = False

    def child(self, node: Any, *, alone: bool) -> _Branch:
        """The same branch one node further down."""
        return replace(self, node=node, alone=alone)

    def mean_of_sums(self) -> Term | None:
        """The mean that was taken of sums over parts of this branch's node."""
        if not self.summed or self.fallback is None or self.fallback[1] != "reduction":
            return None
        over = describe(self.fallback[0])
        term = Term("reduction", over, self.fallback_alone, name_of(self.fallback[0]), self.fallback_divisors)
        return term if over.reduction == "mean" else None

    def suggest(self, kind: str) -> None:
        """Let the node stand for the branch unless a better one is found below it."""
        if self.fallback is None or (self.fallback[1] == "custom" and kind != "custom" and not self._product):
            self.fallback, self.fallback_alone, self.fallback_divisors = (self.node, kind), self.alone, self.divisors

    @property
    def _product(self) -> bool:
        return self.fallback is not None and len(children_of(self.fallback[0])) > 1


class LossGraph:
    """Finds the loss terms of each backward pass.

    It remembers, by node name and sequence number and without keeping any graph alive, which losses modules returned
    and which losses a scaler multiplied.
    """

    def __init__(self) -> None:
        self._returned: dict[tuple[str, int], tuple[Tensor, int]] = {}
        self._scaled: dict[tuple[str, int], Tensor | None] = {}
        self._given: dict[tuple[str, int], None] = {}

    def returned(self, loss: Tensor) -> None:
        """A module returned a scalar that requires a gradient."""
        if loss.grad_fn is not None:
            _remember(self._returned, _key(loss.grad_fn), (loss.detach().clone(), loss.output_nr))

    def scaled(self, outputs: Any, scale: Tensor | None) -> None:
        """A scaler multiplied one or several losses by `scale`."""
        for output in [outputs] if isinstance(outputs, Tensor) else list(outputs):
            if isinstance(output, Tensor) and output.grad_fn is not None:
                _remember(self._scaled, _key(output.grad_fn), scale)
                for node in children_of(output.grad_fn):
                    _remember(self._given, _key(node), None)

    def find(self, roots: list[Tensor]) -> LossTerms:
        """The terms that lead to `roots`, with a hook on each node; call `LossTerms.release` after the backward."""
        found = LossTerms()
        taken: dict[tuple[str, int], tuple[Any, Term]] = {}
        for root in roots:
            if root.grad_fn is not None:
                self._walk(_Branch(root.grad_fn, alone=len(roots) == 1), found, taken)
        best = max((_RANKS[term.kind] for _, term in taken.values()), default=0)
        for node, term in taken.values():
            if _RANKS[term.kind] > 1 or best <= 1:
                self._hook(node, term, found)
        return found

    def _walk(self, root: _Branch, found: LossTerms, taken: dict[tuple[str, int], tuple[Any, Term]]) -> None:
        """Depth first from the root. Each branch carries the outermost node that would do as its term."""
        stack = [root]
        seen: set[tuple[str, int]] = set()
        ended: list[_Branch] = []
        while stack and found.nodes < _MOST_NODES:
            branch = stack.pop()
            node, key = branch.node, _key(branch.node)
            if key in seen:
                ended.append(branch)
                continue
            seen.add(key)
            found.nodes += 1
            if key in self._scaled:
                found.scaled, found.scale = True, self._scaled[key]
            found.left_out |= key in self._given and not found.scaled
            if is_loss(node) or is_composite(node):
                kind = "targets" if is_loss(node) else "composite"
                term = Term(kind, describe(node), branch.alone, name_of(node), branch.divisors)
                taken[key] = node, term
                if term.over.reduction == "none":
                    term.mean = branch.mean_of_sums()
                if term.mean is not None and branch.fallback is not None:
                    found.handles.append(branch.fallback[0].register_prehook(_Arrival(term.mean, 0)))
                if branch.fallback is not None:
                    seen.add(_key(branch.fallback[0]))
                    taken.setdefault(_key(branch.fallback[0]), taken[key])
                continue
            further = self._further(branch)
            if not further:
                ended.append(branch)
            stack.extend(further)
        for branch in ended:
            self._settle(branch, taken)

    def _further(self, branch: _Branch) -> list[_Branch]:
        """The branches below a node that is no loss; empty where the way ends."""
        node, name, below = branch.node, name_of(branch.node), children_of(branch.node)
        branch.summed |= branch.fallback is not None and name.startswith("SumBackward")
        if is_reduction(node):
            branch.suggest("reduction")
        elif _key(node) in self._returned:
            branch.suggest("returned")
        product = len(below) > 1 and name.startswith(("MulBackward0", "DivBackward0"))
        ends = not below or not name.startswith(_PASS)
        if product or (ends and name != "AccumulateGrad"):
            branch.suggest("custom")
        if ends:
            return []
        single = branch.alone and not product and not (name.startswith(_JOINS) and len(below) > 1)
        by = divisor(node)
        children = [branch.child(child, alone=single) for child in reversed(below)]
        if by is not None:
            for child in children:
                child.divisors = (*child.divisors, by)
        return children

    def _settle(self, branch: _Branch, taken: dict[tuple[str, int], tuple[Any, Term]]) -> None:
        """A branch ended without a loss node: its fallback, if nothing below that was taken, is the term."""
        if branch.fallback is None:
            return
        node, kind = branch.fallback
        key = _key(node)
        if key not in taken:
            over = describe(node) if kind == "reduction" else Targets("")
            taken[key] = node, Term(kind, over, branch.fallback_alone, name_of(node), branch.fallback_divisors)

    def _hook(self, node: Any, term: Term, found: LossTerms) -> None:
        if any(term is t for t in found.terms):
            return
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

    @torch.no_grad()
    def __call__(self, gradients: tuple[Tensor | None, ...]) -> None:
        gradient = gradients[self.place] if self.place < len(gradients) else None
        term = self.term
        if gradient is None or term.arrived is not None:
            return
        gradient = gradient.detach()
        if gradient.numel() != 1 and term.kind == "custom":
            return  # not a loss: some tensor on the way to one
        if gradient.dim():
            _keep_elements(term, gradient)
        else:
            term.arrived = gradient.clone()


def _keep_elements(term: Term, gradient: Tensor) -> None:
    """Sum, count and range of what arrived at a loss that is not reduced."""
    valid = term.over.valid
    if valid is not None and valid.shape == gradient.shape:
        gradient = torch.where(valid, gradient, 0)
    size = gradient.abs()
    term.arrived = gradient.sum(dtype=torch.float64 if gradient.dtype is torch.float64 else torch.float32)
    term.counted = torch.count_nonzero(gradient)
    if gradient.numel():
        term.most = size.amax()
        term.least = torch.where(size > 0, size, term.most).amin()


def _key(node: Any) -> tuple[str, int]:
    """Name and sequence number identify a node of this thread without keeping it alive."""
    number = getattr(node, "_sequence_nr", None)
    return (name_of(node), number() if callable(number) else id(node))


def _remember(book: dict[tuple[str, int], Any], key: tuple[str, int], value: Any) -> None:
    book.pop(key, None)
    book[key] = value
    while len(book) > 64:
        del book[next(iter(book))]
