"""Batches as trees of tensors: measuring, cutting, reordering and joining them along their first dimension."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from stepscope.errors import StepscopeError


def _as_plain_tree(batch: Any) -> Any:
    """Mappings that torch's tree utilities do not know (a tokenizer's BatchEncoding) become plain dicts."""
    if isinstance(batch, Mapping) and not isinstance(batch, dict):
        return dict(batch)
    return batch


def map_tensors(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    """Apply `function` to every tensor of a batch; leave everything else as it is."""
    return tree_map(lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, _as_plain_tree(batch))


def tensors_of(batch: Any) -> list[Tensor]:
    """The tensors of a batch, in the order of its tree."""
    return [leaf for leaf in tree_leaves(_as_plain_tree(batch)) if isinstance(leaf, Tensor)]


def batch_size(batch: Any) -> int:
    """Rows of a batch: the common size of the first dimension of its tensors.

    Raises:
        StepscopeError: there is no tensor, one has no dimension, or the first dimensions differ.
    """
    shapes = [tuple(tensor.shape) for tensor in tensors_of(batch)]
    if not shapes:
        raise StepscopeError(f"the batch holds no tensor (it is a {type(batch).__name__})", hint="give tensors")
    if any(not shape for shape in shapes) or len({shape[0] for shape in shapes}) > 1:
        raise StepscopeError(
            f"the batch cannot be split: its tensors have the shapes {', '.join(map(str, shapes))}",
            hint="the first dimension of every tensor must be the batch",
        )
    return shapes[0][0]


def rows(batch: Any, index: Tensor | slice) -> Any:
    """The rows `index` of every tensor of a batch."""
    return map_tensors(lambda tensor: tensor[index], batch)


def split(batch: Any, parts: int) -> list[Any]:
    """Cut a batch into `parts` micro-batches whose sizes differ by one row at most, in order.

    Raises:
        StepscopeError: `parts` is not positive, or the batch has fewer rows than parts.
    """
    size = batch_size(batch)
    if parts < 1:
        raise StepscopeError(f"accumulation steps must be at least 1, not {parts}")
    if size < parts:
        raise StepscopeError(
            f"a batch of {size} rows cannot be split into {parts} micro-batches",
            hint="use a larger batch or fewer accumulation steps",
        )
    edges = [part * (size // parts) + min(part, size % parts) for part in range(parts + 1)]
    return [rows(batch, slice(start, end)) for start, end in itertools.pairwise(edges)]


def join(micro_batches: list[Any]) -> Any:
    """One batch out of micro-batches: the inverse of `split`."""
    first = _as_plain_tree(micro_batches[0])
    others = [_as_plain_tree(micro) for micro in micro_batches[1:]]
    return tree_map(lambda *leaves: torch.cat(leaves) if isinstance(leaves[0], Tensor) else leaves[0], first, *others)


def shuffled(batch: Any, generator: torch.Generator) -> Any:
    """The same rows in another order."""
    return rows(batch, torch.randperm(batch_size(batch), generator=generator))


def as_dtype(batch: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors cast to `dtype`; integer and boolean ones stay."""
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, batch)


def elements(batch: Any) -> int:
    """Size of the largest tensor of a batch: how many terms a parameter's gradient adds up, at most."""
    return max(tensor.numel() for tensor in tensors_of(batch))
