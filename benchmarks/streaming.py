"""Streams rows from Parquet shards, is killed at random and resumed, and says what memory and time it took.

    python -m benchmarks.streaming FOLDER [--rows 10000000] [--shards 40] [--kills 4]

FOLDER gets the shards, which are kept for the next call, and streaming.json. It needs no GPU: nothing is trained, but
the rows go all the way to the batches of a run's steps. Every row has a number of its own for its text, so that batches
say which rows they have. A child process reads them, and records every few steps where it is and what it has seen. The
parent kills it with SIGKILL at random moments and starts it again. In the end every number must have been seen once in
the first pass, and a step that was made twice must have had the same bits both times.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from jaxtune.system.files import atomic_write

DIGITS, LENGTH, ROWS_PER_STEP, SAVED_STEPS = 8, 2048, 64, 5
TOKENS = DIGITS + 1  # of a row, with the one that ends it


def write_shards(folder: Path, rows: int, shards: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    folder.mkdir(parents=True, exist_ok=True)
    for shard, numbers in enumerate(np.array_split(np.arange(rows), shards)):
        path = folder / f"part-{shard:04}.parquet"
        if not path.exists():
            texts = [f"{number:0{DIGITS}}" for number in numbers.tolist()]
            parquet.write_table(pa.table({"text": texts}), path.with_suffix(".tmp"), row_group_size=10_000)
            os.rename(path.with_suffix(".tmp"), path)


def digit_tokenizer() -> Any:
    """A token for each digit, and one that ends a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({**{str(digit): digit for digit in range(10)}, "<eos>": 10}, unk_token="<eos>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>")


def source_of(shards: Path) -> Any:
    from jaxtune.train.config import DataConfig, ModelConfig, TrainConfig
    from jaxtune.train.objectives.sft import SUPERVISED
    from jaxtune.train.spec.run_rows import Reader, run_rows

    data = DataConfig(train=str(shards), length=LENGTH, streaming=True)
    config = TrainConfig(model=ModelConfig(path="none"), data=data, steps=1, rows_per_step=ROWS_PER_STEP, seed=1)
    model: Any = SimpleNamespace(vocab_size=11, context_length=LENGTH)
    return run_rows(Reader(SUPERVISED, digit_tokenizer(), config, model))[0]


def numbers_in(batch: Any) -> np.ndarray:
    """The numbers of a batch's rows, in its order."""
    found = []
    for tokens, segments in zip(batch.tokens, batch.segment_ids, strict=True):
        digits = tokens[: np.count_nonzero(segments)].reshape(-1, TOKENS)[:, :DIGITS]
        found.append(digits @ 10 ** np.arange(DIGITS - 1, -1, -1, dtype=np.int64))
    return np.concatenate(found)


def resident_bytes() -> int:
    [found] = re.findall(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())
    return int(found) << 10


def read(shards: Path, work: Path, rows: int) -> None:
    """The child: steps from the last position on, until as many rows were seen as there are."""
    source = source_of(shards)
    saved = work / "position.json"
    at = json.loads(saved.read_text()) if saved.exists() else {"step": 0, "seen": 0, "position": None}
    if at["step"]:
        source.resume(at["step"], at["position"])
    step, seen, waiting = at["step"], at["seen"], []
    with open(work / "steps.txt", "a") as log:
        while seen < rows:
            batch = source.batch_at(step)
            waiting.append(numbers_in(batch))
            seen += len(waiting[-1])
            log.write(f"{step} {zlib.crc32(batch.tokens.tobytes())} {zlib.crc32(batch.segment_ids.tobytes())}\n")
            log.flush()  # a kill loses no line, so that the bits of the same step can be compared
            step += 1
            if step % SAVED_STEPS == 0 or seen >= rows:
                np.save(work / f"seen-{step:08}.npy", np.concatenate(waiting))
                waiting = []
                log.write(f"memory {seen} {resident_bytes()}\n")
                atomic_write(saved, json.dumps({"step": step, "seen": seen, "position": source.position(step)}))
    source.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    for name, default in (("rows", 10_000_000), ("shards", 40), ("kills", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    shards, work = given.folder / f"shards-{given.rows}", given.folder / "work"
    if given.child:
        read(shards, work, given.rows)
        return
    write_shards(shards, given.rows, given.shards)
    work.mkdir(exist_ok=True)
    for old in work.iterdir():
        old.unlink()
    started, draw = time.monotonic(), random.Random(0)
    saves = given.rows // (LENGTH // TOKENS * ROWS_PER_STEP * SAVED_STEPS)
    command = [sys.executable, "-m", "benchmarks.streaming", str(given.folder), "--child", f"--rows={given.rows}"]
    killed = 0
    while True:
        child = subprocess.Popen(command, env=os.environ | {"JAX_PLATFORMS": "cpu"})
        if killed < given.kills and wait_for(child, work, draw.randint(1, max(1, saves // (given.kills + 1)))):
            time.sleep(draw.uniform(0, 3))
            child.send_signal(signal.SIGKILL)
            child.wait()
            killed += 1
        elif child.wait():
            sys.exit(child.returncode)
        else:
            break
    seconds = time.monotonic() - started
    report(given, work, killed, seconds)


def wait_for(child: subprocess.Popen, work: Path, saves: int) -> bool:
    """Whether the child saves that many times more before it ends; waits for it."""
    before = len(list(work.glob("seen-*.npy")))
    while child.poll() is None:
        if len(list(work.glob("seen-*.npy"))) >= before + saves:
            return True
        time.sleep(0.1)
    return False


def report(given: argparse.Namespace, work: Path, killed: int, seconds: float) -> None:
    bits: dict[str, str] = {}
    memory, again = [], 0
    for line in (work / "steps.txt").read_text().splitlines():
        first, *rest = line.split()
        if first == "memory" and len(rest) == 2:
            memory.append((int(rest[0]), int(rest[1])))
        elif len(rest) == 2:
            again += first in bits
            assert bits.setdefault(first, str(rest)) == str(rest), f"step {first} had other bits the second time"
    seen = np.concatenate([np.load(path) for path in sorted(work.glob("seen-*.npy"))])[: given.rows]
    counts = np.bincount(seen, minlength=given.rows)
    assert len(counts) == given.rows and (counts == 1).all(), "a row was not seen once"
    early = [size for rows, size in memory if rows <= given.rows // 10]
    record = {
        "rows": given.rows,
        "shards": given.shards,
        "steps": len(bits),
        "kills": killed,
        "steps_made_again_with_the_same_bits": again,
        "rows_seen_once": int((counts == 1).sum()),
        "peak_mb_in_the_first_tenth": round(max(early) / 1e6, 1),
        "peak_mb": round(max(size for _, size in memory) / 1e6, 1),
        "rows_per_second": round(given.rows / seconds),
        "seconds": round(seconds, 1),
    }
    atomic_write(given.folder / "streaming.json", json.dumps(record, indent=1) + "\n")
    sys.stdout.write(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
