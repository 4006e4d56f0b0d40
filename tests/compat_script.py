"""A script as people write it for Unsloth: only the import differs. Run with MODEL, DATA and OUT set."""

import os

from datasets import load_dataset

from jaxtune.compat import FastLanguageModel, SFTConfig, SFTTrainer, is_bfloat16_supported, train_on_responses_only

max_seq_length = 96
model, tokenizer = FastLanguageModel.from_pretrained(
    model_name=os.environ["MODEL"],
    max_seq_length=max_seq_length,
    dtype=None,
    load_in_4bit=False,
)
model = FastLanguageModel.get_peft_model(
    model,
    r=4,
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    lora_alpha=8,
    lora_dropout=0,
    bias="none",
    use_gradient_checkpointing="unsloth",
    random_state=3407,
    use_rslora=False,
    loftq_config=None,
)


def formatting_prompts_func(examples):
    chats = examples["conversations"]
    texts = [tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=False) for c in chats]
    return {"text": texts}


dataset = load_dataset("json", data_files=os.environ["DATA"], split="train", cache_dir=os.environ["OUT"] + "/cache")
dataset = dataset.map(formatting_prompts_func, batched=True)

trainer = SFTTrainer(
    model=model,
    tokenizer=tokenizer,
    train_dataset=dataset,
    dataset_text_field="text",
    max_seq_length=max_seq_length,
    packing=True,
    args=SFTConfig(
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        warmup_steps=2,
        max_steps=12,
        learning_rate=2e-2,
        fp16=not is_bfloat16_supported(),
        bf16=is_bfloat16_supported(),
        logging_steps=1,
        optim="adamw_8bit",
        weight_decay=0.01,
        lr_scheduler_type="linear",
        seed=3407,
        save_strategy="no",
        output_dir=os.environ["OUT"] + "/outputs",
        report_to="none",
    ),
)
trainer = train_on_responses_only(
    trainer,
    instruction_part="<|im_start|>user\n",
    response_part="<|im_start|>assistant\n",
)
example = trainer.train_dataset[0]
supervised = tokenizer.decode([token for token in example["labels"] if token != -100])

FastLanguageModel.for_inference(model)
prompt = tokenizer.apply_chat_template(
    [{"role": "user", "content": "Who are you?"}], add_generation_prompt=True, tokenize=False
)
inputs = tokenizer([prompt], return_tensors="np")
before = model.generate(**inputs, max_new_tokens=16, use_cache=True)

FastLanguageModel.for_training(model)
trainer_stats = trainer.train()

FastLanguageModel.for_inference(model)
after = model.generate(**inputs, max_new_tokens=16, use_cache=True)
text = tokenizer.batch_decode(after)[0]

model.save_pretrained(os.environ["OUT"] + "/lora_model")
tokenizer.save_pretrained(os.environ["OUT"] + "/lora_model")
model.save_pretrained_merged(os.environ["OUT"] + "/merged", tokenizer, save_method="merged_16bit")

model, tokenizer = FastLanguageModel.from_pretrained(
    model_name=os.environ["OUT"] + "/lora_model", max_seq_length=max_seq_length, load_in_4bit=False
)
again = model.generate(**inputs, max_new_tokens=16, use_cache=True)
