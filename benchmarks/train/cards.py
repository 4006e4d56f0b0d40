"""Whole lives of packaged recipes on cards that people have: from the model's folder to a GGUF file, as commands.

    python benchmarks/train/cards.py LIFE --material FOLDER --output cards.json [--seconds 460] [--work FOLDER]
        [--phases train,resume,export] [--beside LIFE] [--at-once 2]

A life is the commands that a person types, each a process of its own, on a GPU whose allocator gives out no more than
the card would: its GiB less 0.6 GB for the CUDA context. Unlike memory.budget_gb, which limits plans alone, such a cap
ends whatever asks for more, from loading to exporting.

    write     a folder of the recipe's shape with random weights and a real tokenizer (not capped)
    train     the recipe as packaged, on real rows; SIGTERM comes after a few steps, and it saves
    resume    the same command goes on to the last step
    deliver   what that command does then: it writes the adapter and the merged model
    evaluate  jaxtune evaluate RUN/config.yaml data.eval=FILE
    generate  jaxtune generate RUN/adapter --prompt ...
    chat      jaxtune chat RUN/adapter, with two questions on its standard input
    export    jaxtune export RUN/adapter FOLDER --to gguf --outtype q8_0

The record is written after each phase and is added to by the next call; --phases leaves those that are not named as
they are recorded. Of each phase it holds: the commit, seconds, the exit status, the most device bytes that the
allocator had given out by its end, the most host bytes that its process held in memory of its own (resident, without
pages of files: what the kernel takes back when it needs them), the seconds of its `parts` (loading weights, comparing
the merged model's logits, writing a model, reading it back, the fingerprints of a result's files, waiting for the
disk), and in `problem` the last line of what it said, where it failed.

A merged model that no later phase reads may be larger than the disk (66 GB of a 32B): such a life's shards are each
read back and compared with what was made of the model, and then emptied, before the next one is written.

Args: --material has a folder for each tokenizer (llama-3.2, qwen3, gpt-oss) and the files of rows: any JSONL of
instructions, and one of preferences. --work keeps the model's folder for the next call of the same machine. --beside
names the life that runs at the same time on the same machine, and --at-once lets so many of the phases after `deliver`
run side by side, each on a card of its own: memory is what it would be alone, seconds are not, and the record says so.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

CONTEXT_BYTES = 0.6e9
PHASES = ("train", "resume", "export", "chat", "generate", "evaluate")
AFTER = PHASES[2:]  # of which each needs the run alone


@dataclasses.dataclass(frozen=True)
class Life:
    """A packaged recipe on a card."""

    recipe: str
    card_gib: int
    # A name of benchmarks/shapes.py.
    shape: str
    # A folder of --material.
    tokenizer: str
    # Of the recipe's keys, as somebody with such a card would set them.
    overrides: tuple[str, ...] = ()
    rows: str = "alpaca_en_demo.jsonl"
    # How the folder stores its weights: None, "nf4" as bitsandbytes writes it, or "mxfp4" as gpt-oss is published.
    stored_in: str | None = None
    # What the run leaves to generate from.
    result: str = "adapter"
    # Whether shards of the merged model are emptied once they were read back.
    emptied: bool = False


LIVES = {
    "qlora-8b": Life("qlora-8b", 12, "llama-3.1-8b", "llama-3.2"),
    "qlora-14b": Life("qlora-14b", 16, "qwen3-14b", "qwen3", emptied=True),
    "qwen3.5-9b-nf4": Life("qwen3.5-9b", 16, "qwen3.5-9b", "qwen3", ("model.load_in=nf4",)),
    "dpo-8b-nf4": Life("qlora-8b", 16, "llama-3.1-8b", "llama-3.2", ("objective=dpo",), rows="dpo_en_demo.jsonl"),
    "lora-8b": Life("lora-8b", 24, "llama-3.1-8b", "llama-3.2"),
    "qlora-32b": Life("qlora-32b", 24, "qwen3-32b", "qwen3", ("model.load_in=null",), stored_in="nf4", emptied=True),
    "full-1b": Life("full-1b", 24, "llama-3.2-1b", "llama-3.2", result="merged"),
    "gpt-oss-20b-qlora": Life("gpt-oss-20b-qlora", 24, "gpt-oss-20b", "gpt-oss", stored_in="mxfp4", emptied=True),
    # Without the merged model, which would take a minute more; the export merges too.
    "gpt-oss-20b-mxfp4": Life(
        "gpt-oss-20b-qlora",
        24,
        "gpt-oss-20b",
        "gpt-oss",
        ("model.load_in=mxfp4", "export.merged=false"),
        stored_in="mxfp4",
    ),
    "full-8b-8bit-adam": Life("full-8b-8bit-adam", 80, "llama-3.1-8b", "llama-3.2", result="merged"),
}
STEPS, STOP_AFTER = 8, 4


# ---- a phase, in a process of its own


def time_parts(parts: dict[str, float]) -> None:
    """Adds up the seconds that parts of a phase take in this process."""
    from jaxtune.export import gguf_file
    from jaxtune.models import hf
    from jaxtune.models.adapters import merge
    from jaxtune.system import files
    from jaxtune.train.folder import results

    def timed(module: Any, function: str, part: str) -> None:
        inner = getattr(module, function)

        def outer(*given, **named):
            begun = time.monotonic()
            try:
                return inner(*given, **named)
            finally:
                parts[part] = round(parts.get(part, 0.0) + time.monotonic() - begun, 1)

        setattr(module, function, outer)

    timed(hf, "_loaded", "load")
    timed(hf, "write_checkpoint", "write")
    timed(gguf_file, "write", "write")
    timed(gguf_file, "verify", "read_back")
    timed(merge, "check_logits", "check_logits")
    timed(results, "write_manifest", "fingerprints")
    timed(files, "sync", "sync")


def empty_shards() -> None:
    """Has each file of weights that this process writes read back, compared and emptied. Its header and its size stay:
    the folder is what it would be, but for the numbers in it."""
    from jaxtune.models import hf
    from jaxtune.models.files import byte_files, headers, shards

    write_file = shards.write_file

    def emptied(file: Path, *given) -> dict:
        written = write_file(file, *given)
        if not file.name.startswith("model"):
            return written  # of an adapter
        entries = headers.read_header(file)
        same = byte_files.all_of(lambda name: shards.is_as_written(entries[name], written[name]), list(written))
        if entries.keys() != written.keys() or not all(same):
            raise ArithmeticError(f"{file.name}: read back, not as the model has it")
        size = file.stat().st_size
        os.truncate(file, min(entry.offset for entry in entries.values()))
        os.truncate(file, size)
        return written

    shards.write_file = emptied
    hf.require_room = lambda *_: None


def child(record: Path, emptied: bool, arguments: list[str]) -> int:
    """Runs a jaxtune command and says what it took; `deliver` is told apart from what came before it."""
    from jaxtune import cli

    marks: dict[str, Any] = {}
    parts: dict[str, float] = {}
    time_parts(parts)
    if emptied:
        empty_shards()
    ended, host = threading.Event(), [0, 0]

    def resident() -> int:
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
        return sum(int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))

    def sample() -> None:
        while not ended.wait(0.05):
            host[0] = max(host[0], resident())

    def device_peak() -> int:
        if "jax" not in sys.modules:
            return 0
        import jax

        return max((device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in jax.local_devices())

    def mark(name: str) -> None:
        marks[name] = {"seconds": time.time(), "peak_device_bytes": device_peak(), "peak_host_bytes": host[0]}
        marks[name]["parts"] = dict(parts)
        parts.clear()

    if arguments[0] == "train":
        from jaxtune.train.engine.trained_model import TrainedModel

        finished = TrainedModel.finished

        def marked(self, *given):
            mark("trained")
            host[0] = 0
            return finished(self, *given)

        TrainedModel.finished = marked
    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    mark("begun")
    code = 1
    try:
        code = cli.main(arguments)
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    finally:
        ended.set()
        sampler.join()
        mark("ended")
        marks["ended"]["exit"] = code
        record.write_text(json.dumps(marks), encoding="utf-8")
    return code


# ---- a life


@dataclasses.dataclass
class Call:
    """One call of this program: what it works with."""

    life: Life
    work: Path
    material: Path
    end: float
    record: dict[str, Any]
    output: Path
    commit: str
    beside: str | None = None
    at_once: int = 1
    lock: Any = dataclasses.field(default_factory=threading.Lock)

    def run(self, phase: str, arguments: list[str], typed: str = "", stop_after: int | None = None) -> bool:
        """A phase; whether the life goes on. typed: its standard input. stop_after: SIGTERM comes then."""
        log, marks = self.work / f"{phase}.log", self.work / f"{phase}.json"
        marks.unlink(missing_ok=True)
        left = self.end - time.monotonic()
        if left < 20:
            return False
        begun = time.time()
        with log.open("w", encoding="utf-8") as file:
            emptied = ["--emptied"] if self.life.emptied and phase == "resume" else []
            command = [sys.executable, __file__, "--child", str(marks), *emptied, "--", *arguments]
            process = subprocess.Popen(
                command,
                env=self.environment(phase),
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
            )
            stopper = threading.Thread(target=self._stop, args=(process, stop_after), daemon=True)
            if stop_after is not None:
                stopper.start()
            try:
                process.communicate(typed, timeout=left)
                ended = True
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                ended = False
        found = json.loads(marks.read_text(encoding="utf-8")) if marks.is_file() else {}
        last = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()][-1:]
        code = found.get("ended", {}).get("exit", process.returncode)
        good = ended and code == (75 if stop_after is not None else 0)
        problem = None if good else ("its time ran out; " if not ended else "") + " ".join(last)[:300]
        previous = begun
        for name, mark in found.items():
            if name == "begun":
                continue
            own = {"trained": phase, "ended": "deliver" if "trained" in found else phase}[name]
            entry = {
                "seconds": round(mark["seconds"] - previous, 1),
                "peak_device_bytes": mark["peak_device_bytes"],
                "peak_host_bytes": mark["peak_host_bytes"],
                "exit": code if name == "ended" else 0,
                **({"parts": mark["parts"]} if mark["parts"] else {}),
            }
            self.add(own, entry | ({"problem": problem} if problem and name == "ended" else {}))
            previous = mark["seconds"]
        if not found:
            self.add(phase, {"seconds": round(time.time() - begun, 1), "exit": process.returncode, "problem": problem})
        return good

    def _stop(self, process: subprocess.Popen, after: int) -> None:
        metrics = self.work / "run/metrics.jsonl"
        while process.poll() is None:
            lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.is_file() else []
            if sum('"loss"' in line for line in lines) >= after:
                process.send_signal(signal.SIGTERM)
                return
            time.sleep(0.05)

    def add(self, phase: str, entry: dict[str, Any]) -> None:
        """Writes a phase into the record."""
        from benchmarks.record import write

        beside = {"beside": self.beside} if self.beside else {}
        at_once = {"at_once": self.at_once} if phase in AFTER and self.at_once > 1 else {}
        print(self.record["name"], phase, json.dumps(entry), flush=True)
        with self.lock:
            self.record["phases"][phase] = {"commit": self.commit, **entry, **beside, **at_once}
            whole = json.loads(self.output.read_text(encoding="utf-8")) if self.output.is_file() else {"lives": {}}
            whole["lives"][self.record["name"]] = self.record
            write(self.output, {"benchmark": "train/cards", **whole})

    def environment(self, phase: str) -> dict[str, str]:
        """Of a phase's process: the allocator has what the card would have. Where phases share the GPU, it takes that
        little by little."""
        from benchmarks.record import driver_bytes

        total = driver_bytes()
        assert total is not None, "this program measures a GPU"
        return os.environ | {
            "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{self.record['cap_bytes'] / total:.6f}",
            "JAXTUNE_CACHE": str(self.work / "cache"),
            "PYTHONPATH": str(ROOT) + os.pathsep + os.environ.get("PYTHONPATH", ""),
            "JAXTUNE_COMMIT": self.commit,
            "PYTHONUNBUFFERED": "1",
            **({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if phase in AFTER and self.at_once > 1 else {}),
        }

    def train(self) -> list[str]:
        rows, life = self.material / self.life.rows, self.life
        given = [f"model.path={self.work / 'model'}", f"data.train={rows}", f"output={self.work / 'run'}"]
        given += [f"steps={STEPS}", f"data.cache_dir={self.work / 'cache'}"]
        return ["train", life.recipe, *life.overrides, *given]

    def phases(self, chosen: Collection[str]) -> Iterator[bool]:
        """Makes the chosen phases, those AFTER the run side by side where that was asked for; says whether the next can
        come."""
        run, rows = self.work / "run", self.material / self.life.rows
        result = str(run / self.life.result)
        gguf = self.work / "gguf"
        shutil.rmtree(gguf, ignore_errors=True)
        commands = {
            "train": self.train(),
            "resume": self.train(),
            "evaluate": ["evaluate", str(run / "config.yaml"), f"data.eval={rows}"],
            "generate": ["generate", result, "--prompt", "Why is the sky blue?", "--max-new-tokens", "64"],
            "chat": ["chat", result, "--max-new-tokens", "32"],
            "export": ["export", result, str(gguf), "--to", "gguf", "--outtype", "q8_0"],
        }
        typed = {"chat": "Who are you?\nSay it again.\n/exit\n"}
        for name in PHASES[:2]:
            if name in chosen:
                yield self.run(name, commands[name], stop_after=STOP_AFTER if name == "train" else None)
        with ThreadPoolExecutor(self.at_once) as pool:
            after = [name for name in AFTER if name in chosen]
            yield all(list(pool.map(lambda name: self.run(name, commands[name], typed.get(name, "")), after)))
        shutil.rmtree(gguf, ignore_errors=True)


def write_model(life: Life, material: Path, folder: Path) -> None:
    """A folder with random weights of the life's shape, and a real tokenizer; in a process of its own."""
    script = (
        "import sys, jax, jaxtune;"
        "from benchmarks.random_model import random_model; from benchmarks.shapes import SHAPES;"
        "from jaxtune.export.api import export_model; shape, folder, stored = sys.argv[1:];"
        "model = random_model(SHAPES[shape], jax.random.key(0), 'nf4' if stored == 'nf4' else None);"
        "to = {'nf4': 'bnb-4bit', 'mxfp4': 'mxfp4', '': None}[stored];"
        "export_model(model, folder, to) if to else jaxtune.save_pretrained(model, folder)"
    )
    variables = os.environ | {"PYTHONPATH": str(ROOT) + os.pathsep + os.environ.get("PYTHONPATH", "")}
    variables["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # another life may run beside
    command = [sys.executable, "-c", script, life.shape, str(folder), life.stored_in or ""]
    subprocess.run(command, env=variables, check=True)
    for file in (material / life.tokenizer).iterdir():
        shutil.copy(file, folder / file.name)


def main() -> int:
    if "--child" in sys.argv:
        at = sys.argv.index("--")
        return child(Path(sys.argv[2]), "--emptied" in sys.argv[:at], sys.argv[at + 1 :])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("life", choices=LIVES)
    parser.add_argument("--material", required=True, type=Path)
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--seconds", type=float, default=460.0)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--phases", default=",".join(PHASES))
    parser.add_argument("--beside")
    parser.add_argument("--at-once", type=int, default=1)
    options = parser.parse_args()
    from benchmarks.record import commit_here

    end, life = time.monotonic() + options.seconds, LIVES[options.life]
    work = options.work or Path(tempfile.mkdtemp())
    work.mkdir(parents=True, exist_ok=True)
    cap = life.card_gib * 2**30 - CONTEXT_BYTES
    gpu = subprocess.run(
        ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader", "--id=0"],
        capture_output=True,
        text=True,
        check=True,
    )
    stored = json.loads(options.output.read_text(encoding="utf-8"))["lives"] if options.output.is_file() else {}
    before = stored.get(options.life, {})
    record = {
        **before,
        "name": options.life,
        **dataclasses.asdict(life),
        "cap_bytes": cap,
        "device": gpu.stdout.strip(),
        "steps": STEPS,
        "phases": before.get("phases", {}),
    }
    material, commit = options.material.resolve(), commit_here()
    call = Call(life, work, material, end, record, options.output, commit, options.beside, options.at_once)
    if not (work / "model").is_dir():
        begun = time.time()
        write_model(life, options.material, work / "model")
        record["written_seconds"] = round(time.time() - begun, 1)
        size = sum(file.stat().st_size for file in (work / "model").iterdir())
        record["model_bytes"] = size
        if options.beside is None:
            begun = time.time()
            shutil.copytree(work / "model", work / "copy")  # what a merge, an export and a load are held against
            record["copy_seconds"] = round(time.time() - begun, 1)
            shutil.rmtree(work / "copy")
        print(
            json.dumps({key: record.get(key) for key in ("written_seconds", "model_bytes", "copy_seconds")}), flush=True
        )
    whole = all(call.phases(options.phases.split(",")))
    over = [name for name, entry in record["phases"].items() if entry.get("peak_device_bytes", 0) > cap]
    print("over the card: " + ", ".join(over) if over else "within the card" if whole else "not whole")
    return 0 if whole and not over else 1


if __name__ == "__main__":
    sys.exit(main())
