"""Small loops with loss scaling and autocast: faults in several shapes, and right loops that look like them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

HALF = torch.float16


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))


def batches(count: int, size: int = 8, seed: int = 5) -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(seed)
    return [(torch.randn(size, 6, generator=g), torch.randint(0, 3, (size,), generator=g)) for _ in range(count)]


def sgd(model: nn.Module, **options: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, **options)


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor, dtype: torch.dtype = HALF) -> torch.Tensor:
    with torch.autocast("cpu", dtype=dtype):
        out = model(x)
    return F.cross_entropy(out.float(), y)


def right(
    *,
    steps: int = 12,
    k: int = 1,
    init: float = 2.0**10,
    interval: int = 4,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    unscale: bool = False,
    scaler_class: type = torch.amp.GradScaler,
    enabled: bool = True,
    dtype: torch.dtype = HALF,
    inf_at: tuple[int, ...] = (),
) -> None:
    """scale, backward (K times), unscale_ and clip, step, update, clear; losses named in `inf_at` are infinite."""
    model = net()
    opt = optimizer(model)
    options = {"init_scale": init, "growth_interval": interval, "enabled": enabled}
    scaler = scaler_class("cpu", **options) if scaler_class is torch.amp.GradScaler else scaler_class(**options)
    for i, (x, y) in enumerate(batches(steps * k)):
        loss = loss_of(model, x, y, dtype) / k
        scaler.scale(loss * math.inf if i in inf_at else loss).backward()
        if (i + 1) % k == 0:
            if unscale:
                scaler.unscale_(opt)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()


def unscale_each(update: bool, k: int = 2) -> None:
    """``unscale_`` after every micro-batch; with `update` nothing is raised, without it the second call raises."""
    model = net()
    opt = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for i, (x, y) in enumerate(batches(6 * k)):
        scaler.scale(loss_of(model, x, y) / k).backward()
        scaler.unscale_(opt)
        if (i + 1) % k == 0:
            scaler.step(opt)
            opt.zero_grad()
        if update or (i + 1) % k == 0:
            scaler.update()


def unscale_then_update() -> None:
    """``update`` stands between ``unscale_`` and ``step``: step divides again."""
    model = net()
    opt = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for x, y in batches(8):
        scaler.scale(loss_of(model, x, y)).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.update()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()


def unscale_by_hand_too() -> None:
    """The script divides by the scale itself, and ``scaler.step`` does so again."""
    model = net()
    opt = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for x, y in batches(8):
        scaler.scale(loss_of(model, x, y)).backward()
        for p in model.parameters():
            p.grad.div_(scaler.get_scale())
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()


def skipped_update() -> None:
    """A guard skips the step and the ``update`` too, so that the next ``unscale_`` raises."""
    model = net()
    opt = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for i, (x, y) in enumerate(batches(8)):
        scaler.scale(loss_of(model, x, y)).backward()
        scaler.unscale_(opt)
        if i == 4:
            opt.zero_grad()
            continue
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()


def dropped_batches() -> None:
    """Right: the guard drops the gradient and calls ``update``."""
    model = net()
    opt = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for i, (x, y) in enumerate(batches(10)):
        scaler.scale(loss_of(model, x, y)).backward()
        scaler.unscale_(opt)
        if i % 4 != 2:
            scaler.step(opt)
        scaler.update()
        opt.zero_grad()


def collapse(make: str, steps: int = 30) -> None:
    """NaN at any scale: in the loss, or only in its gradient."""
    model = net()
    opt = sgd(model)
    scaler = torch.amp.GradScaler("cpu")
    for x, y in batches(steps):
        loss = loss_of(model, x, y)
        if make == "loss":
            loss = loss * math.nan
        else:
            loss = loss + ((model[0].bias - model[0].bias.detach()) ** 2).sum().sqrt()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()


def two_optimizers(*, between: bool, interval: int = 3, fused: bool = False, scalers: int = 1) -> None:
    """Body and head have an optimizer each; with `between`, ``update`` follows each step."""
    model = net()
    opts = [torch.optim.Adam(part.parameters(), lr=1e-2, fused=fused) for part in (model[0], model[2])]
    amp = [torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=interval) for _ in range(scalers)]
    for x, y in batches(12):
        for opt in opts:
            opt.zero_grad()
        amp[0].scale(loss_of(model, x, y)).backward()
        for opt in opts:
            amp[0].step(opt)
            if between:
                amp[0].update()
        if not between:
            amp[0].update()


def gan(updates: int) -> None:
    """Right: generator and discriminator on one scaler, with one update an iteration or one after each step."""
    made, judged = nn.Linear(4, 6), net()
    opt_g, opt_d = torch.optim.Adam(made.parameters(), lr=1e-3), torch.optim.Adam(judged.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
    torch.manual_seed(3)
    for x, y in batches(12):
        fake = made(torch.randn(8, 4))
        opt_d.zero_grad()
        scaler.scale(loss_of(judged, x, y)).backward()
        scaler.scale(loss_of(judged, fake.detach(), y)).backward()
        scaler.step(opt_d)
        if updates == 2:
            scaler.update()
        opt_g.zero_grad()
        scaler.scale(loss_of(judged, fake, y)).backward()
        scaler.step(opt_g)
        scaler.update()


def own_scalers() -> None:
    """Right: each optimizer has a scaler of its own, updated after its own step."""
    nets = [net(0), net(1)]
    opts = [sgd(n) for n in nets]
    amps = [torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=n) for n in (2, 5)]
    for x, y in batches(12):
        for n, amp in zip(nets, amps, strict=True):
            amp.scale(loss_of(n, x, y)).backward()
        for opt, amp in zip(opts, amps, strict=True):
            amp.step(opt)
            amp.update()
            opt.zero_grad()


def order(kind: str, optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd) -> None:
    """The scale changes between backward and the division: by ``update``, by a new scale, or within the window."""
    model = net()
    opt = optimizer(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
    for i, (x, y) in enumerate(batches(12)):
        scaler.scale(loss_of(model, x, y)).backward()
        if kind == "update" and i:
            scaler.update()
        if kind == "new scale" and i % 4 == 3:
            scaler.update(2.0**9 if i % 8 == 3 else 2.0**8)
        if kind == "window" and i % 2 == 0:
            scaler.update(2.0 ** (8 + i % 3))
            continue
        scaler.step(opt)
        if kind != "update":
            scaler.update(scaler.get_scale())
        opt.zero_grad()


def own_scale(late: bool) -> None:
    """A loss scale written by hand that grows every third step; with `late`, before the division."""
    model = net()
    opt = sgd(model)
    scale = 2.0**8
    for i, (x, y) in enumerate(batches(15)):
        (F.cross_entropy(model(x), y) * scale).backward()
        if late and i % 3 == 2:
            scale *= 2
        for p in model.parameters():
            p.grad /= scale
        opt.step()
        opt.zero_grad()
        if not late and i % 3 == 2:
            scale *= 2


def new_scales() -> None:
    """Right: the script sets scales of its own, between steps."""
    model = net()
    opt = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for i, (x, y) in enumerate(batches(12)):
        scaler.scale(loss_of(model, x, y)).backward()
        scaler.step(opt)
        scaler.update(2.0 ** (6 + i % 4))
        opt.zero_grad()


def bypassed(kind: str) -> None:
    """The step runs outside the scaler, with scaled, unscaled or hand-divided gradients; or the loss was not scaled."""
    model = net()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=kind == "fused")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for i, (x, y) in enumerate(batches(8)):
        opt.zero_grad()
        loss = loss_of(model, x, y)
        if kind == "infinite" and i == 5:
            loss = loss * math.inf
        if kind == "left out":
            scaler.scale(loss)
        bare = kind in ("reverse", "left out") or (kind == "some" and i % 2)
        (loss if bare else scaler.scale(loss)).backward()
        if kind in ("reverse", "some", "left out"):
            scaler.step(opt)
            scaler.update()
            continue
        if kind in ("unscaled", "infinite"):
            scaler.unscale_(opt)
        if kind == "divided":
            for p in model.parameters():
                p.grad.mul_(1 / scaler.get_scale())
        opt.step()
        scaler.update(2.0**10)


def no_gradient(kind: str) -> None:
    """One of two optimizers gets no gradient, from the start or later."""
    model = net()
    opts = [sgd(model[0]), sgd(model[2])]
    scaler = torch.amp.GradScaler("cpu")
    for i, (x, y) in enumerate(batches(6)):
        for opt in opts:
            opt.zero_grad()
        with torch.autocast("cpu", dtype=HALF):
            hidden = model[1](model[0](x))
            out = model[2](hidden.detach() if kind == "detached" and i == 3 else hidden)
        if kind == "frozen" and i == 3:
            model[0].requires_grad_(False)
            out = model(x)
        scaler.scale(F.cross_entropy(out.float(), y)).backward()
        for opt in opts:
            scaler.step(opt)
        scaler.update()


def half_weights(kind: str) -> None:
    """float16 parameters with a scaler: refused at unscale_ or step; a fused optimizer takes them."""
    model = net().half()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=kind == "fused")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6)
    for x, y in batches(5):
        opt.zero_grad()
        scaler.scale(F.cross_entropy(model(x.half()).float(), y)).backward()
        if kind == "unscale":
            scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()


def masters(scale: bool) -> None:
    """float16 model, float32 copies in the optimizer, loss scaled by hand (right) or not."""
    model = net().half()
    params = list(model.parameters())
    copies = [p.detach().float().requires_grad_() for p in params]
    opt = torch.optim.SGD(copies, lr=0.05)
    factor = 2.0**10 if scale else 1.0
    for x, y in batches(6):
        (F.cross_entropy(model(x.half()).float(), y) * factor).backward()
        for c, p in zip(copies, params, strict=True):
            c.grad = p.grad.float() / factor
        opt.step()
        with torch.no_grad():
            for c, p in zip(copies, params, strict=True):
                p.copy_(c)
        opt.zero_grad()
        model.zero_grad()


def misdetected(action: str, *, fault: bool = True, steps: int = 24) -> None:
    """After a step that is taken for skipped something is left out: a scheduler's step, a rate, an average, the clearing."""
    model = net()
    opt = sgd(model)
    schedule = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.1, total_iters=steps)
    average = torch.optim.swa_utils.AveragedModel(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=4)
    done = 0
    for x, y in batches(steps):
        if action == "rate":
            opt.param_groups[0]["lr"] = 0.05 * (1 - done / steps)
        scaler.scale(loss_of(model, x, y)).backward()
        before = scaler.get_scale()
        scaler.step(opt)
        scaler.update()
        skipped = scaler.get_scale() != before if fault else scaler.get_scale() < before
        if action != "clearing":
            opt.zero_grad()
        if skipped:
            continue
        done += 1
        if action == "clearing":
            opt.zero_grad()
        if action == "average":
            average.update_parameters(model)
        if action == "scheduler":
            schedule.step()


