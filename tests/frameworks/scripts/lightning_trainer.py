"""A Lightning Trainer in bfloat16 autocast with accumulation and clipping."""

import json
import logging
from pathlib import Path

import lightning
import torch
from torch import nn


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 4))
        self.logged = []

    def training_step(self, batch, _):
        inputs, targets = batch
        self.last_loss = nn.functional.cross_entropy(self.net(inputs), targets)
        return self.last_loss

    def on_before_optimizer_step(self, optimizer):
        norm = lightning.pytorch.utilities.grad_norm(self, norm_type=2)["grad_2.0_norm_total"]
        lr = optimizer.param_groups[0]["lr"]
        self.logged.append({"loss": self.last_loss.item(), "learning_rate": lr, "grad_norm": norm.item()})

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main():
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    lightning.seed_everything(0, verbose=False)
    data = torch.utils.data.TensorDataset(torch.randn(32, 6), torch.randint(0, 4, (32,)))
    model = Classifier()
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=2,
        accumulate_grad_batches=4,
        precision="bf16-mixed",
        gradient_clip_val=0.5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=2, shuffle=True))
    torch.save(model.state_dict(), "final.pt")
    Path("log.json").write_text(json.dumps(model.logged))


if __name__ == "__main__":
    main()
