"""One train step with two implementations of attention, in one process on one GPU, with a profile of each.

    python benchmarks/train/attention_pair.py --output FILE.json [--arms mosaic cudnn] [--profile FOLDER]
                                              [--rounds 5] [options of benchmarks/train/step.py]

The same trainer, weights and packed rows for both; only the implementation of attention differs. The arms take turns,
round by round, since the longer a GPU works the slower it gets; `speedup` is the ratio of the medians, the second arm's
time over the first's. Then some steps of each are profiled (jaxtune.profile), and the time of each category is kept.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.94")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np

import jaxtune
from benchmarks.record import environment, honest, write
from benchmarks.shapes import SHAPES
from benchmarks.train import step as one_step
from jaxtune.pallas import dispatch
from jaxtune.pallas.attention import api

PROFILED_STEPS = 3


@contextlib.contextmanager
def only(name: str):
    """While tracing: attention by this implementation or not at all."""
    whole = api.implementations

    def table(*arguments, **options):
        return {name: whole(*arguments, **options)[name]}

    jax.clear_caches()  # layers traced for another arm would be taken from there
    with mock.patch.object(api, "implementations", table):
        yield


class Arm:
    """The programs and the training state of one implementation."""

    def __init__(self, name: str, trainer, state, sums, frozen, loaded):
        self.name, self.trainer, self.loaded = name, trainer, loaded
        # Both are donated at every step: a copy for each arm.
        self.state, self.sums, self.frozen = jax.tree.map(jnp.copy, state), jax.tree.map(jnp.copy, sums), frozen
        with only(name):
            self.programs = trainer.engine.compile(state, sums, frozen)
        assert dispatch.record["attention"][0] == name
        self.number, self.losses, self.norms, self.round_seconds = 0, [], [], []

    def step(self):
        batches = self.loaded[self.number % len(self.loaded)][0]
        sums = self.trainer.engine.accumulate(self.programs, self.sums, self.state, self.frozen, batches)
        self.state, self.sums, latest = self.programs.update(self.state, sums)
        self.number += 1
        return latest

    def warm_up(self):
        for _ in range(3):
            latest = self.step()
            self.losses.append(float(latest["loss"]))
            self.norms.append(np.asarray(latest["grad_norms"]))

    def round(self, steps: int):
        began = time.perf_counter()
        for _ in range(steps):
            latest = self.step()
        float(latest["loss"])
        self.round_seconds.append((time.perf_counter() - began) / steps)

    def profile(self, folder: Path, tokens: int) -> dict:
        programs = {"accumulate": self.programs.accumulate, "update": self.programs.update}
        with jaxtune.profile.capture(folder, {"tokens_per_step": tokens}, programs):
            for _ in range(PROFILED_STEPS):
                float(self.step()["loss"])
        report = jaxtune.profile.show(folder)
        return {"step_ms": report.step_ms, "categories": {row.name: row.ms for row in report.categories}}

    def record(self, slots: int, profile: dict) -> dict:
        seconds = statistics.median(self.round_seconds)
        return {
            "step_seconds": seconds,
            "step_seconds_of_rounds": [round(s, 5) for s in self.round_seconds],
            "tokens_per_second": slots / seconds,
            "compile_seconds": self.programs.seconds,
            "first_loss": self.losses[0],
            "losses": self.losses,
            "smallest_grad_norm_by_step_2": float(np.maximum(self.norms[0], self.norms[1]).min()),
            "vocab_size": SHAPES[self.trainer.config.model.path]["vocab_size"],
            "profile": profile,
        }


def measure(options) -> dict:
    trainer, _ = one_step.build(options)
    state, sums, frozen = trainer.model.first_state(trainer.engine)
    loaded = [trainer.engine.load_step(number) for number in range(2)]
    arms = [Arm(name, trainer, state, sums, frozen, loaded) for name in options.arms]
    del state, sums
    slots = options.rows * options.length
    for arm in arms:
        arm.warm_up()
    for _ in range(options.rounds):
        for arm in arms:
            arm.round(options.steps)
    folder = Path(options.profile or tempfile.mkdtemp())
    found = {arm.name: arm.record(slots, arm.profile(folder / arm.name, slots)) for arm in arms}
    first, second = (found[name] for name in options.arms)
    return {
        "benchmark": "train/attention_pair",
        **environment(),
        "shape": options.shape,
        "load_in": options.load_in,
        "adapter_rank": options.rank,
        "rows": options.rows,
        "length": options.length,
        "documents": options.documents,
        "max_documents": trainer.program.max_documents,
        "fill": statistics.mean(counts["tokens"] for _, counts in loaded) / slots,
        "arms": found,
        "speedup": second["step_seconds"] / first["step_seconds"],
        "largest_loss_difference": max(abs(a - b) for a, b in zip(first["losses"], second["losses"], strict=True)),
    }


def arguments():
    parser = one_step.arguments()
    parser.description = __doc__
    parser.add_argument("--arms", nargs=2, default=["mosaic", "cudnn"], choices=list(api.IMPLEMENTATIONS))
    parser.add_argument("--rounds", type=int, default=5, help="of --steps steps, by each arm in turn")
    parser.set_defaults(documents="packed", steps=6)
    return parser


def main() -> int:
    options = arguments().parse_args()
    record = measure(options)
    problems = [f"{name}: {problem}" for name, arm in record["arms"].items() if (problem := honest(arm))]
    if problems:
        record["rejected"] = problems
    if options.output:
        write(options.output, record)
    print(json.dumps(record))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
