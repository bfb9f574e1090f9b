"""Resume of a training session of any kind: run whole, and run in two halves with a save and a load between."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from stepscope.checks.experiment import first_line
from stepscope.checks.findings import finding, outcome
from stepscope.checks.precision import seeded
from stepscope.checks.states import Difference, differences
from stepscope.errors import StepscopeError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from stepscope.rules.outcome import Outcome

CODE = "CHK200"
NAME = "resume"

BLAME = {
    "optimizer": "resume-optim-state-lost",
    "scheduler": "resume-sched-not-restored",
    "scaler": "scaler-not-checkpointed",
    "rng": "resume-rng-sampler",
    "sampler": "resume-rng-sampler",
}
"""Part of the state that is already wrong right after the load -> the finding that names it."""


@runtime_checkable
class Session(Protocol):
    """A training run that can be saved: what ``make()`` returns."""

    def step(self) -> Any:
        """Train one optimizer step; may return its loss."""

    def state_dict(self) -> Mapping[str, Any]:
        """Everything that has to be saved."""

    def load_state_dict(self, state: Any) -> Any:
        """Go on from a saved state."""


def check_session(make: Callable[[], Session], steps: int = 8, seed: int = 0) -> Outcome:
    """Compare `steps` steps in one go with half of them, a save, a load into a new session, and the rest.

    The state travels through `torch.save` and a load that runs no code. The new session starts from another random
    state than the one that was saved, as a new process would.

    Args:
        make: builds a session from scratch; called twice.
        steps: N, optimizer steps of the whole run.
        seed: random state from which the whole run is built.

    Raises:
        StepscopeError: N is below 2, or `make` returns something that cannot step, save and load.
    """
    if steps < 2:
        raise StepscopeError(f"a run of {steps} steps has no half to resume from", hint="give at least 2")
    half = steps // 2
    with seeded(seed):
        whole = _session(make)
        _train(whole, half)
        saved = _through_file(whole.state_dict())
        losses = _train(whole, steps - half)
        end = _through_file(whole.state_dict())
    with seeded(seed + 1):
        resumed = _session(make)
        _load(resumed, _through_file(saved))
        after_load = list(differences(_through_file(saved), _through_file(resumed.state_dict())))
        resumed_losses = _train(resumed, steps - half)
        found = list(differences(end, _through_file(resumed.state_dict())))
    return _judge(found, after_load, losses, resumed_losses, half)


def _session(make: Callable[[], Session]) -> Session:
    made = make()
    if not isinstance(made, Session):
        raise StepscopeError(
            f"make() returned a {type(made).__name__} without step(), state_dict() and load_state_dict()",
            hint="return an object with these three methods",
        )
    return made


def _train(session: Session, steps: int) -> list[float | None]:
    losses = [session.step() for _ in range(steps)]
    return [None if loss is None else float(loss) for loss in losses]


def _load(session: Session, state: Any) -> None:
    try:
        session.load_state_dict(state)
    except (KeyError, ValueError, RuntimeError) as error:
        raise StepscopeError(
            f"the saved state cannot be loaded: {type(error).__name__}: {first_line(error)}"
        ) from error


def _through_file(state: Mapping[str, Any]) -> Any:
    """A copy of the state as a file would give it back."""
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def _judge(
    found: list[Difference],
    after_load: list[Difference],
    losses: list[float | None],
    resumed: list[float | None],
    half: int,
) -> Outcome:
    rows = [
        {"step": half + place, "loss_whole": a, "loss_resumed": b}
        for place, (a, b) in enumerate(zip(losses, resumed, strict=True), 1)
    ]
    first = next((row for row in rows if row["loss_whole"] != row["loss_resumed"]), None)
    if not found and first is None:
        return outcome(CODE, NAME, [], f"bit-identical: {len(rows)} steps after a resume at {half}", rows=rows)
    message = _message(found, after_load, first)
    name = BLAME.get(after_load[0].part, "resume-differs") if after_load else "resume-differs"
    summary = f"different: {len(found)} values of the state" if found else "different: the losses"
    return outcome(CODE, NAME, [finding(name, message, rows=rows, observed=len(found), expected=0)], summary, rows=rows)


def _message(found: list[Difference], after_load: list[Difference], first: dict[str, Any] | None) -> str:
    parts = []
    if first is not None:
        parts.append(f"step {first['step']} has the loss {first['loss_resumed']} where {first['loss_whole']} is right")
    if found:
        parts.append(f"{len(found)} values of the state differ at the end, first {found[0].path}")
    if after_load:
        wrong = ", ".join(list(dict.fromkeys(difference.path for difference in after_load))[:3])
        parts.append(f"the load did not restore {wrong}")
    else:
        parts.append(
            "the load restored all that was saved, so something is missing in the state: the random state, the position "
            "in the data, or a part that state_dict() leaves out"
        )
    return "; ".join(parts)
