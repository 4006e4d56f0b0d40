"""Speed and memory of LoRA steps of Hugging Face transformers + PEFT (+ bitsandbytes), beside ours in the same call.

    python benchmarks/train/hf_peft.py [CASE ...] [--rows 8] [--length 2048] [--steps 4] [--seconds 235]
                                        --output FILE.json

Theirs is run as its users run it: transformers' own Trainer with bf16=True (autocast), fused AdamW, clipping and SDPA
attention (gpt-oss's sinks have only the eager form there), LoRA r=16 on all linears and on the experts of a model that
has them, gradient checkpointing on; four-bit linears are bitsandbytes' NF4 with double quantisation, their adapters
bf16 as TRL makes them. The cases `*_kept` have gradient checkpointing off, and as many rows at once as then fit.
Ours are cases of benchmarks/cases.py. All train a published shape with random weights made on the device on the same
number of tokens. FILE.json is written as each case ends.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import compare
from benchmarks.cases import STEPS
from benchmarks.record import honest, write
from benchmarks.shapes import SHAPES

RANK = 16
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
FEED_FORWARD = ["gate_proj", "up_proj", "down_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
WARM_UP = 2
THEIRS: dict[str, dict[str, Any]] = {
    "hf_8b": {"shape": "llama-3.1-8b", "load_in": None, "recomputes": "every layer"},
    "hf_8b_nf4": {"shape": "llama-3.1-8b", "load_in": "nf4", "recomputes": "every layer"},
    "hf_gpt_oss": {"shape": "gpt-oss-20b", "load_in": None, "recomputes": "every layer"},
    "hf_8b_kept": {"shape": "llama-3.1-8b", "load_in": None, "recomputes": "nothing"},
    "hf_8b_nf4_kept": {"shape": "llama-3.1-8b", "load_in": "nf4", "recomputes": "nothing"},
    "hf_qwen3_moe": {"shape": "qwen3-30b-a3b", "load_in": None, "recomputes": "every layer"},
}
OURS = ("8b", "8b_24gb", "gpt_oss", "8b_nf4", "qwen3_moe")
DEFAULT = ("hf_8b", "hf_8b_nf4", "hf_gpt_oss", "8b", "8b_24gb", "gpt_oss", "hf_8b_kept", "hf_8b_nf4_kept")


def four_bit(model) -> None:
    """Replaces every linear of the layers by bitsandbytes' NF4 linear with the same weight."""
    import bitsandbytes as bnb
    import torch

    for layer in model.model.layers:
        for path, linear in list(layer.named_modules()):
            if not isinstance(linear, torch.nn.Linear):
                continue
            parent, _, name = path.rpartition(".")
            where = linear.weight.device
            replaced = bnb.nn.Linear4bit(
                linear.in_features, linear.out_features, bias=linear.bias is not None, quant_type="nf4",
                compute_dtype=torch.bfloat16, compress_statistics=True, device="meta",
            )  # fmt: skip
            weight = bnb.nn.Params4bit(
                linear.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=True, module=replaced
            )
            replaced.weight, replaced.bias = weight.to(where), linear.bias
            setattr(layer.get_submodule(parent), name, replaced)
    model.is_loaded_in_4bit = True  # from_pretrained sets it; PEFT takes its four-bit adapters by it


