"""Supervised fine-tuning as TRL's own script does it, with reports at the end."""

from datasets import load_dataset

from jaxtune.compat import SFTConfig, SFTTrainer

dataset = load_dataset("trl-lib/Capybara")
training_args = SFTConfig(
    output_dir="sft",
    learning_rate=2.0e-5,
    num_train_epochs=1,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    gradient_checkpointing=True,
    max_length=128,
    packing=True,
    logging_steps=2,
    eval_strategy="steps",
    eval_steps=100,
    report_to="none",
)
trainer = SFTTrainer(
    model="tests/tiny-chatml",
    args=training_args,
    train_dataset=dataset["train"],
    eval_dataset=dataset["test"],
)
train_result = trainer.train()

metrics = train_result.metrics
metrics["train_samples"] = len(dataset["train"])
trainer.log_metrics("train", metrics)
trainer.save_metrics("train", metrics)
trainer.save_state()

metrics = trainer.evaluate()
metrics["eval_samples"] = len(dataset["test"])
trainer.log_metrics("eval", metrics)
trainer.save_metrics("eval", metrics)
trainer.save_model(training_args.output_dir)
