"""A reward model from pairs of conversations."""

from datasets import load_dataset

from jaxtune.compat import LoraConfig, RewardConfig, RewardTrainer

dataset = load_dataset("trl-lib/ultrafeedback_binarized")
trainer = RewardTrainer(
    model="tests/tiny-chatml",
    args=RewardConfig(
        output_dir="reward",
        per_device_train_batch_size=2,
        max_steps=2,
        max_length=128,
        learning_rate=1.0e-4,
        logging_steps=1,
        center_rewards_coefficient=0.01,
        report_to="none",
    ),
    train_dataset=dataset["train"],
    peft_config=LoraConfig(r=8, lora_alpha=16, task_type="SEQ_CLS", modules_to_save=["score"]),
)
trainer.train()
trainer.save_model("reward_model")
