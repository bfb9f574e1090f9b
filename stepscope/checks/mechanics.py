"""The lesson's alignment test: do the small functions of a training loop, and the loop made of them, do what they say?

The functions are `cosine_lr`, `scale_loss_for_accumulation`, `should_step_optimizer`, `should_flush_tail` and, where
the file has it, `train_one_epoch`. They are looked up in a learner's file or in the reference loop.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from stepscope.checks.experiment import first_line
from stepscope.checks.findings import finding, outcome
from stepscope.errors import StepscopeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from stepscope.rules.outcome import Finding, Outcome

CODE = "CHK400"
NAME = "mechanics"

REQUIRED = ("cosine_lr", "scale_loss_for_accumulation", "should_step_optimizer", "should_flush_tail")
LOOP = "train_one_epoch"
TOTAL_STEPS, BASE_LR, K = 10, 5e-4, 4
LR_STEPS = (0, 1, 5, 9, 10)
FLUSH_TABLE = (
    (10, 0, 4, True),
    (8, 0, 4, False),
    (0, 0, 4, False),
    (9, 8, 4, True),
    (7, 7, 4, False),
    (3, 0, 1, False),
)
"""(last_step, start_step, accumulation_steps) and whether a tail is left."""


@dataclass(frozen=True)
class Part:
    """What one function was found to do: the lesson's line, and findings where it is wrong."""

    line: str
    findings: tuple[Finding, ...] = ()


def check_mechanics(functions: Mapping[str, Callable[..., Any]], source: str = "the reference loop") -> Outcome:
    """Run the alignment test.

    Args:
        functions: by name; the four of `REQUIRED` and optionally `train_one_epoch`.
        source: where they come from, in words.

    Returns:
        An outcome whose ``details["lines"]`` are the lines of the lesson's own test.
    """
    from stepscope.checks.mechanics_loop import check_loop

    parts = [part for check in (_lr, _loss, _steps, _flush) for part in _guard(check, functions)]
    if LOOP in functions:
        parts += _guard(lambda f: iter([check_loop(f[LOOP])]), functions, LOOP)
    findings = [f for part in parts for f in part.findings]
    wrong = [f for f in findings if f.severity == "error"]
    verdict = "passed" if not wrong else "failed"
    lines = [part.line for part in parts if part.line] + [f"train_loop_mechanics={verdict}"]
    tested = [*REQUIRED, *([LOOP] if LOOP in functions else [])]
    return outcome(CODE, NAME, findings, f"{', '.join(tested)} of {source}: {verdict}", lines=lines)


def load_functions(path: str) -> dict[str, Callable[..., Any]]:
    """The functions that a learner's file defines.

    Raises:
        StepscopeError: the file cannot be loaded.
    """
    from stepscope.reference.factory import load_object

    found = {}
    for name in (*REQUIRED, LOOP):
        try:
            found[name] = load_object(f"{path}:{name}")
        except StepscopeError as error:
            if f"has no {name!r}" not in str(error):
                raise
    if not found:
        raise StepscopeError(f"{path} defines none of {', '.join(REQUIRED)}")
    return found


def reference_functions() -> dict[str, Callable[..., Any]]:
    """The functions of the reference loop."""
    from stepscope.reference import loop, schedules

    return {"cosine_lr": schedules.cosine_lr, **{name: getattr(loop, name) for name in (*REQUIRED[1:], LOOP)}}


def _guard(
    check: Callable[[Mapping[str, Any]], Iterator[Part]], functions: Mapping[str, Any], name: str = ""
) -> Iterator[Part]:
    """Run the check of one function; a function that is missing or raises is a finding, not an end."""
    try:
        yield from list(check(functions))
    except KeyError as error:
        yield Part("", (finding("mechanics-missing", f"{error.args[0]} is not defined"),))
    except NotImplementedError:
        yield Part("", (finding("mechanics-missing", f"{name or _subject(check)} is not implemented yet"),))
    except StepscopeError:
        raise
    except Exception as error:
        text = f"{name or _subject(check)} raised {type(error).__name__}: {first_line(error)}"
        yield Part("", (finding("mechanics-missing", text),))


def _subject(check: Any) -> str:
    return dict(zip((_lr, _loss, _steps, _flush), REQUIRED, strict=True)).get(check, "a function")


