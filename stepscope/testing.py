"""Assertions about training loops for test suites. The pytest plugin's fixture ``stepscope`` offers them as methods.

Each raises `AssertionError` with the numbers that matter where a check finds something at or above a severity.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from stepscope.rules.outcome import SEVERITIES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from stepscope.rules.outcome import Outcome, Severity
    from stepscope.store.trace import Trace
    from stepscope.watching import Watching

__all__ = [
    "FindingsError",
    "assert_accumulation_equals_large_batch",
    "assert_lr_follows",
    "assert_resume_equals_uninterrupted",
    "watching",
]


class FindingsError(AssertionError):
    """What a failed assertion raises; its text is the whole story, no traceback is needed."""


def assert_accumulation_equals_large_batch(
    model: Any = None,
    batch: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    *,
    window: Callable[..., Any] | None = None,
    optimizer: Callable[..., Any] | None = None,
    num_targets: Callable[[Any], int] | None = None,
    target: str = "",
    accumulation_steps: int = 4,
    fail_on: Severity = "error",
    **settings: Any,
) -> Outcome:
    """Assert that accumulating K micro-batches gives the gradient of the large batch.

    Args:
        model: any module; it is copied.
        batch: tensors whose first dimension is the batch.
        loss_fn: ``loss_fn(model, batch)`` gives the loss.
        window: ``window(model, micro_batches)``, the accumulation to test; the tool's own without it.
        optimizer: ``optimizer(parameters)`` builds the optimizer for the comparison after a step.
        num_targets: counts the targets of a batch.
        target: ``file.py:make`` instead of the objects above.
        accumulation_steps: K.
        fail_on: severity from which on a finding fails; a layer that couples the batch is a notice.
        **settings: ``tail``, ``normalisation``, ``dtypes``, … of `stepscope.checks.accumulation.Settings`.

    Raises:
        AssertionError: it does not.
        StepscopeError: the check cannot be run.
    """
    from stepscope.checks.accumulation import Settings, check_accumulation
    from stepscope.checks.experiment import as_experiment, load_experiment

    parts = {"model": model, "batch": batch, "loss_fn": loss_fn, "window": window, "optimizer": optimizer}
    experiment = load_experiment(target) if target else as_experiment({**parts, "num_targets": num_targets})
    return _require(check_accumulation(experiment, Settings(accumulation_steps, **settings)), fail_on)


def assert_resume_equals_uninterrupted(
    make: Callable[[], Any], steps: int = 8, *, seed: int = 0, fail_on: Severity = "error"
) -> Outcome:
    """Assert that a run which is saved, loaded into a new session and continued is the uninterrupted one, bit for bit.

    Args:
        make: builds a session with ``step()``, ``state_dict()`` and ``load_state_dict(state)``.
        steps: steps of the whole run.
        seed: random state from which the whole run is built.
        fail_on: severity from which on a finding fails.

    Raises:
        AssertionError: it is not.
        StepscopeError: the session cannot be run.
    """
    from stepscope.checks.session import check_session

    return _require(check_session(make, steps, seed), fail_on)


def assert_lr_follows(
    rates: Trace | Sequence[float],
    formula: str,
    *,
    unit: str = "",
    first: int | None = None,
    fail_on: Severity = "error",
    **values: float,
) -> Outcome:
    """Assert that learning rates follow a formula.

    Args:
        rates: a trace, or one rate per optimizer step.
        formula: a known schedule (``warmup-cosine``) or an expression in s, T, lr, w and r.
        unit: ``micro-step`` or ``optimizer-step``.
        first: s of the first step, 0 or 1.
        fail_on: severity from which on a finding fails.
        **values: T, lr, w, r where they are known.

    Raises:
        AssertionError: they do not.
        StepscopeError: the formula cannot be read, or no rate was recorded.
    """
    from stepscope.checks.schedule import Rates, check_schedule
    from stepscope.store.trace import Trace

    recorded = Rates.of_trace(rates) if isinstance(rates, Trace) else Rates.of_steps(rates)
    return _require(check_schedule(recorded, formula, values, unit, first), fail_on)


@contextmanager
def watching(
    model: Any = None,
    optimizer: Any = None,
    *,
    fail_on: Severity = "error",
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    declare: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    **options: Any,
) -> Iterator[Watching]:
    """Watch the training loop inside the ``with`` block and fail it on what the rules find.

    Args:
        model: the model; None finds it.
        optimizer: the optimizer; None finds it.
        fail_on: severity from which on a finding fails.
        select: rules to ask, by code or name; all if empty.
        ignore: rules to leave out.
        declare: what the loop is meant to do, such as ``{"accumulation_steps": 4}``.
        out: directory for the trace; it stays in memory without one.
        **options: of `stepscope.watch`.

    Raises:
        AssertionError: a rule found something, or no training step ran.
    """
    from stepscope.rules.engine import judge
    from stepscope.watching import watch

    recording = watch(model, optimizer, declare=dict(declare or {}), out=out, **options)
    with recording:
        yield recording
    if not recording.micro_steps:
        raise FindingsError("no training step was recorded: no backward pass ran")
    found = judge(recording.trace, declared=dict(declare or {}), select=select, ignore=ignore)
    _require_all(found, fail_on)


def _require(outcome: Outcome, fail_on: Severity) -> Outcome:
    _require_all([outcome], fail_on)
    return outcome


def _require_all(outcomes: Sequence[Outcome], fail_on: Severity) -> None:
    from stepscope.checks.report import text_lines

    loud = SEVERITIES[: SEVERITIES.index(fail_on) + 1]
    failed = [outcome for outcome in outcomes if any(finding.severity in loud for finding in outcome.findings)]
    if failed:
        raise FindingsError("\n".join(line for outcome in failed for line in text_lines(outcome)))
