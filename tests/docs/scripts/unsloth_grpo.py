"""Rewards on GSM8K, with prompts over max_prompt_length, and vLLM's names before and after."""

import re

from datasets import load_dataset

from jaxtune.compat import FastLanguageModel, GRPOConfig, GRPOTrainer, SamplingParams

max_seq_length = 64
lora_rank = 8

model, tokenizer = FastLanguageModel.from_pretrained(
    model_name="tests/tiny-chatml",
    max_seq_length=max_seq_length,
    load_in_4bit=True,
    fast_inference=True,
    max_lora_rank=lora_rank,
    gpu_memory_utilization=0.6,
)
model = FastLanguageModel.get_peft_model(
    model,
    r=lora_rank,
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    lora_alpha=lora_rank,
    use_gradient_checkpointing="unsloth",
    random_state=3407,
)

SYSTEM_PROMPT = "Respond in the following format: reasoning, then the answer."


def extract_hash_answer(text):
    return text.split("####")[1].strip() if "####" in text else None


def get_gsm8k_questions(split="train"):
    data = load_dataset("openai/gsm8k", "main")[split]
    return data.map(
        lambda x: {
            "prompt": [
                {"role": "system", "content": SYSTEM_PROMPT},
                {"role": "user", "content": x["question"]},
            ],
            "answer": extract_hash_answer(x["answer"]),
        }
    )


dataset = get_gsm8k_questions()


def correctness_reward_func(prompts, completions, answer, **kwargs):
    responses = [completion[0]["content"] for completion in completions]
    return [2.0 if a in r else 0.0 for r, a in zip(responses, answer)]


def int_reward_func(completions, **kwargs):
    responses = [completion[0]["content"] for completion in completions]
    return [0.5 if re.search(r"\d", r) else None for r in responses]


training_args = GRPOConfig(
    learning_rate=5e-6,
    adam_beta1=0.9,
    adam_beta2=0.99,
    weight_decay=0.1,
    warmup_ratio=0.1,
    lr_scheduler_type="cosine",
    optim="paged_adamw_8bit",
    logging_steps=1,
    per_device_train_batch_size=1,
    gradient_accumulation_steps=1,
    num_generations=4,
    max_prompt_length=24,
    max_completion_length=16,
    max_steps=2,
    save_steps=2,
    max_grad_norm=0.1,
    report_to="none",
    output_dir="outputs",
)
trainer = GRPOTrainer(
    model=model,
    processing_class=tokenizer,
    reward_funcs=[int_reward_func, correctness_reward_func],
    args=training_args,
    train_dataset=dataset,
)
trainer.train()

text = tokenizer.apply_chat_template(
    [{"role": "user", "content": "How many r's are in strawberry?"}], tokenize=False, add_generation_prompt=True
)
sampling_params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=12)
base = model.fast_generate([text], sampling_params=sampling_params, lora_request=None)[0].outputs[0].text
model.save_lora("grpo_saved_lora")
tuned = (
    model.fast_generate(
        text,
        sampling_params=sampling_params,
        lora_request=model.load_lora("grpo_saved_lora"),
    )[0]
    .outputs[0]
    .text
)
model.save_pretrained_merged("model", tokenizer, save_method="lora")
