"""What quantisation-aware training (QAT) regains of the loss that rounding costs, on a small model pretrained here.

    python benchmarks/train/qat_quality.py [--seeds 3 4 5] [--formats int4 int8-int4 nvfp4] [--output FILE.json]

The model has the architecture and the tokenizer of the packaged one, but two layers of 64 channels: rounding costs the
packaged one, which has far more weights than its skills need, less than a thousandth of a nat. Its text is that of
scripts/quickstart/make_pretraining_text.py, 400 pages of it held out, and all weights train in float32 on a CPU.
Phase one pretrains it from random weights, once for all seeds. Phase two continues from there with a learning rate of
its own and with rows in the order of a seed, once plain and once for each format with `qat`: the same steps, rows and
rates. Four held-out losses (nats a token) are compared:

    base     after phase one
    plain    L0, after both phases without rounding
    rounded  L1, the same weights, which are rounded to the format only afterwards
    qat      L2, after both phases, the second one with QAT, rounded to the format

QAT regains (L1 - L2) / (L1 - L0). In L1 and L2 the activations are rounded too where the format says so, by the same
code. That share means something only where rounding costs much more than a seed does. So the record also has
L1 - L0 over the deviation of L0 between seeds (of a sample: n - 1), which must be ten. The int4 formats take groups of
64, the rows of most matrices; NVFP4 has no choice of groups.

The settings (--help lists them) were chosen on the seeds 0 to 2, which are no part of a result: with peak rates of
1e-3 and 4e-3 in phase two, and a shorter phase one, QAT regained less, because the plain model was still learning. The
file is written after each loss, and a seed that it has with all formats is not run again, so that several calls make
one record. The exit status is 1 where a floor is missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.record import RESULTS, environment, write  # noqa: E402
from jaxtune.models.decoder import Decoder  # noqa: E402
from jaxtune.models.files.model_folder import load_tokenizer  # noqa: E402
from jaxtune.models.registry import config_from_hf  # noqa: E402
from jaxtune.pallas.format_names import QAT_GROUPS  # noqa: E402
from jaxtune.system.program_cache import use_program_cache  # noqa: E402
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
from jaxtune.train.trainer import Trainer  # noqa: E402

FORMATS = ("int4", "int8-int4", "nvfp4")
SCRIPTS = ROOT / "scripts" / "quickstart"
# What differs from the packaged model's config.
SHAPE: dict[str, Any] = dict(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
)
PAGES, HELD_OUT = {"pages": 8000, "seed": 5}, {"pages": 400, "seed": 77}  # of the text that is made
FLOOR, GOAL = 0.70, 0.85  # of the share that QAT regains
DEVIATIONS = 10.0  # the least cost of rounding, in deviations of L0 between seeds


@dataclasses.dataclass(frozen=True)
class Settings:
    """What may be chosen, each an option of the command. steps, learning_rate: of phase one. qat_steps,
    qat_learning_rate: of phase two, plain or with QAT. Either rate is a peak, from which a cosine falls to zero after a
    warm-up of 5 % of the phase. rows: of `length` tokens in a step. group_size: of the formats that let it be chosen.
    gradients: qat.gradients."""

    steps: int = 900
    learning_rate: float = 5e-3
    qat_steps: int = 400
    qat_learning_rate: float = 3e-4
    rows: int = 16
    length: int = 256
    group_size: int = 64
    gradients: str = "straight_through"

    def qat(self, name: str) -> QatConfig:
        """The section `qat` for a format (its name)."""
        size = self.group_size if self.group_size in QAT_GROUPS[name] else None
        return QatConfig(name, size, gradients=self.gradients)


class Runs:
    """The trainings and evaluations of one process, all on the same text."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.tokenizer = load_tokenizer(ROOT / "jaxtune" / "quickstart" / "base")
        config = json.loads((SCRIPTS / "config.json").read_text(encoding="utf-8")) | SHAPE
        self.first = Decoder(config_from_hf(config), jax.random.key(0), "float32")
        options: dict[str, Any] = dict(
            length=settings.length, vocab_size=config["vocab_size"], num_workers=0, train_on="all"
        )
        self.rows, self.held_out = (prepare(_text(**pages), self.tokenizer, **options) for pages in (PAGES, HELD_OUT))

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
            model=ModelConfig(path="random weights"),
            data=DataConfig(train="text made here", eval="text made here", length=settings.length),
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

    def pretrained(self) -> Decoder:
        """The model after phase one."""
        return self._trainer(self.first, None, self.settings.steps, self.settings.learning_rate).train()

    def second_phase(self, model: Decoder, seed: int, qat: QatConfig | None) -> Decoder:
        """The model after phase two, from `model` of phase one. The rows come in another order than in phase one."""
        settings = self.settings
        return self._trainer(model, qat, settings.qat_steps, settings.qat_learning_rate, seed + 1000).train()

    def loss(self, model: Decoder, qat: QatConfig | None = None) -> float:
        """The held-out loss of a model, whose weights (and activations, where the format has them) are rounded as `qat`
        says; weights that are on the grid stay there."""
        return float(self._trainer(model, qat, trains=False).evaluate(trained=True)["eval_loss"])


def _text(pages: int, seed: int) -> str:
    """Makes a JSONL file with that many pages of the packaged model's pretraining text, drawn from `seed`, in a new
    temporary folder, and returns its path."""
    file = Path(tempfile.mkdtemp()) / "text.jsonl"
    command = [sys.executable, str(SCRIPTS / "make_pretraining_text.py"), str(file)]
    subprocess.run([*command, "--pages", str(pages), "--seed", str(seed)], check=True)
    return str(file)


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


def measure(runs: Runs, model: Decoder, seed: int, formats: list[str], keep) -> None:
    """Runs phase two of one seed, from `model` of phase one. keep: called with {"base", "plain", format: {...},
    "seconds"} after each loss; all of the seed's losses so far; the two of a format come at once."""
    begun, found = time.monotonic(), {}

    def add(**losses) -> None:
        found.update(losses, seconds=round(time.monotonic() - begun, 1))
        print(f"seed {seed}: {found}", flush=True)
        keep(dict(found))

    add(base=runs.loss(model))
    plain = runs.second_phase(model, seed, None)
    add(plain=runs.loss(plain))
    for name in formats:
        qat = runs.settings.qat(name)
        losses = {"rounded": runs.loss(plain, qat), "qat": runs.loss(runs.second_phase(model, seed, qat), qat)}
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
    facts = {
        "benchmark": "train/qat_quality",
        **environment(),
        "model": "two layers of 64 channels, pretrained here, float32",
    }
    record = begun(options.output, facts | {"settings": dataclasses.asdict(settings)})
    use_program_cache()
    runs = Runs(settings)
    left = [seed for seed in options.seeds if not set(options.formats) <= record["seeds"].get(str(seed), {}).keys()]
    model = runs.pretrained() if left else runs.first
    for seed in left:

        def keep(losses: dict[str, Any], seed: str = str(seed)) -> None:
            record["seeds"][seed] = losses
            write(options.output, record)

        measure(runs, model, seed, options.formats, keep)
    record["summary"] = summary({str(seed): record["seeds"][str(seed)] for seed in options.seeds})
    record["must_show"] = must_show(record["summary"])
    write(options.output, record)
    for row in record["must_show"]:
        print(f"{row['what']}: {row['value']:.3g}, at least {row['floor']:g} is asked")
    return int(any(row["value"] < row["floor"] for row in record["must_show"]))


if __name__ == "__main__":
    sys.exit(main())
