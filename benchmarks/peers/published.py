"""jaxtune at the shapes of figures that others publish for one card, as JSON in their repositories."""

from __future__ import annotations

import datetime
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cases import Step
from benchmarks.peers.sft import card_name, file_name
from benchmarks.processes import ROOT, Call, Side
from benchmarks.record import commit_here, write


@dataclass(frozen=True)
class Figure:
    """arguments: of step.py, without a plan. source: the file, in PrimeIntellect-ai/prime-rl."""

    arguments: str
    published: float  # tokens/s
    source: str
    words: str


_FILES = "benchmarks/baselines/benchmark-1xh100-Qwen--"
_ENDS = "1gpu-Recompute-flash_attention_3-16384-cp1-ep1.json"
FIGURES = {
    "qwen3-0.6b": Figure(
        "--shape qwen3-0.6b --rank 0 --rows 2 --length 16384",
        25486,
        f"{_FILES}Qwen3-0.6B-sft-full-{_ENDS}",
        "Qwen3-0.6B, SFT of all parameters, 2 x 16,384",
    ),
    "qwen3-4b": Figure(
        "--shape qwen3-4b --rank 16 --rows 2 --length 16384",
        6038,
        f"benchmarks/baselines/benchmark-8xh100-Qwen--Qwen3-4B-Instruct-2507-rl-16-{_ENDS}",
        "Qwen3-4B, LoRA r=16, 2 x 16,384 (theirs: the trainer of RL; here: SFT)",
    ),
}


def run(output: Path, seconds: float) -> None:
    """Adds DIR/published_CARD.json's cases that it lacks."""
    card = card_name()
    call = Call(output / f"published_{file_name(card)}", seconds)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    begun = {"benchmark": "peers/published", "device": card, "commit": commit_here(), "time": now, "cases": {}}
    record = call.begun(begun)
    side = Side("new", ROOT, record["commit"], Path(tempfile.gettempdir(), "jaxtune_benchmarks"))
    steps = {
        name: Step(f"{figure.arguments} --plan auto", 8)
        for name, figure in FIGURES.items()
        if "tokens_per_second" not in record["cases"].get(name, {})
    }
    call.ahead([(side, list(steps.values()))])
    for name, step in steps.items():
        found = call.run(side, step, name, 20, 150)
        if found is None:
            break
        figure = FIGURES[name]
        found |= {"what": figure.words, "published_tokens_per_second": figure.published, "source": figure.source}
        record["cases"][name] = found
        write(call.output, record)
