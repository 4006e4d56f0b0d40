"""Where the time of one train step goes, ours beside Hugging Face + PEFT: same model, same tokens, one GPU.

    python benchmarks/train/profile_pair.py FOLDER [--shape llama-3.1-8b] [--rows 8] [--length 2048] [--steps 3]
                                            [--checkpointing auto|on|off] [--limit-layers N]

Ours is recorded with jaxtune.profile.capture, theirs with torch.profiler; both train LoRA (rank 16) on all seven
linears of random bf16 weights made on the device. FOLDER gets ours/, hf.json.gz, the comparison as compare.json and
compare.html, and the times as pair.json. Each side runs in a process of its own, so that each has the whole memory.
`--checkpointing auto` turns gradient checkpointing on for theirs only if the step does not fit without; pair.json says
which it was.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.94")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.record import environment, write
from benchmarks.shapes import SHAPES

RANK = 16
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def record_ours(folder: Path, shape: dict, rows: int, length: int, steps: int, what: str) -> dict:
    """Captures `steps` steps of the Trainer's own programs into `folder`; returns step times around the capture."""
    import jax
    import numpy as np

    import jaxtune
    from benchmarks.train.step import random_documents
    from jaxtune.models.hf import model_from_config
    from jaxtune.train.config import AdapterConfig, DataConfig, ModelConfig, TrainConfig
    from jaxtune.train.config_file import config_to_dict
    from jaxtune.train.data import TokenDataset
    from jaxtune.train.data.cache import Summary
    from jaxtune.train.planning.plan import residuals_text
    from jaxtune.train.trainer import Trainer

    model = model_from_config(shape, jax.random.key(0), "bfloat16")
    model = jaxtune.get_peft_model(model, r=RANK, lora_alpha=RANK)
    config = TrainConfig(
        model=ModelConfig(path="random"),
        data=DataConfig(train="random tokens", length=length),
        adapter=AdapterConfig(r=RANK, lora_alpha=RANK),
        steps=100,
        rows_per_step=rows,
        output=tempfile.mkdtemp(),
    )
    documents = random_documents("full", rows, length, shape["vocab_size"])
    trainer = Trainer(model, None, config, TokenDataset(documents, Summary(), length))
    del model
    state, sums, frozen = trainer.model.first_state(trainer.engine)
    programs = trainer.engine.compile(state, sums, frozen)
    batch = trainer.engine.load_step(0)[0][0]
    index = jax.device_put(np.int32(0), trainer.engine.replicated)
    held = [state, sums]

    def run(count):
        times = []
        for _ in range(count):
            began = time.perf_counter()
            held[1] = programs.accumulate(held[1], held[0], frozen, batch, index)
            held[0], held[1], latest = programs.update(*held)
            float(latest["loss"])
            times.append(time.perf_counter() - began)
        return times

    run(3)
    before = run(5)
    meta = {
        "tokens_per_step": rows * length,
        "what": f"{what}, residuals {residuals_text(trainer.planner.plan.residuals)}",
        "shape": shape,
        "config": config_to_dict(config),
    }
    with jaxtune.profile.capture(folder, meta, {"accumulate": programs.accumulate, "update": programs.update}):
        inside = run(steps)
    after = run(5)
    median = statistics.median
    return {"step_seconds_before": before, "step_seconds_captured": inside, "step_seconds_after": after,
            "capture_slows_by": median(inside) / median(before) - 1,
            "steps_after_slower_by": median(after) / median(before) - 1}  # fmt: skip


def record_hf(file: Path, shape: dict, rows: int, length: int, steps: int, what: str, checkpointing: str) -> dict:
    """Writes a Chrome trace of `steps` steps of transformers + PEFT to `file` (.json.gz)."""
    import torch
    from peft import LoraConfig, get_peft_model
    from torch.profiler import ProfilerActivity, profile, record_function, schedule
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    keys = {k: v for k, v in shape.items() if k != "model_type"}
    config = AutoConfig.for_model(shape["model_type"], **keys)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    torch.set_default_dtype(torch.float32)
    model.config.use_cache = False
    model = get_peft_model(
        model, LoraConfig(r=RANK, lora_alpha=RANK, target_modules=list(LINEARS), task_type="CAUSAL_LM")
    )
    model.train()
    name_modules(model, record_function)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    tokens = torch.randint(0, shape["vocab_size"], (rows, length), device="cuda")

    def step():
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    used = checkpointing
    if checkpointing == "on":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    try:
        step()
    except torch.OutOfMemoryError:
        if checkpointing != "auto":
            raise
    else:
        used = "off" if checkpointing == "auto" else checkpointing
    if used == "auto":
        used = "on"
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    times = []
    for _ in range(3):
        began = time.perf_counter()
        step()
        times.append(time.perf_counter() - began)
    with tempfile.TemporaryDirectory() as scratch:
        raw = Path(scratch) / "trace.json"
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        plan = schedule(wait=0, warmup=1, active=steps, repeat=1)

        def save(profiler):
            profiler.export_chrome_trace(str(raw))

        with profile(activities=activities, schedule=plan, record_shapes=True, on_trace_ready=save) as profiler:
            profiler.add_metadata_json("tokens_per_step", json.dumps(rows * length))
            profiler.add_metadata_json("what", json.dumps(f"{what}, gradient checkpointing {used}"))
            for _ in range(steps + 1):
                step()
                torch.cuda.synchronize()
                profiler.step()
        with raw.open("rb") as source, gzip.open(file, "wb", compresslevel=6) as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    return {"gradient_checkpointing": used, "step_seconds": times, "peak_bytes": torch.cuda.max_memory_allocated()}


