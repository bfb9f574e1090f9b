"""A training run in two sittings, with every part of the checkpoint under control."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler as schedulers
from torch.utils.data import DataLoader, TensorDataset

from tests.rules.loops.schedule import linear

if TYPE_CHECKING:
    from collections.abc import Iterator

TOTAL, STOP = 24, 12
ALL = ("model", "optimizer", "scheduler", "scaler", "rng")


@dataclass
class Sitting:
    """How the run is built, what is saved and what is loaded; `disk` outlives the process.

    Attributes:
        saves: parts that go into the checkpoint.
        loads: parts that are taken from it, in this order; ``build scheduler`` builds the scheduler only then.
        optimizer: ``adam``, ``momentum`` or ``sgd``.
        schedule: ``linear``, ``cosine``, ``step``, ``exponential``, ``one-cycle``, ``hand`` or ``none``.
        data: ``indexed`` by the step, ``shuffled`` by a loader on the global generator, ``fixed`` order, ``random`` draws.
        writer: ``torch.save``, ``pickle`` (of state dicts), or ``apart`` (a file for each part).
        saves_at: steps after which the checkpoint is written; the last step if empty.
        weights: dtype of the weights in the checkpoint.
        dummy: an optimizer step with zero gradients while loading: ``before`` or ``after`` the weights, or ``after on
            nothing``: with the zeros that a backward of nothing left.
        order: names of the heads, in the order in which the model is built.
        position: whether the position in the data is restored.
        told: ``last_epoch`` that the constructor of a linear schedule is given in the second sitting.
    """

    disk: dict[str, Any] = field(default_factory=dict)
    saves: tuple[str, ...] = ALL
    loads: tuple[str, ...] = ALL
    optimizer: str = "adam"
    schedule: str = "linear"
    data: str = "indexed"
    writer: str = "torch.save"
    saves_at: tuple[int, ...] = ()
    weights: torch.dtype | None = None
    dummy: str = ""
    order: tuple[str, ...] = ("a", "b", "c")
    position: bool = True
    amp: bool = False
    lr: float = 0.01
    dropout: float = 0.0
    set_lr: float | None = None
    rebuild: bool = False
    told: int = -1
    start: int = 0
    stop: int = STOP

    def again(self, **changes: Any) -> Sitting:
        """The second sitting, on the same disk."""
        return replace(self, **{"start": STOP, "stop": TOTAL, **changes})

    def __call__(self) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        model = Heads(self.order, self.dropout)
        optimizer = self.make_optimizer(model)
        late = "build scheduler" in self.loads and self.start
        scheduler = None if late else self.make_scheduler(optimizer)
        scaler = (
            torch.amp.GradScaler("cpu", init_scale=2.0**12 if self.start else 2.0**8, growth_interval=5)
            if self.amp
            else None
        )
        parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
        step = 0
        if self.start:
            step, scheduler = self.load(parts)
            if self.rebuild:
                optimizer = self.make_optimizer(model)
                scheduler = self.make_scheduler(optimizer)
            for group in optimizer.param_groups if self.set_lr else ():
                group["lr"] = self.set_lr
        parts |= {"optimizer": optimizer, "scheduler": scheduler}
        rng = parts.pop("rng", None)
        batches = self.batches(step if self.position else 0)
        next_batch = next(batches, None)
        if rng is not None:
            torch.set_rng_state(rng)
        while step < self.stop and next_batch is not None:
            if self.schedule == "hand":
                for group in optimizer.param_groups:
                    group["lr"] = self.lr * linear(TOTAL, 4)(step if self.position else step - self.start)
            self.train(model, optimizer, scheduler, scaler, *next_batch)
            step += 1
            if step in (self.saves_at or (self.stop,)):
                self.save(parts, step)
            next_batch = next(batches, None)

    def train(
        self, model: nn.Module, optimizer: Any, scheduler: Any, scaler: Any, x: torch.Tensor, y: torch.Tensor
    ) -> None:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        if scheduler is not None:
            scheduler.step()

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.optimizer == "adam":
            return torch.optim.AdamW(model.parameters(), lr=self.lr, weight_decay=0.1)
        return torch.optim.SGD(model.parameters(), lr=self.lr, momentum=0.9 if self.optimizer == "momentum" else 0.0)

    def make_scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        make = {
            "linear": lambda: schedulers.LambdaLR(optimizer, linear(TOTAL, 4), self.told if self.start else -1),
            "cosine": lambda: schedulers.CosineAnnealingLR(optimizer, TOTAL),
            "step": lambda: schedulers.StepLR(optimizer, 5, 0.5),
            "exponential": lambda: schedulers.ExponentialLR(optimizer, 0.9),
            "one-cycle": lambda: schedulers.OneCycleLR(optimizer, self.lr, total_steps=TOTAL + 1),
        }
        return make[self.schedule]() if self.schedule in make else None

    def batches(self, position: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        if self.data == "indexed":
            for step in range(position, TOTAL + 1):
                yield sample(torch.Generator().manual_seed(step))
        elif self.data == "random":
            while True:
                yield sample(None)
        else:
            x, y = sample(torch.Generator().manual_seed(1), 64)
            for epoch in range(4):
                generator = torch.Generator().manual_seed(epoch)
                loader = DataLoader(
                    TensorDataset(x, y), batch_size=8, shuffle=self.data == "shuffled", generator=generator
                )
                for number, held in enumerate(loader):
                    if epoch * len(loader) + number >= position:
                        yield held[0], held[1]

    # ---- the disk ---------------------------------------------------------------------------------------------------

    def save(self, parts: dict[str, Any], step: int) -> None:
        content = {n: parts[n].state_dict() for n in self.saves if parts.get(n) is not None}
        if self.weights is not None:
            content["model"] = {k: v.to(self.weights) for k, v in content["model"].items()}
        content |= {"step": step, **({"rng": torch.get_rng_state()} if "rng" in self.saves else {})}
        if self.writer == "pickle":
            self.disk["file"] = pickle.dumps(content)
        elif self.writer == "apart":
            self.disk["file"] = {name: _saved(part) for name, part in content.items()}
        else:
            self.disk["file"] = _saved(content)

    def load(self, parts: dict[str, Any]) -> tuple[int, Any]:
        held = self.disk["file"]
        if self.writer == "apart":
            content = {name: torch.load(io.BytesIO(part)) for name, part in held.items()}
        else:
            content = pickle.loads(held) if self.writer == "pickle" else torch.load(io.BytesIO(held))
        if self.dummy == "before":
            self.step_without_gradient(parts["optimizer"])
        for name in self.loads:
            if name == "build scheduler":
                parts["scheduler"] = self.make_scheduler(parts["optimizer"])
            elif name == "rng" and "rng" in content:
                parts["rng"] = content["rng"]
            elif parts.get(name) is not None and name in content:
                parts[name].load_state_dict(content[name])
            if name == "model" and self.dummy == "after on nothing":
                (0.0 * parts["model"](torch.ones(1, 4))).sum().backward()
                parts["optimizer"].step()
                parts["optimizer"].zero_grad()
            if name == "model" and self.dummy == "after":
                self.step_without_gradient(parts["optimizer"])
        return content["step"], parts["scheduler"]

    @staticmethod
    def step_without_gradient(optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.zeros_like(p)
        optimizer.step()
        optimizer.zero_grad()


class Heads(nn.Module):
    """A trunk and heads of equal shape, built in a given order."""

    def __init__(self, order: tuple[str, ...], dropout: float) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout))
        self.heads = nn.ModuleDict({name: nn.Linear(8, 1) for name in order})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.trunk(x)
        return torch.cat([self.heads[name](hidden) for name in sorted(self.heads)], 1)


def sample(generator: torch.Generator | None, size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and three targets of different scale."""
    x = torch.randn(size, 4, generator=generator)
    return x, torch.stack([x[:, 0], 3 * x[:, 1], 9 * x[:, 2].sin()], 1)


def _saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
