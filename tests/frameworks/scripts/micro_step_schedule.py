"""A loop of the MiniMind shape: the rate set by hand at each micro-step, a tail flushed with the full divisor."""

# Written as such scripts are.
# ruff: noqa: PTH100, PTH118, PTH120

import argparse
import json
import math
import os
import sys
from pathlib import Path

__package__ = "scripts"
sys.path.append(os.path.abspath(os.path.join(os.path.dirname(__file__), "..")))

import warnings

import torch
from torch import nn, optim

warnings.filterwarnings("ignore")


def get_lr(current_step, total_steps, lr):
    return lr * (0.1 + 0.45 * (1 + math.cos(math.pi * current_step / total_steps)))


def train_epoch(epoch, loader, iters, start_step=0):
    step = start_step
    for step, (input_ids, labels) in enumerate(loader, start=start_step + 1):
        lr = get_lr(epoch * iters + step, args.epochs * iters, args.learning_rate)
        for param_group in optimizer.param_groups:
            param_group["lr"] = lr

        with torch.amp.autocast("cpu", dtype=torch.bfloat16):
            logits = model(input_ids)
            loss = nn.functional.cross_entropy(logits.view(-1, 32), labels.view(-1), ignore_index=-100)
            loss = loss / args.accumulation_steps

        scaler.scale(loss).backward()

        if step % args.accumulation_steps == 0:
            finish_window(loss, lr)

    if step > start_step and step % args.accumulation_steps != 0:
        finish_window(loss, lr)


def finish_window(loss, lr):
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    current_loss = loss.item() * args.accumulation_steps
    logged.append({"loss": current_loss, "learning_rate": lr, "grad_norm": norm.item(), "scale": scaler.get_scale()})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="pretrain")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--learning_rate", type=float, default=5e-3)
    parser.add_argument("--accumulation_steps", type=int, default=4)
    parser.add_argument("--grad_clip", type=float, default=1.0)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(42)
    model = nn.Sequential(nn.Embedding(32, 16), nn.Tanh(), nn.Linear(16, 32))
    tokens = torch.randint(0, 32, (20, 9))
    labels = tokens[:, 1:].clone()
    labels[::3, 5:] = -100  # padding
    dataset = torch.utils.data.TensorDataset(tokens[:, :-1], labels)
    loader = torch.utils.data.DataLoader(dataset, batch_size=2, shuffle=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    optimizer = optim.AdamW(model.parameters(), lr=args.learning_rate)
    logged = []
    for epoch in range(args.epochs):
        train_epoch(epoch, loader, len(loader))
    torch.save(model.state_dict(), "final.pt")
    Path("log.json").write_text(json.dumps(logged))
