"""Small loops that clip gradients: faults in several shapes, and right loops that look like them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_

LIMIT = 0.1


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))


def batches(count: int, size: int = 8, seed: int = 5) -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 6, generator=g) * (1 + i % 3), torch.randint(0, 3, (size,), generator=g))
        for i in range(count)
    ]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def limit_by_hand(params: list[nn.Parameter], limit: float = LIMIT) -> float:
    """A clip as people write it themselves."""
    total = math.sqrt(sum(float(p.grad.norm()) ** 2 for p in params if p.grad is not None))
    coefficient = limit / (total + 1e-6)
    if coefficient < 1:
        for p in params:
            if p.grad is not None:
                p.grad.mul_(coefficient)
    return total


def plain(clip, *, steps: int = 8, late: bool = False, set_to_none: bool = True, optimizer=sgd) -> None:
    """Forward, backward, clip, step; with `late` the clip comes after the step."""
    model = net()
    opt = optimizer(model)
    for x, y in batches(steps):
        F.cross_entropy(model(x), y).backward()
        if not late:
            clip(model)
        opt.step()
        if late:
            clip(model)
        opt.zero_grad(set_to_none=set_to_none)


def norm(model: nn.Module) -> None:
    clip_grad_norm_(model.parameters(), LIMIT)


def value(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)


def measure(model: nn.Module) -> None:
    clip_grad_norm_(model.parameters(), math.inf)


def measured_and_clipped(model: nn.Module) -> None:
    """Right: a norm for the log, then the clip, then a norm again."""
    measure(model)
    norm(model)
    measure(model)


def own(model: nn.Module) -> None:
    limit_by_hand(list(model.parameters()))


def two_calls(model: nn.Module) -> None:
    """torch's two halves of a clip, called by the script."""
    grads = [p.grad for p in model.parameters()]
    total = torch.nn.utils.get_total_norm(grads)
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), LIMIT, total)


def at_loop_top(set_to_none: bool = True) -> None:
    """The clip stands before backward, where there is nothing to clip."""
    model = net()
    opt = sgd(model)
    for x, y in batches(8):
        opt.zero_grad(set_to_none=set_to_none)
        loss = F.cross_entropy(model(x), y)
        clip_grad_norm_(model.parameters(), LIMIT)
        loss.backward()
        opt.step()


def in_closure() -> None:
    """Right: a closure that clips before it returns."""
    model = net()
    opt = sgd(model)
    for x, y in batches(8):

        def closure(x=x, y=y):
            opt.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            clip_grad_norm_(model.parameters(), LIMIT)
            return loss

        opt.step(closure)


def two_networks(order: str) -> None:
    """Two networks and optimizers in turn; `order` says which one each clip is given: ``ab`` is right."""
    nets = [net(0), net(1)]
    opts = [sgd(n) for n in nets]
    for x, y in batches(8):
        for i in (0, 1):
            opts[i].zero_grad(set_to_none=False)
            F.cross_entropy(nets[i](x), y).backward()
            clip_grad_norm_(nets["ab".index(order[i])].parameters(), LIMIT)
            opts[i].step()


def through_the_other(clipped: str) -> None:
    """The second network is trained through the first; its turn clips itself (``own``) or the first one (``other``)."""
    first, second = net(0), nn.Linear(6, 6)
    opts = [sgd(first), sgd(second)]
    for x, y in batches(8):
        opts[0].zero_grad()
        F.cross_entropy(first(x), y).backward()
        clip_grad_norm_(first.parameters(), LIMIT)
        opts[0].step()
        opts[1].zero_grad()
        F.cross_entropy(first(second(x)), y).backward()
        clip_grad_norm_((second if clipped == "own" else first).parameters(), LIMIT)
        opts[1].step()


def shared_clip() -> None:
    """Right: one clip for two optimizers of one model, of which one has stepped already."""
    model = net()
    body = torch.optim.SGD(model[0].parameters(), lr=0.05)
    head = torch.optim.SGD(model[2].parameters(), lr=0.05)
    for x, y in batches(8):
        F.cross_entropy(model(x), y).backward()
        clip_grad_norm_(model.parameters(), LIMIT)
        body.step()
        clip_grad_norm_(model.parameters(), LIMIT)
        head.step()
        model.zero_grad()


def per_tensor() -> None:
    """Right: one optimizer for each tensor, one clip for all."""
    model = net()
    opts = [torch.optim.SGD([p], lr=0.05) for p in model.parameters()]
    for x, y in batches(6):
        F.cross_entropy(model(x), y).backward()
        clip_grad_norm_(model.parameters(), LIMIT)
        for opt in opts:
            opt.step()
            opt.zero_grad()


def exhausted(kind: str) -> None:
    """The parameters are in a generator that the optimizer (or a count) has used up."""
    model = net()
    params = (
        filter(lambda p: p.requires_grad, model.parameters())
        if kind != "generator"
        else (p for p in model.parameters())
    )
    count = sum(p.numel() for p in params) if kind == "counted" else 0
    opt = torch.optim.Adam(model.parameters() if count else params, lr=1e-2)
    for x, y in batches(6):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if kind == "value":
            torch.nn.utils.clip_grad_value_(params, 1e-3)
        elif kind == "generator":
            import warnings

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                clip_grad_norm_(params, LIMIT)
        else:
            clip_grad_norm_(params, LIMIT)
        opt.step()


