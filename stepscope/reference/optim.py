"""AdamW as language models use it: decay on matrices, none on norms and biases."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stepscope.errors import StepscopeError


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split the trainable parameters into those that decay and those that do not.

    Every parameter with two or more dimensions decays, embeddings included: the embedding is tied to the output
    projection here, which is a matrix like the others (nanoGPT decides the same). Norm weights and biases do not.

    Args:
        model: any module; parameters that need no gradient are left out.
        weight_decay: for the first group.

    Raises:
        StepscopeError: nothing to train.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise StepscopeError("the model has no parameter that requires a gradient")
    matrices = [parameter for parameter in trainable if parameter.ndim >= 2]
    vectors = [parameter for parameter in trainable if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def make_adamw(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
    fused: bool | None = None,
) -> torch.optim.AdamW:
    """Build AdamW (Loshchilov and Hutter, Decoupled Weight Decay Regularization).

    Args:
        model: whose trainable parameters are optimized.
        lr: learning rate of both groups.
        weight_decay: decoupled decay of the matrices.
        betas: decay of the first and second moment; 0.95 follows GPT-3.
        fused: torch's fused kernel; None leaves the choice to torch.

    Raises:
        StepscopeError: nothing to train.
    """
    return torch.optim.AdamW(parameter_groups(model, weight_decay), lr=lr, betas=betas, fused=fused)
