"""The calls of TRL's SFT quick start; only the import of the trainer differs."""

from datasets import load_dataset

from jaxtune.compat import SFTTrainer

trainer = SFTTrainer(
    model="Qwen/Qwen2.5-0.5B",
    train_dataset=load_dataset("trl-lib/Capybara", split="train"),
)
trainer.train()