def no_update(caught: bool = False) -> None:
    """``update`` is forgotten; the second step raises, and the script may go on regardless."""
    model = net()
    opt = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for x, y in batches(4):
        opt.zero_grad()
        scaler.scale(loss_of(model, x, y)).backward()
        if caught:
            try:
                scaler.unscale_(opt)
            except RuntimeError:
                continue
        scaler.step(opt)


def growth(cap: bool) -> None:
    """Gradients are zero for long, so the scale grows at every second step."""
    model = net()
    opt = sgd(model)
    scaler = torch.amp.GradScaler("cpu", growth_interval=1)
    for x, y in batches(60):
        scaler.scale(0.0 * loss_of(model, x, y)).backward()
        scaler.step(opt)
        scaler.update()
        if cap and scaler.get_scale() > 2.0**15:
            scaler.update(2.0**15)
        opt.zero_grad()


def no_scaler(dtype: torch.dtype, *, by_hand: bool = False, teacher: bool = False) -> None:
    """Autocast without a scaler; the teacher's autocast is not the student's."""
    model, other = net(), net(1)
    opt = sgd(model)
    factor = 2.0**12 if by_hand else 1.0
    for x, y in batches(6):
        opt.zero_grad()
        if teacher:
            with torch.autocast("cpu", dtype=dtype), torch.no_grad():
                soft = other(x)
            loss = F.mse_loss(model(x), soft.float())
        else:
            loss = loss_of(model, x, y, dtype)
        (loss * factor).backward()
        if by_hand:
            for p in model.parameters():
                p.grad.div_(factor)
        opt.step()


