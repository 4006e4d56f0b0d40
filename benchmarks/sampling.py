"""Tokens per second of jaxtune.Sampler: full slots, answers of unequal lengths, one row, the first answer of a process.

    python benchmarks/sampling.py --output FILE.json [--seconds 480] [CASE ...]

Prompts are random tokens, 200 each, and so are the weights: a row ends at its limit. Each case is a process of its own
that adds what it measured to the file, a figure at a time; a case that fails, or for which no time is left, costs only
itself. All processes share one cache of compiled programs, empty at the beginning.

    full            every slot has a row of 512 new tokens; seconds of the whole, prefill included, after one run of
                    the same programs. `decode_ms` is of one token of all slots, while none is prefilled.
    roof            tokens per second if a step took the larger of the weights' bytes at --bandwidth and their
                    multiplications at --flops, and the bytes of the live caches beside.
    lognormal       1,024 rows over 64 slots, answers log-normal with mean 700, at most 2,048. `busy` is the share of
                    slots that made a token that counts; `over_full` is useful tokens per second over those of full
                    slots times that share.
    first_answer    seconds from the start of a process to one answer of 16 tokens, without the seconds in which random
                    weights were made, which stand for those of a load; with an empty cache of programs, and again.
    adapter         full slots without an adapter, with one of rank 16 on all linears, and with three such ones of which
                    each row has one or none, in turns in one process: milliseconds of a decoding step in each turn, and
                    `share` and `share_of_rows`, the speed with one and with three as shares of that without; and tokens
                    per second, prefill included.
    second_turn     milliseconds to the first token of a chat's second turn, after a first prompt of 16,000 tokens, an
                    answer of 64 and a question of 100: with the first prompt's states stored (`stored`) and without
                    (`alone`), the least of three chats each after one that compiles, and `share`, stored over alone.
    transformers    tokens per second of transformers' own `generate` on the same shape, prompts and lengths, sampled,
                    all rows in one batch; bf16 weights, its default attention and cache, after a run of eight tokens.
    mismatch        the packaged model with an adapter: log-probabilities of 16 x 96 sampled tokens against the forward
                    pass of training, in absolute value, for eight sets of prompts; benchmarks/mismatch.py has more.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import figures
from benchmarks import mismatch as packaged
from benchmarks.figures import ROOT

_PROMPT, _NEW = 200, 512
QWEN3_06B = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
}
TINY = QWEN3_06B | {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}


@dataclasses.dataclass(frozen=True)
class Case:
    """shape: of benchmarks.shapes, or a config. slots: numbers of slots that are filled. adapter: numbers of slots that
    are filled with an adapter and without. others: further figures."""

    shape: str | dict
    slots: tuple[int, ...] = ()
    load_in: str | None = None
    adapter: tuple[int, ...] = ()
    others: tuple[str, ...] = ()


# The most wanted first: later ones are left out where time is short.
CASES = {
    "8b": Case("llama-3.1-8b", (64, 128, 256), others=("one_row",)),
    "8b_lognormal": Case("llama-3.1-8b", (64,), others=("lognormal",)),
    "8b_nf4": Case("llama-3.1-8b", (64, 128), "nf4"),
    "0.6b": Case(QWEN3_06B, (64, 256)),
    "30b_a3b": Case("qwen3-30b-a3b", (64, 256)),
    "gemma4_12b": Case("gemma-4-12b", (64,)),
    "8b_adapter": Case("llama-3.1-8b", adapter=(64, 128)),
    "transformers_8b": Case("llama-3.1-8b", others=("transformers",)),
    "8b_second_turn": Case("llama-3.1-8b", others=("second_turn",)),
    "mismatch": Case({}),
    "first_cold": Case("llama-3.1-8b", others=("first_answer",)),
    "first_cached": Case("llama-3.1-8b", others=("first_answer",)),
    "tiny": Case(TINY, (4, 8), adapter=(4,), others=("lognormal", "one_row", "second_turn", "first_answer")),
}


# ---- one case


def made(case: Case) -> Any:
    import jax

    from benchmarks.random_model import random_model
    from benchmarks.shapes import SHAPES

    hf = SHAPES[case.shape] if isinstance(case.shape, str) else case.shape
    return random_model(hf, jax.random.key(0), case.load_in)


def roof(model: Any, slots: int, bandwidth: float, flops: float, new: int) -> float:
    """Tokens per second at the mean length of the rows of `full`."""
    import jax
    from flax import nnx

    from jaxtune.models.generation import slots as device
    from jaxtune.models.generation.structure import structure_of

    graph, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten(state)
    structure = structure_of(graph, treedef, model.config)
    shapes = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in leaves)
    small, large = (
        sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(device.states_shape(structure, shapes, slots, length)))
        for length in (256, 512)  # at most the windows of Gemma 4's sliding layers, whose caches grow no further
    )
    cache = (large - small) / 256 * (_PROMPT + new / 2)
    embedding = 0 if model.head is None else model.embedding.weight.nbytes
    weights = sum(a.nbytes for a in leaves) - embedding
    moe = model.config.moe
    share = 1.0 if moe is None else moe.experts_per_token / moe.num_experts  # of the weights that a token meets
    numbers = weights / 2 if moe is None or slots == 1 else weights / 2 * share
    seconds = max(weights / bandwidth, 2 * numbers * slots / flops) + cache / bandwidth
    return slots / seconds


def prompts_of(model: Any, count: int) -> list[list[int]]:
    import numpy as np

    draw = np.random.default_rng(0)
    return draw.integers(3, model.config.vocab_size - 1, (count, _PROMPT)).tolist()


def drain(sampler: Any) -> tuple[int, list[tuple[float, int]]]:
    """(tokens, [(time, tokens of a step)]) until nothing is pending."""
    began, tokens, steps = time.perf_counter(), 0, []
    while sampler.pending:
        made_now = sum(len(piece.ids) for piece in sampler.step())
        tokens += made_now
        steps.append((time.perf_counter() - began, made_now))
    for _ in range(2):  # rounds of cancelled rows, which the device would compute in the time that is measured next
        sampler.step()
    return tokens, steps


def submit(sampler: Any, prompts: list[list[int]], new: int) -> list[int]:
    """Rows with the sampler's adapters and without, in turns."""
    names = [None, *sampler.adapters]
    return [
        sampler.submit(prompt, new, 1.0, index=index, eos_token_ids=(), adapter=names[index % len(names)])
        for index, prompt in enumerate(prompts)
    ]


