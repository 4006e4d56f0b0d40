"""A run is continued from its last checkpoint with more steps, then from an earlier one."""

from datasets import load_dataset

from jaxtune.compat import FastLanguageModel, SFTConfig, SFTTrainer

dataset = load_dataset("philschmid/dolly-15k-oai-style", split="train")


def train(max_steps, resume_from_checkpoint=None):
    model, tokenizer = FastLanguageModel.from_pretrained("tests/tiny-chatml", max_seq_length=64, load_in_4bit=False)
    model = FastLanguageModel.get_peft_model(model, r=4)
    trainer = SFTTrainer(
        model=model,
        tokenizer=tokenizer,
        train_dataset=dataset,
        args=SFTConfig(
            per_device_train_batch_size=2,
            gradient_accumulation_steps=1,
            max_steps=max_steps,
            learning_rate=1e-3,
            logging_steps=1,
            save_strategy="steps",
            save_steps=1,
            output_dir="outputs",
            report_to="none",
        ),
    )
    return trainer, trainer.train(resume_from_checkpoint=resume_from_checkpoint)


first, first_stats = train(2)
longer, longer_stats = train(4, resume_from_checkpoint=True)
again, again_stats = train(3, resume_from_checkpoint="outputs/checkpoint-2")
