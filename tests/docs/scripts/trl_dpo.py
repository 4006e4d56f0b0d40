"""Direct preference optimisation with the arguments where TRL has them now."""

from datasets import load_dataset

from jaxtune.compat import DPOConfig, DPOTrainer, LoraConfig

dataset = load_dataset("trl-lib/ultrafeedback_binarized")
training_args = DPOConfig(
    output_dir="dpo",
    learning_rate=5.0e-6,
    max_steps=2,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=1,
    max_length=128,
    beta=0.1,
    loss_type="ipo",
    logging_steps=1,
    eval_strategy="steps",
    eval_steps=2,
    report_to="none",
)
trainer = DPOTrainer(
    model="tests/tiny-chatml",
    args=training_args,
    train_dataset=dataset["train"],
    eval_dataset=dataset["test"],
    peft_config=LoraConfig(r=8, lora_alpha=16, task_type="CAUSAL_LM"),
)
trainer.train()
metrics = trainer.evaluate()
trainer.log_metrics("eval", metrics)
trainer.save_metrics("eval", metrics)
trainer.save_model("dpo_model")
