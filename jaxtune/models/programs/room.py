"""Room in a GPU's memory for what a program takes in one block, seen before its first launch.

A device that finds no block fails alone, while the others wait for it in a collective for ever. So each device of a
mesh first allocates the block without collectives. Where free memory lies in pieces, arrays are moved together: the
device buffers of live arrays are replaced under the array objects, which everybody keeps.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import logging
import os
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jax.errors import JaxRuntimeError
from jax.sharding import SingleDeviceSharding

from jaxtune.models.placement import partition
from jaxtune.models.programs.compiling import out_of_memory
from jaxtune.system import host_memory, private_jax, processes
from jaxtune.system.private_jax import Device

logger = logging.getLogger(__name__)

type Block = tuple[int, int]  # (address, bytes)
type _Buffer = tuple[Device, int]  # (device, address)

_ALIGNED = 256
UNSPLIT = 128 << 20  # XLA's allocator gives a free block whole that exceeds a request by less than this, and twice it
_PIECE = 1 << 20  # of a block that is tried, so that programs of nearly equal sizes are one
_IN_ADVANCE = "XLA_PYTHON_CLIENT_PREALLOCATE"
_SMALL = 16  # a block of less than this part of the free memory is taken to fit
_RESULT = 64 << 20  # the size of blocks in place of a program's results, which are many arrays
_lock = threading.Lock()


# ---- which arrays move


class Pool:
    """The free blocks of a pool from `start` to `end`, as XLA's allocator (best fit with coalescing) gives them out."""

    def __init__(self, blocks: Iterable[Block], start: int, end: int):
        self._free: list[Block] = []  # (bytes, address), sorted
        for address, size in sorted(blocks):
            if address > start:
                self._free.append((address - start, start))
            start = max(start, address + _rounded(size))
        if end > start:
            self._free.append((end - start, start))
        self._free.sort()

    @property
    def largest(self) -> int:
        return self._free[-1][0] if self._free else 0

    def take(self, size: int) -> bool:
        """Takes the smallest free block that is large enough, of equal ones the lowest; False without one."""
        size = _rounded(size)
        index = bisect.bisect_left(self._free, (size, 0))
        if index == len(self._free):
            return False
        whole, address = self._free.pop(index)
        if whole >= 2 * size or whole - size >= UNSPLIT:
            bisect.insort(self._free, (whole - size, address + size))
        return True


def _rounded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def to_move(movable: Sequence[Block], fixed: Sequence[Block], total: int, need: int) -> list[int] | None:
    """Indices of the blocks, by address, that leave a free block of `need` bytes in a pool of `total` if all of them
    are freed, and then allocated in this order: the highest ones, few. [] if there is such a block; None if none comes.
    """
    start = min((address for address, _ in (*movable, *fixed)), default=0)
    order = sorted(range(len(movable)), key=lambda index: movable[index])
    count = 0
    while True:
        stay, moved = order[: len(order) - count], order[len(order) - count :]
        pool = Pool([*fixed, *(movable[index] for index in stay)], start, start + total)
        if all(pool.take(movable[index][1]) for index in moved) and pool.largest >= _rounded(need):
            return moved
        if count == len(order):
            return None
        count = min(max(1, 2 * count), len(order))


# ---- moving them


def buffers(devices: Sequence[Device]) -> tuple[dict[_Buffer, int], dict[_Buffer, int]]:
    """{buffer: bytes} of live arrays in the devices' own memory: those that may move, and others."""
    movable, fixed = {}, {}
    for array in _live(devices):
        plain = private_jax.in_row_order(array)
        for key, data in _shards(array):
            (movable if plain else fixed)[key] = data.on_device_size_in_bytes()
    return {key: size for key, size in movable.items() if key not in fixed}, fixed


def _live(devices: Sequence[Device]) -> list[jax.Array]:
    kinds = {device: device.default_memory().kind for device in devices}

    @functools.cache
    def is_there(where: jax.sharding.Sharding) -> bool:
        return where.memory_kind in {None, *(kinds[device] for device in where.addressable_devices if device in kinds)}

    arrays = jax.live_arrays(devices[0].platform)
    return [array for array in arrays if not array.is_deleted() and array.size and is_there(array.sharding)]


