"""Measures which Blocks of the grouped product's Hopper kernel are fastest on this machine's GPU, for the shapes of two
models, and stores them for later products of any number of rows and experts.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxtune.pallas import tuning
from jaxtune.pallas.formats import NF4
from jaxtune.pallas.grouped_matmul import mosaic
from jaxtune.pallas.grouped_matmul.layout import groups_of

# (experts, pairs, in, out, whether weights are [E, in, out]) of gpt-oss-20b and Qwen3-30B-A3B at 16,384 tokens: gate
# with up, and down.
SHAPES = (
    (32, 65_536, 2880, 5760, True),
    (32, 65_536, 2880, 2880, True),
    (128, 131_072, 2048, 1536, False),
    (128, 131_072, 768, 2048, False),
)


def tune(
    dtype=jnp.bfloat16, say: Callable[[str], None] = lambda text: None, path: Path | None = None
) -> dict[str, dict[str, Any]]:
    """Times Blocks on balanced groups, forward and for dx, with weights in `dtype` and in NF4, and stores the fastest
    of each product. A candidate that fails, or differs from the first one's result, is skipped. Hopper only.

      say: gets a line of text before and after each candidate.
      path: of the stored result; None: the user's cache.
    Returns:
      {mosaic.bucket: the entry of tuning.measure}.
    Raises:
      RuntimeError: there is no GPU, or no candidate runs for one of the products.
      OSError: `path` cannot be written.
    """
    entries = {}
    for (experts, pairs, in_size, out_size, transposed), ahead in itertools.product(SHAPES, (False, True)):
        sizes = jnp.full(experts, pairs // experts, jnp.int32)
        groups = groups_of(sizes, pairs)
        for size, result_size, contract in (
            (in_size, out_size, 1 if transposed else 2),
            (out_size, in_size, 2 if transposed else 1),
        ):
            x = jax.random.normal(jax.random.key(0), (groups.rows, size), dtype)
            pair = (size, result_size) if contract == 1 else (result_size, size)
            weight = jax.random.normal(jax.random.key(1), (experts, *pair), dtype)
            weight = NF4.encode(weight) if ahead else weight

            def prepare(x=x, weight=weight, groups=groups, contract=contract):
                # Compiled here, because only here a trace finds the blocks under test.
                run = jax.jit(lambda x, weight: mosaic.product(x, weight, groups, contract)).lower(x, weight).compile()
                return lambda: run(x, weight)

            bucket = mosaic.bucket(size, result_size, contract, ahead)
            if bucket in entries:
                continue
            candidates = [dataclasses.asdict(blocks) for blocks in mosaic.candidates(result_size, ahead)]
            entries[bucket] = tuning.measure(
                "grouped_matmul", bucket, dtype, candidates, prepare, wrong=tuning.as_the_first(), say=say, path=path
            )
    return entries
