"""The identity of a base model: a digest of its config and of every byte of its weights. An adapter's file records it,
and the adapter is refused over a base that has another one. `Digest` digests tensors; `base_digest` makes the identity
of a Digest and the config, and `random_digest` that of random weights.

Each tensor is digested as it is read, and the digests are joined in the order of the tensors' names. A checkpoint that
is divided into other shards therefore has the same digest. Bytes that a load reads anyway are always digested, at 13
GB/s a thread. A tensor that is divided over devices would have to be read as a whole for its digest alone, so its
digest is cached (`DigestCache`) for as long as the files have the same path, size, times and inode.

Older versions compare only `Digest.sampled` (Decoder.base_fingerprint), which covers 64 blocks of 4 KiB of each tensor
and nothing of config.json. It is still computed and recorded beside the identity, so that their records can be compared
with those of this version.
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
_READ_BYTES = 1 << 26  # how much is read at a time of a tensor that is read only for its digest
# A file that was written less than this long ago may be written again without a change of its modification time,
# because the clock of file systems has coarse ticks.
_SETTLED_SECONDS = 2.0
_FORMAT = 1  # version of the cache's files
# Config fields that have been renamed, {name: name in digests}, so that recorded digests stay valid.
_FIRST_NAMES = {"fused": "together", "hf_name": "their_name"}


@dataclasses.dataclass(frozen=True)
class Digest:
    """The identity of one or more tensors, as two digests of their names, dtypes, shapes and content.

    `whole` covers every byte, and base_digest makes the identity of a base model of it. `sampled` covers up to 64
    blocks of each tensor, and is all that older versions of jaxtune recorded; it is still recorded too, so that records
    of both can be compared. The methods digest a tensor in memory (`of`) or in a file (`read`), and combine the digests
    of several tensors (`joined`).
    """

    # SHA-256 over name, dtype, shape and up to 64 evenly spaced blocks of 4 KiB of a tensor, or over several digests
    sampled: bytes
    # XXH3-128 over name, dtype, shape and every byte of a tensor, or SHA-256 over the digests of several
    whole: bytes

    @classmethod
    def of(cls, name: str, array: np.ndarray) -> Digest:
        """Both digests of a tensor in host memory (`array`), for a load, which digests most tensors by it. Its dtype,
        shape and `name` are digested too: the model's name of the tensor, or for a tensor of a quantised weight the
        label that its format's layout gives it."""
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
        known: bytes | None = None,
    ) -> Digest:
        """Both digests of a tensor that is not in memory, equal to those that `of` gives for the same tensor. A load
        digests by it the tensors that are divided over devices (shards.entry_digest).

        Args:
          name: under which the tensor is digested.
          dtype: of its elements.
          shape: of the tensor.
          size: the number of its bytes.
          read: (start, stop) -> the tensor's bytes from start to before stop, uint8.
          known: its `whole` digest, if it is cached; then only the sampled blocks are read. None: every byte is read,
            in blocks of 64 MiB.
        """
        what = f"{name} {dtype.name} {shape}"
        if known is None:
            whole = xxhash.xxh3_128(what.encode())
            for start in range(0, size, _READ_BYTES):
                whole.update(read(start, min(start + _READ_BYTES, size)))
            known = whole.digest()
        return cls(_sampled(what, size, read), known)

    @classmethod
    def joined(cls, parts: Iterable[Digest]) -> Digest:
        """Both digests of several tensors, such as all of a model or those of one quantised weight, from their own
        digests `parts` in the given order. A load gives those of a model in the order of the tensors' names, and those
        of a quantised weight in the order that its format's layout fixes (Layout.digested).

        `sampled` is SHA-256 over the `sampled` digests of the parts, one after another, and `whole` is SHA-256 over
        their `whole` digests. Another order of the parts therefore gives another digest.
        """
        parts = list(parts)
        sampled, whole = (b"".join(getattr(part, key) for part in parts) for key in ("sampled", "whole"))
        return cls(hashlib.sha256(sampled).digest(), hashlib.sha256(whole).digest())


