"""Do the recorded learning rates follow a formula: in which unit, from which step on, and up to where?

The rates are those that were in the parameter groups when each step used them. Four ways of counting s are tried:
micro-steps, optimizer steps that were attempted, those that were applied, each from 0 or from 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from stepscope.checks.expression import NAMES, Values, evaluate
from stepscope.checks.findings import finding, outcome
from stepscope.checks.schedule_formulas import FORMULAS, Formula, Lengths
from stepscope.errors import StepscopeError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from stepscope.rules.outcome import Outcome
    from stepscope.store.trace import Trace

CODE = "CHK300"
NAME = "schedule"

TOLERANCE = 1e-7
"""Share of the largest rate by which a recorded rate may miss a formula. A chainable scheduler multiplies its rate step
by step and collects a rounding error of about 1e-16 each; one step too far in a million shows at 1e-6."""

UNITS = ("micro-step", "optimizer-step")


@dataclass(frozen=True)
class Rates:
    """Recorded learning rates, one per micro-step.

    Attributes:
        lr: the rates, shape (n,).
        micro_step: number of the micro-step, from 1.
        attempts: optimizer steps attempted before the one this micro-step belongs to.
        applied: those of them that were not skipped.
    """

    lr: Values
    micro_step: Values
    attempts: Values
    applied: Values

    @property
    def skipped(self) -> bool:
        """Some optimizer step was skipped, so that attempted and applied steps differ."""
        return bool((self.attempts != self.applied).any())

    @classmethod
    def of_trace(cls, trace: Trace, column: str = "lr") -> Rates:
        """The rates of a trace's first process and optimizer.

        Raises:
            StepscopeError: no learning rate was recorded.
        """
        if not trace.has(column):
            raise StepscopeError(f"the trace has no column {column!r} with a value", hint="see `stepscope columns`")
        chosen = trace.valid(column) & (np.nan_to_num(trace.values("rank")) == 0)
        optimizers = trace.values("optimizer")
        if optimizers.dtype == object and chosen.any():
            chosen &= optimizers == optimizers[chosen][0]
        attempts = trace.values("global_step")[chosen] - 1
        sync = trace.values("sync_gradients")[chosen] == 1
        skipped = np.nan_to_num(trace.values("step_skipped")[chosen]) == 1
        before = np.concatenate([[0.0], np.cumsum(sync & ~skipped)[:-1]])
        return cls(trace.values(column)[chosen], trace.values("micro_step")[chosen], attempts, before)

    @classmethod
    def of_steps(cls, lr: Sequence[float]) -> Rates:
        """Rates given one per optimizer step, as a loop logs them."""
        steps = np.arange(len(lr), dtype=np.float64)
        return cls(np.asarray(lr, dtype=np.float64), steps + 1, steps, steps)


@dataclass(frozen=True)
class Counting:
    """A way of counting s."""

    unit: str
    first: int
    skips: bool
    s: Values

    @property
    def words(self) -> str:
        """For people."""
        noun = "micro-steps" if self.unit == "micro-step" else "optimizer steps"
        return f"{noun} counted from {self.first}" + (", skipped ones included" if self.skips else "")


@dataclass(frozen=True)
class Match:
    """How far a formula agrees with the rates.

    Attributes:
        name: of the formula.
        counting: what s counts.
        expected: the formula's rates.
        agree: rows from the start that agree.
        values: the parameters found: lr, T, w, r.
    """

    name: str
    counting: Counting
    expected: Values
    agree: int
    values: dict[str, float] = field(default_factory=dict)

    @property
    def words(self) -> str:
        """Formula, parameters and counting for people."""
        listed = ", ".join(f"{key}={value:.6g}" for key, value in self.values.items())
        return f"{self.name}{f' ({listed})' if listed else ''}, s in {self.counting.words}"


def check_schedule(
    rates: Rates, formula: str = "", values: Mapping[str, float] | None = None, unit: str = "", first: int | None = None
) -> Outcome:
    """Compare recorded rates with a formula, or find the formula that they follow.

    Args:
        rates: what was recorded.
        formula: a name in `FORMULAS`, an expression in s, T, lr, w and r, or empty to look for a known one.
        values: known parameters: T, lr, w, r. What a named formula needs and is not given is fitted.
        unit: ``micro-step`` or ``optimizer-step``: what s must count; empty tries both.
        first: s of the first step, 0 or 1; None tries both.

    Raises:
        StepscopeError: no rate is finite, the formula cannot be read, or a name is not known.
    """
    values = dict(values or {})
    _check_input(rates, values, unit)
    countings = [c for c in _countings(rates) if unit in ("", c.unit) and first in (None, c.first)]
    if formula and formula not in FORMULAS:
        matches = [_expression_match(formula, rates, c, values) for c in countings]
        return _judge(formula, matches, rates)
    candidates = [FORMULAS[formula]] if formula else list(FORMULAS.values())
    return _judge(formula, list(_until_whole(_fits(candidates, rates, countings, values), len(rates.lr))), rates)


def _until_whole(matches: Iterator[Match], rows: int) -> Iterator[Match]:
    """The matches up to the first one that agrees everywhere."""
    for match in matches:
        yield match
        if match.agree == rows:
            return


def _check_input(rates: Rates, values: Mapping[str, float], unit: str) -> None:
    if not len(rates.lr) or not np.isfinite(rates.lr).all():
        raise StepscopeError("no learning rate was recorded, or one is not finite")
    unknown = [name for name in values if name not in NAMES or name in ("s", "pi")]
    if unknown:
        raise StepscopeError(f"unknown parameter {unknown[0]!r}", hint="T, lr, w and r can be set")
    if unit and unit not in UNITS:
        raise StepscopeError(f"unknown unit {unit!r}", hint=f"one of {', '.join(UNITS)}")


def _countings(rates: Rates) -> Iterator[Counting]:
    for first in (0, 1):
        yield Counting("optimizer-step", first, False, rates.applied + first)
    if rates.skipped:
        for first in (0, 1):
            yield Counting("optimizer-step", first, True, rates.attempts + first)
    if len(np.unique(rates.attempts)) == len(rates.lr):
        return  # windows of one micro-step: both units are the same
    for first in (1, 0):
        yield Counting("micro-step", first, False, rates.micro_step - rates.micro_step[0] + first)


def _expression_match(formula: str, rates: Rates, counting: Counting, values: Mapping[str, float]) -> Match:
    known = {"T": float(counting.s[-1] + 1 - counting.first), "lr": float(rates.lr.max()), "w": 0.0, "r": 0.0} | dict(
        values
    )
    expected = evaluate(formula, {**known, "s": counting.s})
    return Match(formula, counting, expected, _agreeing(rates.lr, expected))


def _fits(
    formulas: Sequence[Formula], rates: Rates, countings: Sequence[Counting], values: Mapping[str, float]
) -> Iterator[Match]:
    """Every formula with every counting: with the run's own length first, then with others, then on part of the run."""
    rows = len(rates.lr)
    for far, part in ((False, rows), (True, rows), (False, max(rows // 2, min(rows, 4)))):
        for formula in formulas:
            for counting in countings:
                for lengths in _lengths(formula, rates, counting, values, far=far):
                    yield _fit(formula, rates, counting, lengths, values, part)


def _fit(
    formula: Formula, rates: Rates, counting: Counting, lengths: Lengths, values: Mapping[str, float], rows: int
) -> Match:
    """Solve for the rates of a formula on the first `rows` rows."""
    shapes = formula.shapes(counting.s, lengths)
    weights = _given_weights(len(shapes), values)
    if weights is None:
        weights = _solve([shape[:rows] for shape in shapes], rates.lr[:rows])
    expected = np.asarray(sum(weight * shape for weight, shape in zip(weights, shapes, strict=True)))
    lr, floor = formula.read(weights)
    found = {"lr": lr} | {name: getattr(lengths, name) for name in formula.needs}
    found |= {} if floor is None else {"r": 0.0 if abs(floor) < TOLERANCE else floor}
    agree = _agreeing(rates.lr, expected) if _sensible(formula, lr, floor) else 0
    return Match(formula.name, counting, expected, agree, found)


def _sensible(formula: Formula, lr: float, floor: float | None) -> bool:
    """A base rate above 0, and a floor that is a share of it; a straight line may also rise."""
    return lr > 0 and (floor is None or formula.name == "linear" or -TOLERANCE <= floor <= 1 + TOLERANCE)


def _solve(shapes: list[Values], lr: Values) -> Values:
    """Least squares for one or two shapes, from the normal equations."""
    gram = np.array([[a @ b for b in shapes] for a in shapes])
    right = np.array([shape @ lr for shape in shapes])
    return np.asarray(np.linalg.pinv(gram, rcond=1e-13) @ right, dtype=np.float64)


def _given_weights(count: int, values: Mapping[str, float]) -> Values | None:
    if "lr" not in values or (count > 1 and "r" not in values):
        return None
    return np.array([values["lr"], values["lr"] * values.get("r", 0.0)][:count])


def _lengths(
    formula: Formula, rates: Rates, counting: Counting, values: Mapping[str, float], *, far: bool
) -> Iterator[Lengths]:
    totals = _totals(rates, counting, far=far) if "T" in formula.needs else [1.0]
    warmups = _warmups(rates, counting) if "w" in formula.needs else [0.0]
    factor = 1.0
    if "g" in formula.needs:
        period, factor = _first_change(rates, counting)
        totals = [period]
    for w in [float(values["w"])] if "w" in values else warmups:
        for T in [float(values["T"])] if "T" in values else totals:
            yield Lengths(T, w, factor)


def _warmups(rates: Rates, counting: Counting) -> list[float]:
    """No warm-up, or one that ends around the largest rate."""
    peak = float(counting.s[int(np.argmax(rates.lr))])
    return sorted({0.0} | {peak + shift for shift in (-1, 0, 1) if peak + shift > 0})


def _totals(rates: Rates, counting: Counting, *, far: bool) -> list[float]:
    """The run's own length, one more or less, and the start of a plateau at its end; `far`: lengths beyond the run."""
    end = int(counting.s[-1]) + 1 - counting.first
    if far:
        longer = set(np.linspace(end, 5 * end, min(4 * end + 1, 400)).round().astype(int).tolist())
        return [
            float(T) for T in sorted(longer | {m * 10**k for k in range(1, 7) for m in (1, 2, 5) if m * 10**k > end})
        ]
    moving = np.flatnonzero(rates.lr != rates.lr[-1])
    plateau = float(counting.s[min(int(moving[-1]) + 1, len(rates.lr) - 1)]) if len(moving) else float(end)
    return [T for T in dict.fromkeys((end, end - 1, end + 1, plateau)) if T > 0]


def _first_change(rates: Rates, counting: Counting) -> tuple[float, float]:
    """Steps until the rate changes first, and the factor of that change."""
    changes = np.flatnonzero(np.diff(rates.lr))
    if not len(changes) or not rates.lr[0]:
        return 1.0, 1.0
    place = int(changes[0]) + 1
    return max(float(counting.s[place]), 1.0), float(rates.lr[place] / rates.lr[0])


def _agreeing(lr: Values, expected: Values) -> int:
    """Rows from the start at which both agree."""
    wrong = np.flatnonzero(~(np.abs(lr - expected) <= TOLERANCE * np.abs(lr).max()))
    return int(wrong[0]) if len(wrong) else len(lr)


def _judge(asked: str, matches: list[Match], rates: Rates) -> Outcome:
    best = max(matches, key=lambda match: match.agree)
    details: dict[str, Any] = {"formula": best.name, "unit": best.counting.unit, "first": best.counting.first}
    details |= {"values": best.values, "skips_counted": best.counting.skips, "rows": len(rates.lr)}
    if best.agree == len(rates.lr):
        return outcome(CODE, NAME, _unit_findings(asked, best, rates), f"follows {best.words}", **details)
    place = best.agree
    where = f"micro-step {int(rates.micro_step[place])}"
    observed, expected = float(rates.lr[place]), float(best.expected[place])
    text = f"{where} has the rate {observed:.6g} where {best.words} gives {expected:.6g}"
    if not asked and place < max(4, len(rates.lr) // 4):
        text = f"the rates follow no known formula; the nearest is {best.words}, which departs at {where}"
        found = finding("schedule-unknown", text, observed=observed, expected=expected, columns=["lr"])
    else:
        found = finding("schedule-differs", text, observed=observed, expected=expected, columns=["lr"])
    return outcome(CODE, NAME, [found], f"departs at {where} from {best.words}", agree=place, **details)


def _unit_findings(asked: str, match: Match, rates: Rates) -> list[Any]:
    """The formula fits, but counts what it should not: micro-steps, or steps that were skipped."""
    formula = FORMULAS.get(asked)
    windows = len(np.unique(rates.attempts))
    if formula is not None and formula.needs and match.counting.unit != formula.unit and windows < len(rates.lr):
        ratio = len(rates.lr) / windows
        text = (
            f"{asked} is followed in {match.counting.unit}s and is meant in {formula.unit}s: it runs {ratio:.3g} times "
        )
        text += "too fast" if formula.unit == "optimizer-step" else "too slow"
        return [finding("sched-per-microbatch", text, observed=match.counting.unit, expected=formula.unit)]
    if match.counting.skips:
        skipped = int(rates.attempts[-1] - rates.applied[-1])
        text = f"{match.name} also advances at the {skipped} optimizer steps that were skipped"
        return [finding("sched-advance-on-skip", text, severity="warning")]
    return []
