"""Supervised fine-tuning with TRL's SFTTrainer: a random model, a tokenizer and a data set made on the spot."""

import json
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

WORDS = ["the", "a", "loss", "rate", "step", "model", "learns", "scales", "clips", "gradient", "batch", "window"]


def make_tokenizer():
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<unk>", "<eos>", *WORDS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", eos_token="<eos>", bos_token="<eos>"
    )


def make_texts(count):
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(3, 10, (count,), generator=generator).tolist()
    return [" ".join(WORDS[i] for i in torch.randint(0, len(WORDS), (n,), generator=generator)) for n in lengths]


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=2,
    )
    trainer = SFTTrainer(
        model=LlamaForCausalLM(config),
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"text": make_texts(32)}),
        args=SFTConfig(
            output_dir="out",
            max_length=16,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=4,
            learning_rate=1e-2,
            max_steps=4,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
            seed=0,
        ),
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
