"""How an accumulation check is run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast, get_args

from stepscope.checks.precision import WORKING, working_precisions
from stepscope.errors import StepscopeError

Normalisation = Literal["auto", "mean", "sum", "targets"]


def normalisation_named(name: str) -> Normalisation:
    """The normalisation of that name.

    Raises:
        StepscopeError: there is none.
    """
    for known in get_args(Normalisation):
        if name == known:
            return cast("Normalisation", known)
    raise StepscopeError(f"unknown normalisation {name!r}", hint=f"one of {', '.join(get_args(Normalisation))}")


@dataclass(frozen=True)
class Settings:
    """How a check is run.

    Attributes:
        accumulation_steps: K, micro-batches of a full window.
        tail: check a last window of this many micro-batches (fewer than K) instead of a full one; 0 for a full one.
        full_divisor: in a tail, the tool's own window divides by K as in a full window (MiniMind does).
        normalisation: how the tool's own window weighs a micro-batch's loss: ``mean`` 1/K, ``sum`` 1, ``targets``
            n_i/N; ``auto`` takes ``sum`` where the losses of the micro-batches add up to the batch's, else ``mean``.
        dtypes: working dtypes to run after float64.
        keep_dropout: leave dropout on.
        seed: random state of each pass, and of the reorderings.

    Raises:
        StepscopeError: a value that makes no sense; the line names it.
    """

    accumulation_steps: int = 4
    tail: int = 0
    full_divisor: bool = False
    normalisation: Normalisation = "auto"
    dtypes: tuple[str, ...] = tuple(WORKING)
    keep_dropout: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.accumulation_steps < 1:
            raise StepscopeError(f"accumulation steps must be at least 1, not {self.accumulation_steps}")
        if not 0 <= self.tail < max(self.accumulation_steps, 1):
            raise StepscopeError(
                f"a tail of {self.tail} micro-batches does not fit",
                hint=f"it must be shorter than a window of {self.accumulation_steps}",
            )
        normalisation_named(self.normalisation)
        working_precisions(self.dtypes)

    @property
    def window_size(self) -> int:
        """Micro-batches in the window that is checked."""
        return self.tail or self.accumulation_steps
