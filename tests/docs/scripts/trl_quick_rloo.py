"""Leave one out, as TRL's page begins."""

from datasets import load_dataset

from jaxtune.compat import RLOOConfig, RLOOTrainer

dataset = load_dataset("trl-lib/ultrafeedback-prompt", split="train")


def reward_len(completions, **kwargs):
    return [-abs(20 - len(completion[0]["content"])) for completion in completions]


trainer = RLOOTrainer(
    model="tests/tiny-chatml",
    reward_funcs=reward_len,
    args=RLOOConfig(output_dir="rloo", max_completion_length=8, max_steps=2),
    train_dataset=dataset,
)
trainer.train()
