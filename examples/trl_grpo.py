"""The calls of TRL's quick start of GRPO, whose import alone is changed."""

from datasets import load_dataset

from jaxtune.compat import GRPOConfig, GRPOTrainer

dataset = load_dataset("trl-lib/ultrafeedback-prompt", split="train")


# Rewards answers that have many different letters.
def reward_num_unique_chars(completions, **kwargs):
    texts = [completion if isinstance(completion, str) else completion[0]["content"] for completion in completions]
    return [len(set(text)) for text in texts]


trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    reward_funcs=reward_num_unique_chars,
    train_dataset=dataset,
    args=GRPOConfig(max_completion_length=256, max_steps=100, use_vllm=True, log_completions=True),
)
trainer.train()
