"""Does accumulating K micro-batches give the gradient of the large batch? `check_accumulation` answers in three words.

**equal**: the two gradients agree in float64, so the mechanics are right. **rounding**: they do, and what differs in
the working dtype stays below a bound that is derived, not chosen (see `rounding`). **different**: float64 disagrees,
and the check says how. float64 alone decides between right and wrong; a working dtype can add a fault that exists only
there, such as gradients that are left scaled.

How a difference is explained: every micro-batch's gradient g_i is computed for each term of the loss. The large
batch's gradient is written as Σ w_i·g_i by least squares, which gives the weights that a right window must use
(n_i/N for a mean over targets, 1 for a sum). The window's gradient is written the same way, which gives the weights
that it did use. Where the large batch is no such sum, something couples the rows of a batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from stepscope.checks.accumulation import diagnosis
from stepscope.checks.accumulation.exact import Evidence, measure
from stepscope.checks.accumulation.settings import Normalisation, Settings
from stepscope.checks.accumulation.weights import relative
from stepscope.checks.accumulation.working import WorkingResult, run_working
from stepscope.checks.batches import batch_size
from stepscope.checks.experiment import Experiment
from stepscope.checks.findings import finding, outcome
from stepscope.checks.passes import Laboratory
from stepscope.checks.precision import FLOAT64, working_precisions

if TYPE_CHECKING:
    from stepscope.rules.outcome import Finding, Outcome

__all__ = ["CODE", "NAME", "Experiment", "Normalisation", "Settings", "check_accumulation"]

CODE = "CHK100"
NAME = "accumulation"


def check_accumulation(experiment: Experiment, settings: Settings | None = None) -> Outcome:
    """Compare the gradient of one batch with that of K micro-batches, in float64 and in working dtypes.

    Args:
        experiment: model, batch, loss and, if given, the user's window; nothing of it is changed.
        settings: K, the tail, dtypes and so on.

    Returns:
        A passed outcome for ``equal`` and ``rounding``; a failed one with findings for ``different``. Where only a
        layer that couples the rows makes the difference, the one finding is a notice. ``details`` holds ``verdict``,
        ``summary`` (one line) and ``dtypes``, one row per dtype with ``difference``, ``bound`` and ``verdict``.

    Raises:
        StepscopeError: the experiment cannot be run; one line says why.
    """
    settings = settings or Settings()
    laboratory = Laboratory(experiment, FLOAT64, dropout=settings.keep_dropout, seed=settings.seed)
    evidence = measure(laboratory, settings)
    findings = _float64_findings(laboratory, evidence, settings)
    working = [run_working(experiment, settings, p, evidence) for p in working_precisions(settings.dtypes)]
    findings += [f for result in working for f in _working_findings(result, evidence, settings)]
    details = _details(laboratory, evidence, settings, working, findings)
    return outcome(CODE, NAME, findings, **details)


def _float64_findings(laboratory: Laboratory, evidence: Evidence, settings: Settings) -> list[Finding]:
    if evidence.equal:
        return []
    if (
        settings.keep_dropout
        and measure(Laboratory(laboratory.experiment, FLOAT64), replace(settings, keep_dropout=False)).equal
    ):
        return [_dropout_finding(evidence)]
    coupled = [diagnosis.coupling_finding(evidence, laboratory)] if evidence.coupled else []
    if evidence.mechanics_right:
        return coupled
    return diagnosis.explain(evidence, settings, laboratory.sizes) + coupled


def _dropout_finding(evidence: Evidence) -> Finding:
    return finding(
        "accum-dropout",
        f"with dropout on the gradients differ by {evidence.difference:.3g}, with dropout off they agree: "
        "micro-batches draw other masks than the large batch. This is no fault.",
        observed=evidence.difference,
        expected=0.0,
    )


def _working_findings(result: WorkingResult, evidence: Evidence, settings: Settings) -> list[Finding]:
    """Findings for a fault that exists in a working dtype alone."""
    if result.verdict != "different" or not evidence.mechanics_right or result.bound is None:
        return []
    where = f"in {result.dtype} alone, "
    if result.used:
        used = dict(zip(evidence.pieces.parts, result.used, strict=True))
        tolerance = max(result.bound.value, diagnosis.NAMING_TOLERANCE)
        named = diagnosis.name_weights(evidence, settings, used, min(tolerance, 0.1), where)
        if named:
            return named
    lost = f"; {100 * result.vanished:.3g} % of its elements became zero" if result.vanished else ""
    return [
        finding(
            "accum-precision",
            f"{where}the window differs from the right gradient by {result.difference:.3g}, more than rounding "
            f"explains (at most {result.bound.value:.3g}){lost}",
            observed=result.difference,
            expected=result.bound.value,
        )
    ]


def _details(
    laboratory: Laboratory,
    evidence: Evidence,
    settings: Settings,
    working: list[WorkingResult],
    findings: list[Finding],
) -> dict[str, Any]:
    verdict = _verdict(evidence, working)
    rows = [_float64_row(evidence), *(_row(result) for result in working)]
    step = after_step(laboratory, evidence)
    masks = f"{laboratory.dropout_calls} masks replaced by their mean" if laboratory.dropout_calls else "none"
    return {
        "verdict": verdict,
        "summary": f"{verdict}: {_what(evidence, settings)}",
        "window": evidence.own or "window() of the target",
        "accumulation_steps": settings.accumulation_steps,
        "dropout": "kept" if settings.keep_dropout else masks,
        "dtypes": rows,
        "lines": [f"  {line}" for line in (*map(_dtype_line, rows), _step_line(step))],
        "weights": diagnosis.weight_table(evidence, evidence.used),
        "after_step": step,
    }


def _verdict(evidence: Evidence, working: list[WorkingResult]) -> str:
    if not evidence.equal or any(result.verdict == "different" for result in working):
        return "different"
    return "rounding" if any(result.verdict == "rounding" for result in working) else "equal"


def _what(evidence: Evidence, settings: Settings) -> str:
    pieces = evidence.pieces
    sizes = sorted({batch_size(micro) for micro in pieces.micro_batches})
    each = "–".join(map(str, sizes))
    tail = f", a tail of a window of {settings.accumulation_steps}" if settings.tail else ""
    how = evidence.own or "the target's window()"
    return (
        f"{len(pieces.micro_batches)} micro-batches of {each} rows against one batch of {batch_size(pieces.whole)}"
        f"{tail} ({how})"
    )


def _float64_row(evidence: Evidence) -> dict[str, Any]:
    verdict = "equal" if evidence.equal else "different"
    return {"dtype": "float64", "difference": evidence.difference, "bound": evidence.bound.value, "verdict": verdict}


def _row(result: WorkingResult) -> dict[str, Any]:
    return {
        "dtype": result.dtype,
        "difference": result.difference,
        "bound": result.bound.value if result.bound else None,
        "verdict": result.verdict,
        **({"loss_scale": result.loss_scale} if result.loss_scale != 1 else {}),
        **({"reason": result.reason} if result.reason else {}),
    }


def _dtype_line(row: dict[str, Any]) -> str:
    if row["difference"] is None:
        return f"{row['dtype']:<9}not run: {row['reason']}"
    limit = "" if row["bound"] is None else f"  bound {row['bound']:.1e}"
    return f"{row['dtype']:<9}difference {row['difference']:.1e}{limit}  {row['verdict']}"


def _step_line(step: dict[str, Any]) -> str:
    return f"parameters after one step of {step['optimizer']}: {step['difference']:.1e} of the step apart"


def after_step(laboratory: Laboratory, evidence: Evidence) -> dict[str, Any]:
    """How far the parameters are apart after one optimizer step with either gradient, in float64.

    The distance is relative to the step itself. Adam divides the gradient by its own size, so a common factor hardly
    shows in the parameters: a loop can train well with a gradient that is K times too large.
    """
    start = laboratory.parameters_after_step(evidence.pieces.gradient * 0)
    large = laboratory.parameters_after_step(evidence.pieces.gradient)
    window = laboratory.parameters_after_step(evidence.accumulated)
    make = laboratory.experiment.optimizer
    return {
        "optimizer": "the target's optimizer" if make else "AdamW",
        "difference": relative(window - large, large - start),
        "largest": float((window - large).abs().max()),
    }
