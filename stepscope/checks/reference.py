"""The reference model as an experiment, for checks that are given no target."""

from __future__ import annotations

import torch

from stepscope.checks.experiment import Experiment

ROWS, LENGTH = 16, 24


def reference_experiment(*, moe: bool = False, padded: bool = False, rows: int = ROWS, seed: int = 0) -> Experiment:
    """A small reference language model with random tokens.

    Args:
        moe: a mixture of experts, whose balance loss couples the tokens of a batch.
        padded: rows of different length, so that micro-batches count different numbers of targets.
        rows: rows of the batch.
        seed: of weights and tokens.
    """
    from stepscope.reference.loop import language_model_loss
    from stepscope.reference.model import CausalLM, ModelConfig

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = ModelConfig(vocab_size=64, hidden_size=32, num_attention_heads=2, dropout=0.1, use_moe=moe)
        model = CausalLM(config)
        input_ids = torch.randint(0, 64, (rows, LENGTH))
    labels = input_ids.clone()
    if padded:
        for row in range(rows):
            labels[row, LENGTH - row % (LENGTH // 2) :] = -100
    return Experiment(model, (input_ids, labels), language_model_loss)
