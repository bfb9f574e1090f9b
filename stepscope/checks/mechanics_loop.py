"""A learner's `train_one_epoch` on a model whose gradients are known, with an optimizer and scaler that take notes."""

from __future__ import annotations

import contextlib
import inspect
import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor, nn

from stepscope.checks.findings import finding
from stepscope.checks.mechanics import BASE_LR, K, Part, expected_lr
from stepscope.errors import StepscopeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from stepscope.rules.outcome import Finding

BATCHES = 10
MAX_NORM = 0.5
LOSS_SCALE = 8.0
ORDER = ("unscale_", "clip", "step", "update", "zero_grad")


@dataclass
class Diary:
    """What the loop did, in order.

    Attributes:
        calls: names of calls since the last step's end.
        windows: for each optimizer step the micro-steps since the last one, the gradient before the clip, and the
            order of the calls around it.
        rates: learning rate at each forward.
        pending: micro-steps since the last optimizer step.
        before_clip: gradient that the last clip was given; None before the first clip of a window.
    """

    calls: list[str] = field(default_factory=list)
    windows: list[dict[str, Any]] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    before_clip: Tensor | None = None


class KnownModel(nn.Module):
    """loss_i(w) = a_i·w with known a_i: the gradient of micro-step i is a_i, whatever w is. `aux_loss` is 0."""

    def __init__(self, diary: Diary) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.diary = diary
        self.rate: Callable[[], float] = lambda: 0.0

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **_: Any) -> SimpleNamespace:
        """The loss of one micro-batch, whose number is in `input_ids`."""
        self.diary.rates.append(self.rate())
        self.diary.pending.append(int(input_ids.flatten()[0]))
        loss = (direction(int(input_ids.flatten()[0])) * self.weight).sum()
        return SimpleNamespace(loss=loss, aux_loss=torch.zeros(()), logits=torch.zeros(1, 1, 2))


def direction(micro_step: int) -> Tensor:
    """a_i: the gradient of micro-step i, from 1."""
    return torch.tensor([float(micro_step), 1.0, -0.5 * micro_step])


def check_loop(train_one_epoch: Callable[..., Any]) -> Part:
    """Run the loop for `BATCHES` micro-steps and compare every step that it takes with the right one.

    Raises:
        StepscopeError: the loop asks for an argument whose meaning cannot be guessed.
    """
    diary = Diary()
    model = KnownModel(diary)
    optimizer = _NotingSgd(model, diary)
    model.rate = lambda: float(optimizer.param_groups[0]["lr"])
    scaler = _NotingScaler(diary)
    with _noting_clip(diary):
        train_one_epoch(**_arguments(train_one_epoch, model, optimizer, scaler))
    problem = _first_problem(diary)
    line = f"train_one_epoch_steps_after={[window['micro_steps'][-1] for window in diary.windows]}"
    return Part(line, (problem,) if problem else ())


def _first_problem(diary: Diary) -> Finding | None:
    ends = [window["micro_steps"][-1] for window in diary.windows if window["micro_steps"]]
    if ends[: BATCHES // K] != [K * i for i in range(1, BATCHES // K + 1)]:
        return finding("mechanics-loop", f"the optimizer steps after micro-steps {ends} and should after [4, 8, 10]")
    if len(ends) == BATCHES // K:
        return finding(
            "accum-tail-dropped",
            f"no step after micro-step {BATCHES}: the last {BATCHES % K} micro-batches are dropped; flush the tail",
        )
    for number, window in enumerate(diary.windows, 1):
        problem = _order_problem(number, window["order"]) or _gradient_problem(number, window)
        if problem:
            return problem
    return _rate_problem(diary.rates) or _tail_notice(diary.windows[-1])


def _order_problem(number: int, order: list[str]) -> Finding | None:
    known = [call for call in order if call in ORDER]
    missing = [call for call in ORDER[:-1] if call not in known]
    if missing:
        return finding("mechanics-loop", f"step {number} runs without {', '.join(missing)}", observed=known)
    places = [known.index(call) for call in ORDER if call in known]  # gradients may be cleared as p.grad = None
    if places != sorted(places):
        return finding(
            "mechanics-loop",
            f"step {number} runs {' → '.join(known)} and should run {' → '.join(ORDER)}{_order_reason(known)}",
            observed=known,
            expected=list(ORDER),
        )
    return None


def _order_reason(known: list[str]) -> str:
    if known.index("clip") < known.index("unscale_"):
        return ": the clip then limits gradients that are still multiplied by the loss scale"
    if "zero_grad" in known and known.index("zero_grad") < known.index("step"):
        return ": the step then has no gradient"
    return ""


def _gradient_problem(number: int, window: dict[str, Any]) -> Finding | None:
    """The gradient that the clip was given. What the clip makes of it is torch's own business."""
    share = len(window["micro_steps"]) / K
    ratio = _ratio(window)
    if any(abs(ratio - right) < 1e-4 for right in (1.0, share)):
        return None
    if math.isnan(ratio):
        return finding(
            "mechanics-loop",
            f"the gradient of step {number} is no multiple of the mean over micro-steps {window['micro_steps']}: old "
            "gradients are still in it, or some micro-step is missing",
        )
    hints = {float(K): ": the loss is not divided by accumulation_steps", 1 / K: ": the loss is divided twice"}
    return finding(
        "mechanics-loop",
        f"the gradient of step {number} is {ratio:.4g} times the mean over micro-steps {window['micro_steps']}"
        f"{hints.get(round(ratio, 4), '')}",
        observed=ratio,
        expected=1.0,
    )


def _ratio(window: dict[str, Any]) -> float:
    """Size of the gradient before the clip against the mean of the window's; nan where the directions differ."""
    mean = torch.stack([direction(i) for i in window["micro_steps"]]).mean(dim=0)
    ratio = float(window["before_clip"] @ mean / (mean @ mean))
    return ratio if torch.allclose(window["before_clip"], ratio * mean, rtol=1e-4) else math.nan


def _tail_notice(window: dict[str, Any]) -> Finding | None:
    ratio = _ratio(window)
    if abs(ratio - 1) < 1e-4:
        return None
    return finding(
        "mechanics-tail-weight",
        f"the tail of {len(window['micro_steps'])} micro-batches is divided by {K}, as in MiniMind: its gradient is "
        f"{ratio:.4g} times their mean",
        observed=ratio,
        expected=1.0,
    )


def _rate_problem(rates: list[float]) -> Finding | None:
    expected = _rates(first=1)
    wrong = _first_difference(rates, expected)
    if wrong is None:
        return None
    if _first_difference(rates, _rates(first=0)) is None:
        return finding("mechanics-lr", "the schedule counts micro-steps from 0 where MiniMind counts from 1")
    return finding(
        "mechanics-lr",
        f"at micro-step {wrong + 1} the rate is {rates[wrong]:.6g}; MiniMind sets {expected[wrong]:.6g} before it",
        observed=rates[wrong],
        expected=expected[wrong],
    )


def _rates(first: int) -> list[float]:
    return [expected_lr(step, BATCHES, BASE_LR) for step in range(first, first + BATCHES)]


def _first_difference(left: list[float], right: list[float]) -> int | None:
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if not math.isclose(a, b)), None)


