"""SFT of an 8B beside peers: their trainers at their fastest micro-batch, and jaxtune on the whole card and within the
peak memory of each of them, on one card."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cases import Step
from benchmarks.peers.documents import read_documents
from benchmarks.peers.trained import RANK, installed
from benchmarks.processes import ROOT, Call, Side
from benchmarks.processes import wait as wait_for
from benchmarks.record import commit_here, write
from benchmarks.train.memory import pool_of

ROWS, LENGTH = 8, 2048
SHAPE = "llama-3.1-8b"
FORMATS = {"bf16": "", "nf4": "--load-in nf4"}
SCRATCH = Path(tempfile.gettempdir(), "jaxtune_peers")  # logs of the processes
_WHOLE = "whole card"
_LEAST, _OURS, _AHEAD = 40, 30, 45  # seconds that a peer takes at least, that a run of jaxtune takes, and compiling


@dataclass(frozen=True)
class Peer:
    """A setting of a peer: its name in the record, and arguments of trained.py."""

    name: str
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Running:
    """A peer's process, the file of its figures, and that whose making lets it go."""

    process: subprocess.Popen
    output: Path
    go: Path


PEERS = (
    Peer("unsloth unsloth", ("--peer", "unsloth", "--recompute", "unsloth")),
    Peer("unsloth false", ("--peer", "unsloth", "--recompute", "false")),
    Peer("unsloth true", ("--peer", "unsloth", "--recompute", "true")),
    Peer("padded unsloth unsloth", ("--peer", "unsloth", "--recompute", "unsloth", "--padded")),
    Peer("padded unsloth false", ("--peer", "unsloth", "--recompute", "false", "--padded")),
    Peer("trl true", ("--peer", "trl", "--recompute", "true")),
    Peer("trl false", ("--peer", "trl", "--recompute", "false")),
    Peer("trl liger true", ("--peer", "trl", "--recompute", "true", "--liger")),
    Peer("trl liger false", ("--peer", "trl", "--recompute", "false", "--liger")),
)


def fastest(case: Mapping[str, Any]) -> dict[str, Any] | None:
    """Of a peer's tries, that of most tokens per second."""
    done = [one for one in case.get("tried", ()) if "tokens_per_second" in one]
    return max(done, key=lambda one: one["tokens_per_second"]) if done else None


