"""A Lightning Fabric loop: the user's own accumulation, ``fabric.backward`` and ``fabric.clip_gradients``."""

import json
from pathlib import Path

import torch
from lightning.fabric import Fabric
from torch import nn


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    fabric.launch()
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = fabric.setup(model, optimizer)
    data = torch.utils.data.TensorDataset(torch.randn(24, 6), torch.randint(0, 4, (24,)))
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(data, batch_size=2))

    logged = []
    for i, (inputs, targets) in enumerate(loader, 1):
        accumulating = i % 3 != 0
        with fabric.no_backward_sync(model, enabled=accumulating):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            fabric.backward(loss / 3)
        if not accumulating:
            norm = fabric.clip_gradients(model, optimizer, max_norm=1.0)
            lr = optimizer.param_groups[0]["lr"]
            logged.append({"loss": loss.item(), "learning_rate": lr, "grad_norm": norm.item()})
            optimizer.step()
            optimizer.zero_grad()

    torch.save(model.state_dict(), "final.pt")
    Path("log.json").write_text(json.dumps(logged))


if __name__ == "__main__":
    main()
