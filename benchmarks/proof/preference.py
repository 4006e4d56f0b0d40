"""DPO here and in TRL on the same pairs: margins, accuracies and losses, of training and of held-out pairs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.proof.curves import write_folder
from benchmarks.proof.work import ROOT, Run, path, read_rows, save, train_all, write_rows

HELD_OUT, BETA, RATE, PER_STEP = 48, 0.1, 5e-5, 8


def pairs(file: Path, output: Path) -> tuple[Path, Path]:
    """(training pairs, held-out pairs) in TRL's conversational form."""
    roles = {"human": "user", "gpt": "assistant", "system": "system"}

    def turn(said: dict[str, str]) -> dict[str, str]:
        return {"role": roles[said["from"]], "content": said["value"]}

    rows = [
        {
            "prompt": list(map(turn, row["conversations"])),
            "chosen": [turn(row["chosen"])],
            "rejected": [turn(row["rejected"])],
        }
        for row in read_rows(file)
    ]
    write_rows(output / "pairs_train.jsonl", rows[HELD_OUT:])
    write_rows(output / "pairs_eval.jsonl", rows[:HELD_OUT])
    return output / "pairs_train.jsonl", output / "pairs_eval.jsonl"


def trl_side(folder: Path, train: Path, held_out: Path, output: Path, steps: int) -> None:
    import datasets
    import peft
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    gpu = torch.cuda.is_available()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16 if gpu else torch.float32)
    args = DPOConfig(
        output_dir=str(output / "trl"),
        report_to=[],
        use_cpu=not gpu,
        bf16=gpu,
        beta=BETA,
        learning_rate=RATE,
        max_length=1024,
        per_device_train_batch_size=PER_STEP,
        per_device_eval_batch_size=PER_STEP,
        max_steps=steps,
        lr_scheduler_type="constant",
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=max(1, steps // 4),
        eval_on_start=True,
        save_strategy="no",
        gradient_checkpointing=False,
    )
    trainer = DPOTrainer(
        model=model,
        args=args,
        train_dataset=datasets.Dataset.from_list(read_rows(train)),
        eval_dataset=datasets.Dataset.from_list(read_rows(held_out)),
        processing_class=AutoTokenizer.from_pretrained(folder),
        peft_config=peft.LoraConfig(r=16, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.train()
    (output / "trl.json").write_text(json.dumps(trainer.state.log_history), encoding="utf-8")


def run(model: Path, file: Path, output: Path, steps: int, seconds: float) -> None:
    until, folder = time.time() + seconds, output / "model"
    output.mkdir(parents=True, exist_ok=True)
    train, held_out = pairs(file, output)
    if not folder.exists():
        write_folder(model, folder)
    words = ["--side", "trl", "--model", str(folder), "--rows", str(file), "--output", str(output)]
    with open(output / "trl.log", "w", encoding="utf-8") as log:
        theirs = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.proof", "preference", *words, "--steps", str(steps)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path()},
            stdout=log,
            stderr=log,
        )
    own = [
        f"model.path={folder}",
        f"data.train={train}",
        f"data.eval={held_out}",
        "data.length=1024",
        "data.packing=step",
        "data.num_workers=2",
        "objective.name=dpo",
        f"objective.beta={BETA}",
        f"optim.learning_rate={RATE}",
        "schedule.name=constant",
        "schedule.warmup_ratio=null",
        f"steps={steps}",
        f"rows_per_step={PER_STEP}",
        "precision=bf16",
        "evaluation.at_start=true",
        f"evaluation.every_steps={max(1, steps // 4)}",
        "checkpoint.every_minutes=null",
        "export.merged=false",
    ]
    found = train_all([Run("jaxtune", ())], own, output, 2, until - 10)
    while theirs.poll() is None and time.time() < until:
        time.sleep(0.5)
    if theirs.poll() is None:
        theirs.kill()
    done = output / "trl.json"
    log_history: list[dict[str, Any]] = json.loads(done.read_text()) if done.exists() else []
    save(output, "preference", {"steps": steps, "beta": BETA, "jaxtune": found.get("jaxtune"), "trl": log_history})
