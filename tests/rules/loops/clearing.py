"""Loops that clear gradients at the right and at the wrong place, with one and several optimizers, closures, empty labels."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.rules.loops.accumulation import (
    IGNORE,
    Loop,
    classes,
    classifier,
    cross_entropy,
    language_model,
    masked_mean,
    sentences,
)


def cleared(
    place: str,
    *,
    windows: int = 8,
    k: int = 1,
    optimizer: Any = torch.optim.SGD,
    to_none: bool = True,
    scaler: bool = False,
    extra: bool = False,
) -> Loop:
    """A loop that clears at `place`.

    ``after``, ``top``, ``after forward``, ``none`` (assigns None), ``data`` (zeros through .data), ``model`` (the model's
    method; with `extra` the optimizer holds a parameter that is not the model's), ``never``, ``once`` (before the loop),
    ``sometimes`` (every fourth step), ``before step``.
    """

    def loop() -> None:
        torch.manual_seed(0)
        net, temperature = classifier(), nn.Parameter(torch.ones(()))
        opt = optimizer([*net.parameters(), *([temperature] if extra else [])], lr=1e-2)
        scale = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=scaler)
        opt.zero_grad()
        for i, (x, y) in enumerate(classes(windows * k)):
            first, last = i % k == 0, (i + 1) % k == 0
            if place == "top" and first:
                opt.zero_grad(set_to_none=to_none)
            output = net(x) / temperature if extra else net(x)
            if place == "after forward" and first:
                net.zero_grad(set_to_none=to_none)
            scale.scale(F.cross_entropy(output, y) / k).backward()
            if not last:
                continue
            if place == "before step":
                opt.zero_grad(set_to_none=to_none)
            scale.step(opt)
            scale.update()
            _clear(place, i, net, opt, to_none)

    return loop


def _clear(place: str, i: int, net: nn.Module, opt: Any, to_none: bool) -> None:
    if place == "after" or (place == "sometimes" and i % 4 == 3):
        opt.zero_grad(set_to_none=to_none)
    elif place == "model":
        net.zero_grad(set_to_none=to_none)
    elif place == "none":
        for p in net.parameters():
            p.grad = None
    elif place == "data":
        for p in net.parameters():
            p.grad.data.zero_()


def gan(order: str, *, steps: int = 8, scaler: bool = False, optimizer: Any = torch.optim.Adam) -> Loop:
    """A generator and a discriminator.

    `order`: ``right`` (each cleared before its own backward), ``after`` (each cleared after its own step: the generator's
    backward leaks), ``first`` (generator first, both cleared at the top: it leaks too), ``never`` (the discriminator is
    never cleared), ``frozen`` (the discriminator needs no gradients in the generator's turn).
    """

    def loop() -> None:
        torch.manual_seed(0)
        g, d = nn.Linear(3, 2), nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1))
        og, od = optimizer(g.parameters(), lr=1e-3), optimizer(d.parameters(), lr=1e-3)
        scale = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=scaler)
        loss = nn.BCEWithLogitsLoss()
        one, zero = torch.ones(8, 1), torch.zeros(8, 1)

        def discriminate() -> None:
            if order in ("right", "frozen"):
                od.zero_grad()
            scale.scale(loss(d(torch.randn(8, 2)), one)).backward()
            scale.scale(loss(d(g(torch.randn(8, 3)).detach()), zero)).backward()
            scale.step(od)
            if order == "after":
                od.zero_grad()

        def generate() -> None:
            if order in ("right", "frozen", "never"):
                og.zero_grad()
            d.requires_grad_(order != "frozen")
            scale.scale(loss(d(g(torch.randn(8, 3))), one)).backward()
            d.requires_grad_(True)
            scale.step(og)
            if order == "after":
                og.zero_grad()

        for _ in range(steps):
            if order == "first":
                og.zero_grad()
                od.zero_grad()
            for turn in (generate, discriminate) if order == "first" else (discriminate, generate):
                turn()
            scale.update()

    return loop


def distillation(detached: bool, steps: int = 8) -> Loop:
    """A teacher that trains too; the student's loss reaches it unless its output is detached."""

    def loop() -> None:
        torch.manual_seed(0)
        teacher, student = classifier(), classifier()
        ot, os = torch.optim.SGD(teacher.parameters(), lr=0.1), torch.optim.SGD(student.parameters(), lr=0.1)
        for x, y in classes(steps):
            F.cross_entropy(teacher(x), y).backward()
            ot.step()
            ot.zero_grad()
            target = teacher(x).softmax(-1)
            F.cross_entropy(student(x), target.detach() if detached else target).backward()
            os.step()
            os.zero_grad()

    return loop


def momentum_in_the_gradient(steps: int = 10) -> Loop:
    """Right: the gradient is shrunk instead of cleared, and the next backward adds to it."""

    def loop() -> None:
        torch.manual_seed(0)
        net = classifier()
        opt = torch.optim.SGD(net.parameters(), lr=1e-2)
        for x, y in classes(steps):
            for p in net.parameters():
                if p.grad is not None:
                    p.grad.mul_(0.9)
            F.cross_entropy(net(x), y).backward()
            opt.step()

    return loop


def adversarial_features(cleared: bool, steps: int = 8) -> Loop:
    """A discriminator and features that are to fool it: every backward reaches both, and both optimizers step on their own.

    Unless the features are `cleared` before their turn, they also learn from the discriminator's loss.
    """

    def loop() -> None:
        torch.manual_seed(0)
        features, critic = nn.Sequential(nn.Linear(5, 6), nn.Tanh()), nn.Linear(6, 1)
        of, oc = torch.optim.Adam(features.parameters(), lr=1e-3), torch.optim.SGD(critic.parameters(), lr=0.1)
        domain = (torch.arange(8) % 2).float()
        for _ in range(steps):
            of.zero_grad()
            oc.zero_grad()
            F.binary_cross_entropy_with_logits(critic(features(torch.randn(8, 5))).squeeze(1), domain).backward()
            oc.step()
            if cleared:
                of.zero_grad()
            h = features(torch.randn(8, 5))
            fooled = F.binary_cross_entropy_with_logits(critic(h).squeeze(1), domain)
            (F.mse_loss(h, torch.zeros_like(h)) - 0.3 * fooled).backward()
            of.step()

    return loop


def shared_backward(slow: int = 1, windows: int = 12) -> Loop:
    """One backward for two optimizers; the second steps every `slow`-th time only."""

    def loop() -> None:
        torch.manual_seed(0)
        net = classifier()
        fast = torch.optim.Adam(net[0].parameters(), lr=1e-3)
        other = torch.optim.SGD(net[2].parameters(), lr=1e-3)
        for i, (x, y) in enumerate(classes(windows)):
            F.cross_entropy(net(x), y).backward()
            fast.step()
            fast.zero_grad()
            if (i + 1) % slow == 0:
                other.step()
                other.zero_grad()

    return loop


def lbfgs(how: str, steps: int = 5) -> Loop:
    """LBFGS: ``right``, ``sums`` (no clearing in the closure), ``outside`` (accumulation before the step), ``window`` (the
    closure accumulates two micro-steps: right), ``never`` (cleared nowhere)."""

    def loop() -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
        opt = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=5)
        (x, y), (x2, y2) = classes(2)

        def closure() -> torch.Tensor:
            if how not in ("sums", "never"):
                opt.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            if how == "window":
                F.cross_entropy(net(x2), y2).backward()
            return loss

        for _ in range(steps):
            if how == "sums":
                opt.zero_grad()
            if how == "outside":
                for _ in range(3):
                    (F.cross_entropy(net(x2), y2) / 3).backward()
            opt.step(closure)

    return loop


def sgd_closure(k: int = 3, steps: int = 6, scaler: str = "") -> Loop:
    """SGD with a closure that accumulates k micro-steps: right; with a scaler, refused or (`positional`) silently wrong."""

    def loop() -> None:
        torch.manual_seed(0)
        net = classifier()
        opt = torch.optim.SGD(net.parameters(), lr=1e-3)
        scale = torch.amp.GradScaler("cpu", init_scale=64.0)
        data = classes(k)

        def closure() -> torch.Tensor:
            opt.zero_grad()
            for x, y in data:
                loss = F.cross_entropy(net(x), y) / k
                (scale.scale(loss) if scaler else loss).backward()
            return loss

        for _ in range(steps):
            if scaler == "keyword":
                closure()
                scale.step(opt, closure=closure)
            elif scaler == "positional":
                closure()
                scale.step(opt, closure)
                scale.update()
            else:
                opt.step(closure)

    return loop


def sam(k: int = 1, steps: int = 8, divide: bool = True) -> Loop:
    """Sharpness-aware minimisation with plain code: climb on the first gradient, clear it, step on the second."""

    def loop() -> None:
        torch.manual_seed(0)
        net = classifier()
        opt = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
        data = classes(steps * k)
        for s in range(0, len(data), k):
            for climb in (True, False):
                for x, y in data[s : s + k]:
                    (F.cross_entropy(net(x), y) / (k if divide else 1)).backward()
                with torch.no_grad():
                    if climb:
                        away = [0.05 * p.grad for p in net.parameters()]
                    for p, e in zip(net.parameters(), away, strict=True):
                        p.add_(e if climb else -e)
                if not climb:
                    opt.step()
                opt.zero_grad()

    return loop


def empty_labels(how: str, *, k: int = 1, scaler: bool = False, clip: bool = False, guard: bool = False) -> Loop:
    """A padded task in which one batch has no label at all.

    `how`: ``masked`` (0/0 by hand), ``clamped`` (the same, clamped: right), ``torch`` (cross_entropy over ignored labels),
    ``selected`` (the mean of an empty selection), ``second`` (0/0 in the second of two terms).
    """

    def loss_of(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if how == "torch":
            return cross_entropy(output, y)
        if how == "masked":
            return masked_mean(output, y)
        if how == "second":
            return torch.stack([F.mse_loss(output, torch.zeros_like(output)), masked_mean(output, y)]).sum()
        each = F.cross_entropy(output.flatten(0, -2), y.clamp(min=0).flatten(), reduction="none")
        mask = (y != IGNORE).flatten()
        return each[mask].mean() if how == "selected" else (each * mask).sum() / mask.sum().clamp(min=1)

    def loop() -> None:
        torch.manual_seed(0)
        net = language_model()
        opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
        scale = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=scaler)
        for i, (x, y) in enumerate(sentences(12, (5,))):
            loss = loss_of(net(x), torch.full_like(y, IGNORE) if i == 6 else y) / k
            if guard and not torch.isfinite(loss):
                continue
            scale.scale(loss).backward()
            if (i + 1) % k == 0:
                scale.unscale_(opt)
                if clip:
                    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                scale.step(opt)
                scale.update()
                opt.zero_grad()

    return loop


def ignored_gradient(steps: int = 8) -> Loop:
    """A guard that clears a too large gradient and steps on nothing, now and then."""

    def loop() -> None:
        torch.manual_seed(0)
        net = classifier()
        opt = torch.optim.SGD(net.parameters(), lr=1e-2)
        for i, (x, y) in enumerate(classes(steps)):
            F.cross_entropy(net(x), y).backward()
            if i == 3:
                opt.zero_grad()
            opt.step()
            opt.zero_grad()

    return loop
