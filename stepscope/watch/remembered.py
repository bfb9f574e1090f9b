"""Tensors that have been seen, by identity."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable


class Remembered:
    """A set of tensors that keeps none of them alive: the address of one that is gone may be another's by now."""

    def __init__(self) -> None:
        self._refs: dict[int, weakref.ref[Any]] = {}

    def add(self, tensors: Iterable[Any]) -> None:
        """Remember each of `tensors`."""
        for tensor in tensors:
            if tensor not in self:
                self._refs[id(tensor)] = weakref.ref(tensor)

    def __contains__(self, tensor: object) -> bool:
        held = self._refs.get(id(tensor))
        return held is not None and held() is tensor
