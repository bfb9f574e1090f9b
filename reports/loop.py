"""One small training loop, right or with a fault chosen by name: what the sample reports are recorded from."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy


@dataclass(frozen=True)
class Loop:
    """What the loop does.

    Attributes:
        fault: a name of the rule catalogue; empty for the right loop.
        dtype: of autocast.
        max_norm: limit of the clip.
        windows: optimizer steps.
        tail: micro-steps after the last full window.
    """

    fault: str = ""
    dtype: torch.dtype = torch.float16
    max_norm: float = 0.4
    windows: int = 24
    tail: int = 0


K, BATCH, LENGTH, WORDS, WIDTH = 4, 8, 16, 64, 48


def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    """A tiny language model: the next word from the last one."""
    torch.manual_seed(0)
    layers = (
        nn.Embedding(WORDS, WIDTH),
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, 2 * WIDTH),
        nn.GELU(),
        nn.Linear(2 * WIDTH, WORDS),
    )
    return nn.Sequential(*layers).to(dtype)


def batches(count: int, fault: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Words that mostly count upwards, and the word after each; in one batch of a faulty run no target counts."""
    generator = torch.Generator().manual_seed(1)
    steps = torch.randint(1, 3, (count, BATCH, LENGTH + 1), generator=generator)
    words = steps.cumsum(-1).add(torch.randint(0, WORDS, (count, BATCH, 1), generator=generator)) % WORDS
    targets = words[..., 1:].clone()
    if fault == "loss-nan-empty-labels":
        targets[count // 2] = -100
    if fault == "accum-token-mean":
        for i in range(count):
            targets[i, :, LENGTH // (1 + i % K) :] = -100
    return list(zip(words[..., :-1], targets, strict=True))


def train(loop: Loop, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Float16 or bfloat16 training with accumulation over K micro-steps, a clip, and a warm-up cosine."""
    fault = loop.fault
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, enabled=loop.dtype == torch.float16)
    total = loop.windows
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min((s + 1) / 4, 0.55 + 0.45 * math.cos(math.pi * min(s, total) / total))
    )
    data = batches(loop.windows * K + loop.tail, fault)
    for micro_step, (words, targets) in enumerate(data, 1):
        with torch.autocast("cpu", dtype=loop.dtype):
            loss = cross_entropy(model(words).flatten(0, 1), targets.flatten(), ignore_index=-100)
        if fault == "scaler-collapse" and micro_step > 40:
            loss = loss * math.nan
        scaler.scale(loss if fault == "accum-missing-divide" else loss / K).backward()
        if fault == "sched-per-microbatch":
            scheduler.step()
        if micro_step % K:
            continue
        if fault != "clip-before-unscale":
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), loop.max_norm)
        scaler.step(optimizer)
        scale = scaler.get_scale()
        scaler.update()
        applied = scaler.get_scale() >= scale
        if fault != "zero-grad-missing":
            optimizer.zero_grad(set_to_none=True)
        if applied and fault != "sched-per-microbatch":
            scheduler.step()
