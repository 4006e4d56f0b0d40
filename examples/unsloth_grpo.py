"""The calls of Unsloth's GRPO notebooks on GSM8K, whose imports alone are changed.

What a notebook does with `model.fast_generate` after training, `model.generate` does here.
"""

import re

from datasets import load_dataset

from jaxtune.compat import FastLanguageModel, GRPOConfig, GRPOTrainer

max_seq_length = 1024
lora_rank = 32

model, tokenizer = FastLanguageModel.from_pretrained(
    model_name="Qwen/Qwen2.5-0.5B-Instruct",
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

SYSTEM_PROMPT = """Answer in this form:
<reasoning>
...
</reasoning>
<answer>
...
</answer>
"""


def answer_in(text):
    return text.split("<answer>")[-1].split("</answer>")[0].strip()


def with_prompt(row):
    messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": row["question"]}]
    return {"prompt": messages, "answer": row["answer"].split("####")[-1].strip()}


dataset = load_dataset("openai/gsm8k", "main", split="train").map(with_prompt)


def correctness_reward_func(prompts, completions, answer, **kwargs):
    given = [answer_in(completion[0]["content"]) for completion in completions]
    print("-" * 20, f"Question:\n{prompts[0][-1]['content']}\nAnswer:\n{answer[0]}\nGiven:\n{given[0]}")
    return [2.0 if one == wanted else 0.0 for one, wanted in zip(given, answer)]


def int_reward_func(completions, **kwargs):
    return [0.5 if answer_in(completion[0]["content"]).isdigit() else 0.0 for completion in completions]


def format_reward_func(completions, **kwargs) -> list[float]:
    pattern = r"<reasoning>.*?</reasoning>\s*<answer>.*?</answer>"
    return [0.5 if re.match(pattern, completion[0]["content"], re.DOTALL) else 0.0 for completion in completions]


def xmlcount_reward_func(completions, **kwargs) -> list[float]:
    tags = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
    return [sum(0.125 for tag in tags if completion[0]["content"].count(tag) == 1) for completion in completions]


max_prompt_length = 256
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
    num_generations=6,
    max_prompt_length=max_prompt_length,
    max_completion_length=max_seq_length - max_prompt_length,
    max_steps=250,
    save_steps=250,
    max_grad_norm=0.1,
    report_to="none",
    output_dir="outputs",
)
trainer = GRPOTrainer(
    model=model,
    processing_class=tokenizer,
    reward_funcs=[xmlcount_reward_func, format_reward_func, int_reward_func, correctness_reward_func],
    args=training_args,
    train_dataset=dataset,
)
trainer.train()
model.save_lora("grpo_saved_lora")
