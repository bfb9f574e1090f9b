"""Measurements on tensors. All return device scalars or vectors and never wait for a device.

Norms are accumulated in float32 at least: a float16 norm overflows at 65504. Nothing here writes to a tensor that it did
not make, and nothing is measured with ``clip_grad_norm_``, which writes NaN into gradients when one entry is infinite.
"""

from __future__ import annotations

from dataclasses import dataclass
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
    out: list[Tensor] = [values[0]] * len(values)
    for (device, dtype), places in _by_kind(values).items():
        chosen = [values[i] for i in places]
        found = torch._foreach_norm(chosen, 2, dtype=_accumulator(dtype))
        for i, norm in zip(places, found, strict=True):
            out[i] = norm if device == values[0].device else norm.to(values[0].device, non_blocking=True)
    widest = torch.float64 if any(n.dtype is torch.float64 for n in out) else torch.float32
    return torch.stack([n.to(widest) for n in out])


def total(parts: Tensor) -> Tensor:
    """The L2 norm of a whole from the norms of its parts. Shape ``()``."""
    norm: Tensor = torch.linalg.vector_norm(parts)
    return norm


def _by_kind(tensors: Sequence[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[int]]:
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
        small = [i for i, v in enumerate(values) if v.numel() <= _SMALL]
        size = len(values)
        wide = torch.float64 if any(v.dtype is torch.float64 for v in values) else torch.float32
        before, change, low, high = (torch.zeros(size, dtype=wide, device="cpu") for _ in range(4))
        if small:
            held, now = [self._buffers[i] for i in small], [values[i] for i in small]
            before[small] = norms(held).to(wide)
            for places in _by_kind(now).values():
                torch._foreach_sub_([held[i] for i in places], [now[i] for i in places])
            change[small] = norms(held).to(wide)
            ends = [torch.stack(torch.aminmax(h)) if h.numel() else h.new_zeros(2) for h in held]
            span = torch.stack([e.to(wide) for e in ends])
            low[small], high[small] = span[:, 0], span[:, 1]
        small_set = set(small)
        for i in range(size):
            if i not in small_set:
                before[i], change[i], low[i], high[i] = _blocks(self._buffers[i], values[i], wide)
        return before, change, low, high

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


def _blocks(held: Tensor, value: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    flat_held, flat_value = held.view(-1), value.reshape(-1)
    rows = []
    for start in range(0, flat_held.numel(), _BLOCK):
        old, new = flat_held[start : start + _BLOCK], flat_value[start : start + _BLOCK]
        norm_before = torch.linalg.vector_norm(old, dtype=wide)
        old.sub_(new)
        least, greatest = torch.aminmax(old)
        rows.append(
            torch.stack([norm_before, torch.linalg.vector_norm(old, dtype=wide), least.to(wide), greatest.to(wide)])
        )
    table = torch.stack(rows)
    return total(table[:, 0]), total(table[:, 1]), table[:, 2].amin(), table[:, 3].amax()


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
    result = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), _BLOCK):
        block = flat[start : start + _BLOCK]
        bits = block.contiguous().view(integers[block.element_size()]).to(torch.int64)
        weights = torch.arange(start, start + bits.numel(), device=bits.device) % 65521 + 1
        result += (bits * weights).sum()
    return result


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
