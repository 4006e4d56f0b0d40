"""PEFT's quick tour: an adapter is made, trained, saved, put on a fresh base, and merged."""

from datasets import load_dataset

from jaxtune.compat import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LoraConfig,
    PeftModel,
    SFTConfig,
    SFTTrainer,
    TaskType,
    get_peft_model,
)

model_id = "tests/tiny-chatml"
model = AutoModelForCausalLM.from_pretrained(model_id, device_map="cuda")
tokenizer = AutoTokenizer.from_pretrained(model_id)
peft_config = LoraConfig(
    r=16, lora_alpha=16, task_type=TaskType.CAUSAL_LM, target_modules=["q_proj", "v_proj"], inference_mode=False
)
model = get_peft_model(model, peft_config)
model.print_trainable_parameters()

trainer = SFTTrainer(
    model=model,
    args=SFTConfig(
        output_dir="peft",
        max_length=64,
        max_steps=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=1,
        learning_rate=1e-3,
        report_to="none",
    ),
    train_dataset=load_dataset("philschmid/dolly-15k-oai-style", split="train"),
    processing_class=tokenizer,
)
trainer.train()
model.save_pretrained("peft_adapter")
tokenizer.save_pretrained("peft_adapter")

base = AutoModelForCausalLM.from_pretrained(model_id)
tuned = PeftModel.from_pretrained(base, "peft_adapter", is_trainable=False)
tuned.eval()
inputs = tokenizer("Who are you?", return_tensors="pt").to(tuned.device)
outputs = tuned.generate(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=4)
merged = tuned.merge_and_unload()
merged.save_pretrained("peft_merged", safe_serialization=True, max_shard_size="5GB")
tokenizer.save_pretrained("peft_merged")
