"""Watching changes nothing: parameters, optimizer state, scaler and random state are bit-identical."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepscope
from tests.watch import loops


def everything(net, optimizer, scaler) -> list[torch.Tensor]:
    """All state that a loop leaves, as tensors."""
    state = [p.detach().clone() for p in net.parameters()] + [b.clone() for b in net.buffers()]
    for parameter in net.parameters():
        state += [torch.as_tensor(v).clone() for _, v in sorted(optimizer.state.get(parameter, {}).items())]
    saved = scaler.state_dict()
    state += [torch.tensor(float(saved[k])) for k in sorted(saved)]
    return [*state, torch.get_rng_state(), torch.tensor(random.random())]


OPTIMIZERS = {
    # No momentum where it is fused: after a skipped first step torch leaves that buffer uninitialised, so that not even
    # two native runs agree.
    "sgd": lambda p, fused: torch.optim.SGD(p, lr=0.05, momentum=0.0 if fused else 0.9, fused=fused),
    "adamw": lambda p, fused: torch.optim.AdamW(p, lr=1e-2, fused=fused),
}


def run(kind: str, dtype: str, fused: bool, *, watched: bool, **options) -> list[torch.Tensor]:
    random.seed(0)
    net = loops.model()
    optimizer = OPTIMIZERS[kind](net.parameters(), fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=2, enabled=dtype == "float16")
    if watched:
        with stepscope.watch() as watching:
            losses = loops.train(net, optimizer, scaler, dtype=dtype, **options)
        assert not watching.trace.meta["probes_off"]
        assert len(watching.trace.steps) == 12
    else:
        losses = loops.train(net, optimizer, scaler, dtype=dtype, **options)
    return [*everything(net, optimizer, scaler), torch.tensor(losses)]


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
def test_a_loop_ends_in_the_same_bits(kind, dtype, fused, set_to_none):
    """The same loop twice, once watched: every tensor is equal bit for bit, NaN included."""
    plain = run(kind, dtype, fused, watched=False, set_to_none=set_to_none)
    seen = run(kind, dtype, fused, watched=True, set_to_none=set_to_none)

    assert len(plain) == len(seen)
    for a, b in zip(plain, seen, strict=True):
        assert torch.equal(a.view(torch.uint8) if a.dim() else a, b.view(torch.uint8) if b.dim() else b)


def lbfgs(watched: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net = nn.Linear(3, 1)
    x, y = torch.randn(20, 3), torch.randn(20, 1)
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=5)

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(net(x), y)
        loss.backward()
        return loss

    def loop():
        for _ in range(4):
            optimizer.step(closure)

    if watched:
        with stepscope.watch():
            loop()
    else:
        loop()
    return [p.detach().clone() for p in net.parameters()]


def penalty(watched: bool) -> list[torch.Tensor]:
    """A critic with a gradient penalty through torch.autograd.grad."""
    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2)

    def loop():
        for _ in range(5):
            x = torch.randn(6, 2, requires_grad=True)
            (slope,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
            loss = critic(torch.randn(6, 2)).mean() + ((slope.norm(dim=1) - 1) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    if watched:
        with stepscope.watch():
            loop()
    else:
        loop()
    return [p.detach().clone() for p in critic.parameters()]


def sparse(watched: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    table = nn.Embedding(20, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)

    def loop():
        for _ in range(4):
            optimizer.zero_grad()
            table(torch.randint(0, 20, (5, 2))).pow(2).sum().backward()
            optimizer.step()

    if watched:
        with stepscope.watch() as watching:
            loop()
        assert not watching.trace.meta["probes_off"]
    else:
        loop()
    return [table.weight.detach().clone()]


def checkpointed(watched: bool) -> list[torch.Tensor]:
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.ReLU())
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)

    def loop():
        for reentrant in (True, False, True):
            optimizer.zero_grad()
            x = torch.randn(3, 4, requires_grad=True)
            checkpoint(block, x, use_reentrant=reentrant).sum().backward()
            optimizer.step()

    if watched:
        with stepscope.watch() as watching:
            loop()
        assert len(watching.trace.steps) == 3
    else:
        loop()
    return [p.detach().clone() for p in block.parameters()]


@pytest.mark.parametrize("loop", [lbfgs, penalty, sparse, checkpointed], ids=lambda f: f.__name__)
def test_other_shapes_of_loops_end_in_the_same_bits(loop):
    """Closures, double backward, sparse gradients and checkpointed blocks."""
    for a, b in zip(loop(False), loop(True), strict=True):
        assert torch.equal(a, b)


def test_a_compiled_model_ends_in_the_same_bits_and_is_not_recompiled():
    """Hooks must neither break the graph nor appear in it."""
    counted = []
    for watched in (False, True):
        torch._dynamo.reset()
        graphs: list[int] = []

        def backend(graph, inputs, graphs=graphs):
            graphs.append(len(graph.graph.nodes))
            return graph.forward

        net = loops.model(dropout=0.0)
        compiled = torch.compile(net, backend=backend)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        if watched:
            with stepscope.watch() as watching:
                loops.train(compiled, optimizer, scaler)
            assert watching.trace.steps["loss_weight"].tolist() == pytest.approx([1 / 3] * 12)
        else:
            loops.train(compiled, optimizer, scaler)
        counted.append((graphs, [p.detach().clone() for p in net.parameters()]))
    torch._dynamo.reset()

    (graphs, plain), (seen_graphs, seen) = counted
    assert graphs == seen_graphs
    assert all(torch.equal(a, b) for a, b in zip(plain, seen, strict=True))
