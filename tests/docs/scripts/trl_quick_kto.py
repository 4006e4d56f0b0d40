"""Desirable and undesirable answers, with nothing but a model's name and a data set."""

from datasets import load_dataset

from jaxtune.compat import KTOTrainer

trainer = KTOTrainer(model="tests/tiny-chatml", train_dataset=load_dataset("trl-lib/small-kto", split="train"))
trainer.train()
