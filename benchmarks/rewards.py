"""Seconds of whole steps that learn from rewards, reward curves of the packaged model, and TRL's trainer beside them.

    python benchmarks/rewards.py --output FILE.json [--seconds 560] [CASE ...]

Each case is a process of its own that adds what it measured to the file, a figure at a time; a case that fails, or for
which no time is left, costs only itself. All processes share one cache of compiled programs, empty at the beginning.

The cases of published shapes have random weights, LoRA r=16 on all linears (and experts), and steps of 8 prompts of 200
random tokens with 8 answers each, none of which ends before 512 tokens. After one step that compiles, `steps` has for
each step: its seconds, those of sampling, of the rewards and of the update, and the mean difference between the
sampler's and the trainer's log-probabilities.

    0.6b, 8b, 30b_a3b    in bfloat16
    8b_nf4               the base in NF4, the allocator held to 24 GB
    trl_0.6b, trl_8b     TRL's GRPOTrainer with transformers' generation on the shape of 0.6b or 8b; needs trl
    curves_bf16, _fp16,  the packaged model learns from rewards (the recipe quickstart-rewards), seeds 0 to 2: the
    _nf4                 reward of every step, the largest mismatch, and exact match before and after
    8b_over_2, 8b_one,   answers of 256 tokens, 64 a GPU: weights divided over two GPUs (the allocators held to 14 GB),
    8b_data_2            on one GPU, and whole on each of two; run only if they are named
    8b_over_2_fp8,       the first two with keys and values in FP8 (objective.cache); run only if they are named
    8b_one_fp8
    8b_256, 8b_256_exact answers of 256 tokens, 20 steps as usual and 60 with `exact`, and _nf4, 30b_256, 30b_256_nf4
                         (20 steps each): `seconds` so far after each step; run only if they are named
    tiny                 all of this in seconds, to check the script; runs only if it is named
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import figures
from benchmarks.figures import ROOT
from benchmarks.sampling import QWEN3_06B, TINY
from benchmarks.shapes import SHAPES


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and the lengths of its prompts and answers."""

    shape: str | dict  # of benchmarks.shapes, or a config
    load_in: str | None = None
    budget_gb: float | None = None  # what the allocator is held to, in 1e9 bytes
    optim: Literal["adamw", "adamw_8bit"] = "adamw"
    prompt: int = 200  # tokens
    answer: int = 512  # tokens
    prompts: int = 8  # of a step
    answers: int = 8  # to a prompt
    length: int = 5760  # tokens of a row: eight prompts with their answers, and a multiple of 128
    steps: int = 4  # the first of them compiles
    data: int = 1  # GPUs, or groups of GPUs, that have the weights each; `prompts` are those of all
    fsdp: int = 1  # GPUs that divide the weights
    exact: bool = False  # sampler and training compute the same bits
    cache: Literal["fp8"] | None = None  # in what the sampler stores keys and values; None: the model's dtype

    @property
    def gpus(self) -> int:
        return self.data * self.fsdp


# The most wanted first: later ones are left out where time is short.
STEPS = {
    "0.6b": Case(QWEN3_06B, steps=9),
    "8b": Case("llama-3.1-8b"),
    "8b_nf4": Case("llama-3.1-8b", "nf4", budget_gb=24.0),
    "30b_a3b": Case("qwen3-30b-a3b", optim="adamw_8bit"),
}
# Weights over two GPUs that could not hold them alone, a GPU that can, and two, with as many answers a GPU.
OVER = {
    "8b_one": Case("llama-3.1-8b", answer=256, length=3712),
    "8b_over_2": Case("llama-3.1-8b", budget_gb=14.0, answer=256, length=3712, prompts=16, fsdp=2),
    "8b_data_2": Case("llama-3.1-8b", answer=256, length=3712, prompts=16, data=2),
}
OVER |= {f"{name}_fp8": dataclasses.replace(OVER[name], cache="fp8") for name in ("8b_over_2", "8b_one")}
_SHORT = Case("llama-3.1-8b", answer=256, length=3712, steps=21)
_LARGE = dataclasses.replace(_SHORT, shape="qwen3-30b-a3b", optim="adamw_8bit")
EXACT = {
    "8b_256_exact": dataclasses.replace(_SHORT, steps=61, exact=True),
    "8b_256": _SHORT,
    "8b_256_nf4_exact": dataclasses.replace(_SHORT, load_in="nf4", exact=True),
    "8b_256_nf4": dataclasses.replace(_SHORT, load_in="nf4"),
    "30b_256_exact": dataclasses.replace(_LARGE, exact=True),
    "30b_256": _LARGE,
    "30b_256_nf4_exact": dataclasses.replace(_LARGE, load_in="nf4", exact=True),
    "30b_256_nf4": dataclasses.replace(_LARGE, load_in="nf4"),
}
_WHOLE = STEPS | OVER | EXACT
CURVES = {
    "curves_bf16": ("precision=bf16",),
    "curves_fp16": ("precision=fp16",),
    "curves_nf4": ("precision=bf16", "model.load_in=nf4"),
}
_TINY = Case(TINY, prompt=10, answer=16, prompts=2, answers=4, length=128, steps=3)
TRL = {"trl_0.6b": "0.6b", "trl_8b": "8b"}
CASES = (*STEPS, *TRL, *CURVES, *OVER, *EXACT, "tiny")
_UNASKED = (*OVER, *EXACT, "tiny")


