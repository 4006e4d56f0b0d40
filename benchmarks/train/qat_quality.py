"""What quantisation-aware training (QAT) regains of the loss that rounding costs, on the packaged model.

    python benchmarks/train/qat_quality.py [--seeds 3 4 5] [--formats int4 int8-int4 nvfp4] [--output FILE.json]

The model is the packaged one of 1.75 million parameters, the rows are those of the recipe quickstart.yaml, and all
weights train in float32 on a CPU. For each seed, which orders the rows, phase one trains the plain model. Phase two
continues from its weights with a learning rate of its own, once plain and once for each format with `qat`: the same
steps, rows and rates. Four held-out losses (nats a trained token) are compared:

    base     the packaged model, before any step
    plain    L0, after both phases without rounding
    rounded  L1, the same weights, which are rounded to the format only afterwards
    qat      L2, after both phases, the second one with QAT, rounded to the format

QAT regains (L1 - L2) / (L1 - L0). In L1 and L2 the activations are rounded too where the format says so, by the same
code. That share means something only where rounding costs much more than a seed does. So the record also has
L1 - L0 over the deviation of L0 between seeds (of a sample: n - 1), which must be ten. The int4 formats take groups of
64, the largest size that divides the rows of all matrices of this model (192, 256 and 448 numbers), because rounding
errors grow with the largest number of a group. NVFP4 has no choice of groups.

--seeds 0 with a file of its own and other values of the settings (--help lists them) is for choosing these; seed 0 is
no part of a result. The defaults are a first guess, which no run has confirmed yet. The file is written after each
loss, and a seed that it has with all formats is not run again, so that several calls make one record. The exit status
is 1 where a floor is missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.record import RESULTS, environment, write  # noqa: E402
from jaxtune.models.decoder import Decoder  # noqa: E402
from jaxtune.models.hf import from_pretrained  # noqa: E402
from jaxtune.pallas.format_names import QAT_GROUPS  # noqa: E402
from jaxtune.train.config import (  # noqa: E402
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    MetricsConfig,
    ModelConfig,
    OptimConfig,
    QatConfig,
    ScheduleConfig,
    TrainConfig,
)
from jaxtune.train.data import prepare  # noqa: E402
from jaxtune.train.program.program_cache import use_program_cache  # noqa: E402
from jaxtune.train.trainer import Trainer  # noqa: E402

FORMATS = ("int4", "int8-int4", "nvfp4")
QUICKSTART = ROOT / "jaxtune" / "quickstart"
FLOOR, GOAL = 0.70, 0.85  # of the share that QAT regains
DEVIATIONS = 10.0  # the least cost of rounding, in deviations of L0 between seeds


@dataclasses.dataclass(frozen=True)
class Settings:
    """What may be chosen, each an option of the command. steps, learning_rate: of phase one. qat_steps,
    qat_learning_rate: of phase two, plain or with QAT. Either rate is a peak, from which a cosine falls to zero after a
    warm-up of 5 % of the phase. rows: of `length` tokens in a step. group_size: of the formats that let it be chosen.
    gradients: qat.gradients."""

    steps: int = 400
    learning_rate: float = 1e-3
    qat_steps: int = 300
    qat_learning_rate: float = 3e-4
    rows: int = 8
    length: int = 128
    group_size: int = 64
    gradients: str = "straight_through"

    def qat(self, name: str) -> QatConfig:
        """The section `qat` for a format (its name)."""
        size = self.group_size if self.group_size in QAT_GROUPS[name] else None
        return QatConfig(name, size, gradients=self.gradients)


class Runs:
    """The trainings and evaluations of one process, all from the packaged model and its rows."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.base, self.tokenizer = from_pretrained(QUICKSTART / "base", dtype="float32")
        options = dict(length=settings.length, vocab_size=self.base.config.vocab_size, num_workers=0)
        self.rows, self.held_out = (
            prepare(str(QUICKSTART / f"{name}.jsonl"), self.tokenizer, **options) for name in ("train", "eval")
        )

    def _trainer(
        self,
        model: Decoder,
        qat: QatConfig | None,
        steps: int = 1,
        rate: float = 1e-3,
        seed: int = 0,
        trains: bool = True,
    ) -> Trainer:
        settings = self.settings
        config = TrainConfig(
            model=ModelConfig(path=str(QUICKSTART / "base")),
            data=DataConfig(train="the packaged rows", eval="the packaged rows", length=settings.length),
            steps=steps,
            rows_per_step=settings.rows,
            precision="fp32",
            seed=seed,
            optim=OptimConfig(learning_rate=rate),
            schedule=ScheduleConfig(name="cosine", warmup_ratio=0.05),
            qat=qat,
            checkpoint=CheckpointConfig(every_minutes=None),
            evaluation=EvaluationConfig(at_end=False),
            metrics=MetricsConfig(log_every=50),
            output=tempfile.mkdtemp(),
        )
        return Trainer(model, self.tokenizer, config, self.rows, self.held_out, trains=trains)

    def first_phase(self, seed: int) -> Decoder:
        """The plain model after phase one."""
        return self._trainer(self.base, None, self.settings.steps, self.settings.learning_rate, seed).train()

    def second_phase(self, model: Decoder, seed: int, qat: QatConfig | None) -> Decoder:
        """The model after phase two, from `model` of phase one. The rows come in another order than in phase one."""
        settings = self.settings
        return self._trainer(model, qat, settings.qat_steps, settings.qat_learning_rate, seed + 1000).train()

    def loss(self, model: Decoder, qat: QatConfig | None = None) -> float:
        """The held-out loss of a model, whose weights (and activations, where the format has them) are rounded as `qat`
        says; weights that are on the grid stay there."""
        return float(self._trainer(model, qat, trains=False).evaluate(trained=True)["eval_loss"])


