"""The same promises on CUDA: the same bits, no waiting, the truth about skips, and real CUDA AMP."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepscope

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch finds none"),
]

K = 3


def parts(fused: bool, dtype: str, init_scale: float = 2.0**30):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 8)).cuda()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=fused)
    scaler = torch.amp.GradScaler("cuda", init_scale=init_scale, growth_interval=3, enabled=dtype == "float16")
    return net, optimizer, scaler


def train(net, optimizer, scaler, dtype: str, micro_steps: int = 60) -> None:
    torch.manual_seed(1)
    x = torch.randn(micro_steps, 32, 16, device="cuda")
    y = torch.randint(0, 8, (micro_steps, 32), device="cuda")
    for i in range(micro_steps):
        with torch.autocast("cuda", dtype=getattr(torch, dtype), enabled=dtype != "float32"):
            loss = F.cross_entropy(net(x[i]), y[i])
        scaler.scale(loss / K).backward()
        if (i + 1) % K == 0:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_loop_ends_in_the_same_bits(dtype, fused):
    """Parameters, optimizer state, scale and the CUDA random state, with overflows forced in float16."""
    ends = []
    for watched in (False, True):
        net, optimizer, scaler = parts(fused, dtype)
        if watched:
            with stepscope.watch() as watching:
                train(net, optimizer, scaler, dtype)
            assert not watching.trace.meta["probes_off"]
        else:
            train(net, optimizer, scaler, dtype)
        state = [p.detach().clone() for p in net.parameters()]
        state += [torch.as_tensor(v).clone() for p in net.parameters() for v in optimizer.state[p].values()]
        ends.append([*state, torch.cuda.get_rng_state(), torch.tensor(scaler.get_scale())])

    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_no_synchronisation_of_our_own(dtype):
    """A fused optimizer makes no host sync at all; with stepscope there is still none, batches of rows included."""
    net, optimizer, scaler = parts(fused=True, dtype=dtype, init_scale=2.0**10)
    train(net, optimizer, scaler, dtype, micro_steps=6)  # lazy initialisation synchronises once
    watching = stepscope.watch(net, optimizer).start()
    try:
        train(net, optimizer, scaler, dtype, micro_steps=6)
        torch.cuda.synchronize()
        torch.manual_seed(1)
        x, y = torch.randn(32, 16, device="cuda"), torch.randint(0, 8, (32,), device="cuda")
        torch.cuda.set_sync_debug_mode("error")
        for i in range(240):
            with torch.autocast("cuda", dtype=getattr(torch, dtype), enabled=dtype != "float32"):
                loss = F.cross_entropy(net(x), y)
            scaler.scale(loss / K).backward()
            if (i + 1) % K == 0:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        watching.stop()
    trace = watching.trace
    assert not trace.meta["probes_off"]
    assert len(trace.steps) == 246


@pytest.mark.parametrize("fused", [False, True])
def test_skips_are_told_from_steps(fused):
    """Forced overflows: a skip is where no parameter changed, whatever the hooks say."""
    net, optimizer, scaler = parts(fused, "float16", init_scale=2.0**40)
    changed = []
    torch.manual_seed(2)
    with stepscope.watch(net, optimizer) as watching:
        for _ in range(40):
            before = [p.detach().clone() for p in net.parameters()]
            with torch.autocast("cuda", dtype=torch.float16):
                loss = F.cross_entropy(
                    net(torch.randn(32, 16, device="cuda")), torch.randint(0, 8, (32,), device="cuda")
                )
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            changed.append(any(not torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True)))
    steps = watching.trace.steps

    assert any(changed)
    assert not all(changed)
    assert steps["step_skipped"].tolist() == [not c for c in changed]
    lowered = steps["loss_scale_after"] < steps["loss_scale_before"]
    assert lowered.tolist() == [not c for c in changed]


def test_norms_against_float64():
    """Unscaled norms before and after the clip, one parameter at a time in float64."""
    net, optimizer, scaler = parts(fused=True, dtype="float16", init_scale=2.0**8)
    told = []
    with stepscope.watch(net, optimizer) as watching:
        for _ in range(5):
            with torch.autocast("cuda", dtype=torch.float16):
                loss = F.cross_entropy(
                    net(torch.randn(32, 16, device="cuda")), torch.randint(0, 8, (32,), device="cuda")
                )
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            before = sum(float((p.grad.double() ** 2).sum()) for p in net.parameters()) ** 0.5
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            after = sum(float((p.grad.double() ** 2).sum()) for p in net.parameters()) ** 0.5
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            told.append((before, after))
    steps = watching.trace.steps

    assert steps["grad_norm"].tolist() == pytest.approx([b for b, _ in told], rel=1e-4)
    assert steps["grad_norm_clipped"].tolist() == pytest.approx([a for _, a in told], rel=1e-4)


def test_the_tracer_runs_cuda_amp():
    """The tracer takes the model's device: CUDA autocast and a CUDA scaler."""
    net, optimizer, _ = parts(fused=False, dtype="float16")
    tracer = stepscope.Tracer(
        net,
        optimizer,
        loss_fn=lambda m, b: F.cross_entropy(m(b[0]), b[1]),
        dtype="float16",
        accumulation_steps=2,
        max_norm=1.0,
    )
    with tracer:
        for _ in range(8):
            tracer.step((torch.randn(4, 16), torch.randint(0, 8, (4,))))
    steps = tracer.trace.steps

    assert tracer.device.type == "cuda"
    assert steps["autocast_dtype"].tolist() == ["float16"] * 8
    assert steps["loss_weight"].tolist() == pytest.approx([0.5] * 8)