def warm_up(sampler: Any, prompts: list[list[int]], new: int) -> None:
    """Compiles the programs of such rows."""
    requests = submit(sampler, prompts, new)
    for _ in range(4):
        sampler.step()
    for request in requests:
        sampler.cancel(request)
    drain(sampler)


def full(
    model: Any, slots: int, options: argparse.Namespace, new: int = _NEW, adapters: dict[str, Any] | None = None
) -> dict[str, float]:
    import jaxtune

    prompts = prompts_of(model, slots)
    sampler = jaxtune.Sampler(model, slots, _PROMPT + new, adapters=adapters)
    began = time.perf_counter()
    warm_up(sampler, prompts, new)
    compiled = time.perf_counter() - began
    began = time.perf_counter()
    submit(sampler, prompts, new)
    tokens, steps = drain(sampler)
    seconds = time.perf_counter() - began
    assert tokens == slots * new, (tokens, slots)
    whole = [at for at, count in steps if count == slots * 8]
    decode = (whole[-1] - whole[0]) / (8 * (len(whole) - 1)) if len(whole) > 1 else float("nan")
    best = roof(model, slots, options.bandwidth, options.flops, new)
    return {
        "tokens_per_second": tokens / seconds,
        "roof": best,
        "of_roof": tokens / seconds / best,
        "decode_ms": 1e3 * decode,
        "decode_of_roof": slots / decode / best,
        "seconds": seconds,
        "before_first_tokens": steps[next(i for i, (_, n) in enumerate(steps) if n)][0],
        "compile_and_start": compiled,
    }


