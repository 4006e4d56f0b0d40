"""States of prompts' beginnings, by blocks of tokens at fixed positions, so that a prompt that begins as an earlier one
is prefilled from where they part. A block has its tokens' part of each cache; states that cannot be cut are stored
whole where a later prompt is likely to go on: at a prompt's last block, and where prompts have parted.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.models.generation.layer_steps import States
from jaxtune.models.generation.slot_plan import prefix_room

BLOCK = 512  # tokens of a block, and of a prompt's piece
_LEAST_SHARED = 0.25  # of the tokens of prompts; packed into long rows they are prefilled in fewer and faster programs


def worthwhile_bytes(prompts: Iterable[Sequence[int]]) -> int | None:
    """The usual Sampler.prefix_bytes if enough of the prompts' tokens are in whole blocks that other prompts begin with
    too; else None. Equal prompts count once.
    """
    distinct = set(map(tuple, prompts))
    blocks = [key for prompt in distinct for key in block_keys(prompt[:-1], BLOCK)]
    shared = BLOCK * (len(blocks) - len(set(blocks)))
    return prefix_room() if shared and shared >= _LEAST_SHARED * sum(map(len, distinct)) else None


def block_keys(tokens: Sequence[int], size: int, condition: object = None) -> list[bytes]:
    """A key for each whole block of `size` tokens, of all tokens up to its end. condition: what else the states depend
    on, by its repr.
    """
    key, keys = hashlib.sha256(repr(condition).encode()).digest(), []
    array = np.asarray(tokens, np.int32)
    for end in range(size, len(array) + 1, size):
        key = hashlib.sha256(key + array[end - size : end].tobytes()).digest()
        keys.append(key)
    return keys


@dataclasses.dataclass
class _Block:
    caches: list[jax.Array]  # of each cache the block's last tokens, as many as it has room for
    whole: list[jax.Array] | None  # each state that cannot be cut, as it is after the block; None: not stored

    @property
    def bytes(self) -> int:
        return sum(array.nbytes for array in (*self.caches, *(self.whole or ())))


class Prefixes:
    """Blocks of at most `most_bytes`; those whose use is longest ago go first, and a block before those that it
    continues.

      size: tokens of a block.
      is_cache: for each array of a row's states, whether it is a cache (Mixer.has_cache).
    """

    def __init__(self, size: int, most_bytes: int, is_cache: Sequence[bool]):
        self.size = size
        self._most_bytes, self._is_cache = most_bytes, tuple(is_cache)
        # by use; a block's key is more recent than those of the blocks that continue it
        self._blocks: collections.OrderedDict[bytes, _Block] = collections.OrderedDict()
        self._bytes = 0

    def find(self, keys: Sequence[bytes]) -> tuple[int, int]:
        """(from how many blocks a prompt can go on, how many of its first blocks are there)."""
        present = 0
        while present < len(keys) and keys[present] in self._blocks:
            present += 1
        self._use(keys[:present])
        usable = present
        while usable and self._blocks[keys[usable - 1]].whole is None:
            usable -= 1
        return usable, present

    def restored(self, keys: Sequence[bytes], states: States) -> States:
        """The states after all blocks of `keys`, of which `find` said so.

        states: of one row, of zeros, with room for the blocks; donated.
        """
        arrays, tree = jax.tree.flatten(states)
        caches = [array for array, is_cache in zip(arrays, self._is_cache, strict=True) if is_cache]
        for index, key in enumerate(keys):
            caches = _with_block(caches, self._blocks[key].caches, np.int32(index * self.size), self.size)
        rest, whole = iter(caches), iter(self._blocks[keys[-1]].whole or ())
        # Copies, because the next piece's program gets them donated.
        return tree.unflatten([next(rest) if is_cache else jnp.copy(next(whole)) for is_cache in self._is_cache])

    def add(self, keys: Sequence[bytes], states: States, whole: bool) -> None:
        """Stores the last block of `keys`, unless others that must stay fill the memory.

        keys: of the first blocks of a prompt.
        states: of one row, after these blocks.
        whole: also the states that cannot be cut.
        """
        arrays = jax.tree.leaves(states)
        stored = self._blocks.get(keys[-1])
        if any(key not in self._blocks for key in keys[:-1]) or (
            stored is not None and (stored.whole is not None or not whole)
        ):
            return
        self._use(keys[:-1] if stored is None else keys)
        cut = [array for array, is_cache in zip(arrays, self._is_cache, strict=True) if is_cache]
        uncut = [array for array, is_cache in zip(arrays, self._is_cache, strict=True) if not is_cache]
        whole = whole or not uncut
        added_bytes = sum(array.nbytes for array in uncut) if whole else 0
        if stored is None:
            added_bytes += sum(array.nbytes // array.shape[2] * min(self.size, array.shape[2]) for array in cut)
        if not self._make_room(added_bytes, set(keys)):
            return
        if stored is None:
            stored = _Block(_block_of(cut, np.int32((len(keys) - 1) * self.size), self.size), None)
        if whole:
            stored.whole = [jnp.copy(array) for array in uncut]
        self._blocks[keys[-1]] = stored
        self._bytes += added_bytes
        self._use(keys)

    def forget(self) -> None:
        """Frees all blocks."""
        self._blocks.clear()
        self._bytes = 0

    def _use(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            self._blocks.move_to_end(key)

    def _make_room(self, added_bytes: int, needed: set[bytes]) -> bool:
        """Drops blocks, but none of `needed`, until there is room; False if there is too little. The needed ones have
        been used last.
        """
        while self._bytes + added_bytes > self._most_bytes:
            oldest = next(iter(self._blocks), None)
            if oldest is None or oldest in needed:
                return False
            self._bytes -= self._blocks.pop(oldest).bytes
        return True


@functools.partial(jax.jit, static_argnums=2)
def _block_of(caches: list[jax.Array], start: jax.Array, size: int) -> list[jax.Array]:
    """[1, heads, tokens, D] of each cache for the last tokens of the `size` from position `start` on."""
    return [jnp.take(cache, _indices(cache, start, size), axis=2) for cache in caches]


@functools.partial(jax.jit, static_argnums=3, donate_argnums=0)
def _with_block(caches: list[jax.Array], block: list[jax.Array], start: jax.Array, size: int) -> list[jax.Array]:
    return [
        cache.at[:, :, _indices(cache, start, size)].set(tokens, unique_indices=True)
        for cache, tokens in zip(caches, block, strict=True)
    ]


def _indices(cache: jax.Array, start: jax.Array, size: int) -> jax.Array:
    """Of the last of `size` tokens from position `start` on, as many as the cache has room for."""
    count = min(size, cache.shape[2])
    return (start + size - count + jnp.arange(count, dtype=jnp.int32)) % cache.shape[2]
