"""What a base is known by: a digest of what its config.json says and of every byte of its weights.

Weights are digested tensor by tensor, in the order of their names, as they are read: a checkpoint that is cut into
other shards is the same base. Bytes that a load has in hand anyway are always digested, at 13 GB/s a thread; those of a
tensor that devices divide would be read again for it alone, so their digests are kept (`Kept`) for as long as the files
have the same path, size, times and inode.

Older versions recorded `Digest.sampled`, of 64 blocks of 4 KiB of each tensor and nothing of config.json. It is still
made, so that what they wrote can be compared by what they recorded.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import xxhash
from jax.core import Tracer

from jaxtune.models.config import DecoderConfig
from jaxtune.system.files import atomic_write

_SAMPLES, _SAMPLE_BYTES = 64, 4096
_READ_BYTES = 1 << 26  # of a tensor that is read for its digest alone
# A file that was written so shortly before may be written again without its times telling: their clock ticks slowly.
_SETTLED_SECONDS = 2.0
_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Digest:
    """Of one or more tensors, each by its name, dtype, shape and content."""

    sampled: bytes  # SHA-256, with up to 64 evenly spaced blocks of 4 KiB
    whole: bytes  # with every byte

    @classmethod
    def of(cls, name: str, array: np.ndarray) -> Digest:
        """Of a tensor in memory."""
        what, data = f"{name} {array.dtype.name} {array.shape}", array.reshape(-1).view(np.uint8)
        whole = xxhash.xxh3_128(what.encode())
        whole.update(data)
        return cls(_sampled(what, data.size, lambda start, stop: data[start:stop]), whole.digest())

    @classmethod
    def read(
        cls,
        name: str,
        dtype: np.dtype,
        shape: tuple[int, ...],
        size: int,
        read: Callable[[int, int], np.ndarray],
        kept: bytes | None = None,
    ) -> Digest:
        """Of a tensor that is not in memory. size: in bytes; read: gives those from one to before another; kept: its
        `whole`, if that is known."""
        what = f"{name} {dtype.name} {shape}"
        if kept is None:
            whole = xxhash.xxh3_128(what.encode())
            for start in range(0, size, _READ_BYTES):
                whole.update(read(start, min(start + _READ_BYTES, size)))
            kept = whole.digest()
        return cls(_sampled(what, size, read), kept)

    @classmethod
    def joined(cls, parts: Iterable[Digest]) -> Digest:
        """Of several, in their order."""
        parts = list(parts)
        sampled, whole = (b"".join(getattr(part, key) for part in parts) for key in ("sampled", "whole"))
        return cls(hashlib.sha256(sampled).digest(), hashlib.sha256(whole).digest())


def _sampled(what: str, size: int, read: Callable[[int, int], np.ndarray]) -> bytes:
    last = max(0, size - _SAMPLE_BYTES)
    starts = sorted({last * i // (_SAMPLES - 1) for i in range(_SAMPLES)})
    # In one piece: each larger piece that hashlib is given hands Python's lock over, and getting it back can take long.
    blocks = b"".join([read(start, min(start + _SAMPLE_BYTES, size)).tobytes() for start in starts])
    return hashlib.sha256(what.encode() + blocks).digest()


def of_base(config: DecoderConfig, weights: bytes) -> str:
    """What a base is known by, 64 hexadecimal digits. weights: the `whole` of its tensors."""
    return hashlib.sha256(_said(config) + weights).hexdigest()


def of_random(config: DecoderConfig, key: jax.Array, dtype: str) -> str | None:
    """As of_base, of a model whose weights are drawn by `key`; None where both are but traced."""
    if isinstance(key, Tracer):
        return None
    drawn = np.asarray(jax.random.key_data(key)).tolist()
    return of_base(config, f"random {drawn} {dtype}".encode())


def _said(config: DecoderConfig) -> bytes:
    """A config in bytes. What has its default is left out, so that a feature of later versions changes nothing of a
    config without it."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value):
            fields = {f.name: (getattr(value, f.name), f.default) for f in dataclasses.fields(value)}
            return [type(value).__name__, {name: plain(v) for name, (v, default) in fields.items() if v != default}]
        if isinstance(value, tuple | list):
            return [plain(each) for each in value]
        return value

    return json.dumps(plain(config), sort_keys=True, default=repr).encode()


# ---- digests that are kept


def kept_folder() -> Path:
    """The folder `weights` of JAXTUNE_CACHE, or of ~/.cache/jaxtune."""
    return Path(os.environ.get("JAXTUNE_CACHE") or Path.home() / ".cache" / "jaxtune").expanduser() / "weights"


class Kept:
    """Digests of tensors that would be read for their digest alone, as an earlier load found them; thread-safe.

    Args:
      files: those that the tensors lie in.
    """

    def __init__(self, files: Iterable[Path]):
        self._files = sorted(set(files))
        self._began = time.time()
        self._states = self._look()
        place = hashlib.sha256("\n".join(os.path.abspath(file) for file in self._files).encode()).hexdigest()
        self._path = kept_folder() / f"{place[:32]}.json"
        self._known: dict[str, str] = {}
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
            if found["format"] == _FORMAT and found["files"] == self._states:
                self._known = {str(name): str(bytes.fromhex(digest).hex()) for name, digest in found["digests"].items()}
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            pass  # there is none, or a damaged one: they are made anew
        self._before = dict(self._known)

    def _look(self) -> list[list[Any]]:
        """Of each file what changes when it is written; the second time cannot be set by hand."""
        found = [(os.path.abspath(file), os.stat(file)) for file in self._files]
        return [[path, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino, s.st_dev] for path, s in found]

    def get(self, name: str) -> bytes | None:
        """The `whole` of a tensor, if the files are as they were when it was made."""
        known = self._known.get(name)
        return None if known is None else bytes.fromhex(known)

    def put(self, name: str, whole: bytes) -> None:
        self._known[name] = whole.hex()

    def save(self) -> None:
        """Keeps what was put, for as long as the files are as they were; a cache that cannot be written is left."""
        if self._known == self._before:
            return
        newest = max((max(mtime, ctime) for _, _, mtime, ctime, *_ in self._states), default=0) / 1e9
        if self._began - newest < _SETTLED_SECONDS or self._look() != self._states:
            return
        content = {"format": _FORMAT, "files": self._states, "digests": self._known}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(self._path, json.dumps(content), durable=False)
        except OSError:
            pass