def name_modules(model, record_function) -> None:
    """Marks each module's forward in the trace with its kind, so that its kernels have a scope."""
    kinds = {"self_attn": "attention", "mlp": "mlp", "embed_tokens": "embed", "lm_head": "head", "norm": "final_norm"}
    kinds |= {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
    kinds |= dict.fromkeys(LINEARS)

    def mark(module, name):
        ranges = []

        def enter(*_):
            ranges.append(record_function(name))
            ranges[-1].__enter__()

        def leave(*_):
            ranges.pop().__exit__(None, None, None)

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)

    for path, module in model.named_modules():
        last = path.rsplit(".", 1)[-1]
        if last in kinds:
            mark(module, kinds[last] or last)


def _run_both(options) -> int:
    folder = Path(options.folder)
    folder.mkdir(parents=True, exist_ok=True)
    arguments = [a for a in sys.argv[1:] if a != options.folder]
    for side in ("ours", "hf"):
        done = subprocess.run([sys.executable, __file__, options.folder, *arguments, "--side", side], check=False)
        if done.returncode:
            print(f"recording {side} failed", file=sys.stderr)
            return done.returncode
    import jaxtune

    comparison = jaxtune.profile.compare(folder / "hf.json.gz", folder / "ours")
    (folder / "compare.json").write_text(json.dumps(comparison.to_dict(), indent=1), encoding="utf-8")
    (folder / "compare.html").write_text(comparison.to_html(), encoding="utf-8")
    print(comparison)
    ours, theirs = (json.loads((folder / f"{side}_run.json").read_text(encoding="utf-8")) for side in ("ours", "hf"))
    record = {
        "benchmark": "train/pair",
        **environment(),
        "shape": options.shape,
        "rows": options.rows,
        "length": options.length,
        "ours_step_seconds": ours["step_seconds_before"] + ours["step_seconds_after"],
        "ours_capture_slows_by": ours["capture_slows_by"],
        "ours_steps_after_slower_by": ours["steps_after_slower_by"],
        "hf_peft_step_seconds": theirs["step_seconds"],
        "hf_peft_gradient_checkpointing": theirs["gradient_checkpointing"],
        "hf_peft_peak_gb": theirs["peak_bytes"] / 1e9,
        "speedup": statistics.median(theirs["step_seconds"]) / statistics.median(ours["step_seconds_before"]),
        "sentences": comparison.sentences,
    }
    write(folder / "pair.json", record)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--shape", default="llama-3.1-8b", choices=list(SHAPES))
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--checkpointing", default="auto", choices=["auto", "on", "off"])
    parser.add_argument("--limit-layers", type=int, help="fewer layers, for a quick try")
    parser.add_argument("--side", choices=["ours", "hf"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side is None:
        return _run_both(options)
    shape = dict(SHAPES[options.shape])
    if options.limit_layers:
        shape["num_hidden_layers"] = options.limit_layers
    folder = Path(options.folder)
    what = f"{options.shape}, LoRA rank {RANK}, bf16, {options.rows} x {options.length:,} tokens a step"
    common = (shape, options.rows, options.length, options.steps, what)
    began = time.perf_counter()
    if options.side == "ours":
        shutil.rmtree(folder / "ours", ignore_errors=True)
        result = record_ours(folder / "ours", *common)
    else:
        result = record_hf(folder / "hf.json.gz", *common, options.checkpointing)
    result["recorded_in_seconds"] = time.perf_counter() - began
    with contextlib.suppress(OSError):
        (folder / f"{options.side}_run.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
