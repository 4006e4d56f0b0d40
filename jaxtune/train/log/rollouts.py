"""The sampled answers of a run with their rewards: rollouts.jsonl.

A line is one answer: "step" (the first that trains on it), "row" (the number of its prompt among those read, from 0),
"prompt" and "answer" (texts or messages), "rewards" ({function: number or null}), "reward" (their weighted sum),
"advantage", "tokens" (sampled ones), "ended" ("stop" or "length"), and "extra", what functions logged by `log_extra`.

When the file is full, every second generation of the older half is dropped, so that what is left spans the whole run,
closer towards its end.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtune.system.files import atomic_write

if TYPE_CHECKING:
    from jaxtune.train.data.batches import Rollout

ROLLOUTS = "rollouts.jsonl"
_LARGEST = 0.25  # of the size: the most that one generation may have
_FULL = 0.75  # of the size: what is left after generations were dropped
_READ = 1 << 20  # bytes at the file's end in which the latest generation is looked for


class RolloutsFile:
    """Appends generations to rollouts.jsonl, within `most_bytes`. After resumed_step generations are sampled again and
    dropped here; None: a new run.
    """

    def __init__(self, folder: Path, most_bytes: int, resumed_step: int | None = None):
        self._path, self._most = folder / ROLLOUTS, most_bytes
        if self._path.exists():
            lines = _lines(self._path) if resumed_step is not None else []
            atomic_write(self._path, b"".join(text for step, text in lines if step <= (resumed_step or 0)))

    def add(self, rows: Sequence[Rollout]) -> None:
        """Appends the answers of one generation, at most a quarter of the file."""
        texts = [json.dumps(row, ensure_ascii=False, default=str).encode("utf-8", "replace") + b"\n" for row in rows]
        sizes = itertools.accumulate(map(len, texts))
        data = b"".join(text for text, size in zip(texts, sizes, strict=True) if size <= _LARGEST * self._most)
        if not data:
            return
        size = self._path.stat().st_size if self._path.exists() else 0
        if size + len(data) > self._most:
            self._thin()
            size = self._path.stat().st_size
        try:
            with open(self._path, "ab", buffering=0) as file:
                if file.write(data) != len(data):
                    raise OSError(f"{self._path}: only a part of a generation could be written")
        except OSError:
            with contextlib.suppress(OSError):
                os.truncate(self._path, size)
            raise

    def _thin(self) -> None:
        generations = [
            b"".join(text for _, text in lines)
            for _, lines in itertools.groupby(_lines(self._path), key=lambda line: line[0])
        ]
        live_indices = kept_generations([len(text) for text in generations], int(_FULL * self._most))
        atomic_write(self._path, b"".join(generations[index] for index in live_indices))


def kept_generations(sizes: Sequence[int], most: int) -> list[int]:
    """Indices of the generations that stay, from `sizes` (the oldest first), so that they add up to at most `most`."""
    live = list(range(len(sizes)))
    while live and sum(sizes[index] for index in live) > most:
        older = live[: max(2, len(live) // 2)]
        dropped = set(older[1::2] if len(live) > 2 else live[:1])
        live = [index for index in live if index not in dropped]
    return live


def latest(folder: Path) -> list[Rollout]:
    """The answers of the latest generation, or its last ones if it is large."""
    path = folder / ROLLOUTS
    if not path.is_file():
        return []
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _READ))
        lines = file.read().split(b"\n")[1 if size > _READ else 0 :]
    lines_read = [line for text in lines if (line := _parsed(text)) is not None]
    return [line for line in lines_read if line["step"] == lines_read[-1]["step"]]


def _lines(path: Path) -> list[tuple[int, bytes]]:
    """(step, the line with its end) of the readable lines."""
    with open(path, "rb") as file:
        return [(line["step"], text) for text in file if text.endswith(b"\n") and (line := _parsed(text)) is not None]


def _parsed(text: bytes) -> Rollout | None:
    try:
        line: Any = json.loads(text)
        return line if type(line["step"]) is int else None
    except (ValueError, RecursionError, TypeError, LookupError):
        return None
