"""A script for an older TRL: setup_chat_format, and the data set's arguments at the trainer."""

from datasets import load_dataset

from jaxtune.compat import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LoraConfig,
    SFTTrainer,
    TrainingArguments,
    setup_chat_format,
)

model = AutoModelForCausalLM.from_pretrained("tests/tiny-chatml", torch_dtype="auto", device_map="auto")
tokenizer = AutoTokenizer.from_pretrained("tests/tiny-chatml")
tokenizer.chat_template = None
model, tokenizer = setup_chat_format(model, tokenizer)

dataset = load_dataset("philschmid/dolly-15k-oai-style", split="train")
dataset = dataset.map(lambda row: {"text": tokenizer.apply_chat_template(row["messages"], tokenize=False)})

trainer = SFTTrainer(
    model=model,
    args=TrainingArguments(
        output_dir="older",
        max_steps=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=1,
        gradient_checkpointing=True,
        optim="adamw_torch_fused",
        logging_steps=1,
        save_strategy="epoch",
        learning_rate=2e-4,
        bf16=True,
        tf32=None,
        max_grad_norm=0.3,
        warmup_ratio=0.03,
        lr_scheduler_type="constant",
        report_to="none",
    ),
    train_dataset=dataset,
    dataset_text_field="text",
    peft_config=LoraConfig(r=8, lora_alpha=16, lora_dropout=0.05, target_modules="all-linear", task_type="CAUSAL_LM"),
    max_seq_length=128,
    tokenizer=tokenizer,
    packing=True,
    neftune_noise_alpha=5,
    dataset_kwargs={},
)
trainer.train()
trainer.save_model()
