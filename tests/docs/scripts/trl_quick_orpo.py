"""Odds ratios, of a model and a tokenizer that are loaded before."""

from datasets import load_dataset

from jaxtune.compat import AutoModelForCausalLM, AutoTokenizer, ORPOConfig, ORPOTrainer

model = AutoModelForCausalLM.from_pretrained("tests/tiny-chatml")
tokenizer = AutoTokenizer.from_pretrained("tests/tiny-chatml")
train_dataset = load_dataset("trl-lib/ultrafeedback_binarized", split="train")

training_args = ORPOConfig(output_dir="tiny-ORPO")
trainer = ORPOTrainer(model=model, args=training_args, processing_class=tokenizer, train_dataset=train_dataset)
trainer.train()
