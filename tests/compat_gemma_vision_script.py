"""A script with the calls of Unsloth's Gemma 4 vision notebooks: only the import differs. Run with MODEL, DATA and OUT
set.
"""

import os

from datasets import load_dataset
from PIL import Image
from transformers import TextStreamer

from jaxtune.compat import FastVisionModel, SFTConfig, SFTTrainer, UnslothVisionDataCollator, get_chat_template

model, processor = FastVisionModel.from_pretrained(
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
    target_modules="all-linear",
)
dataset = load_dataset("json", data_files=os.environ["DATA"], split="train", cache_dir=os.environ["OUT"] + "/cache")
instruction = "Which?"


def convert_to_conversation(sample):
    image = Image.open(sample["file"])
    question = {"role": "user", "content": [{"type": "text", "text": instruction}, {"type": "image", "image": image}]}
    answer = {"role": "assistant", "content": [{"type": "text", "text": sample["text"]}]}
    return {"messages": [question, answer]}


converted_dataset = [convert_to_conversation(sample) for sample in dataset]
processor = get_chat_template(processor, "gemma-4")


def answer(streamer):
    image = Image.open(dataset[0]["file"]).convert("RGB")
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": instruction}]}]
    input_text = processor.apply_chat_template(messages, add_generation_prompt=True)
    inputs = processor(image, input_text, add_special_tokens=False, return_tensors="pt").to("cuda")
    result = model.generate(
        **inputs, streamer=streamer, max_new_tokens=6, use_cache=True, temperature=1.0, top_p=0.95, top_k=1
    )
    return processor.batch_decode(result[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)[0]


before = answer(TextStreamer(processor, skip_prompt=True))
trainer = SFTTrainer(
    model=model,
    train_dataset=converted_dataset,
    processing_class=processor.tokenizer,
    data_collator=UnslothVisionDataCollator(model, processor),
    args=SFTConfig(
        per_device_train_batch_size=1,
        gradient_accumulation_steps=4,
        max_grad_norm=0.3,
        warmup_ratio=0.03,
        max_steps=8,
        learning_rate=2e-2,
        logging_steps=1,
        save_strategy="steps",
        optim="adamw_8bit",
        weight_decay=0.001,
        lr_scheduler_type="cosine",
        seed=3407,
        output_dir=os.environ["OUT"] + "/outputs",
        report_to="none",
        remove_unused_columns=False,
        dataset_text_field="",
        dataset_kwargs={"skip_prepare_dataset": True},
        max_length=192,
    ),
)
trainer_stats = trainer.train()
after = answer(TextStreamer(processor.tokenizer, skip_prompt=True))
model.save_pretrained(os.environ["OUT"] + "/lora")
processor.save_pretrained(os.environ["OUT"] + "/lora")
model.save_pretrained_merged(os.environ["OUT"] + "/merged", processor)
