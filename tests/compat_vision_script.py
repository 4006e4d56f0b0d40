"""A script with the calls of Unsloth's vision notebooks: only the import differs. Run with MODEL, DATA and OUT set."""

import os

from datasets import load_dataset
from PIL import Image

from jaxtune.compat import FastVisionModel, SFTConfig, SFTTrainer, UnslothVisionDataCollator

model, tokenizer = FastVisionModel.from_pretrained(
    os.environ["MODEL"],
    load_in_4bit=False,
    use_gradient_checkpointing="unsloth",
)
model = FastVisionModel.get_peft_model(
    model,
    finetune_vision_layers=True,
    finetune_language_layers=True,
    finetune_attention_modules=True,
    finetune_mlp_modules=True,
    r=4,
    lora_alpha=4,
    lora_dropout=0,
    bias="none",
    random_state=3407,
    use_rslora=False,
    loftq_config=None,
)
dataset = load_dataset("json", data_files=os.environ["DATA"], split="train", cache_dir=os.environ["OUT"] + "/cache")
instruction = "Which?"


def convert_to_conversation(sample):
    image = Image.open(sample["file"])
    question = {"role": "user", "content": [{"type": "text", "text": instruction}, {"type": "image", "image": image}]}
    answer = {"role": "assistant", "content": [{"type": "text", "text": sample["text"]}]}
    return {"messages": [question, answer]}


converted_dataset = [convert_to_conversation(sample) for sample in dataset]


def answer():
    FastVisionModel.for_inference(model)
    image = Image.open(dataset[0]["file"])
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": instruction}]}]
    input_text = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    inputs = tokenizer(image, input_text, add_special_tokens=False, return_tensors="pt").to("cuda")
    outputs = model.generate(**inputs, max_new_tokens=6, use_cache=True, temperature=0)
    return tokenizer.batch_decode(outputs[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)[0]


before = answer()
FastVisionModel.for_training(model)
trainer = SFTTrainer(
    model=model,
    tokenizer=tokenizer,
    data_collator=UnslothVisionDataCollator(model, tokenizer),
    train_dataset=converted_dataset,
    args=SFTConfig(
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        warmup_steps=2,
        max_steps=8,
        learning_rate=2e-2,
        logging_steps=1,
        optim="adamw_8bit",
        weight_decay=0.001,
        lr_scheduler_type="linear",
        seed=3407,
        output_dir=os.environ["OUT"] + "/outputs",
        report_to="none",
        remove_unused_columns=False,
        dataset_text_field="",
        dataset_kwargs={"skip_prepare_dataset": True},
        max_length=128,
        save_strategy="no",
    ),
)
trainer_stats = trainer.train()
after = answer()
model.save_pretrained(os.environ["OUT"] + "/lora")
tokenizer.save_pretrained(os.environ["OUT"] + "/lora")
model.save_pretrained_merged(os.environ["OUT"] + "/merged", tokenizer)