def expected_lr(step: int, total_steps: int, base_lr: float) -> float:
    """MiniMind's `get_lr`: base_lr·(0.1 + 0.45·(1 + cos(π·s/T)))."""
    return base_lr * (0.1 + 0.45 * (1 + math.cos(math.pi * step / total_steps)))


def _lr(functions: Mapping[str, Any]) -> Iterator[Part]:
    for step in LR_STEPS:
        got = float(functions["cosine_lr"](step, TOTAL_STEPS, BASE_LR))
        expected = expected_lr(step, TOTAL_STEPS, BASE_LR)
        line = f"lr_step_{step}_diff={abs(got - expected):.12f}"
        if math.isclose(got, expected, rel_tol=1e-12):
            yield Part(line)
            continue
        message = (
            f"cosine_lr({step}, {TOTAL_STEPS}, {BASE_LR}) gives {got:.6g}, MiniMind {expected:.6g}"
            f"{_lr_hint(functions['cosine_lr'])}"
        )
        yield Part(line, (finding("mechanics-lr", message, observed=got, expected=expected),))
        return


def _lr_hint(cosine_lr: Callable[..., float]) -> str:
    """What the ends of the curve say about the mistake."""
    start, end = (float(cosine_lr(s, TOTAL_STEPS, BASE_LR)) / BASE_LR for s in (0, TOTAL_STEPS))
    if abs(end) < 1e-9:
        return ": it decays to 0, and should end at a tenth of the base rate"
    if math.isclose(start, end):
        return f": it stays at {start:.3g} times the base rate"
    return f": it runs from {start:.3g} to {end:.3g} times the base rate, and should run from 1 to 0.1"


def _loss(functions: Mapping[str, Any]) -> Iterator[Part]:
    scale = functions["scale_loss_for_accumulation"]
    loss = torch.tensor(8.0, requires_grad=True)
    scaled = scale(loss, K)
    value = float(scaled.detach() if isinstance(scaled, torch.Tensor) else scaled)
    line = f"scaled_loss={value:.6f}"
    expected = 8.0 / K
    if not math.isclose(value, expected):
        hint = ": the loss is multiplied, not divided" if value > 8 else ": divide by accumulation_steps, once"
        text = f"scale_loss_for_accumulation(8, {K}) gives {value:g} where {expected:g} is right{hint}"
        yield Part(line, (finding("mechanics-loss-scaling", text, observed=value, expected=expected),))
    elif not isinstance(scaled, torch.Tensor) or scaled.grad_fn is None:
        text = "scale_loss_for_accumulation cuts the loss off from the model: return loss / accumulation_steps itself"
        yield Part(line, (finding("mechanics-loss-scaling", text),))
    else:
        yield Part(line)


def _steps(functions: Mapping[str, Any]) -> Iterator[Part]:
    found = [step for step in range(1, TOTAL_STEPS + 1) if functions["should_step_optimizer"](step, K)]
    expected = [step for step in range(1, TOTAL_STEPS + 1) if step % K == 0]
    line = f"optimizer_step_micro_steps={found}"
    if found == expected:
        yield Part(line)
        return
    shifted = [step + 1 for step in found if step < TOTAL_STEPS]
    hint = ": micro-steps count from 1, so the condition is step % K == 0" if shifted and shifted[0] % K == 0 else ""
    text = f"with K={K} the optimizer steps after micro-steps {found} and should after {expected}{hint}"
    yield Part(line, (finding("mechanics-step-condition", text, observed=found, expected=expected),))


def _flush(functions: Mapping[str, Any]) -> Iterator[Part]:
    wrong = [
        (last, start, k, expected)
        for last, start, k, expected in FLUSH_TABLE
        if bool(functions["should_flush_tail"](last, start, k)) is not expected
    ]
    if not wrong:
        yield Part("")
        return
    last, start, k, expected = wrong[0]
    why = "gradients are left that no step has used" if expected else "no gradient is left"
    text = (
        f"should_flush_tail(last_step={last}, start_step={start}, accumulation_steps={k}) gives {not expected} and "
        f"should give {expected}: {why}"
    )
    yield Part("", (finding("mechanics-tail-condition", text, observed=not expected, expected=expected),))
