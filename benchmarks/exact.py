"""Whether sampler and training forward give a token the same bits with `exact`, and what that takes.

    python benchmarks/exact.py --output FILE.json [--shape qwen3-30b-a3b] [--layers 4] [--rows 64] [--load-in nf4]
        [--parts sampled operations usual rates]

A published shape (an 8B's unless --shape names another of shapes.py) with fewer layers, bf16, an adapter of rank 16 on
every linear and on experts' matrices; 64 rows of 200 + 256 tokens.

    sampled      how many of the answers' tokens have another log-probability in a training forward, of rows alone and
                 of rows packed behind each other; tokens/s of the sampler
    operations   every operation on the same numbers (models/generation/differences.py): how many results, how many
                 have other bits, the largest difference
    usual        tokens/s of the sampler as usual
    rates        seconds of a training step's forward and backward, with and without

Several processes measure beside each other: each holds a lock while it takes times.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
_PROMPT, _NEW = 200, 256
_AS_STEPS = {"xla_allow_excess_precision": False}
_SMALL = {"vocab_size": 640, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
_SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}
_SMALL_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}


def model_of(shape_name: str, layers: int, small: bool, load_in: str | None) -> Any:
    import jax
    import jax.numpy as jnp

    import jaxtune
    from benchmarks.random_model import random_model
    from benchmarks.shapes import SHAPES
    from jaxtune.models.files.quant import quantize
    from jaxtune.models.lora import matrices

    shape = SHAPES[shape_name] | {"num_hidden_layers": layers}
    experts = ["experts.gate_up_proj", "experts.down_proj"] if "num_experts" in shape else None
    if small:
        shape |= _SMALL | (_SMALL_EXPERTS if experts else {})
    model = random_model(shape, jax.random.key(0))
    model = quantize(model, load_in) if load_in else model
    model = jaxtune.get_peft_model(model, r=16, target_parameters=experts)
    for place, (_, linear) in enumerate(matrices(model)):
        assert linear.lora is not None
        b = linear.lora.b
        b.set_value(0.02 * jax.random.normal(jax.random.key(place), b.shape, jnp.float32))
    return model


def timed(run: Callable[[], Any], times: int) -> list[float]:
    """Seconds of each of so many runs, while no other process measures."""
    seconds = []
    with open(Path(tempfile.gettempdir()) / "exact.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run()
        for _ in range(times):
            begun = time.monotonic()
            run()
            seconds.append(time.monotonic() - begun)
    return seconds


def sampled(model: Any, prompts: list[list[int]], exact: bool) -> dict[str, Any]:
    import jaxtune
    from jaxtune.models.generation.generate import training_logprobs

    with jaxtune.Sampler(model, len(prompts), _PROMPT + _NEW, exact=exact) as sampler:

        def run() -> list[Any]:
            return sorted(sampler.run(prompts, _NEW, temperature=1.0, eos_token_ids=()), key=lambda row: row.index)

        rows, seconds = run(), timed(run, 4)
    answers = [row.ids for row in rows]
    figures = {
        "seconds": [round(s, 3) for s in seconds],
        "tokens_per_second": round(len(prompts) * _NEW / min(seconds)),
        "ids": answers,
    }
    if not exact:
        return figures
    sampled_logprobs = [row.logprobs for row in rows]
    figures |= compared("alone", sampled_logprobs, training_logprobs(model, prompts, answers, _NEW, exact=exact))
    return figures | compared("packed", sampled_logprobs, packed_logprobs(model, prompts, answers, exact))


def compared(name: str, left: list[list[float]], right: list[list[float]]) -> dict[str, Any]:
    import numpy as np

    apart = np.abs(np.array(left, np.float32) - np.array(right, np.float32))
    return {
        f"{name}: tokens": apart.size,
        f"{name}: other bits": int((apart != 0).sum()),
        f"{name}: mean": float(apart.mean()),
        f"{name}: largest": float(apart.max()),
    }


def packed_rows(texts: list[list[int]], length: int) -> tuple[Any, Any, list[tuple[int, int]]]:
    """(tokens, segments, (row, first index) of each text) of texts that lie behind each other."""
    import numpy as np

    starts, row, used = [], 0, 0
    for text in texts:
        if used + len(text) > length:
            row, used = row + 1, 0
        starts.append((row, used))
        used += len(text)
    tokens, segments = (np.zeros((row + 1, length), np.int32) for _ in range(2))
    for number, (text, (row, start)) in enumerate(zip(texts, starts, strict=True), 1):
        tokens[row, start : start + len(text)] = text
        segments[row, start : start + len(text)] = number
    return tokens, segments, starts


def packed_logprobs(model: Any, prompts: list[list[int]], answers: list[list[int]], exact: bool) -> list[list[float]]:
    import jax
    import numpy as np
    from flax import nnx

    texts = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    tokens, segments, starts = packed_rows(texts, 4 * (_PROMPT + _NEW))
    graph, state = nnx.split(model)

    def run(state, tokens, segments):
        return losses(nnx.merge(graph, state), tokens, segments, exact)

    results = np.asarray(jax.jit(run, compiler_options=_AS_STEPS)(state, tokens, segments))
    found = []
    for prompt, answer, (row, start) in zip(prompts, answers, starts, strict=True):
        first = start + len(prompt) - 1
        found.append((0.0 - results[row, first : first + len(answer)]).tolist())
    return found


def losses(model: Any, tokens: Any, segments: Any, exact: bool) -> Any:
    """float32[B, T] of next tokens, as rewards compute their log-probabilities."""
    import jax.numpy as jnp

    from jaxtune.pallas import one_order
    from jaxtune.pallas.linear_cross_entropy import linear_token_losses

    with one_order.exact(exact):
        hidden = model.hidden_states(tokens, segments, max_documents=8)
        targets = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))
        weights = jnp.pad((segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0), ((0, 0), (0, 1)))
        head, hidden = model.head_operands(hidden)
        return linear_token_losses(hidden, head, targets, weights.astype(jnp.float32), head_gradient=False)


def step_seconds(model: Any, texts: list[list[int]], exact: bool) -> dict[str, Any]:
    """Of a forward and backward of all texts in packed rows, after one that compiles."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    tokens, segments, _ = packed_rows(texts, 4 * (_PROMPT + _NEW))
    graph, trained, frozen = nnx.split(model, nnx.Param, ...)

    def loss(trained, frozen, tokens, segments):
        return losses(nnx.merge(graph, trained, frozen), tokens, segments, exact).mean()

    forward = jax.jit(loss, compiler_options=_AS_STEPS)
    both = jax.jit(jax.value_and_grad(loss), compiler_options=_AS_STEPS)
    figures: dict[str, Any] = {"tokens": tokens.size}
    for name, function in (("forward", forward), ("forward and backward", both)):
        result = jax.block_until_ready(function(trained, frozen, tokens, segments))
        seconds = timed(lambda f=function: jax.block_until_ready(f(trained, frozen, tokens, segments)), 6)
        figures[name] = [round(s, 4) for s in seconds]
    figures["gradients are finite"] = bool(
        jnp.all(jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(result)]))
    )
    return figures


