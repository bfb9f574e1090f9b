"""The comparison in a working dtype: is what differs there rounding, or a fault that float64 does not have?"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from stepscope.checks.accumulation import rounding
from stepscope.checks.accumulation.exact import Evidence, Pieces, choose_window
from stepscope.checks.accumulation.weights import fit
from stepscope.checks.batches import shuffled
from stepscope.checks.passes import Laboratory
from stepscope.checks.precision import without_onednn
from stepscope.checks.windows import weighted_window
from stepscope.errors import StepscopeError

if TYPE_CHECKING:
    from stepscope.checks.accumulation.settings import Settings
    from stepscope.checks.experiment import Experiment
    from stepscope.checks.precision import Precision

LARGEST_SCALE = 2.0**16
"""Where a GradScaler starts."""


@dataclass(frozen=True)
class WorkingResult:
    """One working dtype.

    Attributes:
        dtype: its name.
        verdict: ``equal`` (bit for bit), ``rounding``, ``different``, or ``not run``.
        difference: relative L2 distance of the window's gradient from the reference; None if it was not run.
        bound: on that distance; None if it was not derived.
        loss_scale: of the GradScaler in float16, else 1.
        used: weights that the window gave; empty unless the verdict is ``different`` here and not in float64.
        vanished: share of the gradient's elements that are zero here and not in float64.
        reason: why it was not run.
    """

    dtype: str
    verdict: Literal["equal", "rounding", "different", "not run"]
    difference: float | None = None
    bound: rounding.Bound | None = None
    loss_scale: float = 1.0
    used: tuple[float, ...] = ()
    vanished: float = 0.0
    reason: str = ""


def run_working(experiment: Experiment, settings: Settings, precision: Precision, evidence: Evidence) -> WorkingResult:
    """Run the window in a working dtype and judge its distance from the right gradient in the same dtype.

    The reference is the large batch in this dtype; where something couples the rows, the right accumulation over the
    same micro-batches. A window that is different in float64 is different here as well: only its distance is measured.
    """
    if settings.keep_dropout:
        return WorkingResult(precision.name, "not run", reason="with dropout on, only float64 is compared")
    reason = ""
    for surroundings in (contextlib.nullcontext(), without_onednn()):
        try:
            with surroundings:
                laboratory = Laboratory(experiment, precision, dropout=not evidence.dropout_calls, seed=settings.seed)
                return _Run(laboratory, evidence, settings).judge()
        except StepscopeError as error:
            reason = reason or error.message
    return WorkingResult(precision.name, "not run", reason=reason)


class _Run:
    def __init__(self, laboratory: Laboratory, evidence: Evidence, settings: Settings) -> None:
        self.laboratory = laboratory
        self.evidence = evidence
        self.settings = settings
        self.pieces: Pieces = evidence.pieces
        self.window, self.own = choose_window(laboratory.experiment, self.pieces, settings)
        self.scale = 1.0

    def judge(self) -> WorkingResult:
        name = self.laboratory.precision.name
        self.scale, reference = self._reference()
        gradient = self.laboratory.window(self.window, self.pieces.micro_batches, self.scale)
        norm = float(reference.norm()) or 1.0
        difference = float((gradient - reference).norm()) / norm
        if not self.evidence.mechanics_right:
            return WorkingResult(name, "different", difference, None, self.scale)
        limit = rounding.bound(reference, self._parts(), self._orders(), self._additions())
        if math.isfinite(difference) and difference <= limit.value:
            verdict: Literal["equal", "rounding"] = "rounding" if difference else "equal"
            return WorkingResult(name, verdict, difference, limit, self.scale)
        used, vanished = self._weights(gradient), self._vanished(gradient)
        return WorkingResult(name, "different", difference, limit, self.scale, used, vanished)

    def _reference(self) -> tuple[float, Tensor]:
        """The largest loss scale at which the right gradient is finite, found as a GradScaler does: by halving."""
        scale = LARGEST_SCALE if self._scaled else 1.0
        while True:
            reference = self._right(self.pieces.micro_batches, range(len(self.pieces.micro_batches)), scale)
            if not self.evidence.coupled:
                reference = self._large(scale)
            if bool(torch.isfinite(reference).all()):
                return scale, reference
            if scale <= 1.0:
                name = self.laboratory.precision.name
                raise StepscopeError(f"the gradient of the large batch is not finite in {name}")
            scale /= 2

    @property
    def _scaled(self) -> bool:
        """A user's window works with a loss scale only if it takes the scaler."""
        return self.laboratory.precision.scaled and self.laboratory.takes_scaler(self.window)

    def _right(self, micro_batches: list[Any], order: Any, scale: float) -> Tensor:
        terms = dict.fromkeys(term for _, term in self.evidence.needed)
        weights = [{term: self.evidence.needed[place, term] for term in terms} for place in order]
        return self.laboratory.window(
            weighted_window(self.laboratory.experiment.loss_fn, weights), [micro_batches[i] for i in order], scale
        )

    def _large(self, scale: float) -> Tensor:
        window = weighted_window(self.laboratory.experiment.loss_fn, [{"": 1.0}])
        return self.laboratory.window(window, [self.pieces.whole], scale)

    def _orders(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(self.settings.seed)
        count = len(self.pieces.micro_batches)
        found = []
        for _ in range(rounding.SAMPLES):
            micro_batches = [shuffled(micro, generator) for micro in self.pieces.micro_batches]
            order = torch.randperm(count, generator=generator).tolist()
            found.append(self._right(micro_batches, order, self.scale))
        return found

    def _parts(self) -> list[Tensor]:
        return [part * self.evidence.needed[key] for key, part in self.pieces.parts.items()]

    def _additions(self) -> float:
        """γ_2(u_compute) + γ_K(u_parameters): each part rounded once, then K of them added."""
        precision = self.laboratory.precision
        unit = torch.finfo(precision.parameters).eps / 2
        return rounding.gamma(2, precision.unit_roundoff) + rounding.gamma(len(self.pieces.micro_batches), unit)

    def _weights(self, gradient: Tensor) -> tuple[float, ...]:
        if not bool(torch.isfinite(gradient).all()):
            return ()
        guess = [self.evidence.needed[key] for key in self.pieces.parts]
        return tuple(fit(gradient, list(self.pieces.parts.values()), guess).weights)

    def _vanished(self, gradient: Tensor) -> float:
        present = self.evidence.right != 0
        return float(((gradient == 0) & present).sum()) / max(int(present.sum()), 1)
