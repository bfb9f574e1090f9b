"""A loop of the nanoGPT shape: module-level code, config from the globals, a disabled scaler, no scheduler object."""

# Written as such scripts are.
# ruff: noqa: PTH118, PTH120, PTH123, SIM115

import json
import math
import os
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn

# -----------------------------------------------------------------------------
max_iters = 6
gradient_accumulation_steps = 4
batch_size = 4
block_size = 8
vocab_size = 32
learning_rate = 1e-2
min_lr = 1e-3
warmup_iters = 2
grad_clip = 1.0
dtype = "float32"
ddp = False
config_keys = [k for k, v in globals().items() if not k.startswith("_") and isinstance(v, (int, float, bool, str))]
exec(open(os.path.join(os.path.dirname(__file__), "configurator.py")).read())
config = {k: globals()[k] for k in config_keys}
# -----------------------------------------------------------------------------

torch.set_num_threads(1)
torch.manual_seed(1337)
ctx = nullcontext() if dtype == "float32" else torch.amp.autocast("cpu", dtype=getattr(torch, dtype))
data = torch.randint(0, vocab_size, (512,))


def get_batch():
    ix = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([data[i : i + block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + block_size] for i in ix])
    return x, y


class Bigram(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, 16)
        self.head = nn.Linear(16, vocab_size, bias=False)

    def forward(self, idx, targets):
        logits = self.head(torch.tanh(self.embed(idx)))
        loss = nn.functional.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


model = Bigram()
scaler = torch.amp.GradScaler("cpu", enabled=(dtype == "float16"))
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
logged = []

X, Y = get_batch()  # fetch the very first batch
iter_num = 0
while True:
    lr = get_lr(iter_num)
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr
    for micro_step in range(gradient_accumulation_steps):
        # a wrapped model would be told here, by hand, whether to synchronize
        model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        with ctx:
            logits, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        X, Y = get_batch()  # prefetch the next batch while the model works
        scaler.scale(loss).backward()
    norm = 0.0
    if grad_clip != 0.0:
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    lossf = loss.item() * gradient_accumulation_steps
    logged.append({"loss": lossf, "learning_rate": lr, "grad_norm": float(norm)})
    print(f"iter {iter_num}: loss {lossf:.4f}")
    iter_num += 1
    if iter_num >= max_iters:
        break

torch.save(model.state_dict(), "final.pt")
Path("log.json").write_text(json.dumps(logged))
Path("config.json").write_text(json.dumps(config))