def regained(plain: float, rounded: float, qat: float) -> float:
    """The share of the loss of rounding, `rounded` - `plain`, that QAT regains: 1 where its loss `qat` is `plain`."""
    return (rounded - qat) / (rounded - plain)


def summary(seeds: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Means and deviations over the seeds of a record. seeds: {seed: {"plain": loss, format: {"rounded", "qat"}}}, all
    with the same formats. "deviation" is that of the plain loss between seeds, and None for a single seed, as is the
    cost of rounding in such deviations ("over_deviation")."""
    plain = [losses["plain"] for losses in seeds.values()]
    deviation = statistics.stdev(plain) if len(plain) > 1 else None
    found: dict[str, Any] = {"plain": statistics.mean(plain), "deviation": deviation, "formats": {}}
    for name in [key for key, value in next(iter(seeds.values())).items() if isinstance(value, dict)]:
        costs = [losses[name]["rounded"] - losses["plain"] for losses in seeds.values()]
        shares = [regained(losses["plain"], **losses[name]) for losses in seeds.values()]
        found["formats"][name] = {
            "cost": statistics.mean(costs),
            "over_deviation": statistics.mean(costs) / deviation if deviation else None,
            "regained": statistics.mean(shares),
            "regained_each": shares,
        }
    return found


def must_show(found: dict[str, Any]) -> list[dict[str, Any]]:
    """A record's figures beside their floors and goals, from its summary."""
    rows = []
    for name, figures in found["formats"].items():
        what = f"{name}: cost of rounding over the deviation of seeds"
        if figures["over_deviation"] is not None:
            rows.append(dict(what=what, value=figures["over_deviation"], floor=DEVIATIONS, goal=None, at_most=False))
        what = f"{name}: regained of the cost of rounding, mean of the seeds"
        rows.append(dict(what=what, value=figures["regained"], floor=FLOOR, goal=GOAL, at_most=False))
    return rows


def measure(runs: Runs, seed: int, formats: list[str], keep) -> None:
    """Runs one seed. keep: called with {"base", "plain", format: {...}, "seconds"} after each loss; all of the seed's
    losses so far; the two of a format come at once."""
    begun, found = time.monotonic(), {}

    def add(**losses) -> None:
        found.update(losses, seconds=round(time.monotonic() - begun, 1))
        print(f"seed {seed}: {found}", flush=True)
        keep(dict(found))

    add(base=runs.loss(runs.base))
    first = runs.first_phase(seed)
    plain = runs.second_phase(first, seed, None)
    add(plain=runs.loss(plain))
    for name in formats:
        qat = runs.settings.qat(name)
        losses = {"rounded": runs.loss(plain, qat), "qat": runs.loss(runs.second_phase(first, seed, qat), qat)}
        add(**{name: losses})
        print(f"seed {seed}: {name} regains {regained(found['plain'], **losses):.3f}", flush=True)


def begun(output: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """The record that the file holds, to which this call adds, or a new one with `facts`.

    Raises:
      SystemExit: the file is of another commit or other settings.
    """
    if not output.is_file():
        return {**facts, "seeds": {}}
    record = json.loads(output.read_text(encoding="utf-8"))
    for key in ("commit", "settings"):
        if record[key] != facts[key]:
            raise SystemExit(f"{output}: {key} is {record[key]!r} there and {facts[key]!r} here")
    return record


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[3, 4, 5])
    parser.add_argument("--formats", nargs="+", choices=sorted(QAT_GROUPS), default=list(FORMATS))
    parser.add_argument("--output", type=Path, default=RESULTS / "qat_quality.json")
    for field in dataclasses.fields(Settings):
        option = f"--{field.name.replace('_', '-')}"
        parser.add_argument(option, type=type(field.default), default=field.default, help=f"default {field.default}")
    options = parser.parse_args()
    settings = Settings(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Settings)})
    facts = {"benchmark": "train/qat_quality", **environment(), "model": "the packaged one, all weights in float32"}
    record = begun(options.output, facts | {"settings": dataclasses.asdict(settings)})
    use_program_cache()
    runs = Runs(settings)
    for seed in options.seeds:
        if set(options.formats) <= record["seeds"].get(str(seed), {}).keys():
            continue

        def keep(losses: dict[str, Any], seed: str = str(seed)) -> None:
            record["seeds"][seed] = losses
            write(options.output, record)

        measure(runs, seed, options.formats, keep)
    record["summary"] = summary({str(seed): record["seeds"][str(seed)] for seed in options.seeds})
    record["must_show"] = must_show(record["summary"])
    write(options.output, record)
    for row in record["must_show"]:
        print(f"{row['what']}: {row['value']:.3g}, at least {row['floor']:g} is asked")
    return int(any(row["value"] < row["floor"] for row in record["must_show"]))


if __name__ == "__main__":
    sys.exit(main())