def sam(kind: str, *, scaler: bool = True, init: float = 2.0**18) -> None:
    """Sharpness-aware steps. `kind`: ``right``, ``unguarded``, ``data`` (moves through .data), ``left up``, ``scaled``."""
    model = net()
    params = list(model.parameters())
    opt = sgd(model, momentum=0.9)
    amp = torch.amp.GradScaler("cpu", init_scale=init, growth_interval=6, enabled=scaler)
    for i, (x, y) in enumerate(batches(16)):
        opt.zero_grad()
        loss = loss_of(model, x, y) if scaler else F.cross_entropy(model(x), y)
        amp.scale(loss * math.inf if kind in ("unguarded", "data", "right") and scaler and i == 9 else loss).backward()
        by = 1.0 if kind == "scaled" else 1.0 / amp.get_scale()
        grads = [p.grad * by for p in params]
        norm = torch.stack([g.norm() for g in grads]).norm()
        if kind == "right" and not torch.isfinite(norm):
            amp.step(opt)
            amp.update()
            continue
        rho = 0.05 if kind == "scaled" else 0.05 / (norm + 1e-12)
        moves = [g * rho for g in grads]
        with torch.no_grad():
            for p, e in zip(params, moves, strict=True):
                (p.data if kind == "data" else p).add_(e)
        opt.zero_grad()
        loss = loss_of(model, x, y) if scaler else F.cross_entropy(model(x), y)
        overflow = kind == "left up" and i % 5 == 3
        amp.scale(loss * math.inf if overflow else loss).backward()
        if not overflow:
            with torch.no_grad():
                for p, e in zip(params, moves, strict=True):
                    (p.data if kind == "data" else p).sub_(e)
        amp.step(opt)
        amp.update()


