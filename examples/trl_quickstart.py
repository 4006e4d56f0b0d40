"""TRL's SFT quick start, as its documentation has it; only the import of the trainer differs."""

from datasets import load_dataset

from jaxtune.compat import SFTTrainer

dataset = load_dataset("trl-lib/Capybara", split="train")

trainer = SFTTrainer(
    model="Qwen/Qwen2.5-0.5B",
    train_dataset=dataset,
)
trainer.train()
