"""The gated delta rule of a Qwen3.5-9B layer, in one run on one GPU.

    python benchmarks/kernels/delta_rule.py --output FILE.json

16 key heads and 32 value heads of 128, 16,384 tokens in bf16: 8 rows of 2,048, one of 16,384, and 8 rows of 2,048
packed with documents of log-normal lengths. Of every implementation: forward, forward and backward, and of the Triton
kernels each alone. `make gpu-test` compares them with the definition, and their bits over runs.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp

from benchmarks.kernels.timing import arguments, figure, median_ms, normal, record_parts
from jaxtune.pallas.attention import packed_layout
from jaxtune.pallas.attention.shapes import log_normal_segments
from jaxtune.pallas.delta_rule import api, gated_delta_rule, triton

KEY_HEADS, HEADS, DIM = 16, 32, 128
CASES = {"8 x 2,048": (8, 2048, False), "8 x 2,048 packed": (8, 2048, True), "1 x 16,384": (1, 16384, False)}


def operands(rows: int, length: int):
    """(query, key, value, decay, beta), gradient of out; decays as a model begins with (Mamba's)."""
    heads = (KEY_HEADS, KEY_HEADS, HEADS, HEADS)
    query, key, value, dout = (normal(seed, rows, length, count, DIM) for seed, count in enumerate(heads))
    speed = jax.random.uniform(jax.random.key(4), (HEADS,), minval=0.01, maxval=16.0)
    decay = -speed * jax.nn.softplus(normal(5, rows, length, HEADS, dtype=jnp.float32) - 4.0)
    beta = jax.nn.sigmoid(normal(6, rows, length, HEADS, dtype=jnp.float32))
    return (query, key, value, decay, beta), dout


def layout_of(rows: int, length: int, packed: bool):
    if not packed:
        return packed_layout((rows, length))
    return packed_layout((rows, length), jnp.asarray(log_normal_segments(rows, length, mean=256, sigma=0.8)))


def programs(name: str, layout):
    """(forward, forward and backward) of (arrays, dout)."""

    def forward(arrays, dout):
        return gated_delta_rule(*arrays, layout, implementation=name)

    def both(arrays, dout):
        out, pull = jax.vjp(lambda *arrays: forward(arrays, dout), *arrays)
        return out, *pull(dout.astype(out.dtype))

    return jax.jit(forward), jax.jit(both)


def kernels(arrays, dout, layout) -> dict[str, float]:
    """Milliseconds of each Triton kernel alone."""
    query, key, value, decay, beta = arrays
    chunks = jax.jit(triton._chunks)
    made = jax.block_until_ready(chunks(query, key, decay, beta, value, layout))
    times = {"chunk": median_ms(chunks, query, key, decay, beta, value, layout)}
    for save in (False, True):
        states = jax.jit(lambda *a, save=save: triton._states(*a, save=save))
        times["forward, saving states" if save else "forward"] = median_ms(states, query, key, value, made)
    _, error, kept = states(query, key, value, made)
    back = jax.jit(triton._backward)
    times["backward"] = median_ms(back, query, key, dout, error, kept, layout, made)
    times["reverse"] = median_ms(jax.jit(triton._reverse), query, key, dout, made)
    return times


def measure(name: str, rows: int, length: int, packed: bool) -> dict:
    """Milliseconds of an implementation; of the Triton kernels each alone, too."""
    arrays, dout = operands(rows, length)
    layout = layout_of(rows, length, packed)
    both = zip(("forward_ms", "both_ms"), programs(name, layout), strict=True)
    found: dict = {key: median_ms(function, arrays, dout) for key, function in both}
    return found | ({"kernels": kernels(arrays, dout, layout)} if name == "triton" else {})


def must_show(record: dict) -> Iterator[dict]:
    found = record.get("8 x 2,048, triton", {})
    for key, words, bounds in (("forward_ms", "forward", (0.7, 0.45)), ("both_ms", "forward and backward", (1.9, 1.3))):
        if found:
            yield figure("delta rule", f"8 x 2,048, {words}: ms", found[key], *bounds, at_most=True)


def main() -> int:
    options = arguments(__doc__).parse_args()
    names = [name for name in api.IMPLEMENTATIONS if name != "reference"]
    shapes = (jax.ShapeDtypeStruct((1, 64, heads, DIM), jnp.bfloat16) for heads in (KEY_HEADS, HEADS))
    if (refused := triton.refusal(*shapes)) is not None:
        names.remove("triton")
        print("triton:", refused)
    parts = {
        f"{case}, {name}": functools.partial(measure, name, *sizes) for name in names for case, sizes in CASES.items()
    }
    return record_parts("delta_rule", options, parts, must_show)


if __name__ == "__main__":
    sys.exit(main())
