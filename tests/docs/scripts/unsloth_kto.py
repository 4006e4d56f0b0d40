"""Answers that are good or bad, one at a time."""

from datasets import load_dataset

from jaxtune.compat import FastLanguageModel, KTOConfig, KTOTrainer

model, tokenizer = FastLanguageModel.from_pretrained(
    model_name="tests/tiny-chatml", max_seq_length=128, load_in_4bit=False
)
if tokenizer.chat_template is None:
    raise SystemExit("a model that chats is needed")
model = FastLanguageModel.get_peft_model(model, r=4, lora_alpha=4, use_gradient_checkpointing="unsloth")
dataset = load_dataset("trl-lib/kto-mix-14k")

kto_trainer = KTOTrainer(
    model=model,
    args=KTOConfig(
        per_device_train_batch_size=4,
        gradient_accumulation_steps=1,
        max_steps=2,
        optim="adamw_8bit",
        lr_scheduler_type="cosine",
        warmup_ratio=0.1,
        learning_rate=5e-7,
        logging_steps=1,
        dataset_num_proc=2,
        desirable_weight=1.0,
        undesirable_weight=1.2,
        output_dir="outputs",
        report_to="none",
    ),
    train_dataset=dataset["train"],
    processing_class=tokenizer,
)
kto_trainer.train()
