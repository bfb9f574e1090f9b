"""Small loops with a schedule, right and wrong ones. Each is a function without arguments once its options are bound."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler as schedulers
from torch.utils.data import DataLoader, TensorDataset

Make = Callable[[torch.optim.Optimizer], Any]


def net(width: int = 6) -> nn.Module:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))


def batch(step: int, size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(size, 4, generator=torch.Generator().manual_seed(step))
    return x, x[:, :1] - x[:, 1:2]


def adam(model: nn.Module, lr: float = 0.01) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=lr)


def stepped(
    make: Make,
    *,
    windows: int = 24,
    k: int = 1,
    per: str = "window",
    times: int = 1,
    epoch: int = 6,
    build: Callable[[nn.Module], torch.optim.Optimizer] = adam,
) -> Callable[[], None]:
    """A scheduler that is stepped `times` after each ``micro`` step, ``window`` or ``epoch`` (of `epoch` windows)."""

    def loop() -> None:
        model = net()
        optimizer = build(model)
        scheduler = make(optimizer)
        for window in range(windows):
            for micro in range(k):
                x, y = batch(window * k + micro)
                (F.mse_loss(model(x), y) / k).backward()
                if per == "micro":
                    scheduler.step()
            optimizer.step()
            optimizer.zero_grad()
            due = per == "window" or (per == "epoch" and (window + 1) % epoch == 0)
            for _ in range(times if due else 0):
                scheduler.step()

    return loop


def by_hand(
    rate: Callable[[int], float], *, windows: int = 24, k: int = 1, per: str = "window", after: bool = False
) -> Callable[[], None]:
    """Rates written into ``param_groups`` before each micro-step or window, or after the step."""

    def loop() -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def write(at: int) -> None:
            for group in optimizer.param_groups:
                group["lr"] = rate(at)

        for window in range(windows):
            for micro in range(k):
                if not after and (per == "micro" or micro == 0):
                    write(window * k + micro if per == "micro" else window)
                x, y = batch(window * k + micro)
                (F.mse_loss(model(x), y) / k).backward()
            optimizer.step()
            optimizer.zero_grad()
            if after:
                write(window + 1)

    return loop


def cosine(total: int, peak: float = 0.1, low: float = 0.0, *, clamp: bool = False) -> Callable[[int], float]:
    """Half a cosine over `total` steps; beyond, the floor if `clamp`, else back up."""

    def rate(step: int) -> float:
        at = min(step, total) if clamp else step
        return low + 0.5 * (peak - low) * (1 + math.cos(math.pi * at / total))

    return rate


def linear(total: int, warmup: int = 0, *, clamp: bool = True) -> Callable[[int], float]:
    """The factor of a linear decay with warm-up, as transformers writes it."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        left = (total - step) / max(1, total - warmup)
        return max(0.0, left) if clamp else left

    return factor


def lambda_lr(factor: Callable[[int], float]) -> Make:
    return lambda optimizer: schedulers.LambdaLR(optimizer, factor)


def scaled(
    *,
    infinite: tuple[int, ...],
    guarded: bool,
    steps: int = 24,
    fused: bool = False,
    warmup: int = 6,
    by_hand: bool = False,
) -> Callable[[], None]:
    """float32 under a GradScaler; the loss of some steps is infinite, so that they are skipped.

    The rate is a scheduler's, or written into the groups `by_hand`.
    """

    def loop() -> None:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
        factor, position = linear(steps, warmup), 0
        scheduler = None if by_hand else schedulers.LambdaLR(optimizer, factor)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step in range(steps):
            x, y = batch(step)
            for group in optimizer.param_groups if by_hand else ():
                group["lr"] = 0.01 * factor(position)
            loss = F.mse_loss(model(x), y)
            scaler.scale(loss * (float("inf") if step in infinite else 1.0)).backward()
            scaler.step(optimizer)
            before = scaler.get_scale()
            scaler.update()
            optimizer.zero_grad()
            if not guarded or scaler.get_scale() >= before:
                position += 1
                if scheduler is not None:
                    scheduler.step()

    return loop


