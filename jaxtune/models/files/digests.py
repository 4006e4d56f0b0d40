"""The identity of a base model: a digest of its config and of every byte of its weights, which adapters record.

Tensors are digested as they are read, and joined in the order of their names, so that other shards give the same
digest. A tensor divided over devices would be read whole only for its digest, which is therefore cached while the
files' path, size, times and inode stay. `Digest.sampled`, of 64 blocks of 4 KiB of each tensor, is all that older
versions recorded, and stays for comparison.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from jaxtune.models.config import DecoderConfig
from jaxtune.system.files import atomic_write
from jaxtune.system.sealed import checksum, sealed, unsealed

_SAMPLES, _SAMPLE_BYTES = 64, 4096
_READ_BYTES = 1 << 26  # how much is read at a time of a tensor that is read only for its digest
# A file that was written less than this long ago may be written again without a change of its modification time,
# because the clock of file systems has coarse ticks.
_SETTLED_SECONDS = 2.0
_FORMAT = 1  # version of the cache's files
# Config fields that have been renamed, {name: name in digests}, so that recorded digests stay valid.
_FIRST_NAMES = {"fused": "together", "hf_name": "their_name"}
_LATER_NAMES = {"sections"}  # of fields that change nothing in text, and that older versions did not read


@dataclasses.dataclass(frozen=True)
class Digest:
    """Two digests of the names, dtypes, shapes and content of one or more tensors."""

    # SHA-256 over name, dtype, shape and up to 64 evenly spaced blocks of 4 KiB of a tensor, or over several digests
    sampled: bytes
    # XXH3-128 over name, dtype, shape and every byte of a tensor, or SHA-256 over the digests of several
    whole: bytes

    @classmethod
    def of(cls, name: str, array: np.ndarray) -> Digest:
        """Digests a tensor in host memory. name: the model's, or in a quantised weight the layout's label."""
        label, data = f"{name} {array.dtype.name} {array.shape}", array.reshape(-1).view(np.uint8)
        whole = checksum([label.encode(), data])
        return cls(_sampled(label, data.size, lambda start, stop: data[start:stop]), whole)

    @classmethod
    def read(
        cls,
        name: str,
        dtype: np.dtype,
        shape: tuple[int, ...],
        size: int,
        read: Callable[[int, int], np.ndarray],
        cached: bytes | None = None,
    ) -> Digest:
        """Digests a tensor that is not in memory, as `of` does.

        name, dtype, shape: they enter the digest. size: bytes.
        read: (start, stop) -> these bytes, uint8.
        cached: its cached `whole` digest; then only the sampled blocks are read.
        """
        label = f"{name} {dtype.name} {shape}"
        if cached is None:
            blocks = (read(start, min(start + _READ_BYTES, size)) for start in range(0, size, _READ_BYTES))
            cached = checksum(itertools.chain([label.encode()], blocks))
        return cls(_sampled(label, size, read), cached)

    @classmethod
    def joined(cls, digests: Iterable[Digest]) -> Digest:
        """SHA-256 over the digests of several tensors, in this order."""
        digests = list(digests)
        sampled, whole = (b"".join(getattr(digest, key) for digest in digests) for key in ("sampled", "whole"))
        return cls(hashlib.sha256(sampled).digest(), hashlib.sha256(whole).digest())


def _sampled(label: str, size: int, read: Callable[[int, int], np.ndarray]) -> bytes:
    """SHA-256 of `label` (name, dtype, shape) and up to 64 evenly spaced blocks of 4 KiB."""
    last = max(0, size - _SAMPLE_BYTES)
    starts = sorted({last * i // (_SAMPLES - 1) for i in range(_SAMPLES)})
    # All blocks in one call: hashlib releases Python's lock for each larger piece, and taking it again can be slow.
    blocks = b"".join([read(start, min(start + _SAMPLE_BYTES, size)).tobytes() for start in starts])
    return hashlib.sha256(label.encode() + blocks).digest()


def base_digest(config: DecoderConfig, weights: bytes) -> str:
    """The identity of a base model, 64 hexadecimal digits. weights: `Digest.whole` of all its tensors."""
    return hashlib.sha256(_config_json(config) + weights).hexdigest()


def random_digest(config: DecoderConfig, key: jax.Array, dtype: str) -> str | None:
    """The identity of a base model with random weights; None if the key is traced.

    config: of the model.
    key: the jax.random key that drew the weights.
    dtype: of the weights as stored.
    """
    if isinstance(key, Tracer):
        return None
    key_data = np.asarray(jax.random.key_data(key)).tolist()
    return base_digest(config, f"random {key_data} {dtype}".encode())


def _config_json(config: DecoderConfig) -> bytes:
    """A config as JSON without default values, so that later versions give the same digest."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value):
            fields = {f.name: (getattr(value, f.name), f.default) for f in dataclasses.fields(value)}
            fields = {name: pair for name, pair in fields.items() if name not in _LATER_NAMES}
            values = {_FIRST_NAMES.get(name, name): plain(v) for name, (v, default) in fields.items() if v != default}
            return [type(value).__name__, values]
        if isinstance(value, tuple | list):
            return [plain(element) for element in value]
        return value

    return json.dumps(plain(config), sort_keys=True, default=repr).encode()


# ---- cached digests


def cache_folder() -> Path:
    """$JAXTUNE_CACHE/weights, or ~/.cache/jaxtune/weights; need not exist."""
    return Path(os.environ.get("JAXTUNE_CACHE") or Path.home() / ".cache" / "jaxtune").expanduser() / "weights"


class DigestCache:
    """A checkpoint's digests on disk, of tensors that are divided over devices. They are valid while none of `files`,
    its weight files, changes.
    """

    def __init__(self, files: Iterable[Path]):
        self._files = sorted(set(files))
        self._began = time.time()
        self._states = self._look()
        path_hash = hashlib.sha256("\n".join(os.path.abspath(file) for file in self._files).encode()).hexdigest()
        self._path = cache_folder() / f"{path_hash[:32]}.digests"
        self._known: dict[str, str] = {}
        try:
            record = json.loads(unsealed(self._path.name, self._path.read_bytes()))
            if record["format"] == _FORMAT and record["files"] == self._states:
                self._known = {
                    str(name): str(bytes.fromhex(digest).hex()) for name, digest in record["digests"].items()
                }
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            pass  # without a usable cache the digests are computed
        self._before = dict(self._known)

    def _look(self) -> list[list[Any]]:
        """[path, bytes, modification and change time in ns, inode, device] of each file."""
        stats = [(os.path.abspath(file), os.stat(file)) for file in self._files]
        return [[path, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino, s.st_dev] for path, s in stats]

    def get(self, name: str) -> bytes | None:
        """A tensor's cached `Digest.whole`, or None."""
        digest = self._known.get(name)
        return None if digest is None else bytes.fromhex(digest)

    def put(self, name: str, whole: bytes) -> None:
        """Adds a tensor's `Digest.whole` for `save`."""
        self._known[name] = whole.hex()

    def save(self) -> None:
        """Writes added digests, unless the files changed meanwhile, or less than two seconds before the load, when
        another change might not show in their times. Failures are ignored.
        """
        if self._known == self._before:
            return
        newest = max((max(mtime, ctime) for _, _, mtime, ctime, *_ in self._states), default=0) / 1e9
        if self._began - newest < _SETTLED_SECONDS:
            return
        content = {"format": _FORMAT, "files": self._states, "digests": self._known}
        try:
            if self._look() != self._states:
                return
            self._path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(self._path, sealed(self._path.name, json.dumps(content).encode()), durable=False)
        except OSError:
            pass