def make_model(shape: dict, load_in: str | None):
    """The model with its adapter, on the device."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(shape["model_type"], **{k: v for k, v in shape.items() if k != "model_type"})
    attention = "eager" if shape["model_type"] == "gpt_oss" else "sdpa"
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    torch.set_default_dtype(torch.float32)
    model.config.use_cache = False
    if load_in == "nf4":
        four_bit(model)
    has_experts = any("experts" in name for name, _ in model.named_parameters())
    adapter = LoraConfig(
        r=RANK, lora_alpha=RANK, target_modules=ATTENTION if has_experts else ATTENTION + FEED_FORWARD,
        target_parameters=EXPERTS if has_experts else None, task_type="CAUSAL_LM",
    )  # fmt: skip
    return get_peft_model(model, adapter, autocast_adapter_dtype=load_in is None)


def train(model, case: dict, vocab: int, rows: int, at_once: int, length: int, steps: int) -> dict:
    """Trains 2 + `steps` steps of `rows` rows, `at_once` of them in a forward; the figures of the last `steps`."""
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    cuda = torch.cuda.is_available()
    ends = []

    class Clock(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if cuda:
                torch.cuda.synchronize()
            ends.append(time.perf_counter())

    tokens = torch.randint(0, vocab, (rows * (WARM_UP + steps), length))
    kept = case["recomputes"] == "nothing"
    settings = TrainingArguments(
        output_dir=tempfile.mkdtemp(), max_steps=WARM_UP + steps, per_device_train_batch_size=at_once,
        gradient_accumulation_steps=rows // at_once, gradient_checkpointing=not kept,
        gradient_checkpointing_kwargs=None if kept else {"use_reentrant": False}, bf16=True, learning_rate=1e-4,
        optim="adamw_torch_fused", logging_steps=1, report_to=[], save_strategy="no", disable_tqdm=True,
        use_cpu=not cuda,
    )  # fmt: skip
    trainer = Trainer(
        model, settings, train_dataset=[{"input_ids": row, "labels": row} for row in tokens], callbacks=[Clock()]
    )
    if cuda:
        torch.cuda.reset_peak_memory_stats()  # making the model may need more than training it
    trainer.train()
    seconds = [late - early for early, late in zip(ends[WARM_UP - 1 :], ends[WARM_UP:], strict=False)]
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    unmoved = [name for name, p in trained.items() if "lora_B" in name and not p.detach().any()]
    return {
        "tokens_per_second": rows * length / statistics.median(seconds),
        "step_seconds": statistics.median(seconds),
        "step_seconds_all": seconds,
        "rows_at_once": at_once,
        "peak_memory_gb": torch.cuda.max_memory_allocated() / 1e9 if cuda else None,
        "trained_parameters": sum(p.numel() for p in trained.values()),
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        **({"failed": f"not trained: {unmoved[:3]}"} if unmoved else {}),
    }


def measure(case: dict, shape: dict, rows: int, length: int, steps: int) -> dict:
    """The record of one case, of as many rows at once as the device holds."""
    import torch

    torch.manual_seed(0)
    model = make_model(shape, case["load_in"])
    at_once = rows
    while True:
        try:
            found = train(model, case, shape["vocab_size"], rows, at_once, length, steps)
            break
        except torch.OutOfMemoryError:
            if at_once == 1:
                raise
        at_once //= 2
        model.zero_grad(set_to_none=True)
        _held_bytes()
    facts = {"first_loss": found["losses"][0], "vocab_size": shape["vocab_size"], "smallest_grad_norm_by_step_2": 1.0}
    problem = honest(facts)  # that every matrix moved, `train` looked at
    return found if problem is None else found | {"failed": problem}


def _held_bytes() -> int:
    """What is left on the device once everything that nobody refers to is gone."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def _child(pipe, todo: list[tuple]) -> None:
    """Sends the record of each case; ends early where one leaves memory behind, which the next must not find taken."""
    for arguments in todo:
        try:
            pipe.send(measure(*arguments))
        except Exception as error:
            first = str(error).strip().splitlines()[:1]
            pipe.send({"failed": f"{type(error).__name__}: {' '.join(first)}"[:400]})
        if _held_bytes() > 1e8:
            return