class Wrapper(torch.optim.Optimizer):
    """Lets another optimizer step; `shares` says whether both have the same groups."""

    def __init__(self, inner: torch.optim.Optimizer, *, shares: bool) -> None:
        super().__init__([dict(group) for group in inner.param_groups], {})
        self.inner = inner
        if shares:
            self.param_groups = inner.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def wrapped(*, shares: bool, steps: int = 16) -> Callable[[], None]:
    """The scheduler is built on a wrapper."""

    def loop() -> None:
        model = net()
        optimizer = Wrapper(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), shares=shares)
        scheduler = schedulers.CosineAnnealingLR(optimizer, steps)
        for step in range(steps):
            x, y = batch(step)
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            scheduler.step()

    return loop


def two_schedulers(
    make: Callable[[torch.optim.Optimizer], tuple[Any, Any]], warmup: int = 6, steps: int = 20
) -> Callable[[], None]:
    """The first of two schedulers is stepped for `warmup` steps, then the other."""

    def loop() -> None:
        model = net()
        optimizer = adam(model)
        first, second = make(optimizer)
        for step in range(steps):
            x, y = batch(step)
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            (first if step < warmup else second).step()

    return loop


def unfrozen(follow: str, steps: int = 24) -> Callable[[], None]:
    """A second group joins in the middle; the schedule is a scheduler (``StepLR``), for ``all`` groups, or the ``first``."""

    def loop() -> None:
        model = net()
        optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)  # type: ignore[index]
        scheduler = Truncating(optimizer) if follow == "truncating" else None
        if follow == "StepLR":
            scheduler = schedulers.StepLR(optimizer, 3, 0.7)
        for step in range(steps):
            if step == steps // 3:
                optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.05})  # type: ignore[index]
            if scheduler is None:
                groups = optimizer.param_groups if follow == "all" else optimizer.param_groups[:1]
                for group in groups:
                    group["lr"] = cosine(steps)(step)
            x, y = batch(step)
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()

    return loop


class Truncating(schedulers.LRScheduler):
    """A scheduler of one's own that knows the groups of its construction only."""

    def get_lr(self) -> list[float]:
        return [base * 0.95**self.last_epoch for base in self.base_lrs]

    def step(self, epoch: int | None = None) -> None:
        self.last_epoch += 1
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=False):
            group["lr"] = rate


def grouped(make: Make, steps: int = 16) -> Callable[[], None]:
    """Two groups that are built with rates of 1 to 10."""

    def loop() -> None:
        model = net()
        groups = [
            {"params": list(model[0].parameters()), "lr": 1e-3},
            {"params": list(model[2].parameters()), "lr": 1e-2},
        ]  # type: ignore[index]
        optimizer = torch.optim.AdamW(groups)
        scheduler = make(optimizer)
        for step in range(steps):
            if not hasattr(scheduler, "step"):
                for group in optimizer.param_groups:
                    group["lr"] = scheduler(step, group)
            x, y = batch(step)
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if hasattr(scheduler, "step"):
                scheduler.step()

    return loop


def rebuilt(how: str, steps: int = 16) -> Callable[[], None]:
    """The optimizer that steps is not the scheduler's: ``new`` object, deep ``copy`` of the pair, or ``switched`` midway."""

    def loop() -> None:
        model = net()
        optimizer = adam(model)
        scheduler: Any = schedulers.CosineAnnealingLR(optimizer, steps)
        if how == "new":
            optimizer = adam(model)
        elif how == "copy":
            scheduler = copy.deepcopy(scheduler)
        for step in range(steps):
            if how == "switched" and step == 5:
                optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            x, y = batch(step)
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()

    return loop


class GradualWarmup(schedulers.LRScheduler):
    """A warm-up that hands over to another scheduler, as a popular package writes it."""

    def __init__(self, optimizer: torch.optim.Optimizer, total: int, after: Any) -> None:
        self.total, self.after = total, after
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        if self.last_epoch > self.total:
            return list(self.after.get_last_lr())
        return [base * (self.last_epoch + 1) / (self.total + 1) for base in self.base_lrs]

    def step(self, epoch: int | None = None) -> None:
        if self.last_epoch >= self.total:
            self.last_epoch += 1
            self.after.step()
        else:
            super().step()


def nested(other: bool, steps: int = 20) -> Callable[[], None]:
    """A warm-up whose inner scheduler writes to the same optimizer, or to another one."""

    def loop() -> None:
        model = net()
        optimizer = adam(model)
        inner = schedulers.CosineAnnealingLR(adam(model) if other else optimizer, steps - 4)
        scheduler = GradualWarmup(optimizer, 4, inner)
        for step in range(steps):
            x, y = batch(step)
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()

    return loop


