"""Measurements on tensors. All return device scalars or vectors and never wait for a device.

Norms are accumulated in float32 at least: a float16 norm overflows at 65504. Nothing here writes to a tensor that it did
not make, and nothing is measured with ``clip_grad_norm_``, which writes NaN into gradients when one entry is infinite.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

_BLOCK = 1 << 20
"""Elements measured at a time on a CPU: the block is still in cache for the next operation on it."""

_SMALL = 1 << 16
"""Below this, one foreach call for all tensors beats a loop over them: the price is the dispatch."""


def dense(tensor: Tensor) -> Tensor:
    """The values that `tensor` holds on this process: sparse ones coalesced, a sharded tensor's local part."""
    local = getattr(tensor, "to_local", None)
    if local is not None:
        tensor = local()
    if tensor.layout is not torch.strided:
        tensor = tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor.values()
    return tensor.detach()


def _real(tensor: Tensor) -> Tensor:
    """The same as real numbers: a complex tensor as its two parts, in a further dimension. Its L2 norm is the same."""
    if type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_complex():
        return tensor.detach() if tensor.requires_grad else tensor
    values = dense(tensor)
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


@torch.no_grad()
def norms(tensors: Sequence[Tensor]) -> Tensor:
    """The L2 norm of each tensor. Returns shape ``(len(tensors),)``, float32 or float64, on the first one's device."""
    values = [_real(t) for t in tensors]
    if not values:
        return torch.zeros(0, device="cpu")
    kinds = _by_kind(values)
    if len(kinds) == 1:
        return torch.stack(_norms_alike(values))
    out: list[Tensor] = [values[0]] * len(values)
    for places in kinds.values():
        for i, norm in zip(places, _norms_alike([values[i] for i in places]), strict=True):
            out[i] = norm.to(values[0].device, non_blocking=True)
    widest = torch.float64 if any(n.dtype is torch.float64 for n in out) else torch.float32
    return torch.stack([n.to(widest) for n in out])


def _norms_alike(values: Sequence[Tensor]) -> list[Tensor]:
    """The L2 norms of tensors of one device and dtype."""
    if sum(v.numel() for v in values) > _SMALL * len(values) and all(map(_has_dot, values)):
        return _by_dot(values)
    return list(torch._foreach_norm(list(values), 2, dtype=_accumulator(values[0].dtype)))


def _has_dot(tensor: Tensor) -> bool:
    """Whether the product of a tensor with itself is one call of the CPU's linear algebra library."""
    return tensor.dtype is torch.float32 and tensor.device.type == "cpu" and tensor.is_contiguous()


def _by_dot(values: Sequence[Tensor]) -> list[Tensor]:
    """Roots of the products of each with itself: two to three times as fast as torch's norm, which uses one core."""
    return [torch.dot(v, v).sqrt_() for v in (v.view(-1) for v in values)]


def total(parts: Tensor) -> Tensor:
    """The L2 norm of a whole from the norms of its parts. Shape ``()``."""
    norm: Tensor = torch.linalg.vector_norm(parts)
    return norm