def _shards(array: jax.Array) -> list[tuple[_Buffer, jax.Array]]:
    return [((s.device, s.data.unsafe_buffer_pointer()), s.data) for s in array.addressable_shards]


def move(order: Sequence[_Buffer], devices: Sequence[Device]) -> None:
    """Takes buffers of live arrays to the host, frees them, and allocates them again in this order. The arrays stay
    the same objects with the same bits.

    RuntimeError if one finds no room any more: arrays are lost then.
    """
    chosen, host = set(order), {}
    affected: list[tuple[jax.Array, list[_Buffer], list[jax.Array | None]]] = []
    for array in _live(devices):
        shards = _shards(array)
        if chosen.isdisjoint(key for key, _ in shards):
            continue
        for key, data in shards:
            if key in chosen and key not in host:
                host[key] = partition.on_host(data)
        affected.append((array, [key for key, _ in shards], [None if key in chosen else data for key, data in shards]))
        del shards, data
    number = functools.cache(lambda dtype, device: jax.device_put(np.zeros((), dtype), device))
    for array, keys, _ in affected:
        private_jax.replace(array, [number(array.dtype, device) for device, _ in keys])
    try:
        placed = _placed(order, host)
    except BaseException:
        for array, _, _ in affected:
            array.delete()  # so that nobody takes what is there now for its numbers
        raise
    for array, keys, stay in affected:
        shards = [placed[key] if data is None else data for key, data in zip(keys, stay, strict=True)]
        private_jax.replace(array, shards)


def _placed(order: Sequence[_Buffer], host: dict[_Buffer, np.ndarray]) -> dict[_Buffer, jax.Array]:
    for buffers in (order, sorted(order, key=lambda key: -host[key].nbytes)):
        placed: dict[_Buffer, jax.Array] = {}
        try:
            for key in buffers:
                placed[key] = jax.block_until_ready(jax.device_put(host[key], key[0]))
            return placed
        except JaxRuntimeError as error:
            if not out_of_memory(error):
                raise
            reason = str(error)
    raise RuntimeError(f"arrays that were moved together found no room: {reason}")


# ---- before a program's first launch


class Secured:
    """A compiled program with `secure` before its first launch."""

    def __init__(self, program: jax.stages.Compiled, devices: Sequence[Device]):
        self._program, self._devices, self._secured = program, devices, False
        self._memory = None

    def __call__(self, *arguments):
        if not self._secured:
            secure(self, self._devices)
            self._secured = True
        return self._program(*arguments)

    def memory_analysis(self):
        """Of a deep model the first takes two tenths of a second."""
        if self._memory is None:
            self._memory = self._program.memory_analysis()
        return self._memory

    def __getattr__(self, name: str):
        return getattr(self._program, name)


def secured(program: jax.stages.Compiled, devices: Sequence[Device]) -> jax.stages.Compiled | Secured:
    """The program, for whose first launch `secure` makes room; itself on devices without a limit. Asks for its memory:
    call it in the thread that compiled or loaded it.
    """
    if not is_limited(devices):
        return program
    program_in_room = Secured(program, devices)
    program_in_room.memory_analysis()
    return program_in_room


def is_limited(devices: Sequence[Device]) -> bool:
    """Whether this process's ones among them allocate from a pool (GPUs)."""
    return bool(local := _local(devices)) and "bytes_limit" in _stats(local[0])


