"""Continued pretraining: embeddings train too, at a learning rate of their own."""

from datasets import load_dataset

from jaxtune.compat import FastLanguageModel, UnslothTrainer, UnslothTrainingArguments, is_bfloat16_supported

max_seq_length = 128
model, tokenizer = FastLanguageModel.from_pretrained(
    model_name="tests/tiny-chatml", max_seq_length=max_seq_length, dtype=None, load_in_4bit=True
)
model = FastLanguageModel.get_peft_model(
    model,
    r=8,
    target_modules=[
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
        "embed_tokens",
        "lm_head",
    ],
    lora_alpha=32,
    lora_dropout=0,
    bias="none",
    use_gradient_checkpointing="unsloth",
    random_state=3407,
    use_rslora=True,
)

EOS_TOKEN = tokenizer.eos_token


def formatting_prompts_func(examples):
    return {"text": [example + EOS_TOKEN for example in examples["text"]]}


dataset = load_dataset("roneneldan/TinyStories", split="train[:2500]")
dataset = dataset.map(formatting_prompts_func, batched=True)

trainer = UnslothTrainer(
    model=model,
    tokenizer=tokenizer,
    train_dataset=dataset,
    dataset_text_field="text",
    max_seq_length=max_seq_length,
    packing=True,
    args=UnslothTrainingArguments(
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
        warmup_ratio=0.1,
        num_train_epochs=1,
        learning_rate=5e-5,
        embedding_learning_rate=5e-6,
        fp16=not is_bfloat16_supported(),
        bf16=is_bfloat16_supported(),
        logging_steps=1,
        optim="adamw_8bit",
        weight_decay=0.00,
        lr_scheduler_type="cosine",
        seed=3407,
        output_dir="outputs",
        report_to="none",
    ),
)
trainer_stats = trainer.train()