def plateau(metrics: list[float], mode: str, patience: int = 1, factor: float = 0.5) -> Callable[[], None]:
    """One epoch of three steps for each metric, which is given to ReduceLROnPlateau."""

    def loop() -> None:
        model = net()
        optimizer = adam(model)
        scheduler = schedulers.ReduceLROnPlateau(optimizer, mode=mode, patience=patience, factor=factor)
        for epoch, metric in enumerate(metrics):
            for step in range(3):
                x, y = batch(epoch * 3 + step)
                F.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
            scheduler.step(metric)

    return loop


def plateau_per_batch(steps: int = 60) -> Callable[[], None]:
    """ReduceLROnPlateau is given the loss of each batch."""

    def loop() -> None:
        model = net(16)
        optimizer = adam(model, 3e-3)
        scheduler = schedulers.ReduceLROnPlateau(optimizer, patience=2, factor=0.7)
        for step in range(steps):
            x, y = batch(step, 3)
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step(loss.detach())

    return loop


def gan(steps: int = 24, every: int = 4) -> Callable[[], None]:
    """Two optimizers with a scheduler each; the generator steps less often, its scheduler at every iteration."""

    def loop() -> None:
        generator, critic = net(), net()
        optimizers = [adam(generator, 1e-3), adam(critic, 1e-3)]
        paces = [schedulers.ExponentialLR(o, 0.98) for o in optimizers]
        for step in range(steps):
            x, _ = batch(step)
            optimizers[1].zero_grad()
            (critic(x).mean() - critic(x + generator(x).detach()).mean()).backward()
            optimizers[1].step()
            if step % every == 0:
                optimizers[0].zero_grad()
                (-critic(x + generator(x)).mean()).backward()
                optimizers[0].step()
            for pace in paces:
                pace.step()

    return loop


def epochs_over(loader_size: int, epochs: int, make: Callable[[torch.optim.Optimizer, int], Any]) -> Callable[[], None]:
    """A DataLoader of `loader_size` batches; the scheduler is stepped once an epoch and is given the loader's length."""

    def loop() -> None:
        model = net()
        x = torch.randn(4 * loader_size, 4, generator=torch.Generator().manual_seed(0))
        loader = DataLoader(TensorDataset(x, x[:, :1]), batch_size=4, shuffle=True)
        optimizer = adam(model)
        scheduler = make(optimizer, len(loader))
        for _ in range(epochs):
            for a, b in loader:
                optimizer.zero_grad()
                F.mse_loss(model(a), b).backward()
                optimizer.step()
            scheduler.step()

    return loop


class Averaging(torch.optim.Optimizer):
    """SGD that evaluates at the average of its iterates; ``train()`` and ``eval()`` swap the two."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "train_mode": False})

    def train(self) -> None:
        self._swap(True)

    def eval(self) -> None:
        self._swap(False)

    @torch.no_grad()
    def _swap(self, mode: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] != mode:
                group["train_mode"] = mode
                for p in group["params"]:
                    if "other" in self.state[p]:
                        held = p.clone()
                        p.copy_(self.state[p]["other"])
                        self.state[p]["other"] = held

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"])
                    self.state[p].setdefault("other", p.clone()).lerp_(p, 0.2)


def averaged(
    *, switch: bool, evaluate: str = "epoch", steps: int = 12, save: bool = False, real: Any = None
) -> Callable[[], None]:
    """Evaluation every fourth step (``epoch``), or a forward without gradients in every step (``always``)."""

    def loop() -> None:
        import io

        model = net()
        optimizer = Averaging(model.parameters()) if real is None else real(model.parameters(), lr=0.01)
        optimizer.train()
        for step in range(steps):
            x, y = batch(step)
            if evaluate == "always":
                with torch.no_grad():
                    model(x)
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            if evaluate == "epoch" and step % 4 == 3:
                if switch:
                    optimizer.eval()
                model.eval()
                with torch.no_grad():
                    model(x)
                model.train()
                if switch:
                    optimizer.train()
        if switch:
            optimizer.eval()
        if save:
            torch.save(model.state_dict(), io.BytesIO())

    return loop