def adapter_turns(model: Any, slots: int, options: argparse.Namespace, new: int = _NEW) -> dict[str, Any]:
    """Fills the slots of the model without an adapter, with one, with three of which each row has one or none, and all
    once more.
    """
    from jaxtune.models.generation.adapters import Adapter
    from jaxtune.models.lora import get_peft_model

    adapters = {str(seed): Adapter.of(get_peft_model(model, r=16, seed=seed)) for seed in range(3)}
    kinds = {"without": (model, None), "with": (get_peft_model(model, r=16), None), "of_rows": (model, adapters)}
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in kinds}
    for _ in range(2):
        for name, (each, its_adapters) in kinds.items():
            turns[name].append(full(each, slots, options, new, its_adapters))
    lists = {
        f"{key}_{name}": [turn[key] for turn in each]
        for key in ("decode_ms", "tokens_per_second")
        for name, each in turns.items()
    }
    without, one, of_rows = (sum(lists[f"decode_ms_{name}"]) for name in kinds)
    return {**lists, "share": without / one, "share_of_rows": without / of_rows}


def lognormal(model: Any, decode_rate: float, full_rate: float, rows: int) -> dict[str, float]:
    """decode_rate: tokens per second of 64 full slots while they decode. full_rate: the same with their prefills."""
    import numpy as np

    import jaxtune

    draw = np.random.default_rng(1)
    limits = np.clip(draw.lognormal(np.log(700) - 0.5 * 0.7**2, 0.7, rows), 8, 2048).astype(int).tolist()
    prompts = prompts_of(model, rows)
    sampler = jaxtune.Sampler(model, 64, _PROMPT + 2048)
    warm_up(sampler, prompts[:64], 2048)
    few = min(80, rows)
    for _ in sampler.run(prompts[:few], [16 + 8 * (i % 4) for i in range(few)], 1.0, eos_token_ids=()):
        pass  # the programs by which slots are filled again
    began, rounds, tokens = time.perf_counter(), 0, 0
    for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        sampler.submit(prompt, limit, temperature=1.0, index=index, eos_token_ids=())
    while sampler.pending:
        made_now = sum(len(piece.ids) for piece in sampler.step())
        tokens, rounds = tokens + made_now, rounds + bool(made_now)
    seconds = time.perf_counter() - began
    busy = tokens / (rounds * 8 * 64)
    return {
        "rows": rows,
        "mean_tokens": tokens / rows,
        "tokens_per_second": tokens / seconds,
        "busy": busy,
        "over_full": tokens / seconds / (decode_rate * busy),
        "over_full_with_prefills": tokens / seconds / (full_rate * busy),
        "seconds": seconds,
    }


def second_turn(model: Any, first: int) -> dict[str, Any]:
    """first: tokens of the first prompt."""
    import numpy as np

    import jaxtune
    from jaxtune.models.generation.slot_plan import prefix_room, room_bytes

    found: dict[str, list[float]] = {}
    for name, size in (("alone", 0), ("stored", prefix_room(room_bytes()))):
        with jaxtune.Sampler(model, 8, first + 256, first_at_once=True, prefix_bytes=size) as sampler:
            for chat in range(4):
                draw = np.random.default_rng(chat)
                prompt, question = (draw.integers(3, model.config.vocab_size - 1, n).tolist() for n in (first, 100))
                [row] = sampler.run([prompt], 64, eos_token_ids=())
                began = time.perf_counter()
                sampler.submit([*prompt, *row.ids, *question], 16, eos_token_ids=())
                while not any(piece.ids for piece in sampler.step()):
                    pass
                found.setdefault(name, []).append(1e3 * (time.perf_counter() - began))
                drain(sampler)
    least = {name: min(times[1:]) for name, times in found.items()}
    return found | {"share": least["stored"] / least["alone"]}