# ---- whole steps


def drawn(completion_ids: list[list[int]], **_: object) -> list[float]:
    """A reward that means nothing: drawn by an answer's tokens."""
    return [random.Random(repr(ids)).random() for ids in completion_ids]


def trainer_of(case: Case, folder: str) -> Any:
    """A Trainer of a random model, whose source samples answers that no token ends."""
    import functools

    import jax
    import numpy as np

    import jaxtune
    from benchmarks.random_model import random_model
    from jaxtune.models.files.model_folder import load_tokenizer
    from jaxtune.models.placement import partition
    from jaxtune.train.config import (
        AdapterConfig,
        DataConfig,
        MemoryConfig,
        MeshConfig,
        ModelConfig,
        OptimConfig,
        TrainConfig,
    )
    from jaxtune.train.config.objective import ObjectiveConfig
    from jaxtune.train.objectives.named import objective_of
    from jaxtune.train.objectives.policy import GRPO
    from jaxtune.train.sampled.answering import OneTurn, Prompt, Sampling
    from jaxtune.train.sampled.reward_functions import RewardFunctions
    from jaxtune.train.sampled.rollouts import SampledAnswers
    from jaxtune.train.trainer import Trainer

    hf = SHAPES[case.shape] if isinstance(case.shape, str) else case.shape
    mesh = partition.make_mesh(case.data, case.fsdp) if case.gpus > 1 else None
    model = random_model(hf, jax.random.key(0), case.load_in, mesh)
    experts = None if model.config.moe is None else ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    model = jaxtune.get_peft_model(model, r=16, target_parameters=experts)
    config = TrainConfig(
        model=ModelConfig(path="random weights", load_in=case.load_in),
        adapter=AdapterConfig(r=16),
        data=DataConfig(train="random tokens", length=case.length),
        objective=ObjectiveConfig(
            "grpo",
            reward_funcs=("drawn",),
            num_generations=case.answers,
            max_completion_length=case.answer,
            exact=case.exact or None,
            cache=case.cache,
        ),
        optim=OptimConfig(name=case.optim, learning_rate=1e-5),
        memory=MemoryConfig(budget_gb=case.budget_gb and case.budget_gb * 1e9 / 2**30),
        mesh=MeshConfig(case.data, case.fsdp),
        steps=case.steps,
        rows_per_step=case.prompts * case.answers,
        output=folder,
    )
    objective = objective_of(config.objective)
    assert isinstance(objective, GRPO)
    draw = np.random.default_rng(0)
    tokens = draw.integers(3, model.config.vocab_size - 1, (case.prompts * case.steps, case.prompt)).tolist()
    rewards = RewardFunctions.of([drawn])
    source = SampledAnswers(
        [Prompt("", tuple(row), {}) for row in tokens],
        rewards,
        objective.settings,
        functools.partial(objective.advantages, weights=np.array(rewards.weights)),
        OneTurn(Sampling(objective.settings, (), lambda ids: "")),
        answers_per_step=config.rows_per_step,
        length=case.length,
        rows_multiple=case.gpus,
        seed=0,
    )
    tokenizer = load_tokenizer(ROOT / "jaxtune" / "quickstart" / "base")
    return Trainer(model, tokenizer, config, source, keeps_model=False)


