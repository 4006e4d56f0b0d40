"""A trained adapter is measured on other rows, loaded with its base, and merged."""

import numpy as np
from datasets import load_dataset

from jaxtune.compat import AutoPeftModelForCausalLM, LoraConfig, SFTConfig, SFTTrainer

dataset = load_dataset("philschmid/dolly-15k-oai-style", split="train").train_test_split(test_size=0.25, seed=0)


def preprocess_logits_for_metrics(logits, labels):
    return logits.argmax(dim=-1)


def compute_metrics(eval_preds):
    predictions, labels = eval_preds
    predictions, labels = predictions[:, :-1], labels[:, 1:]
    mask = labels != -100
    return {"accuracy": np.mean(predictions[mask] == labels[mask])}


trainer = SFTTrainer(
    model="tests/tiny-chatml",
    args=SFTConfig(
        output_dir="auto",
        max_length=64,
        max_steps=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=1,
        learning_rate=1e-3,
        report_to="none",
    ),
    train_dataset=dataset["train"],
    eval_dataset=dataset["test"],
    peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    compute_metrics=compute_metrics,
    preprocess_logits_for_metrics=preprocess_logits_for_metrics,
)
trainer.train()
metrics = trainer.evaluate(eval_dataset=dataset["test"], metric_key_prefix="held_out")
result = trainer.predict(dataset["test"])
trainer.log_metrics("test", result.metrics)
trainer.save_metrics("test", result.metrics)
trainer.save_model("auto_adapter")

model = AutoPeftModelForCausalLM.from_pretrained("auto_adapter", device_map="auto", torch_dtype="bfloat16")
model = model.merge_and_unload()
model.save_pretrained("auto_merged")
