"""What a Sampler of two processes gives: rows of prompts that share a beginning, of long ones, and alone or packed.

Usage: sampling_of_processes.py --coordinator=HOST:PORT --processes=N --process=I, which prints the rows as JSON.
"""

from __future__ import annotations

import json
import sys

import jax
import numpy as np
from tiny_models import adapted_model, over, tiny_model

from jaxtune.models.generation.sampler import Sampler
from jaxtune.models.placement import partition
from jaxtune.system import ending, joining

WAYS = (
    dict(prefix_bytes=1 << 22),
    dict(prefix_bytes=1 << 22, prefills_alone=True),
    dict(prefill_tokens=256),
    dict(exact=True),
)


def rows_of(model, way: dict, slots: int) -> list[list[int]]:
    draw = np.random.default_rng(0)
    beginning, lengths = draw.integers(3, 500, 100).tolist(), (3, 5, 9, 20, 40, 150)
    prompts = [[*beginning[: 100 if length < 10 else 0], *draw.integers(3, 500, length).tolist()] for length in lengths]
    sampler = Sampler(model, slots=slots, length=256, **(dict(prefill_tokens=32) | way))
    return [row.ids for row in [*sampler.run(prompts[:1], 6, 1.0), *sampler.run(prompts, 6, 1.0)]]


def model_of():
    shape = dict(initializer_range=0.5, vocab_size=512, max_position_embeddings=512)
    return adapted_model(tiny_model(**shape), r=4)


def main() -> int:
    given = dict(word[2:].split("=") for word in sys.argv[1:])
    joining.join(given["coordinator"], int(given["processes"]), int(given["process"]))
    model = over(model_of(), partition.mesh_shape(-1)[0])
    assert jax.process_count() == 2
    for way in WAYS:
        print("rows", json.dumps(rows_of(model, way, 1)), file=sys.stderr, flush=True)
    ending.leave(0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