def some_idle() -> None:
    """Right: each of two networks is clipped, one of them takes no part in some iterations."""
    nets = [net(0), net(1)]
    opts = [sgd(n) for n in nets]
    for i, (x, y) in enumerate(batches(8)):
        for n, opt in zip(nets, opts, strict=True):
            opt.zero_grad()
            if n is nets[0] or i % 2 == 0:
                F.cross_entropy(n(x), y).backward()
        for n in nets:
            clip_grad_norm_(n.parameters(), LIMIT)
        for opt in opts:
            opt.step()


def nonfinite(clip, *, guard: bool = False, repair: bool = False, scaler: bool = False, bad=math.nan) -> None:
    """The loss of one batch has a gradient that is not finite."""
    model = net()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    amp = torch.amp.GradScaler("cpu", enabled=scaler)
    for i, (x, y) in enumerate(batches(10)):
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if i == 6:
            # 0 / 0 in the derivative of a norm at the origin
            loss = (
                loss + ((model[0].bias - model[0].bias.detach()) ** 2).sum().sqrt() if math.isnan(bad) else loss * bad
            )
        amp.scale(loss).backward()
        amp.unscale_(opt)
        if repair:
            for p in model.parameters():
                p.grad.nan_to_num_(0.0, 0.0, 0.0)
        clip(model)
        if guard and not all(torch.isfinite(p.grad).all() for p in model.parameters()):
            continue
        amp.step(opt)
        amp.update()


def accumulate(clip, *, inside: bool, k: int = 3, guard: bool = False) -> None:
    """K micro-batches for each step; the clip comes after each of them, or once."""
    model = net()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for i, (x, y) in enumerate(batches(5 * k)):
        (F.cross_entropy(model(x), y) / k).backward()
        if inside:
            clip(model)
        if (i + 1) % k == 0:
            if not inside:
                clip(model)
            opt.step()
            opt.zero_grad()


def tight(model: nn.Module) -> None:
    clip_grad_norm_(model.parameters(), 0.02)


def own_tight(model: nn.Module) -> None:
    limit_by_hand(list(model.parameters()), 0.02)


def guarded() -> None:
    """Right: a batch whose norm is large is clipped, found too large, and dropped with its gradient."""
    model = net()
    opt = sgd(model)
    for i, (x, y) in enumerate(batches(12)):
        F.cross_entropy(model(x), y).backward()
        clip_grad_norm_(model.parameters(), LIMIT)
        if i % 4 == 2:
            opt.zero_grad()
            continue
        opt.step()
        opt.zero_grad()


def first_layer(model: nn.Module) -> None:
    clip_grad_norm_(model[0].parameters(), LIMIT)


def by_layer(model: nn.Module) -> None:
    for layer in (model[0], model[2]):
        clip_grad_norm_(layer.parameters(), LIMIT)


def masters(clip: str) -> None:
    """bfloat16 model, float32 copies in the optimizer; `clip` says which are clipped."""
    model = net().to(torch.bfloat16)
    params = list(model.parameters())
    copies = [p.detach().float().requires_grad_() for p in params]
    opt = torch.optim.SGD(copies, lr=0.05)
    for x, y in batches(8):
        F.cross_entropy(model(x.bfloat16()).float(), y).backward()
        for c, p in zip(copies, params, strict=True):
            c.grad = p.grad.float()
        clip_grad_norm_(params if clip == "model" else copies, LIMIT)
        opt.step()
        with torch.no_grad():
            for c, p in zip(copies, params, strict=True):
                p.copy_(c)
        opt.zero_grad()
        model.zero_grad()


def rebuilt() -> None:
    """The model was copied after the list of parameters to clip had been made."""
    import copy

    first = net()
    clipped = list(first.parameters())
    model = copy.deepcopy(first)
    opt = sgd(model)
    for x, y in batches(8):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        clip_grad_norm_(clipped, LIMIT)
        opt.step()


def scaled(
    clip,
    *,
    unscale: str = "no",
    scale: float = 2.0**10,
    optimizer=sgd,
    steps: int = 8,
    interval: int = 3,
    first=lambda model: None,
) -> None:
    """A float16 loop with a scaler; `unscale` is ``no``, ``scaler`` or ``hand`` (divided by the script, stepped by it).

    `first` is called on the scaled gradients.
    """
    model = net()
    opt = optimizer(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=interval)
    for x, y in batches(steps):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(x)
        scaler.scale(F.cross_entropy(out.float(), y)).backward()
        first(model)
        if unscale == "scaler":
            scaler.unscale_(opt)
        if unscale == "hand":
            for p in model.parameters():
                p.grad.div_(scaler.get_scale())
        clip(model)
        if unscale == "hand":
            opt.step()
            scaler.update(scaler.get_scale())
        else:
            scaler.step(opt)
            scaler.update()


def never_bound(model: nn.Module) -> None:
    clip_grad_norm_(model.parameters(), 1e9)


def taken(model: nn.Module) -> None:
    torch.nn.utils.get_total_norm(p.grad for p in model.parameters())


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