def by_transformers(case: Case, slots: int, new: int) -> dict[str, float]:
    """Its rate on a random model of the case's shape. Weights are made on the GPU, in bf16."""
    import numpy as np
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    from benchmarks.shapes import SHAPES

    hf = dict(SHAPES[case.shape] if isinstance(case.shape, str) else case.shape)
    hf.pop("architectures", None)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(hf.pop("model_type"), **hf), dtype=dtype).eval()
    draw = np.random.default_rng(0)
    prompts = torch.tensor(draw.integers(3, hf["vocab_size"] - 1, (slots, _PROMPT)), device=device)

    def seconds(count: int) -> float:
        options = GenerationConfig(
            max_new_tokens=count, min_new_tokens=count, do_sample=True, temperature=1.0, top_k=0, pad_token_id=0
        )
        began = time.perf_counter()
        rows = model.generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=options)
        assert rows.shape == (slots, _PROMPT + count), rows.shape
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    seconds(8)
    taken = seconds(new)
    return {"tokens_per_second": slots * new / taken, "seconds": taken}


def mismatch() -> dict[str, Any]:
    import numpy as np

    found = {}
    for dtype in ("bfloat16", "float16", "float32"):
        model, every = packaged.model_of(ROOT, dtype), []
        for number in range(8):
            prompts = packaged.prompts_of(number)
            tokens, logprobs = packaged.sampled(model, prompts)
            every.append(logprobs - packaged.trained(model, prompts, tokens))
        apart = np.stack(every)
        of_rows = np.exp(apart.sum(2))
        found[dtype] = {
            "mean": float(np.abs(apart).mean()),
            "sets": [float(np.abs(each).mean()) for each in apart],
            "largest": float(np.abs(apart).max()),
            "sequence_ratio": [float(of_rows.min()), float(of_rows.max())],
        }
    return found


def first_answer(case: Case, started: float) -> dict[str, float]:
    import jax

    imported = time.time() - started
    model = made(case)
    jax.block_until_ready(list(jax.live_arrays()))
    weights = time.time() - started - imported
    import jaxtune

    jaxtune.generate(model, prompts_of(model, 1), 16, eos_token_ids=())
    return {"seconds": time.time() - started - weights, "imports": imported, "making_weights": weights}


def measure(name: str, options: argparse.Namespace, say: Callable[[str, Any], None]) -> None:
    from jaxtune.system.program_cache import use_program_cache

    use_program_cache()
    case, started = CASES[name], float(os.environ["STARTED"])
    if name == "mismatch":
        say("mismatch", mismatch())
        return
    if "first_answer" in case.others:
        say("first_answer", first_answer(case, started))
        if not case.slots:
            return
    if "transformers" in case.others:
        say("transformers_64", by_transformers(case, 64, _NEW))
        return
    model, rates = made(case), {}  # of tokens per second by slots: (while they decode, prefills included)
    new = 24 if name == "tiny" else _NEW
    for slots in case.slots:
        figures = full(model, slots, options, new)
        rates[slots] = 1e3 * slots / figures["decode_ms"], figures["tokens_per_second"]
        say(f"full_{slots}", figures)
    for slots in case.adapter:
        say(f"adapter_{slots}", adapter_turns(model, slots, options, new))
    if "one_row" in case.others:
        say("one_row", full(model, 1, options, new))
    if "second_turn" in case.others:
        say("second_turn", second_turn(model, 1200 if name == "tiny" else 16_000))
    if "lognormal" in case.others:
        decoding, whole = rates[min(rates)]
        say("lognormal", lognormal(model, decoding, whole, 8 if name == "tiny" else 1024))


# ---- all of them


def main() -> None:
    parser = figures.arguments(str(__doc__), list(CASES), "tiny", 480)
    parser.add_argument("--bandwidth", type=float, default=4.8e12, help="bytes per second of the device's memory")
    parser.add_argument("--flops", type=float, default=650e12, help="of dense 16-bit products")
    options = parser.parse_args()
    if options.child:
        measure(options.child, options, figures.say)
        return
    unknown = set(options.cases) - set(CASES)
    if unknown:
        parser.error(f"unknown cases: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    names = options.cases or [name for name in CASES if name != "tiny"]
    figures.run(__file__, options, names, ["--bandwidth", str(options.bandwidth), "--flops", str(options.flops)])


if __name__ == "__main__":
    main()
