"""The loss and its gradients without whole logits, beside the unchunked loss: speed, and what it takes in memory.

    python benchmarks/kernels/linear_cross_entropy.py [--tokens 8192] [--vocab 128256] [--hidden 4096] --output OUT.json

Frozen head, as under an adapter: loss and the gradient of the hidden states. The unchunked loss is what one writes down
in JAX: logits of all tokens at once, in float32, differentiated by JAX. Both are timed in turn, in one process; memory
is the compiler's figure of each program, beside the hidden states, their gradient and the head.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.record import environment, write
from jaxtune.pallas.linear_cross_entropy import linear_cross_entropy
from jaxtune.train.programs import compiler_options

FLOOR_SPEED, CEILING_GB = 0.9, 1.0


def chunked(hidden, head, targets, weights):
    return linear_cross_entropy(hidden, head, targets, weights, head_gradient=False)[0]


def unchunked(hidden, head, targets, weights):
    logits = jnp.einsum("btd,vd->btv", hidden, jax.lax.stop_gradient(head), preferred_element_type=jnp.float32)
    hit = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return (weights * (jax.nn.logsumexp(logits, axis=-1) - hit)).sum()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--output", required=True)
    options = parser.parse_args()
    keys = jax.random.split(jax.random.key(0), 3)
    rows = 4 if options.tokens % 4 == 0 else 1
    shape = (rows, options.tokens // rows)
    operands = (
        jax.random.normal(keys[0], (*shape, options.hidden), jnp.bfloat16),
        jax.random.normal(keys[1], (options.vocab, options.hidden), jnp.bfloat16) * options.hidden**-0.5,
        jax.random.randint(keys[2], shape, 0, options.vocab),
        jnp.ones(shape, jnp.float32),
    )
    settings = compiler_options(jax.default_backend(), deterministic=False)
    programs = {
        function.__name__: jax.jit(jax.value_and_grad(function)).lower(*operands).compile(compiler_options=settings)
        for function in (chunked, unchunked)
    }
    results = {name: program(*operands) for name, program in programs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(options.repeats):
        for name, program in programs.items():
            begun = time.perf_counter()
            jax.block_until_ready(program(*operands))
            seconds[name].append(time.perf_counter() - begun)
    losses = {name: float(loss) / options.tokens for name, (loss, _) in results.items()}
    ours, theirs = (np.asarray(results[name][1], np.float32) for name in ("chunked", "unchunked"))
    record = {"benchmark": "kernels/linear_cross_entropy", **environment(), "losses": losses}
    record |= {"tokens": options.tokens, "vocab": options.vocab, "hidden": options.hidden}
    record["gradient_difference"] = float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))
    for name, program in programs.items():
        analysis = program.memory_analysis()
        record[f"{name}_ms"] = 1e3 * statistics.median(seconds[name])
        record[f"{name}_gb"] = analysis.temp_size_in_bytes / 1e9
    record["speed"] = record["unchunked_ms"] / record["chunked_ms"]
    record["met"] = record["speed"] >= FLOOR_SPEED and record["chunked_gb"] < CEILING_GB
    write(options.output, record)
    print({key: record[key] for key in ("chunked_ms", "unchunked_ms", "chunked_gb", "unchunked_gb", "speed", "losses")})
    return 0


if __name__ == "__main__":
    sys.exit(main())
