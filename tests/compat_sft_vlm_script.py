"""A script with the calls of TRL's example for models that read pictures. Run with MODEL, DATA and OUT set."""

import os
from pathlib import Path

from datasets import Dataset, Features, List, Value
from datasets import Image as ImageColumn

from jaxtune.compat import AutoModelForImageTextToText, AutoProcessor, LoraConfig, SFTConfig, SFTTrainer

training_args = SFTConfig(
    output_dir=os.environ["OUT"] + "/vlm",
    max_length=None,
    max_steps=3,
    per_device_train_batch_size=2,
    gradient_checkpointing_kwargs=dict(use_reentrant=False),
    learning_rate=1e-2,
    logging_steps=1,
    report_to="none",
    save_strategy="no",
    eval_strategy="steps",
    eval_steps=3,
)
processor = AutoProcessor.from_pretrained(os.environ["MODEL"])
model = AutoModelForImageTextToText.from_pretrained(os.environ["MODEL"], dtype="float32")
rows = [line.split("\t") for line in Path(os.environ["DATA"] + ".tsv").read_text().splitlines()]
features = Features(
    {
        "images": List(ImageColumn()),
        "messages": [{"role": Value("string"), "content": [{"type": Value("string"), "text": Value("string")}]}],
    }
)
dataset = Dataset.from_list(
    [
        {
            "images": [{"path": file, "bytes": None}],
            "messages": [
                {"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": "Which?"}]},
                {"role": "assistant", "content": [{"type": "text", "text": text}]},
            ],
        }
        for file, text in rows
    ],
    features=features,
)
trainer = SFTTrainer(
    model=model,
    args=training_args,
    train_dataset=dataset,
    eval_dataset=dataset.select(range(2)),
    processing_class=processor,
    peft_config=LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"),
)
stats = trainer.train()
trainer.save_model(training_args.output_dir)
