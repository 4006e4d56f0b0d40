"""Compiles the programs of several cases of step.py side by side, from shapes alone, into one compilation cache.

    python benchmarks/train/compile_ahead.py CACHE 'arguments of step.py' ['of another case' ...]

Then `step.py ... --cache CACHE` finds them there, and says how long a cached start takes. A case that cannot be
compiled is named; its own run will say why.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.94")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import numpy as np
from flax import nnx

from benchmarks.arms import without
from benchmarks.random_model import in_blocks
from benchmarks.shapes import SHAPES
from benchmarks.train.step import arguments, make_trainer, train_config
from jaxtune.models.registry import config_from_hf
from jaxtune.train.planning.cost import abstract_model
from jaxtune.train.planning.devices import allow_pinned_memory

THREADS = 8


def compile_ahead(cases: dict[str, list[str]], cache: str, threads: int = THREADS) -> dict[str, float]:
    """Seconds until each case's programs were in the cache, of those that could be compiled; cases: name to step.py's
    arguments."""
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    began = time.perf_counter()

    def one(options) -> float:
        model = abstract_model(config_from_hf(SHAPES[options.shape]), train_config(options))
        if options.scales == "blocks":
            model = nnx.eval_shape(in_blocks, model)
        trainer = make_trainer(options, model)
        trainer.engine.fit(lambda: trainer.model.first_shapes(trainer.engine), 0, lambda line: None)
        return time.perf_counter() - began

    np.asarray(jax.device_put(0, jax.devices()[0]))  # the backend starts once, before the threads
    wanted = {name: arguments().parse_args(texts) for name, texts in cases.items()}
    found = {}
    for arms in {tuple(options.without) for options in wanted.values()}:
        pending = {}
        with without(arms), ThreadPoolExecutor(threads) as pool:  # patches of the process: not of two at once
            for name, options in wanted.items():
                if tuple(options.without) == arms:
                    pending[name] = pool.submit(one, options)
        for name, future in pending.items():
            try:
                found[name] = future.result()
            except Exception as error:
                print(f"{name}: not compiled ahead: {str(error).splitlines()[0][:300]}", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cache")
    parser.add_argument("cases", nargs="+", help="each the arguments of step.py, as a shell would read them")
    options = parser.parse_args()
    allow_pinned_memory()
    for name, seconds in compile_ahead({text: shlex.split(text) for text in options.cases}, options.cache).items():
        print(f"{seconds:6.1f} s: {name}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