def secure(program: jax.stages.Compiled | Secured, devices: Sequence[Device]) -> None:
    """Sees that each device has the blocks that the program takes, moving arrays together if its free memory lies in
    pieces. RESOURCE_EXHAUSTED if one has not, in all processes of the program's devices; a single device says so
    itself. Collective if several processes have the devices.
    """
    local, problem = _local(devices), None
    memory = program.memory_analysis()
    assert memory is not None
    results = max(memory.output_size_in_bytes - memory.alias_size_in_bytes, 0)
    sizes = [*[_RESULT] * (results // _RESULT), results % _RESULT, memory.temp_size_in_bytes]
    try:
        with _lock:
            _make_room(local, [size for size in sizes if size], alone=len(devices) == 1)
    except JaxRuntimeError as error:
        if not out_of_memory(error):
            raise
        problem = error
    said = [] if len(local) == len(devices) else processes.all_of(None if problem is None else str(problem))
    if problem is not None and len(devices) > 1:
        raise problem
    if words := next(filter(None, said), None):
        raise JaxRuntimeError(f"in another process: {words}")


def _make_room(devices: Sequence[Device], sizes: Sequence[int], alone: bool) -> None:
    need, free = sum(sizes), min(map(_free_bytes, devices))
    if need * _SMALL <= free or (alone and not _few(devices, need)):
        return
    try:
        return hold(devices, sizes)
    except JaxRuntimeError as error:
        if not out_of_memory(error):
            raise
        problem = error
    few = None if need > free else _few(devices, need)
    for keys in () if few is None else (few, None):
        movable = buffers(devices)[0]
        keys = sorted((key for key in movable if key[0] in devices), key=_address) if keys is None else keys
        moved = sum(movable[key] for key in keys)
        if not keys or moved > (1 - host_memory.PINNED_SHARE) * host_memory.size_bytes() / processes.count():
            continue
        move(keys, devices)
        logger.warning("free memory lay in pieces: %d arrays, %.2f GB, were moved together", len(keys), moved / 1e9)
        try:
            return hold(devices, sizes)
        except JaxRuntimeError as error:
            if not out_of_memory(error):
                raise
    raise problem


def _address(key: _Buffer) -> int:
    return key[1]


def _few(devices: Sequence[Device], need: int) -> list[_Buffer] | None:
    """The buffers to move first, by `to_move` of each device; None if that would not help one."""
    if os.environ.get(_IN_ADVANCE, "true").lower() in ("false", "0"):
        return None  # the pool has regions, which do not join
    movable, fixed = buffers(devices)
    keys = []
    for device in devices:
        of_device = [key for key in movable if key[0] == device]
        may_move = [(key[1], movable[key]) for key in of_device]
        stay = [(key[1], size) for key, size in fixed.items() if key[0] == device]
        stats = _stats(device)
        unseen = stats["bytes_in_use"] - sum(_rounded(size) for _, size in (*may_move, *stay))
        moved = to_move(may_move, stay, stats["bytes_limit"] - max(unseen, 0), need)
        if moved is None:
            return None
        keys += [of_device[index] for index in moved]
    return keys


def hold(devices: Sequence[Device], sizes: Sequence[int]) -> None:
    """Allocates these blocks on each of the devices, and frees them. Each device has programs of its own: a program of
    several waits for all of them even without collectives.
    """
    pieces = [-(-size // _PIECE) for size in sizes]
    with ThreadPoolExecutor(len(devices)) as pool:
        programs = list(pool.map(lambda device: [_zeros(device, count) for count in pieces], devices))
    blocks: list[jax.Array] = []
    try:
        for program in itertools.chain(*programs):
            blocks.append(program())
        jax.block_until_ready(blocks)
    finally:
        for block in blocks:
            block.delete()


@functools.lru_cache(256)
def _zeros(device: Device, pieces: int) -> jax.stages.Compiled:
    """Makes [pieces, _PIECE] bytes on the device."""
    where = SingleDeviceSharding(device)
    return jax.jit(lambda: jnp.zeros((pieces, _PIECE), jnp.uint8), out_shardings=where).lower().compile()


def _local(devices: Sequence[Device]) -> list[Device]:
    """This process's ones; none of a machine that programs are only compiled for."""
    local = jax.local_devices()
    return [device for device in devices if device in local]


def _stats(device: Device) -> dict[str, int]:
    return device.memory_stats() or {}


def _free_bytes(device: Device) -> int:
    stats = _stats(device)
    return stats["bytes_limit"] - stats["bytes_in_use"]