def _sampled(what: str, size: int, read: Callable[[int, int], np.ndarray]) -> bytes:
    """SHA-256 of `what` and of up to 64 evenly spaced blocks of 4 KiB of a tensor.

    what: its name, dtype and shape as text. size: its bytes. read: (start, stop) -> its bytes from start to stop,
    uint8[stop - start]. It is the Digest.sampled of one tensor."""
    last = max(0, size - _SAMPLE_BYTES)
    starts = sorted({last * i // (_SAMPLES - 1) for i in range(_SAMPLES)})
    # All blocks in one call: hashlib releases Python's lock for each larger piece, and taking it again can be slow.
    blocks = b"".join([read(start, min(start + _SAMPLE_BYTES, size)).tobytes() for start in starts])
    return hashlib.sha256(what.encode() + blocks).digest()


def base_digest(config: DecoderConfig, weights: bytes) -> str:
    """The identity of a base model, 64 hexadecimal digits: SHA-256 over its config and `weights`. Adapters and runs
    record it, and refuse a base that has another one.

    weights: `Digest.whole` of all its tensors; for random weights, which follow from their key, random_digest passes a
      text with the key and the dtype instead.
    """
    return hashlib.sha256(_said(config) + weights).hexdigest()


def random_digest(config: DecoderConfig, key: jax.Array, dtype: str) -> str | None:
    """The identity, as base_digest gives it, of a base model of this config with random weights drawn by `key` in
    `dtype`, from which the weights follow, so that no tensor is read; None if the key is traced and has no value.
    hf.model_from_config calls it, which makes the models that runs train from scratch (model.from_config)."""
    if isinstance(key, Tracer):
        return None
    drawn = np.asarray(jax.random.key_data(key)).tolist()
    return base_digest(config, f"random {drawn} {dtype}".encode())


def _said(config: DecoderConfig) -> bytes:
    """A config as JSON in bytes, a part of what `base_digest` digests. A dataclass becomes [its class's name, {field:
    value}], with the fields in alphabetical order.

    Fields that have their default value are left out, so that a field which a later version adds does not change the
    digest of a config that does not use it. For the same reason renamed fields have their first names.
    """

    def plain(value: Any) -> Any:
        """A value in JSON's types: a dataclass becomes [its class's name, {field: value}], a tuple a list."""
        if dataclasses.is_dataclass(value):
            fields = {f.name: (getattr(value, f.name), f.default) for f in dataclasses.fields(value)}
            said = {_FIRST_NAMES.get(name, name): plain(v) for name, (v, default) in fields.items() if v != default}
            return [type(value).__name__, said]
        if isinstance(value, tuple | list):
            return [plain(each) for each in value]
        return value

    return json.dumps(plain(config), sort_keys=True, default=repr).encode()


# ---- cached digests


def cache_folder() -> Path:
    """The folder in which DigestCache, its only caller, keeps its files: the subfolder "weights" of the folder that the
    environment variable JAXTUNE_CACHE names, or of ~/.cache/jaxtune if it is not set. The folder need not exist."""
    return Path(os.environ.get("JAXTUNE_CACHE") or Path.home() / ".cache" / "jaxtune").expanduser() / "weights"


class DigestCache:
    """A cache on disk, for one checkpoint, of the digests (Digest.whole) of tensors that are divided over devices, of
    which a load would read every byte only for the base model's identity. Each load makes one, which reads what earlier
    loads saved; if there is nothing usable, it begins empty. `get` looks a digest up, `put` adds one, and `save` writes
    the cache at the end of a load; thread-safe.

    Args:
      files: the weight files of the checkpoint; the cached digests are valid while none of them changes.
    """

    def __init__(self, files: Iterable[Path]):
        self._files = sorted(set(files))
        self._began = time.time()
        self._states = self._look()
        place = hashlib.sha256("\n".join(os.path.abspath(file) for file in self._files).encode()).hexdigest()
        self._path = cache_folder() / f"{place[:32]}.json"
        self._known: dict[str, str] = {}
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
            if found["format"] == _FORMAT and found["files"] == self._states:
                self._known = {str(name): str(bytes.fromhex(digest).hex()) for name, digest in found["digests"].items()}
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            pass  # without a usable cache the digests are computed
        self._before = dict(self._known)

    def _look(self) -> list[list[Any]]:
        """The state of each weight file as the file system reports it now: [path, size in bytes, modification time,
        change time (both in ns), inode, device]. If it equals the state in the cache, the file has not been written
        since: writing sets the change time, which no program can set back. Raises OSError if a file is not there."""
        found = [(os.path.abspath(file), os.stat(file)) for file in self._files]
        return [[path, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino, s.st_dev] for path, s in found]

    def get(self, name: str) -> bytes | None:
        """The digest over every byte of the tensor of this name (`Digest.whole`) that an earlier load saved or `put`
        added, so that a load need not read the whole tensor; None if there is none, or the files had changed between
        that load and the making of this cache."""
        known = self._known.get(name)
        return None if known is None else bytes.fromhex(known)

    def put(self, name: str, whole: bytes) -> None:
        """Adds the digest over every byte of the tensor of this name, `whole` (`Digest.whole`), to be written by
        `save`. A load calls it for every divided tensor that is not quantised; for a digest that came from `get` this
        changes nothing."""
        self._known[name] = whole.hex()

    def save(self) -> None:
        """Writes the cache if digests were added. It writes nothing if the files changed meanwhile, or were written
        less than two seconds before the load, when a further change might not show in their times. A failure to write,
        and a weight file that is no longer there, are ignored."""
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
            atomic_write(self._path, json.dumps(content), durable=False)
        except OSError:
            pass
