"""One SFT script, whole, as people have it, for TRL and for jaxtune.compat; prints a line of JSON with its seconds.

    python benchmarks/first_script.py trl|compat MODEL ROWS.jsonl OUTPUT [--steps 120] [--dtype bfloat16] [--timing]

Rows are of GSM8K: {"question": text, "answer": text}. 8 rows a step, LoRA r=16 on all linear layers, a line each step.
"""

import argparse
import json
import time

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("library", choices=("trl", "compat"))
parser.add_argument("model")
parser.add_argument("rows")
parser.add_argument("output")
parser.add_argument("--steps", type=int, default=120)
parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
parser.add_argument("--timing", action="store_true")
options = parser.parse_args()

marks = [time.perf_counter()]

from datasets import Dataset  # noqa: E402

if options.library == "trl":
    import torch
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    dtype, more = getattr(torch, options.dtype), {}
else:
    from jaxtune.compat import AutoModelForCausalLM, AutoTokenizer, LoraConfig, SFTConfig, SFTTrainer

    dtype, more = options.dtype, {"report_timing": True} if options.timing else {}
marks.append(time.perf_counter())

with open(options.rows, encoding="utf-8") as file:
    lines = [json.loads(line) for line in file]
rows = [
    {
        "prompt": [{"role": "user", "content": line["question"]}],
        "completion": [{"role": "assistant", "content": line["answer"]}],
    }
    for line in lines
]
dataset = Dataset.from_list(rows)
tokenizer = AutoTokenizer.from_pretrained(options.model)
model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype, device_map="auto")
marks.append(time.perf_counter())

trainer = SFTTrainer(
    model=model,
    processing_class=tokenizer,
    train_dataset=dataset,
    peft_config=LoraConfig(r=16, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    args=SFTConfig(
        output_dir=options.output,
        max_steps=options.steps,
        per_device_train_batch_size=8,
        learning_rate=2e-4,
        max_length=512,
        logging_steps=1,
        bf16=options.dtype == "bfloat16",
        save_strategy="no",
        report_to="none",
        **more,
    ),
)
marks.append(time.perf_counter())
trainer.train()
marks.append(time.perf_counter())
trainer.save_model(f"{options.output}/adapter")
marks.append(time.perf_counter())

names = ("imports", "model", "trainer", "train", "save")
seconds = {name: end - begin for name, begin, end in zip(names, marks, marks[1:], strict=False)}
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
print("SCRIPT " + json.dumps({"seconds": seconds, "losses": losses}), flush=True)
