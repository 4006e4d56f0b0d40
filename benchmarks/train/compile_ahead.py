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

from benchmarks.train.step import abstract, arguments, compile_step, make_trainer, prepare


def main() -> int:
    cache, case = sys.argv[1:]
    options = arguments().parse_args(shlex.split(case))
    prepare(cache)
    print(compile_step(make_trainer(options, abstract(options)), options).seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
