"""Random kills, signals, dead readers and full disks over train, DPO, export and launch, run by hand.

    python tests/faults/random_faults.py --count 200 --seed 0

Each trial starts a command on a tiny model, does one thing to it at a random moment, and looks at what it said and how
it ended. Then the same command runs undisturbed, and must lead to the bits of a run that nothing happened to: weights,
tokenizer, losses. What is neither told nor survived is a finding, printed with what the command said; the folder of
that trial stays. Exit code 1 if there is any.

The commands are forked from a process that has imported jaxtune and computed nothing, so that a trial takes seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "models")]

STEPS = 10
PATIENCE_SECONDS = 300
SAVED = 75
KINDS = {"train": 8, "dpo": 5, "export": 5, "launch": 3}  # how often each is drawn
FAULTS = {
    "KILL": 4,
    "TERM": 2,
    "INT": 2,
    "HUP": 2,
    "TERM HUP": 1,
    "INT of all": 1,
    "dead reader": 2,
    "dead reader INT": 2,
    "full disk": 5,
}


@dataclasses.dataclass
class Ended:
    """How a command ended: as Popen.returncode has it. said: stdout and stderr. seconds: how long it took."""

    code: int
    said: str
    seconds: float


class Command:
    """A command in a forked process, in a group of its own, with its output in a pipe."""

    def __init__(self, arguments: list[str], limit_bytes: int | None = None):
        reader, writer = os.pipe()
        self._began = time.monotonic()
        self.process = os.fork()
        if self.process == 0:
            os.setpgid(0, 0)
            os.dup2(writer, 1)
            os.dup2(writer, 2)
            os.close(reader)
            if limit_bytes is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
            from jaxtune import cli

            sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
            sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
            code = 1
            try:
                code = cli.console(arguments)
                sys.stdout.flush()
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(code)
        os.close(writer)
        with contextlib.suppress(OSError):
            os.setpgid(self.process, self.process)
        self._reader, self._said = reader, bytearray()
        self._open = threading.Event()
        self._open.set()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with open(self._reader, "rb", buffering=0) as pipe:
            os.set_blocking(self._reader, False)
            while self._open.is_set():
                data = pipe.read(65536)
                if data == b"":
                    return
                self._said += data or b""
                if data is None:
                    time.sleep(0.01)

    def close_reader(self) -> None:
        self._open.clear()
        self._thread.join()

    def send(self, number: int, group: bool = False) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process, number) if group else os.kill(self.process, number)

    def wait(self, seconds: float = PATIENCE_SECONDS) -> Ended | None:
        """None where it does not end; it is killed then."""
        until = self._began + seconds
        while (done := os.waitpid(self.process, os.WNOHANG))[0] == 0:
            if time.monotonic() > until:
                self.send(signal.SIGKILL, group=True)
                os.waitpid(self.process, 0)
                return None
            time.sleep(0.01)
        took = time.monotonic() - self._began
        self._thread.join(10)  # what others of its group say may come later
        return Ended(os.waitstatus_to_exitcode(done[1]), self._said.decode(errors="replace"), took)


def prepare(folder: Path) -> None:
    """The model, the rows and an adapter to export, made in processes of their own: this one computes nothing."""
    script = (
        "import json, sys; from pathlib import Path; from tests.faults.command import make_folder\n"
        f"folder = Path({str(folder)!r}); make_folder(folder)\n"
        "rows = [{'prompt': 'Name a colour:', 'chosen': f' red {i}', 'rejected': f' {i} or blue'} for i in range(24)]\n"
        "(folder / 'pairs.jsonl').write_text(''.join(json.dumps(row) + chr(10) for row in rows))\n"
    )
    path = os.pathsep.join(sys.path[:2])
    subprocess.run([sys.executable, "-c", script], check=True, env=os.environ | {"PYTHONPATH": path})


def command(kind: str, folder: Path, output: Path, cache: Path) -> list[str]:
    """Arguments of the command of a kind that writes into `output`."""
    run = [str(folder / "recipe.yaml"), f"output={output}", f"steps={STEPS}", "checkpoint.every_steps=3"]
    run += ["evaluation.every_steps=4", f"data.cache_dir={cache}"]
    if kind == "export":
        return ["export", str(folder / "straight" / "train" / "adapter"), str(output)]
    if kind == "launch":
        return ["launch", "--processes=2", *run]
    if kind == "dpo":
        pairs = [f"data.train={folder / 'pairs.jsonl'}", f"data.eval={folder / 'pairs.jsonl'}"]
        run += ["objective=dpo", "objective.precompute_ref_log_probs=true", "adapter.lora_dropout=0", *pairs]
    return ["train", *run]


def result(output: Path) -> dict[str, object]:
    """What a run or an export led to: bytes of what it wrote but for records, and the loss of each step."""
    from jaxtune.train.folder.results import PROOF
    from jaxtune.train.log.metrics import JSONL, read_metrics

    kept = {".safetensors", ".json", ".jinja", ".gguf"}
    records = {PROOF, "results.json", "meta.json", "manifest.json"}
    found: dict[str, object] = {
        path.relative_to(output).as_posix(): path.read_bytes()
        for path in sorted(output.rglob("*"))
        if path.is_file() and path.suffix in kept and path.name not in records and "checkpoints" not in path.parts
    }
    if (output / JSONL).exists():
        lines = read_metrics(output / JSONL)
        found["losses"] = {line["step"]: line["loss"] for line in lines if "loss" in line}
        found["evaluations"] = {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}
    return found


def leftovers(output: Path) -> list[str]:
    """Unfinished files and folders in and beside it."""
    places = [*output.glob(".*"), *output.parent.glob(f".{output.name}*"), *(output / "checkpoints").glob(".*")]
    return [str(path) for path in places]


def disturb(running: Command, fault: str, moment: float) -> None:
    time.sleep(moment)
    if fault.startswith("dead reader"):
        running.close_reader()
        if fault.endswith("INT"):
            time.sleep(0.2)
            running.send(signal.SIGINT)
    elif fault == "INT of all":
        running.send(signal.SIGINT, group=True)
    elif fault != "full disk":
        for name in fault.split():
            running.send(signal.Signals[f"SIG{name}"])


def problem_of(kind: str, fault: str, ended: Ended) -> str | None:
    """What is wrong with how a disturbed command ended; None if it was told or survived."""
    code, said = ended.code, ended.said
    if fault == "KILL":
        return None if code in (0, -signal.SIGKILL) else f"exit code {code} of a killed command"
    if "Traceback (most recent call last)" in said:
        return "a traceback"
    if code == 0:
        return None
    if fault == "full disk":
        lines = [line for line in said.splitlines() if "jaxtune: error: " in line]
        words = ("File too large", "written", "os error", "no room")
        if code != 2 or not lines or not any(word in lines[0] for word in words):
            return f"exit code {code}, and no line that tells of the disk"
        return None
    if fault == "dead reader":
        return f"exit code {code}: a dead reader ended it"
    numbers = [signal.Signals[f"SIG{name}"] for name in fault.split() if name in ("TERM", "INT", "HUP")]
    # 128 + the signal, or the signal itself: before anything was begun, or of a command that keeps no state.
    early = [code in (-number, 128 + number) for number in numbers]
    if kind == "export":
        return None if any(early) else f"exit code {code} of an interrupted export"
    if code == SAVED:
        heard = fault.startswith("dead reader") or "stopped: " in said
        return None if heard else "it was stopped, and does not say so"
    begun = "step " in said or "compiling" in said
    return None if any(early) and not begun else f"exit code {code} of an interrupted run"


def trial(draw: random.Random, folder: Path, place: Path, straight: dict[str, Ended]) -> tuple[str, str | None]:
    """(what was done and how it ended, what is wrong or None)."""
    kind = draw.choices([*KINDS], [*KINDS.values()])[0]
    fault = draw.choices([*FAULTS], [*FAULTS.values()])[0]
    moment = draw.uniform(0, straight[kind].seconds)
    limit = int(10 ** draw.uniform(2.3, 5)) if fault == "full disk" else None
    output = place / kind
    arguments = command(kind, folder, output, place / "cache")
    running = Command(arguments, limit)
    disturb(running, fault, 0 if limit is not None else moment)
    ended = running.wait()
    what = f"{kind}: {fault}" + (f" at {limit:,} bytes" if limit is not None else f" after {moment:.1f} s")
    if ended is None:
        return what, f"it has not ended in {PATIENCE_SECONDS} s"
    what += f": exit code {ended.code}"
    if problem := problem_of(kind, fault, ended):
        return what, f"{problem}\n{ended.said}"
    if not _gone(running):
        return what, "processes of it are left"
    # An export that came to its end is not made twice: its folder is there.
    again = ended if kind == "export" and ended.code == 0 else Command(arguments).wait()
    if again is None:
        return what, "the same command again does not end"
    if again.code != 0:
        return what, f"the same command again: exit code {again.code}\n{again.said}\n--- before:\n{ended.said}"
    if left := leftovers(output):
        return what, f"left behind: {left}"
    if (found := result(output)) != (wanted := result(folder / "straight" / kind)):
        other = [name for name in {*found, *wanted} if found.get(name) != wanted.get(name)]
        return what, f"not the bits of an undisturbed run: {sorted(other)}\n{ended.said}\n--- again:\n{again.said}"
    return what, None


def _gone(running: Command) -> bool:
    """Whether all processes that a command started end soon after it; those of a killed launch miss it in a minute."""
    until = time.monotonic() + 90
    while time.monotonic() < until:
        listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
        if not any("--coordinator=" in line and str(TRIAL) in line for line in listed.splitlines()):
            return True
        time.sleep(0.2)
    return False


TRIAL = Path()  # the folder of the trial under way


def main() -> int:
    global TRIAL
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", type=int, default=200, help="trials (default: 200)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no trial after so long")
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"], os.environ["XLA_FLAGS"] = "cpu", ""
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:2])
    folder = Path(tempfile.mkdtemp(prefix="random-faults-"))
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder / "xla"))
    prepare(folder)
    # What the forked commands share: each would take seconds to import it.
    for module in (
        "jaxtune.export.api",
        "jaxtune.train.app",
        "jaxtune.train.folder.array_files",
        "orbax.checkpoint",
        "transformers.models.auto.tokenization_auto",
        "matplotlib.figure",
        "matplotlib.backends.backend_agg",
        "rich.table",
        "rich.progress",
    ):
        importlib.import_module(module)

    straight = {}
    for kind in KINDS:
        for _ in range(2):  # the first may have to compile
            output = folder / "straight" / kind
            shutil.rmtree(output, ignore_errors=True)
            ended = Command(command(kind, folder, output, folder / "straight" / "cache")).wait()
            assert ended is not None and ended.code == 0, ended
        straight[kind] = ended
        print(f"{kind}: {ended.seconds:.1f} s undisturbed", flush=True)
    findings, done, seen = 0, 0, Counter()
    began = time.monotonic()
    for number in range(options.count):
        if time.monotonic() - began > 60 * options.minutes:
            break
        TRIAL = folder / f"trial{number}"
        TRIAL.mkdir()
        what, problem = trial(random.Random(f"{options.seed} {number}"), folder, TRIAL, straight)
        done += 1
        seen[f"{what.partition(' at ')[0].partition(' after ')[0]}: {what.rpartition(': ')[2]}"] += 1
        print(f"{number} {what}{'' if problem is None else ': FINDING: ' + problem}", flush=True)
        if problem is None:
            shutil.rmtree(TRIAL)
        else:
            findings += 1
    print(f"{done} trials, {findings} findings (seed {options.seed})")
    for what, times in sorted(seen.items()):
        print(f"  {times:4} {what}")
    if findings:
        print(f"their folders: {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
