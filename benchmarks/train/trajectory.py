"""The same fine-tuning in jaxtune and in transformers + PEFT + torch's AdamW: do the losses agree?

    python benchmarks/train/trajectory.py CASE --tokenizer FOLDER --pretrain TEXT.jsonl ... --rows ROWS.jsonl
                                          --output FILE.json

A model is first pretrained for a short while on real text (there are no published weights here, and LoRA on random
weights would hardly move). Then both sides train LoRA r=16 on it with the same base folder, adapter start, batches and
schedule. The cases: `bf16` is a model of Qwen2.5-0.5B's shape on a GPU; `nf4` and `experts` are small models in fp32,
which a CPU trains: one whose frozen weights bitsandbytes and we hold in NF4, each by its own quantiser, and one whose
experts are adapted too (PEFT's target_parameters). FILE.json keeps its other cases.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.shapes import SHAPES

RANK, LEARNING_RATE, LAST = 16, 2e-4, 50
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
_SMALL = dict(
    hidden_size=256, intermediate_size=640, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    head_dim=64, max_position_embeddings=1024, tie_word_embeddings=True, initializer_range=0.04,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """name: of the model, as tables show it. small: what of the published shape is made smaller; its vocabulary is then
    the tokenizer's. pretrain and tune: (steps, rows, tokens of a row)."""

    name: str
    shape: str
    pretrain: tuple[int, int, int]
    tune: tuple[int, int, int]
    small: dict[str, Any] | None = None
    dtype: str = "float32"
    load_in: str | None = None
    experts: bool = False

    @property
    def adapter(self) -> dict[str, Any]:
        """What get_peft_model, and an AdapterConfig, are told."""
        targets = {"target_modules": list(ATTENTION), "target_parameters": list(EXPERTS)} if self.experts else {}
        return {"r": RANK, "lora_alpha": RANK} | targets


CASES = {
    "bf16": Case("Qwen2.5-0.5B's shape", "qwen2.5-0.5b", (200, 16, 1024), (300, 8, 512), dtype="bfloat16"),
    "nf4": Case("a small Qwen3, frozen in NF4", "qwen3-32b", (250, 8, 256), (300, 4, 256), _SMALL, load_in="nf4"),
    "experts": Case(
        "a small Qwen3 of 8 experts", "qwen3-30b-a3b", (250, 8, 256), (300, 4, 256),
        _SMALL | dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256), experts=True,
    ),
}  # fmt: skip


def torch_side(work: Path, case: Case) -> None:
    """Runs in a process of its own: reads base/, adapter/, batches.npz and weights.npz, writes torch.json."""
    import numpy as np
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    device, dtype = "cuda" if torch.cuda.is_available() else "cpu", getattr(torch, case.dtype)
    batches = np.load(work / "batches.npz")
    in_bits = {}
    if case.load_in == "nf4":
        in_bits["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
        )
    model = AutoModelForCausalLM.from_pretrained(
        work / "base", dtype=dtype, attn_implementation="sdpa", device_map=device, **in_bits
    )
    differences = frozen_differences(model, work / "weights.npz") if case.load_in else {}
    model = PeftModel.from_pretrained(model, work / "adapter", is_trainable=True)
    model.train()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert all(p.dtype == torch.float32 for p in trained.values())
    steps = len(batches["tokens"])
    optimizer = torch.optim.AdamW(trained.values(), lr=LEARNING_RATE, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    losses, norms, started = [], [], time.perf_counter()
    for step in range(steps):
        tokens, targets, weights, segments = (
            torch.from_numpy(batches[k][step]).to(device) for k in ("tokens", "targets", "weights", "segment_ids")
        )
        with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16):
            logits = model(input_ids=tokens.long(), attention_mask=(segments > 0).long()).logits
        nll = torch.nn.functional.cross_entropy(
            logits.float().reshape(-1, logits.shape[-1]), targets.long().reshape(-1), reduction="none"
        )
        loss = (nll * weights.reshape(-1)).sum() / weights.sum()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    seconds = time.perf_counter() - started
    facts = {"losses": losses, "norms": norms, "seconds": seconds, "device": device, "frozen": differences}
    (work / "torch.json").write_text(json.dumps(facts | {"trained": sum(p.numel() for p in trained.values())}))


def frozen_differences(model, ours: Path) -> dict[str, Any]:
    """How far the weights that bitsandbytes decodes are from ours.

    Returns:
      matrices, elements; differing: elements that are not the same but for rounding; the largest_difference.
    """
    import bitsandbytes.functional as bnb
    import numpy as np

    decoded = np.load(ours)
    theirs = {
        name: bnb.dequantize_4bit(p.data, p.quant_state).float().cpu().numpy()
        for name, p in model.named_parameters()
        if getattr(p, "quant_state", None) is not None
    }
    assert theirs.keys() == set(decoded), theirs.keys() ^ set(decoded)
    differences = [np.abs(theirs[name] - decoded[name]) for name in theirs]
    return {
        "matrices": len(theirs),
        "elements": sum(difference.size for difference in differences),
        "differing": int(sum((difference > 1e-6).sum() for difference in differences)),
        "largest_difference": float(max(difference.max() for difference in differences)),
    }


