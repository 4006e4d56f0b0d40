"""A model is trained, saved in each of Unsloth's ways, and loaded again."""

from datasets import load_dataset

from jaxtune.compat import FastModel, SFTConfig, SFTTrainer

model, tokenizer = FastModel.from_pretrained(
    model_name="tests/tiny-chatml",
    max_seq_length=64,
    load_in_4bit=True,
    load_in_8bit=False,
    full_finetuning=False,
    token=None,
    trust_remote_code=True,
)
model = FastModel.get_peft_model(
    model,
    finetune_vision_layers=False,
    finetune_language_layers=True,
    finetune_attention_modules=True,
    finetune_mlp_modules=True,
    r=8,
    lora_alpha=8,
    lora_dropout=0,
    bias="none",
    random_state=3407,
)
trainer = SFTTrainer(
    model=model,
    tokenizer=tokenizer,
    train_dataset=load_dataset("philschmid/dolly-15k-oai-style", split="train"),
    eval_dataset=None,
    args=SFTConfig(
        per_device_train_batch_size=2,
        gradient_accumulation_steps=1,
        warmup_steps=1,
        max_steps=2,
        learning_rate=2e-4,
        logging_steps=1,
        optim="adamw_8bit",
        weight_decay=0.01,
        lr_scheduler_type="linear",
        seed=3407,
        report_to="none",
    ),
)
trainer.train()

model.save_pretrained("lora_model")
tokenizer.save_pretrained("lora_model")
model.save_pretrained_merged("merged_16", tokenizer, save_method="merged_16bit")
model.save_pretrained_merged("merged_4", tokenizer, save_method="merged_4bit_forced")
model.save_pretrained_merged("adapter", tokenizer, save_method="lora")

again, tokenizer = FastModel.from_pretrained(model_name="lora_model", max_seq_length=64, load_in_4bit=True)
FastModel.for_inference(again)
inputs = tokenizer(["Name a colour:"], return_tensors="pt").to(again.device)
outputs = again.generate(**inputs, max_new_tokens=4, use_cache=True)
print(tokenizer.batch_decode(outputs, skip_special_tokens=True))
