"""A reward model of a name and a data set."""

from datasets import load_dataset

from jaxtune.compat import RewardTrainer

dataset = load_dataset("trl-lib/ultrafeedback_binarized", split="train")
trainer = RewardTrainer(model="tests/tiny-chatml", train_dataset=dataset)
trainer.train()
