"""PEFT's tour: a configuration, an adapter, a run, and the adapter loaded again."""

from datasets import load_dataset

from jaxtune.compat import (
    AutoModelForCausalLM,
    AutoPeftModelForCausalLM,
    AutoTokenizer,
    LoraConfig,
    SFTTrainer,
    TaskType,
    TrainingArguments,
    get_peft_model,
)

peft_config = LoraConfig(task_type=TaskType.CAUSAL_LM, inference_mode=False, r=8, lora_alpha=32, lora_dropout=0.1)
model = AutoModelForCausalLM.from_pretrained("tests/tiny-chatml")
tokenizer = AutoTokenizer.from_pretrained("tests/tiny-chatml")
model = get_peft_model(model, peft_config)
model.print_trainable_parameters()

training_args = TrainingArguments(
    output_dir="tuned-run",
    learning_rate=1e-3,
    per_device_train_batch_size=8,
    num_train_epochs=1,
    weight_decay=0.01,
    save_strategy="epoch",
)
trainer = SFTTrainer(
    model=model,
    args=training_args,
    train_dataset=load_dataset("ag_news", split="train"),
    processing_class=tokenizer,
)
trainer.train()
model.save_pretrained("tuned")

model = AutoPeftModelForCausalLM.from_pretrained("tuned")
model = model.to("cuda")
model.eval()
inputs = tokenizer("Who are you?", return_tensors="pt")
outputs = model.generate(input_ids=inputs["input_ids"].to("cuda"), max_new_tokens=6)
text = tokenizer.batch_decode(outputs.detach().cpu().numpy(), skip_special_tokens=True)[0]
print(text)
