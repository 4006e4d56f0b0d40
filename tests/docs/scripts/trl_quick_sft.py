"""Supervised fine-tuning with nothing but a model's name and a data set."""

from datasets import load_dataset

from jaxtune.compat import SFTTrainer

trainer = SFTTrainer(model="tests/tiny-chatml", train_dataset=load_dataset("trl-lib/Capybara", split="train"))
trainer.train()
