"""A peer's own trainer at one setting, at several micro-batches in turn: a process that writes JSON as figures come.

    python -m benchmarks.peers.trained --peer unsloth|trl --model FOLDER --recompute unsloth|true|false --output FILE
                                       [--load-in nf4] [--liger] [--padded] [--micro-batches 8,4,2,1] [--go FILE]
                                       [--documents FILE]

Every optimizer step is of `--rows` rows of `--length` random tokens, or of the documents of a file (documents.py) as
the trainer packs them: a micro-batch of m rows, rows / m of them accumulated. The next one is tried while it is faster
than the one before. What is timed is the trainer's whole step, between two synchronisations of the device; tokens are
real ones, without padding.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.peers.documents import read_documents

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RANK, WARM = 16, 2
PACKAGES = (
    *(
        "unsloth",
        "unsloth_zoo",
        "trl",
        "peft",
        "transformers",
        "accelerate",
        "bitsandbytes",
        "liger-kernel",
        "datasets",
    ),
    *("torch", "triton", "xformers", "flash-attn", "torchao", "cut-cross-entropy"),
)
Loader = Callable[[], tuple[Any, Any]]


def installed(names: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """{package: version} of those that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def unsloth_loader(options: argparse.Namespace) -> Loader:
    """Imports Unsloth; the function returned loads its model with LoRA."""
    from unsloth import FastLanguageModel  # isort: skip
    import torch

    recompute = {"unsloth": "unsloth", "true": True, "false": False}[options.recompute]

    def load() -> tuple[Any, Any]:
        model, tokenizer = FastLanguageModel.from_pretrained(
            model_name=options.model,
            max_seq_length=options.length,
            dtype=torch.bfloat16,
            load_in_4bit=options.load_in == "nf4",
            use_gradient_checkpointing=recompute,
        )
        model = FastLanguageModel.get_peft_model(
            model,
            r=RANK,
            lora_alpha=RANK,
            lora_dropout=0,
            bias="none",
            target_modules=TARGETS,
            use_gradient_checkpointing=recompute,
            random_state=0,
        )
        return model, tokenizer

    return load


def trl_loader(options: argparse.Namespace) -> Loader:
    """Imports TRL, PEFT and transformers; the function returned loads their model with LoRA."""
    import peft
    import torch
    import trl
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

    if options.recompute == "unsloth":
        raise SystemExit("--recompute unsloth is Unsloth's; trl has true and false")
    trl.SFTTrainer  # noqa: B018 (loads its module before the device is free)
    attention = "flash_attention_2" if options.documents and find_spec("flash_attn") else "sdpa"

    def load() -> tuple[Any, Any]:
        quantization = None
        if options.load_in == "nf4":
            quantization = BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_quant_type="nf4",
                bnb_4bit_use_double_quant=True,
                bnb_4bit_compute_dtype=torch.bfloat16,
            )
        model = AutoModelForCausalLM.from_pretrained(
            options.model,
            dtype=torch.bfloat16,
            attn_implementation=attention,
            quantization_config=quantization,
            device_map={"": 0} if torch.cuda.is_available() else None,
        )
        if quantization is not None:
            model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        config = peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=TARGETS, task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, config)
        for parameter in model.parameters():  # autocast computes in 16 bits; the adapters' own are 32, as here
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        return model, AutoTokenizer.from_pretrained(options.model)

    return load