class _NotingSgd(torch.optim.SGD):
    def __init__(self, model: KnownModel, diary: Diary) -> None:
        super().__init__(model.parameters(), lr=BASE_LR)
        self.diary = diary

    def step(self, closure: Any = None) -> Any:
        weight = self.param_groups[0]["params"][0]
        gradient = torch.zeros_like(weight) if weight.grad is None else weight.grad.detach().clone()
        order = [*self.diary.calls, "step"]
        self.diary.windows.append(
            {
                "micro_steps": self.diary.pending.copy() or [0],
                "before_clip": gradient if self.diary.before_clip is None else self.diary.before_clip,
                "order": order,
            }
        )
        self.diary.pending.clear()
        self.diary.calls = []
        self.diary.before_clip = None
        return super().step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.diary.windows and "zero_grad" not in self.diary.windows[-1]["order"]:
            self.diary.windows[-1]["order"] += [*self.diary.calls, "zero_grad"]
            self.diary.calls = []
        super().zero_grad(set_to_none)


class _NotingScaler(torch.amp.GradScaler):
    def __init__(self, diary: Diary) -> None:
        super().__init__("cpu", init_scale=LOSS_SCALE)
        self.diary = diary

    def unscale_(self, optimizer: Any) -> None:
        self.diary.calls.append("unscale_")
        super().unscale_(optimizer)

    def update(self, new_scale: Any = None) -> None:
        after_step = self.diary.windows and not self.diary.calls
        (self.diary.windows[-1]["order"] if after_step else self.diary.calls).append("update")
        super().update(new_scale)


@contextlib.contextmanager
def _noting_clip(diary: Diary) -> Iterator[None]:
    """Both import styles of `clip_grad_norm_` end in this function of torch's module."""
    from torch.nn.utils import clip_grad

    original = clip_grad._clip_grads_with_norm_

    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        diary.calls.append("clip")
        diary.before_clip = parameters[0].grad.detach().clone()
        return original(parameters, *args, **kwargs)

    with mock.patch.object(clip_grad, "_clip_grads_with_norm_", clip):
        yield


def _arguments(train_one_epoch: Callable[..., Any], model: nn.Module, optimizer: Any, scaler: Any) -> dict[str, Any]:
    """Arguments by the names that such loops use.

    Raises:
        StepscopeError: a required parameter has a name that is not known.
    """
    batches = [(torch.full((1, 4), i), torch.zeros(1, 4, dtype=torch.long)) for i in range(1, BATCHES + 1)]
    values: dict[str, Any] = {"model": model, "optimizer": optimizer, "scaler": scaler}
    values |= dict.fromkeys(("loader", "dataloader", "data_loader", "train_loader", "train_dataloader"), batches)
    values |= dict.fromkeys(("learning_rate", "lr", "base_lr"), BASE_LR)
    values |= dict.fromkeys(("accumulation_steps", "accum_steps", "gradient_accumulation_steps"), K)
    values |= dict.fromkeys(("grad_clip", "max_norm", "max_grad_norm", "clip_grad"), MAX_NORM)
    values |= dict.fromkeys(("iters", "iters_per_epoch", "steps_per_epoch", "total_steps", "max_steps"), BATCHES)
    values |= dict.fromkeys(("epochs", "total_epochs", "num_epochs"), 1)
    values |= dict.fromkeys(("epoch", "start_step"), 0)
    values |= {"device": "cpu", "autocast_ctx": contextlib.nullcontext()}
    values |= {"lr_at": lambda step: expected_lr(step, BATCHES, BASE_LR)}
    parameters = inspect.signature(train_one_epoch).parameters.values()
    unknown = [
        p.name
        for p in parameters
        if p.name not in values and p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if unknown:
        raise StepscopeError(
            f"train_one_epoch has the parameter {unknown[0]!r}, and its meaning is not known",
            hint="use the names of the lesson: model, loader, optimizer, device, learning_rate, accumulation_steps, …",
        )
    return {p.name: values[p.name] for p in parameters if p.name in values}
