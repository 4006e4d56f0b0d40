"""The same fine-tuning in jaxtune and in transformers + PEFT + torch AdamW on one GPU: do the losses agree?

    python benchmarks/train/trajectory.py --tokenizer FOLDER --pretrain TEXT.jsonl --rows ROWS.jsonl --output FILE.json

A model of Qwen2.5-0.5B's shape is first pretrained for a short while on real text (there are no published weights
here, and LoRA on random weights would hardly move). Then both sides train LoRA r=16 on all linears in bf16 with the
same base folder, adapter start, batches and schedule. Reported: both curves, and their mean difference over the last
50 steps.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

RANK, LEARNING_RATE = 16, 2e-4


def torch_side(work: Path) -> None:
    """Runs in a process of its own: reads base/, adapter/ and batches.npz, writes torch.json."""
    import numpy as np
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    batches = np.load(work / "batches.npz")
    model = AutoModelForCausalLM.from_pretrained(work / "base", dtype=torch.bfloat16, attn_implementation="sdpa")
    model = PeftModel.from_pretrained(model.to(device), work / "adapter", is_trainable=True)
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert all(p.dtype == torch.float32 for p in trained)
    steps = len(batches["tokens"])
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    losses, started = [], time.perf_counter()
    for step in range(steps):
        tokens, targets, weights, segments = (
            torch.from_numpy(batches[k][step]).to(device) for k in ("tokens", "targets", "weights", "segment_ids")
        )
        with torch.autocast(device, torch.bfloat16):
            logits = model(input_ids=tokens.long(), attention_mask=(segments > 0).long()).logits
        nll = torch.nn.functional.cross_entropy(
            logits.float().reshape(-1, logits.shape[-1]), targets.long().reshape(-1), reduction="none"
        )
        loss = (nll * weights.reshape(-1)).sum() / weights.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    seconds = time.perf_counter() - started
    (work / "torch.json").write_text(json.dumps({"losses": losses, "seconds": seconds}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True, help="folder of a tokenizer that fits Qwen2.5's vocabulary")
    parser.add_argument("--pretrain", required=True, nargs="+", help="text rows")
    parser.add_argument("--rows", required=True, help="rows to fine-tune on")
    parser.add_argument("--pretrain-steps", type=int, default=200)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--shape", default="qwen2.5-0.5b")
    parser.add_argument("--output", required=True)
    parser.add_argument("--torch-side", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.torch_side:
        torch_side(Path(options.torch_side))
        return 0

    import jax
    import numpy as np
    from transformers import AutoTokenizer

    import jaxtune
    from benchmarks.record import environment, write
    from benchmarks.shapes import SHAPES
    from jaxtune.models.hf import model_from_config
    from jaxtune.train import TrainConfig, Trainer
    from jaxtune.train.config import (
        AdapterConfig,
        CheckpointConfig,
        DataConfig,
        ModelConfig,
        OptimConfig,
        ScheduleConfig,
    )

    work = Path(tempfile.mkdtemp())
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    none = CheckpointConfig(every_minutes=None)

    model = model_from_config(SHAPES[options.shape], jax.random.key(0), "bfloat16")
    config = TrainConfig(
        model=ModelConfig(path=options.shape),
        data=DataConfig(train=options.pretrain[0], length=1024, train_on="all"),
        steps=options.pretrain_steps,
        rows_per_step=16,
        optim=OptimConfig(learning_rate=6e-4, weight_decay=0.1, beta2=0.95),
        schedule=ScheduleConfig(name="cosine", warmup_steps=20),
        checkpoint=none,
        output=str(work / "pretrain"),
    )
    pretraining = Trainer(model, tokenizer, config, train_rows=options.pretrain)
    model = pretraining.train()
    jaxtune.save_pretrained(model, work / "base", tokenizer=tokenizer)
    pretrain_losses = [line["loss"] for line in pretraining.history]
    del pretraining, model

    model, tokenizer = jaxtune.from_pretrained(work / "base", dtype="bfloat16")
    model = jaxtune.get_peft_model(model, r=RANK, lora_alpha=RANK)
    jaxtune.save_adapter(model, work / "adapter")
    config = TrainConfig(
        model=ModelConfig(path=str(work / "base")),
        data=DataConfig(train=options.rows, length=512, packing=False),
        adapter=AdapterConfig(r=RANK, lora_alpha=RANK),
        steps=options.steps,
        rows_per_step=8,
        optim=OptimConfig(learning_rate=LEARNING_RATE),
        checkpoint=none,
        output=str(work / "ours"),
    )
    trainer = Trainer(model, tokenizer, config)
    taken = [trainer.batches.batch_at(step) for step in range(options.steps)]
    np.savez(
        work / "batches.npz",
        **{k: np.stack([getattr(b, k) for b in taken]) for k in ("tokens", "targets", "weights", "segment_ids")},
    )
    started = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - started
    ours = [line["loss"] for line in trainer.history if "loss" in line]

    command = [sys.executable, __file__, "--torch-side", str(work)]
    for key in ("tokenizer", "rows", "output"):
        command += [f"--{key}", getattr(options, key)]
    subprocess.run([*command, "--pretrain", *options.pretrain], check=True)
    theirs = json.loads((work / "torch.json").read_text())
    difference = np.abs(np.array(ours) - np.array(theirs["losses"]))
    record = {
        "benchmark": "train/trajectory",
        **environment(),
        "shape": options.shape,
        "steps": options.steps,
        "pretrain_losses": pretrain_losses,
        "ours": ours,
        "torch_peft": theirs["losses"],
        "seconds_ours": seconds,
        "seconds_torch_peft": theirs["seconds"],
        "mean_difference_last_50": float(difference[-50:].mean()),
        "largest_difference": float(difference.max()),
    }
    write(options.output, record)
    print(json.dumps({k: v for k, v in record.items() if not isinstance(v, list)}))
    print("ours ", [round(x, 3) for x in ours[::30]], "torch", [round(x, 3) for x in theirs["losses"][::30]])
    return 0


if __name__ == "__main__":
    sys.exit(main())
