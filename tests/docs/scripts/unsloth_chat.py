"""Shared conversations, of which only the answers are trained on, as in Unsloth's conversational notebooks."""

from datasets import load_dataset

from jaxtune.compat import (
    FastLanguageModel,
    SFTConfig,
    SFTTrainer,
    get_chat_template,
    standardize_sharegpt,
    train_on_responses_only,
)

max_seq_length = 128
model, tokenizer = FastLanguageModel.from_pretrained(
    model_name="tests/tiny-chatml", max_seq_length=max_seq_length, load_in_4bit=False
)
model = FastLanguageModel.get_peft_model(model, r=8, lora_alpha=8, lora_dropout=0, bias="none", random_state=3407)

tokenizer = get_chat_template(tokenizer, chat_template="chatml")


def formatting_prompts_func(examples):
    convos = examples["conversations"]
    texts = [tokenizer.apply_chat_template(convo, tokenize=False, add_generation_prompt=False) for convo in convos]
    return {"text": texts}


dataset = load_dataset("mlabonne/FineTome-100k", split="train")
dataset = standardize_sharegpt(dataset)
dataset = dataset.map(formatting_prompts_func, batched=True)

trainer = SFTTrainer(
    model=model,
    tokenizer=tokenizer,
    train_dataset=dataset,
    dataset_text_field="text",
    max_seq_length=max_seq_length,
    dataset_num_proc=2,
    packing=False,
    args=SFTConfig(
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        warmup_steps=1,
        max_steps=2,
        learning_rate=2e-4,
        logging_steps=1,
        optim="adamw_8bit",
        seed=3407,
        output_dir="outputs",
        report_to="none",
    ),
)
trainer = train_on_responses_only(
    trainer,
    instruction_part="<|im_start|>user\n",
    response_part="<|im_start|>assistant\n",
)
shown = tokenizer.decode([token for token in trainer.train_dataset[5]["labels"] if token != -100])
trainer_stats = trainer.train()

FastLanguageModel.for_inference(model)
messages = [{"role": "user", "content": "Who are you?"}]
inputs = tokenizer.apply_chat_template(
    messages, tokenize=True, add_generation_prompt=True, return_tensors="pt", return_dict=True
).to("cuda")
outputs = model.generate(**inputs, max_new_tokens=4, use_cache=True, temperature=1.5, min_p=0.1)
answers = tokenizer.batch_decode(outputs)