def our_side(case: Case, options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Pretrains, writes base/, adapter/ and batches.npz, trains; what our side found."""
    import jax
    import numpy as np
    from transformers import AutoTokenizer

    import jaxtune
    from jaxtune.models.hf import model_from_config
    from jaxtune.models.lora import linears
    from jaxtune.pallas.formats import Stored, dense
    from jaxtune.train import TrainConfig, Trainer
    from jaxtune.train.config import (
        AdapterConfig,
        CheckpointConfig,
        DataConfig,
        EvaluationConfig,
        ModelConfig,
        OptimConfig,
        ScheduleConfig,
    )

    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    shape = SHAPES[case.shape]
    if case.small:
        shape = shape | case.small | {"vocab_size": len(tokenizer)}
    precision = "bf16" if case.dtype == "bfloat16" else "fp32"
    common: dict[str, Any] = dict(
        precision=precision,
        checkpoint=CheckpointConfig(every_minutes=None),
        evaluation=EvaluationConfig(at_end=False),
    )

    steps, rows, length = case.pretrain
    pretraining = Trainer(
        model_from_config(shape, jax.random.key(0), case.dtype),
        tokenizer,
        TrainConfig(
            model=ModelConfig(path=case.shape),
            data=DataConfig(train=options.pretrain[0], length=length, train_on="all"),
            steps=steps,
            rows_per_step=rows,
            optim=OptimConfig(learning_rate=6e-4, weight_decay=0.1, beta2=0.95),
            schedule=ScheduleConfig(name="cosine", warmup_steps=20),
            output=str(work / "pretrain"),
            **common,
        ),
        train_rows=options.pretrain,
    )
    jaxtune.save_pretrained(pretraining.train(), work / "base", tokenizer=tokenizer)
    pretrain_losses = [line["loss"] for line in pretraining.history]
    del pretraining

    model, tokenizer = jaxtune.from_pretrained(work / "base", dtype=case.dtype, load_in=case.load_in)
    weights = {f"{name}.weight": linear.weight.get_value() for name, linear in linears(model)}
    stored = {name: np.asarray(dense(weight)) for name, weight in weights.items() if isinstance(weight, Stored)}
    np.savez(work / "weights.npz", **stored)
    model = jaxtune.get_peft_model(model, **case.adapter)
    jaxtune.save_adapter(model, work / "adapter")
    steps, rows, length = case.tune
    config = TrainConfig(
        model=ModelConfig(path=str(work / "base")),
        data=DataConfig(train=options.rows, length=length, packing=False),
        adapter=AdapterConfig(**case.adapter),
        steps=steps,
        rows_per_step=rows,
        optim=OptimConfig(learning_rate=LEARNING_RATE),
        output=str(work / "ours"),
        **common,
    )
    trainer = Trainer(model, tokenizer, config)
    taken = [trainer.batches.batch_at(step) for step in range(steps)]
    np.savez(
        work / "batches.npz",
        **{k: np.stack([getattr(b, k) for b in taken]) for k in ("tokens", "targets", "weights", "segment_ids")},
    )
    started = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - started
    lines = [line for line in trainer.history if "loss" in line]
    trained = sum(
        matrix.lora.a.size + matrix.lora.b.size for _, matrix in jaxtune.models.lora.matrices(model) if matrix.lora
    )
    return {
        "losses": [line["loss"] for line in lines],
        "norms": [line["grad_norm"] for line in lines],
        "seconds": seconds,
        "trained": trained,
        "pretrain_losses": pretrain_losses,
    }


def compared(case: Case, ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Both curves and how far they are apart.

    Raises:
      ValueError: the two did not train as many parameters, or for as many steps.
    """
    import numpy as np

    for key in ("trained", "losses", "norms"):
        counts = [value if key == "trained" else len(value) for value in (ours[key], theirs[key])]
        if counts[0] != counts[1]:
            raise ValueError(f"{key}: {counts[0]:,} of ours and {counts[1]:,} of theirs")
    difference = np.abs(np.array(ours["losses"]) - np.array(theirs["losses"]))
    apart = np.flatnonzero(difference > 1e-4)
    return {
        "shape": case.shape,
        "name": case.name,
        "precision": "bf16" if case.dtype == "bfloat16" else "fp32",
        "load_in": case.load_in,
        "adapter": case.adapter,
        "steps": len(ours["losses"]),
        "trained_parameters": ours["trained"],
        "frozen_weights": theirs["frozen"],
        "pretrain_losses": ours["pretrain_losses"],
        "ours": ours["losses"],
        "torch_peft": theirs["losses"],
        "ours_grad_norm": ours["norms"],
        "torch_peft_grad_norm": theirs["norms"],
        "seconds_ours": ours["seconds"],
        "seconds_torch_peft": theirs["seconds"],
        "first_step_over_1e-4": int(apart[0]) + 1 if len(apart) else None,
        "mean_difference_last_50": float(difference[-LAST:].mean()),
        "largest_difference": float(difference.max()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--tokenizer", required=True, help="folder of a tokenizer that fits the model's vocabulary")
    parser.add_argument("--pretrain", required=True, nargs="+", help="text rows")
    parser.add_argument("--rows", required=True, help="rows to fine-tune on")
    parser.add_argument("--output", required=True)
    parser.add_argument("--torch-side", help=argparse.SUPPRESS)
    options = parser.parse_args()
    case = CASES[options.case]
    if options.torch_side:
        torch_side(Path(options.torch_side), case)
        return 0

    from benchmarks.record import environment, write

    work = Path(tempfile.mkdtemp())
    ours = our_side(case, options, work)
    subprocess.run([sys.executable, __file__, *sys.argv[1:], "--torch-side", str(work)], check=True)
    theirs = json.loads((work / "torch.json").read_text())
    record = {**environment(), **compared(case, ours, theirs)}
    output = Path(options.output)
    before = json.loads(output.read_text(encoding="utf-8"))["cases"] if output.is_file() else {}
    write(output, {"benchmark": "train/trajectory", "cases": before | {options.case: record}})
    print(json.dumps({k: v for k, v in record.items() if not isinstance(v, list)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
