"""Preferences, with the trainer's arguments where older versions of TRL had them."""

from datasets import load_dataset

from jaxtune.compat import DPOTrainer, FastLanguageModel, PatchDPOTrainer, TrainingArguments

PatchDPOTrainer()

model, tokenizer = FastLanguageModel.from_pretrained(
    model_name="tests/tiny-chatml",
    max_seq_length=128,
    dtype=None,
    load_in_4bit=True,
)
model = FastLanguageModel.get_peft_model(
    model,
    r=8,
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    lora_alpha=8,
    lora_dropout=0,
    bias="none",
    use_gradient_checkpointing="unsloth",
    random_state=3407,
)

dpo_trainer = DPOTrainer(
    model=model,
    ref_model=None,
    args=TrainingArguments(
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        warmup_ratio=0.1,
        max_steps=2,
        learning_rate=5e-6,
        logging_steps=1,
        optim="adamw_8bit",
        weight_decay=0.0,
        lr_scheduler_type="linear",
        seed=42,
        output_dir="outputs",
        report_to="none",
    ),
    beta=0.3,
    train_dataset=load_dataset("HuggingFaceH4/ultrafeedback_binarized", split="train_prefs"),
    tokenizer=tokenizer,
    max_length=128,
    max_prompt_length=64,
    dataset_num_proc=2,
)
dpo_trainer.train()
model.save_pretrained("lora_model")
