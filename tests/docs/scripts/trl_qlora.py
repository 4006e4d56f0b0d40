"""QLoRA with transformers', bitsandbytes' and PEFT's own words."""

from datasets import load_dataset

from jaxtune.compat import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    LoraConfig,
    SFTConfig,
    SFTTrainer,
    TaskType,
    prepare_model_for_kbit_training,
)

model_id = "tests/tiny-chatml"
bnb_config = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_use_double_quant=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_compute_dtype="bfloat16",
)
model = AutoModelForCausalLM.from_pretrained(
    model_id,
    quantization_config=bnb_config,
    device_map="auto",
    attn_implementation="flash_attention_2",
    trust_remote_code=True,
    low_cpu_mem_usage=True,
)
model.config.use_cache = False
model.config.pretraining_tp = 1
tokenizer = AutoTokenizer.from_pretrained(model_id, trust_remote_code=True, use_fast=True)
tokenizer.pad_token = tokenizer.eos_token
tokenizer.padding_side = "right"

model.gradient_checkpointing_enable()
model = prepare_model_for_kbit_training(model)
peft_config = LoraConfig(
    r=8,
    lora_alpha=16,
    target_modules="all-linear",
    lora_dropout=0.05,
    bias="none",
    task_type=TaskType.CAUSAL_LM,
)

trainer = SFTTrainer(
    model=model,
    train_dataset=load_dataset("philschmid/dolly-15k-oai-style", split="train"),
    peft_config=peft_config,
    processing_class=tokenizer,
    args=SFTConfig(
        output_dir="qlora",
        max_length=64,
        max_steps=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=1,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        optim="paged_adamw_32bit",
        logging_steps=1,
        learning_rate=2e-4,
        bf16=True,
        max_grad_norm=0.3,
        warmup_ratio=0.03,
        lr_scheduler_type="constant",
        report_to="none",
    ),
)
trainer.train()
trainer.model.save_pretrained("qlora_adapter")
