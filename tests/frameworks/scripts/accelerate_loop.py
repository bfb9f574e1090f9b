"""A plain Accelerate loop: ``accumulate``, a prepared scheduler, clipping on the micro-batch that steps."""

import json
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.25, total_iters=4)
    data = torch.utils.data.TensorDataset(torch.randn(36, 6), torch.randint(0, 4, (36,)))
    loader = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    logged = []
    for _ in range(2):  # 18 micro-batches an epoch: the last window of each holds two
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    lr = optimizer.param_groups[0]["lr"]
                    logged.append({"loss": loss.item(), "learning_rate": lr, "grad_norm": norm.item()})
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    torch.save(accelerator.unwrap_model(model).state_dict(), "final.pt")
    Path("log.json").write_text(json.dumps(logged))


if __name__ == "__main__":
    main()
