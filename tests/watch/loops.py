"""Small loops that know nothing of stepscope, for the tests of the watcher."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn

K = 3


def model(dropout: float = 0.1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 4))


def autocast(dtype: str):
    return nullcontext() if dtype == "float32" else torch.autocast("cpu", dtype=getattr(torch, dtype))


def train(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    *,
    dtype: str = "float32",
    micro_steps: int = 12,
    max_norm: float | None = 0.5,
    set_to_none: bool = True,
    seed: int = 1,
) -> list[float]:
    """A right loop with accumulation over K and a flushed, rightly weighted tail. Returns the losses."""
    torch.manual_seed(seed)
    losses = []
    for i in range(micro_steps):
        x, y = torch.randn(5, 6), torch.randint(0, 4, (5,))
        window = min(K, micro_steps - i // K * K)
        with autocast(dtype):
            loss = F.cross_entropy(net(x).float(), y)
        losses.append(loss.item())
        scaler.scale(loss / window).backward()
        if (i + 1) % K == 0 or i + 1 == micro_steps:
            if max_norm is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(net.parameters(), max_norm)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=set_to_none)
    return losses
