"""A causal language model trained with the Hugging Face Trainer: four micro-batches a step, ragged labels."""

import json
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Sentences(torch.utils.data.Dataset):
    """Random token rows; sentence i has 3 to 12 tokens that count, the rest is masked with -100."""

    def __init__(self, count: int, length: int = 12):
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(3, 64, (count, length), generator=generator)
        self.counted = torch.randint(3, length + 1, (count,), generator=generator)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        labels = self.tokens[i].clone()
        labels[self.counted[i] :] = -100
        return {"input_ids": self.tokens[i], "labels": labels}


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, use_cache=False
    )
    trainer = Trainer(
        model=LlamaForCausalLM(config),
        args=TrainingArguments(
            output_dir="out",
            per_device_train_batch_size=2,
            gradient_accumulation_steps=4,
            max_grad_norm=1.0,
            learning_rate=1e-2,
            lr_scheduler_type="linear",
            warmup_steps=2,
            max_steps=6,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            seed=0,
        ),
        train_dataset=Sentences(64),
    )
    trainer.train()
    torch.save(trainer.model.state_dict(), "final.pt")
    logged = [
        {k: row[k] for k in ("loss", "learning_rate", "grad_norm")}
        for row in trainer.state.log_history
        if "loss" in row
    ]
    Path("log.json").write_text(json.dumps(logged))


if __name__ == "__main__":
    main()