def operations(model: Any, prompts: list[list[int]], answers: list[list[int]]) -> dict[str, Any]:
    import jaxtune
    from jaxtune.models.generation.differences import differences
    from jaxtune.pallas import one_order

    with jaxtune.Sampler(model, len(prompts), _PROMPT + _NEW, memory_share=0.5, exact=True) as sampler:
        sampled_model = sampler.model
    table: dict[str, list] = {}
    texts = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    with one_order.exact():
        for found in differences(model, texts, [len(p) for p in prompts], sampled=sampled_model, steps=2):
            line = table.setdefault(f"{found.phase}: {found.operation}", [0, 0, 0.0, None])
            line[0] += found.numbers
            line[1] += found.differing
            line[2] = max(line[2], found.largest)
            line[3] = found.layer if line[3] is None and found.differing else line[3]
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True)
    parser.add_argument("--shape", default="llama-3.1-8b", help="a key of shapes.py")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--load-in")
    parts = ("sampled", "operations", "usual", "rates")
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--small", action="store_true", help="a shape for a CPU")
    options = parser.parse_args()
    import jax
    import numpy as np

    from jaxtune.system.program_cache import use_program_cache

    use_program_cache()
    begun, record = time.monotonic(), {}

    def say(name: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Writes what `run` returns, or its error, at once; the next part runs whatever this one does."""
        try:
            value = run()
        except Exception as error:
            traceback.print_exc()
            value = {"error": f"{type(error).__name__}: {str(error)[:2000]}"}
        shown = {k: v for k, v in value.items() if k != "ids"} | {"at": round(time.monotonic() - begun)}
        record[name] = shown
        Path(options.output).write_text(json.dumps(record, indent=1))
        print(f"{name}\n" + "\n".join(f"    {k}: {v}" for k, v in shown.items()), flush=True)
        return value

    say("device", lambda: {"kind": jax.devices()[0].device_kind, "jax": jax.__version__})
    model = model_of(options.shape, options.layers, options.small, options.load_in)
    drawn = np.random.default_rng(0)
    prompts = [drawn.integers(3, model.config.vocab_size, _PROMPT - n % 16).tolist() for n in range(options.rows)]
    answers = drawn.integers(3, model.config.vocab_size, (options.rows, _NEW)).tolist()
    texts = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    if "sampled" in options.parts:
        say("sampled, exact", lambda: sampled(model, prompts, True))
    if "operations" in options.parts:
        say("operations", lambda: operations(model, prompts, answers))
    if "rates" in options.parts:
        say("step", lambda: step_seconds(model, texts, False))
        say("step, exact", lambda: step_seconds(model, texts, True))
    if "usual" in options.parts:
        say("sampled", lambda: sampled(model, prompts, False))
    say("seconds", dict)


if __name__ == "__main__":
    main()
