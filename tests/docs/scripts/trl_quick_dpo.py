"""Preferences with nothing but a model's name and a data set: all weights train."""

from datasets import load_dataset

from jaxtune.compat import DPOTrainer

dataset = load_dataset("trl-lib/ultrafeedback_binarized", split="train")
trainer = DPOTrainer(model="tests/tiny-chatml", train_dataset=dataset)
trainer.train()