def sam_climbing_in_float32(back: str) -> None:
    """Only the second phase is scaled. The weights go back ``inside`` of the step that the scaler may skip, or ``outside``."""
    model = net()
    params = list(model.parameters())
    opt = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18, growth_interval=100)
    origin: list[torch.Tensor] = []

    def put_back(*_: object) -> None:
        with torch.no_grad():
            for p, start in zip(params, origin, strict=True):
                p.copy_(start)

    if back == "inside":
        opt.register_step_pre_hook(put_back)
    for i, (x, y) in enumerate(batches(10)):
        F.cross_entropy(model(x), y).backward()
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        origin[:] = [p.detach().clone() for p in params]
        with torch.no_grad():
            for p in params:
                p.add_(p.grad * 0.3 / norm)
        opt.zero_grad()
        loss = loss_of(model, x, y)
        scaler.scale(loss * math.inf if i % 4 == 1 else loss).backward()
        if back == "outside":
            put_back()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()


def region(kind: str) -> None:
    """Autocast over more than the forward: `kind` says over what."""
    model = net()
    opt = sgd(model)
    data = batches(6)
    if kind == "epoch":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for x, y in data:
                opt.zero_grad()
                F.cross_entropy(model(x).float(), y).backward()
                opt.step()
        return
    for x, y in data:
        opt.zero_grad()
        if kind == "no cache":
            with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
                F.cross_entropy(model(x).float(), y).backward()
                opt.step()
                F.cross_entropy(model(x).float(), y).backward()
                opt.step()
        elif kind == "step":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x).float(), y)
                with torch.autocast("cpu", enabled=False):
                    loss.backward()
                opt.step()
        elif kind == "switched on":
            torch.set_autocast_enabled("cpu", True)
            loss = F.cross_entropy(model(x).float(), y)
            loss.backward()
            torch.set_autocast_enabled("cpu", False)
            opt.step()
        elif kind == "accumulated":
            for _ in range(2):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = F.cross_entropy(model(x).float(), y) / 2
                loss.backward()
            opt.step()
        elif kind == "two phases":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                first, second = F.cross_entropy(model(x).float(), y), F.cross_entropy(model(-x).float(), y)
            (first + second).backward()
            opt.step()


