"""A script with transformers' TrainingArguments and PEFT's LoraConfig; only the imports differ."""

from datasets import load_dataset

from jaxtune.compat import LoraConfig, SFTTrainer, TrainingArguments

dataset = load_dataset("trl-lib/Capybara")

peft_config = LoraConfig(
    r=16,
    lora_alpha=32,
    lora_dropout=0.05,
    bias="none",
    task_type="CAUSAL_LM",
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
    init_lora_weights="gaussian",
)
training_args = TrainingArguments(
    output_dir="peft_outputs",
    num_train_epochs=1,
    per_device_train_batch_size=4,
    per_device_eval_batch_size=8,
    gradient_accumulation_steps=2,
    gradient_checkpointing=True,
    gradient_checkpointing_kwargs={"use_reentrant": False},
    optim="paged_adamw_8bit",
    learning_rate=2e-4,
    lr_scheduler_type="cosine",
    warmup_ratio=0.03,
    bf16=True,
    logging_steps=1,
    save_strategy="epoch",
    eval_strategy="epoch",
    dataloader_num_workers=4,
    dataloader_pin_memory=True,
    group_by_length=True,
    run_name="first",
    report_to="none",
)
trainer = SFTTrainer(
    model="Qwen/Qwen2.5-0.5B",
    args=training_args,
    train_dataset=dataset["train"],
    eval_dataset=dataset["test"],
    peft_config=peft_config,
)
trainer.train()
print(trainer.evaluate())
trainer.save_model("peft_model")