def card_name() -> str:
    """The first card's, by its driver."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader", "--id=0"]
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return "CPU"


def file_name(card: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", card.lower()).strip("_") + ".json"


class Beside:
    """The processes of a call and its record, which is written after every case."""

    def __init__(self, output: Path, model: Path, seconds: float, steps: int, documents: Path | None = None):
        card = card_name()
        self.call = Call(output / (f"packed_{file_name(card)}" if documents else file_name(card)), seconds)
        self.model, self.steps, self.documents = model, steps, documents
        self.side = Side("new", ROOT, commit_here(), Path(tempfile.gettempdir(), "jaxtune_benchmarks"))
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.record = self.call.begun(
            {
                "benchmark": "peers/packed" if documents else "peers",
                "device": card,
                "commit": self.side.commit,
                "time": now,
                "versions": installed() | installed(("jax", "jaxlib", "flax", "nvidia-cudnn-cu13")),
                "settings": {
                    "shape": SHAPE,
                    "weights": "random",
                    "rows": ROWS,
                    "length": LENGTH,
                    "documents": packed_words(documents) if documents else "one a row, of full length",
                    "adapter": f"LoRA r={RANK} on all linear layers",
                    "optimizer": "AdamW, 32-bit states",
                    "timed_steps": steps,
                },
                "cases": {name: {} for name in FORMATS},
            }
        )

    def save(self) -> None:
        write(self.call.output, self.record)

    def start(self, kind: str, peer: Peer) -> Running:
        """A peer's process, which imports at once and loads when it is let go."""
        output = SCRATCH / f"{kind}_{peer.name.replace(' ', '_')}.json"
        go = output.with_suffix(".go")
        for file in (output, go):
            file.unlink(missing_ok=True)
        words = [*peer.arguments, *FORMATS[kind].split(), "--model", str(self.model), "--steps", str(self.steps)]
        words += ["--rows", str(ROWS), "--length", str(LENGTH), "--output", str(output), "--go", str(go)]
        if self.documents:  # what masks a packed batch may grow with its square, so the smallest comes first
            words += ["--documents", str(self.documents), "--micro-batches", "1,2,4,8"]
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        with output.with_suffix(".log").open("w", encoding="utf-8") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.peers.trained", *words],
                cwd=tempfile.mkdtemp(),  # Unsloth writes the trainers that it makes where it runs
                env={**os.environ, "PYTHONPATH": paths},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        return Running(process, output, go)

    def peers(self, wanted: Sequence[tuple[str, Peer]], each: float, first: Running) -> None:
        """Runs them one after another, until the time that is left is needed for jaxtune within the least of their
        peaks; the next one imports while one is measured. first: the first one's process."""
        reserve, process = _AHEAD + _OURS * len({kind for kind, _ in wanted}), first
        for number, (kind, peer) in enumerate(wanted):
            begun, left = time.monotonic(), self.call.left - reserve
            if left < _LEAST:
                print(f"{kind} {peer.name}: no time was left", flush=True)
                break
            process.go.touch()
            after = self.start(*wanted[number + 1]) if number + 1 < len(wanted) else None
            problem = wait_for(process.process, min(each, left))
            self.add(kind, peer, process.output, problem, time.monotonic() - begun)
            if after is None:
                return
            process = after
        process.process.kill()

    def add(self, kind: str, peer: Peer, output: Path, problem: str | None, seconds: float) -> None:
        """A peer's figures into the record."""
        case: dict[str, Any] = {"tried": []}
        if output.is_file():
            case = json.loads(output.read_text(encoding="utf-8"))
        if problem:
            log = output.with_suffix(".log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
            case["failed"] = f"{problem}; {' '.join(log[-2:])}"[:400]
        case["fastest"], case["seconds"] = fastest(case), round(seconds, 1)
        self.record["versions"] |= case.pop("versions", {})
        self.record["cases"][kind][peer.name] = case
        self.save()
        best = case["fastest"]
        figures = (
            f"{best['tokens_per_second']:,.0f} tokens/s, {best['peak_memory_gb'] or 0:.1f} GB" if best else problem
        )
        print(f"{kind} {peer.name}: {figures} ({seconds:.0f} s)", flush=True)

    def budgets(self, kind: str) -> dict[str, float | None]:
        """{name: GB} of what jaxtune may take: the whole card, and the peak of every peer's fastest try."""
        found: dict[str, float | None] = {_WHOLE: None}
        for name, case in self.record["cases"][kind].items():
            if not name.startswith("jaxtune") and (best := case.get("fastest")) and best["peak_memory_gb"]:
                found[name] = best["peak_memory_gb"]
        return found

    def all_budgets(self) -> list[tuple[str, dict[str, float | None]]]:
        return [(kind, self.budgets(kind)) for kind in self.record["cases"] if self.record["cases"][kind]]

    def ours(self, wanted: Sequence[tuple[str, str]], after: subprocess.Popen | None = None) -> None:
        """jaxtune at (format, budget's name) each, but where the whole card's run is within that budget. after: a
        process that ends before anything is timed."""
        cases = {
            (kind, name): Step(_arguments(kind, self.budgets(kind)[name], self.documents), self.steps + 3)
            for kind, name in wanted
            if not self.covered(kind, name) and "tokens_per_second" not in self.case(kind, f"jaxtune {name}")
        }
        if cases:
            self.call.ahead([(self.side, list(cases.values()))])
        if after is not None and (problem := wait_for(after, self.call.left)):
            raise SystemExit(f"the checkpoint could not be written: {problem}; see {SCRATCH / 'checkpoint.log'}")
        for (kind, name), step in cases.items():
            found = self.call.run(self.side, step, f"{kind} jaxtune, {name}", 20, 120, pool_of(step))
            if found is None:
                break
            if "real_tokens_per_second" in found:
                found["tokens_per_second"] = found["real_tokens_per_second"]
            self.record["cases"][kind][f"jaxtune {name}"] = found
            self.save()

    def case(self, kind: str, name: str) -> dict[str, Any]:
        return self.record["cases"][kind].get(name, {})

    def within(self, kind: str, budget: float | None) -> dict[str, Any] | None:
        """Of jaxtune's runs whose peak is within this budget (GB; None: the card), the fastest."""
        done = [
            case
            for name, case in self.record["cases"][kind].items()
            if name.startswith("jaxtune ") and "tokens_per_second" in case
        ]
        fit = [case for case in done if budget is None or case["peak_memory_gb"] <= budget]
        return max(fit, key=lambda case: case["tokens_per_second"]) if fit else None

    def covered(self, kind: str, name: str) -> bool:
        """Whether the run on the whole card is within this budget, so that there is no faster plan for it."""
        whole = self.case(kind, f"jaxtune {_WHOLE}")
        return "tokens_per_second" in whole and self.within(kind, self.budgets(kind)[name]) is whole

    def ratios(self) -> None:
        """Of every peer's setting: jaxtune's tokens per second within its peak, over its own."""
        for kind, cases in self.record["cases"].items():
            for name, budget in self.budgets(kind).items():
                if budget is not None and (found := self.within(kind, budget)) is not None:
                    ratio = found["tokens_per_second"] / cases[name]["fastest"]["tokens_per_second"]
                    kept = {key: found[key] for key in ("tokens_per_second", "peak_memory_gb")}
                    cases[name]["beside"] = {**kept, "ratio": ratio}
        self.save()


def packed_words(documents: Path) -> str:
    """How many documents of how many tokens a file has."""
    lengths = [len(document) for document in read_documents(documents, LENGTH)]
    return f"{len(lengths):,} of {documents.name}, {sum(lengths) / len(lengths):.0f} tokens on average, packed"


def _arguments(kind: str, budget: float | None, documents: Path | None = None) -> str:
    within = "" if budget is None else f"--budget-gb {budget:.3f}"
    within += f" --documents {shlex.quote(str(documents))}" if documents else ""
    return f"--shape {SHAPE} --rows {ROWS} --length {LENGTH} --rank {RANK} --plan auto {FORMATS[kind]} {within}"


def prepare(model: Path) -> subprocess.Popen:
    """A process that writes the checkpoint."""
    from benchmarks.shapes import SHAPES

    model.parent.mkdir(parents=True, exist_ok=True)
    config = SCRATCH / "config.json"
    config.write_text(json.dumps(dict(SHAPES[SHAPE])), encoding="utf-8")
    command = [sys.executable, "-m", "benchmarks.peers.checkpoint", str(config), str(model)]
    with (SCRATCH / "checkpoint.log").open("w", encoding="utf-8") as log:
        return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)