def hooked(optimizer: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    """The schedule follows the calls of the optimizer's step, which a fused optimizer gets on a skip too."""
    model = net()
    opt = optimizer(model)
    schedule = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.1, total_iters=20)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=100)
    called = []
    opt.register_step_post_hook(lambda *_: called.append(1))
    for i, (x, y) in enumerate(batches(16)):
        loss = loss_of(model, x, y)
        scaler.scale(loss * math.inf if i % 5 == 1 else loss).backward()
        called.clear()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        if called:
            schedule.step()


def sam_outside(kind: str) -> None:
    """SAM whose second phase steps the base optimizer directly, or whose phases both call ``unscale_``."""
    model = net()
    params = list(model.parameters())
    opt = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for x, y in batches(8):
        opt.zero_grad()
        scaler.scale(loss_of(model, x, y)).backward()
        if kind == "twice":
            scaler.unscale_(opt)
        norm = torch.stack([p.grad.norm() for p in params]).norm()
        moves = [p.grad * 0.05 / norm for p in params]
        with torch.no_grad():
            for p, e in zip(params, moves, strict=True):
                p.add_(e)
        opt.zero_grad()
        scaler.scale(loss_of(model, x, y)).backward()
        with torch.no_grad():
            for p, e in zip(params, moves, strict=True):
                p.sub_(e)
        if kind == "twice":
            scaler.unscale_(opt)
            scaler.step(opt)
            scaler.update()
        else:
            opt.step()


def functional_region() -> None:
    """No module is called: weights are a list, and the optimizer steps twice in one region."""
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(12, 6) * 0.3), nn.Parameter(torch.randn(3, 12) * 0.3)]
    opt = torch.optim.SGD(weights, lr=0.1)
    for x, y in batches(4):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for _ in range(2):
                loss = F.cross_entropy(F.linear(torch.tanh(F.linear(x, weights[0])), weights[1]).float(), y)
                opt.zero_grad()
                loss.backward()
                opt.step()


def nothing_stepped() -> None:
    """``update`` is called in an iteration in which nothing was stepped through the scaler."""
    model = net()
    opt = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for i, (x, y) in enumerate(batches(6)):
        opt.zero_grad()
        scaler.scale(loss_of(model, x, y)).backward()
        if i != 3:
            scaler.step(opt)
        scaler.update()


class SGD(torch.optim.SGD):
    """A fused SGD as it must not be: it moves on overflow, or divides by the scale twice."""

    fault = ""

    def step(self, closure: object = None) -> None:
        if float(self.found_inf) and self.fault != "moves":
            return
        divisor = float(self.grad_scale) if self.grad_scale is not None else 1.0
        for p in self.param_groups[0]["params"]:
            move = p.grad.nan_to_num(1.0, 1.0, -1.0) / divisor ** (2 if self.fault == "twice" else 1)
            p.data.sub_(self.param_groups[0]["lr"] * move)


def broken_fused(fault: str) -> None:
    """A plain fused step through a scaler, with one overflow."""
    model = net()
    opt = SGD(model.parameters(), lr=0.5, fused=True)
    opt.fault = fault
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for i, (x, y) in enumerate(batches(6)):
        loss = loss_of(model, x, y)
        scaler.scale(loss * math.inf if i == 3 else loss).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
