"""Rewards of a function, with nothing but a model's name and prompts."""

from datasets import load_dataset

from jaxtune.compat import GRPOConfig, GRPOTrainer

dataset = load_dataset("trl-lib/ultrafeedback-prompt", split="train")


def reward_num_unique_letters(completions, **kwargs):
    """Answers with more different letters are better."""
    completion_contents = [completion[0]["content"] for completion in completions]
    return [float(len(set(content))) for content in completion_contents]


trainer = GRPOTrainer(
    model="tests/tiny-chatml",
    reward_funcs=reward_num_unique_letters,
    args=GRPOConfig(output_dir="grpo", max_completion_length=8, max_steps=2),
    train_dataset=dataset,
)
trainer.train()