def steps_of(model: Any, tokenizer: Any, micro: int, options: argparse.Namespace, **settings: Any) -> dict[str, Any]:
    """Figures of one micro-batch: seconds a step, tokens/s, peak bytes of the allocator, losses."""
    import datasets
    import torch
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    gpu, ends = torch.cuda.is_available(), {}

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if state.global_step in (WARM, WARM + options.steps):
                if gpu:
                    torch.cuda.synchronize()
                ends[state.global_step] = time.perf_counter()

    if options.documents:
        rows = read_documents(options.documents, options.length)
        settings["packing"] = True
    else:
        draw = torch.Generator().manual_seed(micro)
        count = options.rows * (WARM + options.steps)
        rows = torch.randint(0, model.config.vocab_size, (count, options.length), generator=draw).tolist()
    settings["gradient_checkpointing"] = options.recompute != "false"
    if options.padded:
        settings["padding_free"] = False
    if options.liger:
        settings["use_liger_kernel"] = True
    config = SFTConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=options.rows // micro,
        max_steps=WARM + options.steps,
        learning_rate=2e-4,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused" if gpu else "adamw_torch",
        bf16=gpu,
        use_cpu=not gpu,
        max_length=options.length,
        logging_steps=options.steps,
        logging_first_step=True,
        save_strategy="no",
        report_to="none",
        seed=0,
        **settings,
    )
    trainer = SFTTrainer(
        model=model,
        args=config,
        train_dataset=datasets.Dataset.from_dict({"input_ids": rows}),
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    collate, counts = trainer.data_collator, []

    def counted(examples: list[Any]) -> Any:
        batch = collate(examples)
        mask = batch.get("attention_mask")
        counts.append(int(batch["input_ids"].numel() if mask is None else mask.sum()))
        return batch

    trainer.data_collator = counted
    if gpu:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    parts = options.rows // micro
    tokens = sum(counts[WARM * parts : (WARM + options.steps) * parts]) / options.steps
    seconds = (ends[WARM + options.steps] - ends[WARM]) / options.steps
    return {
        "micro_batch": micro,
        **settings,
        "padding_free": bool(getattr(trainer, "padding_free", False)),
        "recomputing": bool(trainer.args.gradient_checkpointing),
        "attention": model.config._attn_implementation,
        "step_seconds": seconds,
        "tokens_per_step": tokens,
        "tokens_per_second": tokens / seconds,
        "peak_memory_gb": torch.cuda.max_memory_allocated() / 1e9 if gpu else None,
        "peak_reserved_gb": torch.cuda.max_memory_reserved() / 1e9 if gpu else None,
        "losses": [line["loss"] for line in trainer.state.log_history if "loss" in line],
    }


def attempt(model: Any, tokenizer: Any, micro: int, options: argparse.Namespace, **settings: Any) -> dict[str, Any]:
    """As steps_of, or {"failed": why}."""
    import torch

    try:
        return steps_of(model, tokenizer, micro, options, **settings)
    except Exception as error:
        failed = {"micro_batch": micro, **settings, "failed": f"{type(error).__name__}: {error}"[:400]}
        traceback.print_exc()
        error.__traceback__ = None  # its frames hold the step's arrays
    model.zero_grad(set_to_none=True)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return failed


def measure(options: argparse.Namespace) -> None:
    begun = time.perf_counter()
    record: dict[str, Any] = {"peer": options.peer, "recompute": options.recompute, "tried": []}
    load = {"unsloth": unsloth_loader, "trl": trl_loader}[options.peer](options)
    record |= {"versions": installed(), "import_seconds": time.perf_counter() - begun}
    while options.go and not options.go.exists():
        time.sleep(0.1)
    begun = time.perf_counter()
    model, tokenizer = load()
    record["load_seconds"] = time.perf_counter() - begun

    def add(figures: dict[str, Any]) -> float:
        record["tried"].append(figures)
        options.output.write_text(json.dumps(record), encoding="utf-8")
        print(json.dumps(figures), flush=True)
        return figures.get("tokens_per_second", 0.0)

    fastest = 0.0
    for micro in map(int, options.micro_batches.split(",")):
        speed = add(attempt(model, tokenizer, micro, options))
        if fastest and speed < fastest:
            break
        fastest = max(fastest, speed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", required=True, choices=("unsloth", "trl"))
    parser.add_argument("--model", required=True)
    parser.add_argument("--recompute", required=True, choices=("unsloth", "true", "false"))
    parser.add_argument("--output", required=True, type=lambda text: Path(text).resolve())
    parser.add_argument("--load-in", choices=("nf4",))
    parser.add_argument("--liger", action="store_true")
    parser.add_argument("--padded", action="store_true", help="padding_free=False, by which Unsloth compiles blocks")
    parser.add_argument("--micro-batches", default="8,4,2,1")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=5, help="that are timed, after two that are not")
    parser.add_argument("--documents", type=Path, help="a file of token ids, which are packed")
    parser.add_argument("--go", type=Path, help="nothing touches the device before this file exists")
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("UNSLOTH_DISABLE_STATISTICS", "1")
    measure(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
