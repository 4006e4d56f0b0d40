"""ORPO on pairs of answers, whose prompt is written into the rows."""

from datasets import load_dataset

from jaxtune.compat import FastLanguageModel, ORPOConfig, ORPOTrainer, is_bfloat16_supported

max_seq_length = 128
model, tokenizer = FastLanguageModel.from_pretrained("tests/tiny-chatml", max_seq_length, load_in_4bit=False)
model = FastLanguageModel.get_peft_model(model, r=8, lora_alpha=8)
prompt_template = "### Instruction:\n{}\n\n### Response:\n"


def format_prompt(sample):
    sample["prompt"] = prompt_template.format(sample["prompt"])
    sample["chosen"] = sample["chosen"] + tokenizer.eos_token
    sample["rejected"] = sample["rejected"] + tokenizer.eos_token
    return sample


dataset = load_dataset("reciperesearch/dolphin-sft-v0.1-preference")["train"]
dataset = dataset.map(format_prompt)

orpo_trainer = ORPOTrainer(
    model=model,
    train_dataset=dataset,
    tokenizer=tokenizer,
    args=ORPOConfig(
        max_length=max_seq_length,
        max_prompt_length=max_seq_length // 2,
        max_completion_length=max_seq_length // 2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=1,
        beta=0.1,
        logging_steps=1,
        optim="adamw_8bit",
        lr_scheduler_type="linear",
        max_steps=2,
        fp16=not is_bfloat16_supported(),
        bf16=is_bfloat16_supported(),
        output_dir="outputs",
        report_to="none",
    ),
)
orpo_trainer.train()
model.save_pretrained_merged("model", tokenizer, save_method="merged_16bit")