def in_processes(todo: list[tuple], end: float) -> Iterator[dict]:
    """The record of each case (`measure`'s arguments), in a process that takes the next one too while it is clean.

    Args:
      todo: arguments of `measure`, a tuple a case.
      end: of time.monotonic(), when what runs is ended.
    """
    spawn, done = multiprocessing.get_context("spawn"), 0
    while done < len(todo):
        began = done
        ours, theirs = spawn.Pipe(duplex=False)
        process = spawn.Process(target=_child, args=(theirs, todo[done:]))
        process.start()
        theirs.close()
        try:
            while done < len(todo):
                ready = ours.poll(max(end - time.monotonic(), 0))
                yield ours.recv() if ready else {"failed": "its time ran out"}
                done += 1
                if not ready:
                    break
        except EOFError:
            if done == began:  # it did not end after a record of its own
                yield {"failed": "its process died"}
                done += 1
        finally:
            process.kill()
            process.join()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join([*THEIRS, *OURS])}")
    parser.add_argument("--rows", type=int, default=8, help="of theirs; ours are 8 x 2,048")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=4, help="of theirs that are timed, after two that are not")
    parser.add_argument("--seconds", type=float, default=235, help="that the call may take")
    parser.add_argument("--limit-layers", type=int, help="of theirs, for a quick try")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(argv)
    names = options.cases or list(DEFAULT)
    if unknown := set(names) - {*THEIRS, *OURS}:
        parser.error(f"no case {', '.join(sorted(unknown))}: known are {', '.join([*THEIRS, *OURS])}")
    end = time.monotonic() + options.seconds
    facts = compare.device_facts()  # of a process that ends: none may hold the device here
    for name in ("peft", "accelerate", "bitsandbytes"):
        facts["versions"][name] = metadata.version(name)
    record = {"benchmark": "train/hf_peft", **facts, "rows": options.rows, "length": options.length,
              "adapter_rank": RANK, "cases": {}}  # fmt: skip
    side = compare.Side("new", compare.ROOT, facts["commit"], Path(tempfile.mkdtemp()))
    log = options.output.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)

    def theirs(group: list[str]) -> Iterator[dict]:
        todo = []
        for name in group:
            shape = dict(SHAPES[THEIRS[name]["shape"]])
            if options.limit_layers:
                shape["num_hidden_layers"] = options.limit_layers
                shape |= {"layer_types": shape["layer_types"][: options.limit_layers]} if "layer_types" in shape else {}
            todo.append((THEIRS[name], shape, options.rows, options.length, options.steps))
        for name, found in zip(group, in_processes(todo, end), strict=True):
            yield THEIRS[name] | found

    def ours(group: list[str]) -> Iterator[dict]:
        began = time.monotonic()
        compare.compile_ahead([(side, [STEPS[name] for name in group])], log, (end - began) / 2)
        print(f"compiled ahead in {time.monotonic() - began:.0f} s", flush=True)
        for name in group:
            yield ours_of(compare.run_once(side, STEPS[name], log, end - time.monotonic()))

    for are_ours, group in itertools.groupby(names, OURS.__contains__):
        group = list(group)
        began = time.monotonic()
        for name, found in zip(group, (ours if are_ours else theirs)(group), strict=True):
            record["cases"][name] = found
            write(options.output, record)
            shown = {key: value for key, value in found.items() if not isinstance(value, list)}
            print(f"{name} after {time.monotonic() - began:.0f} s: {shown}", flush=True)
        if time.monotonic() > end:
            break
    if left := [name for name in names if name not in record["cases"]]:
        print(f"no time was left for {' '.join(left)}")
    return int(any("failed" in found for found in record["cases"].values()))


def ours_of(found: dict) -> dict:
    """What the table needs of a record of step.py."""
    if "failed" in found:
        return found
    share = found["recomputing_seconds"] / found["step_seconds"]
    keys = ("shape", "load_in", "tokens_per_second", "step_seconds", "step_seconds_all", "micro_batches", "budget_gb",
            "peak_memory_gb", "losses")  # fmt: skip
    recomputes = "nothing" if share == 0 else f"{100 * share:.0f} % of the step's time"
    return {key: found[key] for key in keys} | {"recomputes": recomputes}


if __name__ == "__main__":
    sys.exit(main())
