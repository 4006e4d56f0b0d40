"""Compiles the programs of a case of step.py, from shapes alone, into a compilation cache.

    python benchmarks/train/compile_ahead.py CACHE 'arguments of step.py'

Then `step.py ... --cache CACHE` finds them there, and says how long a cached start takes. What is printed last is the
seconds that compiling took.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.94")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from flax import nnx

from benchmarks.random_model import in_blocks
from benchmarks.shapes import SHAPES
from benchmarks.train.step import arguments, compile_step, make_trainer, prepare, train_config
from jaxtune.models.registry import config_from_hf
from jaxtune.train.planning.cost import abstract_model


def main() -> int:
    cache, case = sys.argv[1:]
    options = arguments().parse_args(shlex.split(case))
    prepare(cache)
    model = abstract_model(config_from_hf(SHAPES[options.shape]), train_config(options))
    if options.scales == "blocks":
        model = nnx.eval_shape(in_blocks, model)
    print(compile_step(make_trainer(options, model), options).seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
