"""Saved states compared bit for bit, and which part of a training run a difference belongs to."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stepscope.checks.experiment import first_line
from stepscope.errors import StepscopeError

if TYPE_CHECKING:
    from pathlib import Path

PARTS = {
    "model": ("model", "state_dict", "module", "weights", "params"),
    "optimizer": ("optim", "exp_avg", "momentum"),
    "scheduler": ("sched", "lr_s"),
    "scaler": ("scaler", "scale", "amp"),
    "rng": ("rng", "random", "seed"),
    "sampler": ("sampler", "position", "epoch", "step", "iter", "batch"),
}
"""Part of a run -> pieces of the keys under which checkpoints keep it."""


@dataclass(frozen=True)
class Difference:
    """One value that differs between two states.

    Attributes:
        path: keys to it, joined by dots.
        left: what the first state has, in words.
        right: what the second has.
        size: largest absolute distance of two tensors or numbers; None where they cannot be subtracted.
    """

    path: str
    left: str
    right: str
    size: float | None = None

    @property
    def part(self) -> str:
        """The part of a run that it belongs to, ``other`` where the key does not tell."""
        return part_of(self.path)


def part_of(path: str) -> str:
    """The part of a run to which a key belongs, by its first component that tells."""
    for piece in path.lower().split("."):
        for part in ("optimizer", "scheduler", "scaler", "rng", "sampler", "model"):
            if any(mark in piece for mark in PARTS[part]):
                return part
    return "other"


def differences(left: Any, right: Any, path: str = "") -> Iterator[Difference]:
    """Every leaf at which two nested states are not bit for bit the same, in the order of the first."""
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        for key in [*left, *(key for key in right if key not in left)]:
            yield from _member(left, right, key, f"{path}.{key}" if path else str(key))
    elif isinstance(left, Tensor) and isinstance(right, Tensor):
        yield from _tensors(left, right, path)
    elif isinstance(left, list | tuple) and isinstance(right, list | tuple) and len(left) == len(right):
        for place, (a, b) in enumerate(zip(left, right, strict=True)):
            yield from differences(a, b, f"{path}.{place}")
    elif type(left) is not type(right) or not _same(left, right):
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        yield Difference(path, _words(left), _words(right), abs(float(left) - float(right)) if numbers else None)


def _member(left: Mapping[Any, Any], right: Mapping[Any, Any], key: Any, path: str) -> Iterator[Difference]:
    if key in left and key in right:
        yield from differences(left[key], right[key], path)
    else:
        yield Difference(path, "present" if key in left else "absent", "present" if key in right else "absent")


def _tensors(left: Tensor, right: Tensor, path: str) -> Iterator[Difference]:
    if left.shape != right.shape or left.dtype != right.dtype:
        yield Difference(path, f"{left.dtype} {tuple(left.shape)}", f"{right.dtype} {tuple(right.shape)}")
        return
    left, right = left.detach().cpu(), right.detach().cpu()
    if not torch.equal(left.contiguous().view(-1), right.contiguous().view(-1)) and not _same_nans(left, right):
        size = float((left.double() - right.double()).abs().max())
        yield Difference(
            path, f"norm {float(left.double().norm()):.9g}", f"norm {float(right.double().norm()):.9g}", size
        )


def _same_nans(left: Tensor, right: Tensor) -> bool:
    return (
        left.is_floating_point()
        and torch.equal(left.nan_to_num(), right.nan_to_num())
        and bool((left.isnan() == right.isnan()).all())
    )


def _same(left: Any, right: Any) -> bool:
    both_nan = left != left and right != right
    return bool(left == right) or both_nan


def _words(value: Any) -> str:
    text = f"a {type(value).__name__} of {len(value)}" if isinstance(value, list | tuple | Mapping) else repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


def load_state(path: Path) -> dict[str, Any]:
    """Read any checkpoint without running code that it may hold.

    Raises:
        StepscopeError: the file is missing, cannot be read safely, or holds no mapping.
    """
    if not path.is_file():
        raise StepscopeError(f"{path}: no such checkpoint")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise StepscopeError(
            f"{path} holds more than tensors and plain values: {first_line(error)}",
            hint="save plain state dicts; nothing else is read",
        ) from error
    except (RuntimeError, EOFError, ValueError, KeyError, OSError) as error:
        raise StepscopeError(f"{path} is damaged, or no checkpoint at all") from error
    if not isinstance(state, Mapping):
        raise StepscopeError(f"{path} holds a {type(state).__name__}, not a dict of states")
    return dict(state)


def missing_parts(state: Mapping[str, Any]) -> list[str]:
    """Parts of a run that no top-level key of a checkpoint names."""
    present = {part_of(str(key)) for key in state}
    tensors = all(isinstance(value, Tensor) for value in state.values())
    return [part for part in PARTS if part not in present and not (part == "model" and tensors)]
