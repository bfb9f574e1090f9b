"""Hooks that a script puts on an optimizer's step are inside of what is watched."""

from __future__ import annotations

import copy

import torch
from torch import nn

import stepscope

LIMIT = 0.1


def limit(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    """A clip by norm of all gradients."""
    held = [p.grad for g in optimizer.param_groups for p in g["params"]]
    norm = torch.stack([g.norm() for g in held]).norm()
    if norm > LIMIT:
        torch._foreach_mul_(held, float(LIMIT / norm))


def run(register: str) -> tuple[stepscope.Trace, torch.optim.Optimizer, list[float]]:
    """Four steps with `limit` as a hook; also the true norm of the gradient that each step used, from the change it made."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    norms = []
    with stepscope.watch(model, optimizer) as watching:
        getattr(optimizer, register)(limit)
        for _ in range(4):
            before = [p.detach().clone() for p in model.parameters()]
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            change = sum(
                float((p.detach() - b).double().square().sum()) for p, b in zip(model.parameters(), before, strict=True)
            )
            norms.append(change**0.5 / 0.5)
    assert not watching.trace.meta["probes_off"]
    return watching.trace, optimizer, norms


def test_what_a_pre_hook_does_belongs_to_what_the_step_used() -> None:
    trace, _, norms = run("register_step_pre_hook")
    used = trace.steps["grad_norm_clipped"].tolist()
    assert max(norms) <= LIMIT * 1.001
    assert all(abs(u - n) < 1e-5 for u, n in zip(used, norms, strict=True)), (used, norms)
    assert trace.findings.empty, trace.findings["message"].tolist()


def test_a_clip_in_a_post_hook_comes_too_late() -> None:
    trace, _, norms = run("register_step_post_hook")
    used = trace.steps["grad_norm_clipped"].tolist()
    assert max(norms) > LIMIT
    assert all(abs(u - n) < 1e-4 for u, n in zip(used, norms, strict=True)), (used, norms)
    assert trace.findings["name"].tolist() == ["clip-after-step"]


def test_nothing_of_ours_stays_on_the_optimizer() -> None:
    for register in ("register_step_pre_hook", "register_step_post_hook"):
        _, optimizer, _ = run(register)
        assert len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks) == 1
        copy.deepcopy(optimizer).step()