def _by_kind(tensors: Sequence[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[int]]:
    if not tensors:
        return {}
    device, dtype = tensors[0].device, tensors[0].dtype
    if all(t.dtype is dtype and t.device == device for t in tensors):
        return {(device, dtype): list(range(len(tensors)))}
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, t in enumerate(tensors):
        kinds.setdefault((t.device, t.dtype), []).append(i)
    return kinds


@torch.no_grad()
def count_nonfinite(tensors: Sequence[Tensor]) -> Tensor:
    """Elements of each tensor that are NaN or infinite. Shape ``(len(tensors),)``, int64."""
    return _counts([(~torch.isfinite(dense(t))).sum() for t in tensors])


@torch.no_grad()
def count_nonzero(tensors: Sequence[Tensor]) -> Tensor:
    """Elements of each tensor that are not exactly zero. Shape ``(len(tensors),)``, int64."""
    return _counts([torch.count_nonzero(dense(t)) for t in tensors])


def _counts(parts: list[Tensor]) -> Tensor:
    if not parts:
        return torch.zeros(0, dtype=torch.int64, device="cpu")
    return torch.stack([p.to(parts[0].device, non_blocking=True) for p in parts])


def peek(scalar: Tensor) -> float | None:
    """The value of a CPU scalar, read from memory; None for other devices, where reading would wait."""
    return (
        float(scalar.detach().numpy()) if scalar.device.type == "cpu" and scalar.dtype is not torch.bfloat16 else None
    )


@dataclass(slots=True)
class Change:
    """What a step did to each parameter: vectors of shape ``(parameters,)``.

    `low` and `high` are the least and the greatest element of (before - after); `lost` counts elements whose gradient
    is not zero and that kept their value, None where it was not counted. The two parts of a complex number count as two.
    """

    before: Tensor
    change: Tensor
    low: Tensor
    high: Tensor
    lost: Tensor | None
    with_gradient: Tensor | None


class Snapshot:
    """A copy of parameters that is taken before a step and consumed by measuring the change after it.

    The buffers are kept between steps: the price is one copy of the parameters in memory.
    """

    def __init__(self) -> None:
        self._buffers: tuple[Tensor, ...] = ()  # no list: a search for copies of the weights passes it by
        self._key: tuple[tuple[Any, ...], ...] = ()

    @torch.no_grad()
    def take(self, params: Sequence[Tensor]) -> None:
        """Copy the parameters as they are."""
        values = [_real(p) for p in params]
        key = tuple((v.shape, v.dtype, v.device) for v in values)
        if key != self._key:
            self._buffers = tuple(torch.empty_like(v, memory_format=torch.contiguous_format) for v in values)
            self._key = key
        for places in _by_kind(values).values():
            torch._foreach_copy_([self._buffers[i] for i in places], [values[i] for i in places])

    @torch.no_grad()
    def measure(self, params: Sequence[Tensor], gradients: Sequence[Tensor | None] | None = None) -> Change:
        """The change since `take`. With `gradients`, also the updates that were lost.

        The subtraction is done in the parameters' own dtype, in place of the copy; two neighbouring floating-point
        numbers are subtracted without error (Sterbenz), so a change that survived rounding is measured exactly.
        """
        values = [_real(p) for p in params]
        lost = with_gradient = None
        if gradients is not None:
            lost, with_gradient = self._lost(values, gradients)
        if values and values[0].device.type == "cpu":
            before, change, low, high = self._sweep(values)
        else:
            before, change, low, high = self._foreach(values)
        return Change(before, change, low, high, lost, with_gradient)

    def _foreach(self, values: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        before = norms(self._buffers)
        for places in _by_kind(values).values():
            torch._foreach_sub_([self._buffers[i] for i in places], [values[i] for i in places])
        peaks = _peaks(self._buffers)
        return before, norms(self._buffers), -peaks, peaks

    def _sweep(self, values: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """One pass block by block over large tensors, so that each block is read from memory once."""
        size = len(values)
        wide = torch.float64 if any(v.dtype is torch.float64 for v in values) else torch.float32
        before, change, low, high = (torch.zeros(size, dtype=wide, device="cpu") for _ in range(4))
        small = [i for i, v in enumerate(values) if v.numel() <= _SMALL]
        if small:
            place = torch.tensor(small, device="cpu")
            found = self._small([self._buffers[i] for i in small], [values[i] for i in small])
            for column, part in zip((before, change, low, high), found, strict=True):
                column.index_copy_(0, place, part.to(wide))
        blocks: list[tuple[Tensor, ...]] = []
        owner: list[int] = []
        for i in sorted(set(range(size)).difference(small)):
            old, new = self._buffers[i].view(-1), values[i].reshape(-1)
            for start in range(0, old.numel(), _BLOCK):
                blocks.append(_block(old[start : start + _BLOCK], new[start : start + _BLOCK], wide))
                owner.append(i)
        if blocks:
            place = torch.tensor(owner, device="cpu")
            squares, squares_of_change, least, greatest = map(torch.stack, zip(*blocks, strict=True))
            before += torch.zeros_like(before).index_add_(0, place, squares).sqrt_()
            change += torch.zeros_like(change).index_add_(0, place, squares_of_change).sqrt_()
            low.scatter_reduce_(0, place, least, "amin", include_self=False)
            high.scatter_reduce_(0, place, greatest, "amax", include_self=False)
        return before, change, low, high

    @staticmethod
    def _small(held: list[Tensor], now: list[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        before = norms(held)
        for alike in _by_kind(now).values():
            torch._foreach_sub_([held[i] for i in alike], [now[i] for i in alike])
        ends = [torch.aminmax(h) if h.numel() else (h.new_zeros(()), h.new_zeros(())) for h in held]
        if len({h.dtype for h in held}) > 1:
            ends = [(least.to(before.dtype), greatest.to(before.dtype)) for least, greatest in ends]
        low, high = map(torch.stack, zip(*ends, strict=True))
        return before, norms(held), low, high

    def _lost(self, values: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
        lost, moved = [], []
        for held, value, gradient in zip(self._buffers, values, gradients, strict=True):
            if gradient is None or gradient.layout is not torch.strided:
                zero = torch.zeros((), dtype=torch.int64, device=value.device)
                lost.append(zero)
                moved.append(zero)
                continue
            has = _real(gradient) != 0
            moved.append(has.sum())
            lost.append((has & (held == value)).sum())
        return _counts(lost), _counts(moved)


def _block(old: Tensor, new: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sum of squares of `old`; that of the difference, which takes its place; the least and the greatest difference."""
    before = _square(old, wide)
    old.sub_(new)
    low, high = torch.aminmax(old)
    return before, _square(old, wide), low.to(wide), high.to(wide)


def _square(flat: Tensor, wide: torch.dtype) -> Tensor:
    found: Tensor = torch.dot(flat, flat) if _has_dot(flat) else torch.linalg.vector_norm(flat, dtype=wide).square()
    return found.to(wide)


def _peaks(tensors: Sequence[Tensor]) -> Tensor:
    """The largest absolute element of each tensor."""
    wide = torch.float64 if any(t.dtype is torch.float64 for t in tensors) else torch.float32
    found: list[Tensor] = [tensors[0]] * len(tensors)
    for places in _by_kind(tensors).values():
        for i, peak in zip(places, torch._foreach_norm([tensors[i] for i in places], float("inf")), strict=True):
            found[i] = peak.to(tensors[0].device, wide, non_blocking=True)
    return torch.stack(found)


@torch.no_grad()
def fingerprint(tensor: Tensor, most: int | None = None) -> Tensor:
    """A number that changes when any bit of the tensor does, or any element's place. Shape ``()``, int64.

    The bits of element i, as an integer, are multiplied by ``(i mod 65521) + 1`` and summed modulo 2^64.

    Args:
        tensor: any dtype and layout.
        most: look at no more than about this many elements, evenly spaced.
    """
    flat = _real(tensor).reshape(-1)
    if most is not None and flat.numel() > most:
        flat = flat[:: flat.numel() // most + 1]
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    if flat.dtype is torch.bool:
        flat = flat.to(torch.uint8)
    sums = []
    for start in range(0, flat.numel(), _BLOCK):
        block = flat[start : start + _BLOCK]
        bits = block.contiguous().view(integers[block.element_size()]).to(torch.int64)
        weights = _few_weights if start == 0 and bits.numel() <= _SMALL else _weights
        sums.append((bits * weights(start, bits.numel(), bits.device)).sum())
    if len(sums) == 1:
        return sums[0]
    return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.int64, device=flat.device)


def _weights(start: int, count: int, device: torch.device) -> Tensor:
    """``(i mod 65521) + 1`` for `count` elements from `start` on. Shape ``(count,)``, int64."""
    return torch.arange(start, start + count, device=device) % 65521 + 1


_few_weights = lru_cache(maxsize=16)(_weights)
"""The same, kept: batches have the same size over and over."""


@torch.no_grad()
def survives_rounding(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Whether each tensor equals its own round trip through a narrower dtype. Shape ``(len(tensors),)``, bool."""
    values = [_real(t) for t in tensors]
    parts = [((v.to(dtype).to(v.dtype) == v) | v.isnan()).all() for v in values]
    return (
        torch.stack([p.to(parts[0].device, non_blocking=True) for p in parts])
        if parts
        else torch.zeros(0, dtype=torch.bool, device="cpu")
    )