def whole_steps(case: Case, say: Callable[[str, Any], None]) -> None:
    """Trains for case.steps steps and gives the figures of each but the first, their medians, and the memory."""
    import statistics

    from jaxtune.train.callbacks import Callback
    from jaxtune.train.planning.devices import memory_peak_bytes

    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(case, folder)
        arrivals: list[float] = []

        class Clock(Callback):
            def between(self, moment):
                moment.wait()  # until the step was computed; its seconds then have no part of another step
                arrivals.append(time.perf_counter())
                say("seconds", [arrival - begun for arrival in arrivals])

        trainer.callbacks = (Clock(),)
        made = time.perf_counter()
        trainer.train()
    found = []
    for number, line in enumerate(trainer.history):
        if number == 0 or "sampling_seconds" not in line:
            continue
        seconds, sampling, rewards = (
            arrivals[number] - arrivals[number - 1],
            line["sampling_seconds"],
            line["reward_seconds"],
        )
        found.append(
            {
                "seconds": seconds,
                "sampling": sampling,
                "rewards": rewards,
                "update": seconds - sampling - rewards,
                "mismatch": line["sampling/sampling_logp_difference/mean"],
                "largest_mismatch": line["sampling/sampling_logp_difference/max"],
                "ratio": line.get("sampling/importance_sampling_ratio/mean"),
                "mean_length": line["completions/mean_length"],
                "loss": line["loss"],
            }
        )
    say("steps", found)
    medians = {
        name: statistics.median(step[name] for step in found) for name, value in found[0].items() if value is not None
    }
    plan = trainer.planner.plan
    say(
        "whole_step",
        medians
        | {
            "share_sampling": medians["sampling"] / medians["seconds"],
            "share_update": medians["update"] / medians["seconds"],
            "answer_tokens": case.prompts * case.answers * case.answer,
            "answer_tokens_a_second_a_gpu": case.prompts * case.answers * case.answer / medians["seconds"] / case.gpus,
            "sampled_tokens_a_second_a_gpu": case.prompts
            * case.answers
            * case.answer
            / medians["sampling"]
            / case.gpus,
            "slots": str(trainer.batches.answering.sampling.plan),
            "peak_memory_gb": memory_peak_bytes(0) / 1e9,
            "predicted_peak_gb": trainer.planner.forecast.peak_bytes / 1e9,
            "plan": str(plan),
            "seconds_before_training": made - begun,
            "seconds_of_the_first_step": arrivals[0] - made,
        },
    )


# ---- TRL's trainer


def trl_steps(case: Case, say: Callable[[str, Any], None]) -> None:
    """The same step by TRL's GRPOTrainer: a random model of the shape, PEFT, and transformers' generation."""
    import statistics

    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    shape = case.shape if isinstance(case.shape, dict) else SHAPES[case.shape]
    cuda = torch.cuda.is_available()
    settings = {name: value for name, value in shape.items() if name not in ("model_type", "architectures")}
    config = AutoConfig.for_model(shape["model_type"], **settings)
    with torch.device("cuda" if cuda else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if cuda else torch.float32)
    words = Tokenizer(models.WordLevel({f"t{number}": number for number in range(shape["vocab_size"])}, "t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t1", eos_token="t2", unk_token="t0")
    draw = random.Random(0)
    tokens = range(3, shape["vocab_size"] - 1)
    rows = [
        {"prompt": " ".join(f"t{token}" for token in draw.choices(tokens, k=case.prompt))}
        for _ in range(case.prompts * case.steps)
    ]
    ends, begins = [], []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_, **__):
            begins.append(time.perf_counter())

        def on_step_end(self, *_, **__):
            if cuda:
                torch.cuda.synchronize()
            ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=case.answers,
            gradient_accumulation_steps=case.prompts,
            num_generations=case.answers,
            max_completion_length=case.answer,
            max_steps=case.steps,
            learning_rate=1e-5,
            gradient_checkpointing=False,
            generation_kwargs={"min_new_tokens": case.answer},  # no answer ends before its limit
            bf16=cuda,
            use_cpu=not cuda,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=drawn,
            args=args,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            peft_config=LoraConfig(r=16, lora_alpha=16, target_modules="all-linear"),
            callbacks=[Clock()],
        )
        trainer.train()
    seconds = [end - begin for begin, end in zip(begins, ends, strict=True)][1:]
    lengths = [
        line["completions/mean_length"] for line in trainer.state.log_history if "completions/mean_length" in line
    ]
    peak = torch.cuda.max_memory_allocated() / 1e9 if cuda else None
    say(
        "whole_step",
        {"seconds": statistics.median(seconds), "all": seconds, "mean_length": lengths[-1], "peak_memory_gb": peak},
    )


