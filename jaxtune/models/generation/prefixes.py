"""States of prompts' beginnings, by blocks of tokens at fixed positions, so that a prompt that begins as an earlier one
is prefilled from where they part. A block has its tokens' part of each cache; states that cannot be cut are stored
whole where a later prompt is likely to go on: at a prompt's last block, and where prompts have parted.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.models.generation.division import Division
from jaxtune.models.generation.layer_steps import States
from jaxtune.models.generation.slot_plan import prefix_room, room_bytes
from jaxtune.models.generation.structure import Structure, shaped
from jaxtune.models.programs.kept import Call, Function

BLOCK = 512  # tokens of a block, and of a prompt's piece
_LEAST_SHARED = 0.25  # of the tokens of prompts; packed into long rows they are prefilled in fewer and faster programs


def worthwhile_bytes(prompts: Iterable[Sequence[int]]) -> int | None:
    """The usual Sampler.prefix_bytes if `begin_alike`; else None."""
    return prefix_room(room_bytes()) if begin_alike(prompts) else None


def begin_alike(prompts: Iterable[Sequence[int]]) -> bool:
    """Whether enough of the prompts' tokens are in whole blocks that other prompts begin with too. Equal prompts count
    once.
    """
    distinct = set(map(tuple, prompts))
    blocks = [key for prompt in distinct for key in block_keys(prompt[:-1], BLOCK)]
    shared = BLOCK * (len(blocks) - len(set(blocks)))
    return bool(shared) and shared >= _LEAST_SHARED * sum(map(len, distinct))


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
    adapter: int  # the number of the prompt's; 0: none

    @property
    def bytes(self) -> int:
        return sum(array.nbytes for array in (*self.caches, *(self.whole or ())))


class Added(NamedTuple):
    """What is stored of a prompt."""

    keys: Sequence[bytes]  # of its first blocks, of which the last is stored
    whole: bool  # also the states that cannot be cut
    adapter: int = 0  # its number, on which the keys depend


class Prefixes:
    """Blocks of at most `most_bytes`; those whose use is longest ago go first, and a block before those that it
    continues.

      size: tokens of a block.
      are_caches: of which_are_caches.
      division: of devices that each have all blocks.
    """

    def __init__(self, size: int, most_bytes: int, are_caches: Sequence[bool], division: Division | None = None):
        self.size, self._division = size, division
        self._most_bytes, self._are_caches = most_bytes, tuple(are_caches)
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

        states: shapes of one row's, with room for the blocks.
        """
        caches, _ = _divided(states, self._are_caches)
        if caches:
            caches = _begun(self.size, _described(caches), self._blocks[keys[0]].caches)
            for index, key in enumerate(keys[1:], 1):
                caches = _with_block(self.size, caches, self._blocks[key].caches, np.int32(index * self.size))
        # Copies, because the next piece's program gets them donated.
        whole = self._blocks[keys[-1]].whole
        arrays = iter(caches), iter(_copies(whole) if whole else ())
        return jax.tree.structure(states).unflatten([next(arrays[not is_cache]) for is_cache in self._are_caches])

    def add(self, added: Mapping[int, Added], states: States) -> None:
        """Stores the last block of each prompt, unless others that must stay fill the memory.

        added: {row of the states: its prompt's}.
        states: after these blocks, a row for each device.
        """
        cut, uncut = _divided(states, self._are_caches)
        starts = np.zeros(1 if self._division is None else self._division.devices, np.int32)
        starts[[*added]] = [(len(each.keys) - 1) * self.size for each in added.values()]
        caches_of_rows = functools.cache(lambda: self._rows_of(cut, starts, whole=False))
        whole_of_rows = functools.cache(lambda: self._rows_of(uncut, starts, whole=True))
        for row, (keys, is_whole, adapter) in added.items():
            stored, is_whole = self._blocks.get(keys[-1]), is_whole or not uncut
            if any(key not in self._blocks for key in keys[:-1]) or (
                stored is not None and (stored.whole is not None or not is_whole)
            ):
                continue
            self._use(keys[:-1] if stored is None else keys)
            added_bytes = sum(array.nbytes // len(array) for array in uncut) if is_whole else 0
            if stored is None:
                of_tokens = (array.nbytes // len(array) // array.shape[2] for array in cut)
                counts = (min(self.size, array.shape[2]) for array in cut)
                added_bytes += sum(size * count for size, count in zip(of_tokens, counts, strict=True))
            if not self._make_room(added_bytes, set(keys)):
                continue
            stored = stored or _Block(caches_of_rows()[row], None, adapter)
            if is_whole:
                stored.whole = whole_of_rows()[row]
            self._blocks[keys[-1]] = stored
            self._bytes += added_bytes
            self._use(keys)

    def _rows_of(self, arrays: list[jax.Array], starts: np.ndarray, whole: bool) -> list[list[jax.Array]]:
        """What a block has of each row of caches, or of other states, which are stored whole."""
        if not arrays:
            return [[] for _ in starts]
        if self._division is not None:
            return self._division.rows_of(_uncut if whole else _cut_of(self.size), arrays, starts)
        return [_copies(arrays) if whole else _block_of(self.size, arrays, starts[0])]

    def forget(self) -> None:
        """Frees all blocks."""
        self._blocks.clear()
        self._bytes = 0

    def forget_adapter(self, number: int) -> None:
        """Frees the blocks of prompts with an adapter."""
        for key in [key for key, block in self._blocks.items() if block.adapter == number]:
            self._bytes -= self._blocks.pop(key).bytes

    def _use(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            self._blocks.move_to_end(key)

    def _make_room(self, added_bytes: int, needed: set[bytes]) -> bool:
        """Drops blocks, but none of `needed`, until there is room; False if there is too little."""
        while self._bytes + added_bytes > self._most_bytes:
            oldest = next(iter(self._blocks), None)
            if oldest is None or oldest in needed:
                return False
            self._bytes -= self._blocks.pop(oldest).bytes
        return True


def which_are_caches(structure: Structure, shapes: Sequence[jax.ShapeDtypeStruct], states: States) -> list[bool]:
    """For each array of the states of a model of these arrays, whether it is a cache (Mixer.has_cache)."""
    layers = shaped(structure, tuple(shapes)).layers
    has_cache = [{name: mixer.has_cache for name, mixer in layer.mixers.items()} for layer in layers]
    return jax.tree.leaves(jax.tree.map(lambda has, state: [has] * len(jax.tree.leaves(state)), has_cache, states))


def block_calls(size: int, are_caches: Sequence[bool], states: States) -> list[Call | None]:
    """The programs that store and restore blocks of `size` tokens of one row's states, shapes on a device."""
    caches, whole = _divided(states, are_caches)
    calls = [_copies.call(whole)] if whole else []
    if caches:
        where = caches[0].sharding
        start = jax.ShapeDtypeStruct((), jnp.int32, sharding=where)
        block = [
            jax.ShapeDtypeStruct((*a.shape[:2], min(size, a.shape[2]), a.shape[3]), a.dtype, sharding=where)
            for a in caches
        ]
        calls += [_begun.call(size, _described(caches), block), _block_of.call(size, caches, start)]
        calls.append(_with_block.call(size, caches, block, start))
    return calls


def _divided(states: States, are_caches: Sequence[bool]) -> tuple[list, list]:
    """(caches, other arrays)"""
    pairs = list(zip(jax.tree.leaves(states), are_caches, strict=True))
    return [array for array, is_cache in pairs if is_cache], [array for array, is_cache in pairs if not is_cache]


def _described(caches: Sequence[jax.Array | jax.ShapeDtypeStruct]) -> tuple[tuple[tuple[int, ...], str], ...]:
    return tuple((cache.shape, str(cache.dtype)) for cache in caches)


def _cut(size: int, caches: list[jax.Array], start: jax.Array) -> list[jax.Array]:
    """[1, heads, tokens, D] of each cache for the last tokens of the `size` from position `start` on."""
    return [jnp.take(cache, _indices(cache, start, size), axis=2) for cache in caches]


@functools.cache
def _cut_of(size: int) -> Callable[[list[jax.Array], jax.Array], list[jax.Array]]:
    return functools.partial(_cut, size)


def _uncut(arrays: list[jax.Array], start: jax.Array) -> list[jax.Array]:
    return arrays


def _set(size: int, caches: list[jax.Array], block: list[jax.Array], start: jax.Array) -> list[jax.Array]:
    """The caches (donated) with a block from position `start` on."""
    return [
        cache.at[:, :, _indices(cache, start, size)].set(tokens, unique_indices=True)
        for cache, tokens in zip(caches, block, strict=True)
    ]


def _first(size: int, caches: tuple[tuple[tuple[int, ...], str], ...], block: list[jax.Array]) -> list[jax.Array]:
    """New caches of these shapes and dtypes with the first block."""
    return _set(size, [jnp.zeros(shape, dtype) for shape, dtype in caches], block, jnp.int32(0))


def _copied(arrays: list[jax.Array]) -> list[jax.Array]:
    return [jnp.copy(array) for array in arrays]


_block_of, _with_block = Function(_cut, 1), Function(_set, 1, donated=(0,))
_begun, _copies = Function(_first, 2), Function(_copied, 0)


def _indices(cache: jax.Array, start: jax.Array, size: int) -> jax.Array:
    """Of the last of `size` tokens from position `start` on, as many as the cache has room for."""
    count = min(size, cache.shape[2])
    return (start + size - count + jnp.arange(count, dtype=jnp.int32)) % cache.shape[2]