def run(
    model: Path,
    output: Path,
    kinds: Sequence[str],
    peers: Sequence[str],
    seconds: float,
    each: float,
    steps: int,
    documents: Path | None = None,
) -> None:
    """Every peer's setting whose name begins with one of `peers`, and jaxtune; what the record has is kept. documents:
    a file of real ones, which each program packs."""
    for folder in (output, SCRATCH):
        folder.mkdir(parents=True, exist_ok=True)
    beside = Beside(output, model, seconds, steps, documents)
    wanted = [(kind, peer) for peer in PEERS for kind in kinds if peer.name.startswith(tuple(peers))]
    wanted = [(kind, peer) for kind, peer in wanted if not beside.case(kind, peer.name).get("fastest")]
    first = beside.start(*wanted[0]) if wanted else None
    beside.ours([(kind, _WHOLE) for kind in kinds], prepare(model))
    if first is not None:
        beside.peers(wanted, each, first)
    beside.ratios()
    least = [(kind, min(budgets, key=lambda name: budgets[name] or math.inf)) for kind, budgets in beside.all_budgets()]
    beside.ours(least)
    beside.ratios()
    if beside.call.left > _AHEAD + _OURS:
        beside.ours([(kind, name) for kind, budgets in beside.all_budgets() for name in budgets])
        beside.ratios()