# ---- the packaged model


def curves(overrides: tuple[str, ...], say: Callable[[str, Any], None], seeds: int = 3, steps: int = 60) -> None:
    """Runs the recipe quickstart-rewards for each seed, and gives the rewards of its steps and exact match."""
    from jaxtune.train import app
    from jaxtune.train.config.file import load_config
    from jaxtune.train.log import metrics

    for seed in range(seeds):
        begun = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            asked = [f"seed={seed}", f"steps={steps}", f"output={folder}/run", "export.adapter=false", *overrides]
            app.run(load_config("quickstart-rewards", asked))
            lines = [line for line in metrics.read_metrics(Path(folder, "run", metrics.JSONL)) if "reward" in line]
            results = json.loads(Path(folder, "run", "results.json").read_text(encoding="utf-8"))
        mismatch = "sampling/sampling_logp_difference/mean"
        ratios = [line["sampling/importance_sampling_ratio/mean"] for line in lines]
        say(
            f"seed_{seed}",
            {
                "reward": [round(line["reward"], 4) for line in lines],
                "exact_match": [results[when]["exact_match"] for when in ("before", "after")],
                "mismatch": max(line[mismatch] for line in lines),
                "ratio": [min(ratios), max(ratios)],
                "seconds": time.perf_counter() - begun,
            },
        )


# ---- all of them


def measure(name: str, say: Callable[[str, Any], None]) -> None:
    """Makes the figures of one case."""
    if name in TRL:
        trl_steps(STEPS[TRL[name]], say)
        return
    import jax

    from jaxtune.system import host_memory
    from jaxtune.system.program_cache import use_program_cache

    host_memory.allow_pinned()
    use_program_cache()
    if name in _WHOLE:
        whole_steps(_WHOLE[name], say)
    elif name in CURVES:
        curves(CURVES[name], say)
    else:
        whole_steps(_TINY, say)
        whole_steps(dataclasses.replace(_TINY, exact=True), lambda figure, value: say(f"exact_{figure}", value))
        whole_steps(dataclasses.replace(_TINY, cache="fp8"), lambda figure, value: say(f"fp8_{figure}", value))
        if jax.device_count() > 1:
            of_two = dataclasses.replace(_TINY, prompts=4, data=2)
            whole_steps(of_two, lambda figure, value: say(f"data_2_{figure}", value))
        curves(CURVES["curves_nf4"], lambda figure, value: say(f"curves_{figure}", value), seeds=1, steps=2)
        try:
            import trl  # noqa: F401
        except ImportError:
            say("trl", "not installed")
        else:
            trl_steps(_TINY, lambda figure, value: say(f"trl_{figure}", value))


def allocator(name: str) -> dict[str, str]:
    """The variables of the environment that hold the allocator of a case to its budget."""
    from benchmarks.record import driver_bytes
    from jaxtune.train.planning.devices import CONTEXT_BYTES

    budget, total = _WHOLE[name].budget_gb if name in _WHOLE else None, driver_bytes()
    if budget is None or not total:
        return {}
    return {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{(budget * 1e9 - CONTEXT_BYTES) / total:.5f}"}


def main() -> None:
    parser = figures.arguments(str(__doc__), CASES, "tiny", 560)
    options: argparse.Namespace = parser.parse_args()
    if options.child:
        measure(options.child, figures.say)
        return
    unknown = set(options.cases) - set(CASES)
    if unknown:
        parser.error(f"unknown cases: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    figures.run(
        __file__, options, options.cases or [name for name in CASES if name not in _UNASKED], variables=allocator
    )


if __name__ == "__main__":
    main()
