"""Room in one block: which arrays move together, that they are the same arrays then, and that no device hangs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtune.models.placement import partition
from jaxtune.models.programs import room
from jaxtune.models.programs.kept import Function, Request, programs_of

NO_MEMORY = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes."
MIB = 2**20


def rounded(size):
    return (size + 255) // 256 * 256


class Allocator:
    """A pool as a row of chunks [bytes, name of who has it or None], which frees join."""

    def __init__(self, total):
        self.chunks = [[total, None]]

    def allocate(self, name, size):
        size = rounded(size)
        fits = [(chunk[0], index) for index, chunk in enumerate(self.chunks) if chunk[1] is None and chunk[0] >= size]
        if not fits:
            return False
        index = min(fits)[1]
        beyond = self.chunks[index][0] - size
        if beyond >= size or beyond >= 128 * MIB:
            self.chunks[index : index + 1] = [[size, name], [beyond, None]]
        else:
            self.chunks[index][1] = name
        self.chunks = [chunk for chunk in self.chunks if chunk[0]]
        return True

    def free(self, name):
        joined = []
        for size, owner in self.chunks:
            owner = None if owner == name else owner
            if joined and owner is None and joined[-1][1] is None:
                joined[-1][0] += size
            else:
                joined.append([size, owner])
        self.chunks = joined

    def addresses(self):
        ends = np.cumsum([0, *(chunk[0] for chunk in self.chunks)])
        return {chunk[1]: int(start) for chunk, start in zip(self.chunks, ends, strict=False) if chunk[1] is not None}


@st.composite
def filled_pools(draw):
    """(allocator, {name: bytes asked for}, names that may not move): after allocations and frees in a drawn order."""
    total = draw(st.integers(300, 4000)) * MIB
    pool, sizes = Allocator(total), {}
    assert pool.allocate("first", 256)  # as every process has: the pool's start is known from it
    sizes["first"] = 256
    for number in range(draw(st.integers(1, 40))):
        if len(sizes) > 1 and draw(st.integers(0, 2)) == 0:
            name = draw(st.sampled_from(sorted(sizes.keys() - {"first"})))
            pool.free(name)
            del sizes[name]
        else:
            size = draw(st.one_of(st.integers(1, 400 * MIB), st.integers(1, 40).map(lambda n: n * 10 * MIB)))
            if pool.allocate(f"{number}", size):
                sizes[f"{number}"] = size
    fixed = {name for name in sorted(sizes) if name == "first" or draw(st.integers(0, 5)) == 0}
    return pool, sizes, fixed, total, draw(st.integers(1, total))


@settings(max_examples=300, deadline=None)
@given(filled_pools(), st.integers(0, 2**40))
def test_what_moves_leaves_the_block_in_an_allocator_that_fits_best(drawn, base):
    pool, sizes, fixed, total, need = drawn
    addresses = pool.addresses()
    names = [name for name in sizes if name not in fixed]
    blocks = [(base + addresses[name], sizes[name]) for name in names]
    taken = [(base + addresses[name], sizes[name]) for name in fixed]
    moved = room.to_move(blocks, taken, total, need)
    exact = all(chunk[1] is None or chunk[0] == rounded(sizes[chunk[1]]) for chunk in pool.chunks)
    there = any(chunk[1] is None and chunk[0] >= rounded(need) for chunk in pool.chunks)
    if exact:  # where a chunk was given whole, what is beyond the array looks free
        assert (moved == []) == there
    if moved is None:
        assert len(fixed) > 1 or sum(map(rounded, sizes.values())) + rounded(need) + room.UNSPLIT > total
        return
    order = [names[index] for index in moved]
    assert order == sorted(order, key=addresses.__getitem__)
    for name in order:
        pool.free(name)
    assert all(pool.allocate(name, sizes[name]) for name in order)
    if exact:
        assert pool.allocate("step", need)


def test_the_two_tensors_above_what_was_freed_move_alone():
    """An 8B over two H200s: layers; freed; embedding; freed; head; freed."""
    unit, sizes = 12_840_000_000 // 100, [("layers", 59), (None, 15), ("embedding", 5), (None, 3), ("head", 5)]
    blocks, address = [], 0
    for name, size in sizes:
        if name is not None:
            blocks.append((address * unit, size * unit))
        address += size
    need = 3_843_824_896
    assert room.to_move(blocks[:1], blocks[1:], 100 * unit, need) is None
    assert room.to_move(blocks, [], 100 * unit, need) == [1, 2]
    assert room.to_move(blocks, [], 100 * unit, 15 * unit - 256) == []
    assert room.to_move(blocks, [], 100 * unit, 32 * unit) is None


# ---- moving


@pytest.fixture
def copied(monkeypatch):
    """On a CPU numpy sees the buffer itself, which would stay."""
    on_host = partition.on_host
    monkeypatch.setattr(partition, "on_host", lambda array: np.array(on_host(array)))


def bits(array):
    return [np.asarray(shard.data).tobytes() for shard in array.addressable_shards]


def drawn(dtype, size):
    return np.random.default_rng(size).integers(0, 2, size).astype(dtype)


@pytest.mark.parametrize("chosen", ["all", "of one device"])
def test_moved_arrays_are_the_same_objects_with_the_same_bits(copied, chosen):
    devices = jax.devices()[:8]
    mesh = Mesh(np.array(devices).reshape(2, 4), ("data", "fsdp"))
    specs = [PartitionSpec(), PartitionSpec("fsdp"), PartitionSpec(("data", "fsdp"))]
    dtypes = [jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn, jnp.uint8, jnp.int4, jnp.bool_]
    arrays = [jax.device_put(drawn(dtype, 4096), NamedSharding(mesh, spec)) for spec in specs for dtype in dtypes]
    alone = jnp.arange(5000.0)
    also = jax.device_put(alone, NamedSharding(Mesh(np.array(devices[:1]), ("data",)), PartitionSpec()))
    weak = jnp.full(7, 3.0)[0] * 2
    assert also.unsafe_buffer_pointer() == alone.unsafe_buffer_pointer() and not alone.committed
    arrays += [alone, also, weak, jax.random.key_data(jax.random.key(3))]
    facts = [(bits(a), a.sharding, a.committed, a.weak_type, a.dtype, a.shape) for a in arrays]
    movable = room.buffers(devices)[0]
    keys = [key for key in movable if chosen == "all" or key[0] == devices[1]]
    before = {key for array in arrays for key, _ in room._shards(array)}
    held = [np.zeros(size, np.uint8) for size in movable.values()]  # so that addresses are not given out again at once
    room.move(keys, devices)
    del held
    assert facts == [(bits(a), a.sharding, a.committed, a.weak_type, a.dtype, a.shape) for a in arrays]
    assert also.unsafe_buffer_pointer() == alone.unsafe_buffer_pointer()
    after = {key for array in arrays for key, _ in room._shards(array)}
    stayed = {key for key in before if key not in set(keys)}
    assert stayed <= after and before - stayed != after - stayed
    np.testing.assert_array_equal(jax.jit(lambda x: x + 1, donate_argnums=0)(alone), np.arange(5000.0) + 1)


def test_memory_that_moving_takes_is_freed(copied):
    array = jax.device_put(np.ones(1 << 20, np.float32), jax.devices()[0])
    view, [(key, data)] = array.addressable_data(0), room._shards(array)
    del data

    def live():
        return len(jax.live_arrays()), sum(room.buffers(jax.devices())[0].values())

    (count, size), _ = live(), room.move([key], jax.devices())
    after = live()
    assert after[0] <= count and after[1] <= size and not view.is_deleted()


def test_an_order_that_finds_no_room_is_followed_by_the_largest_first(copied, monkeypatch):
    arrays = [jax.device_put(np.full(size, size, np.float32), jax.devices()[0]) for size in (10, 3000, 200)]
    keys, put, sizes = [room._shards(array)[0][0] for array in arrays], jax.device_put, []

    def refuses_once(value, device):
        if value.ndim:
            sizes.append(value.size)
        if sizes == [10, 3000]:
            raise jax.errors.JaxRuntimeError(NO_MEMORY)
        return put(value, device)

    monkeypatch.setattr(jax, "device_put", refuses_once)
    room.move(keys, jax.devices())
    assert sizes == [10, 3000, 3000, 200, 10]
    assert [float(array.sum()) for array in arrays] == [100.0, 3000.0**2, 200.0**2]


def test_arrays_that_find_no_room_have_no_other_numbers(copied, monkeypatch):
    array, put = jax.device_put(np.ones(300, np.float32), jax.devices()[0]), jax.device_put

    def refuses(value, device):
        if value.ndim:
            raise jax.errors.JaxRuntimeError(NO_MEMORY)
        return put(value, device)

    monkeypatch.setattr(jax, "device_put", refuses)
    with pytest.raises(RuntimeError, match="found no room"):
        room.move([room._shards(array)[0][0]], jax.devices())
    assert array.is_deleted()


# ---- before the first launch


class Pools:
    """In place of the devices' allocators, which a CPU lacks: `refused` says which of the holds fail."""

    def __init__(self, monkeypatch, refused):
        self.holds, self.moves, self.refused = [], [], refused
        self.limit, self.in_use = 2**40, 2**39
        monkeypatch.setattr(room, "_SMALL", 2**40)  # a program of any size is seen to
        monkeypatch.setattr(room, "_stats", lambda device: {"bytes_limit": self.limit, "bytes_in_use": self.in_use})
        hold, move = room.hold, room.move

        def held(devices, sizes):
            self.holds.append((len(devices), list(sizes)))
            if self.refused(len(self.holds)):
                raise jax.errors.JaxRuntimeError(NO_MEMORY)
            return hold(devices, sizes)

        monkeypatch.setattr(room, "hold", held)
        monkeypatch.setattr(room, "move", lambda keys, devices: (self.moves.append(list(keys)), move(keys, devices)))


def program_over(count):
    mesh = partition.make_mesh(count)
    where = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    shape = jax.ShapeDtypeStruct((8, 512), jnp.float32, sharding=where)
    request = Request(lambda x: jnp.sort(x @ x.T) @ x, (shape,), where, mesh, {})
    [program] = programs_of([request])
    return program, jax.device_put(np.ones((8, 512), np.float32), where)


def test_each_program_over_several_devices_holds_its_blocks_once(monkeypatch):
    pools = Pools(monkeypatch, lambda number: False)
    program, rows = program_over(2)
    assert not pools.holds
    for _ in range(3):
        program(rows)
    memory = program.memory_analysis()
    assert pools.holds == [(2, [memory.output_size_in_bytes, memory.temp_size_in_bytes])] and not pools.moves
    program, rows = program_over(1)  # one device fails by itself, and its map has room
    program(rows)
    assert len(pools.holds) == 1


def test_each_device_holds_blocks_alone(monkeypatch):
    devices, real, made = jax.devices()[:4], room._zeros, []
    memory = real(devices[0], 3).memory_analysis()
    assert (memory.output_size_in_bytes, memory.temp_size_in_bytes) == (3 * MIB, 0)

    def zeros(device, pieces):
        def program():
            if device == devices[3]:
                raise jax.errors.JaxRuntimeError(NO_MEMORY)
            made.append(real(device, pieces)())
            return made[-1]

        return program

    monkeypatch.setattr(room, "_zeros", zeros)
    room.hold(devices[:3], [5, MIB + 1])
    assert [(array.nbytes, array.devices()) for array in made if not array.is_deleted()] == []
    assert len(made) == 6
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        room.hold(devices, [5])
    assert len(made) == 9 and all(array.is_deleted() for array in made)


def test_a_program_of_the_sampler_over_several_devices_is_seen_to_once_a_shape(monkeypatch):
    pools = Pools(monkeypatch, lambda number: False)
    mesh = partition.make_mesh(2)
    where = NamedSharding(mesh, PartitionSpec("data"))
    function = Function(lambda factor, x: jnp.sort(x * factor), 1, mesh=mesh)
    for size in (8, 8, 16, 8):
        function(2, jax.device_put(np.ones((size, 4), np.float32), where))
    assert len(pools.holds) == 2


@pytest.mark.parametrize("refusals", [1, 2, 3])
def test_arrays_move_and_then_the_error_is_that_of_a_step_without_memory(copied, monkeypatch, refusals):
    pools = Pools(monkeypatch, lambda number: number <= refusals)
    program, rows = program_over(2)
    everything = list(room.buffers(jax.devices()[:2])[0])
    monkeypatch.setattr(room, "_few", lambda devices, need: everything[:1])
    if refusals < 3:
        np.testing.assert_array_equal(program(rows), np.full((8, 512), 512 * 8))
    else:
        with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
            program(rows)
    assert len(pools.holds) == min(refusals + 1, 3) and len(pools.moves) == min(refusals, 2)
    assert pools.moves[0] == everything[:1]


@pytest.mark.parametrize("why", ["no host memory", "a pool that grows", "the sum does not fit"])
def test_nothing_moves_in_vain(monkeypatch, why):
    pools = Pools(monkeypatch, lambda number: True)
    program, rows = program_over(2)
    if why == "no host memory":
        monkeypatch.setattr(room.host_memory, "size_bytes", lambda: 0.0)
    elif why == "a pool that grows":
        monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    else:
        pools.in_use = pools.limit - 100
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        program(rows)
    assert len(pools.holds) == 1 and not pools.moves


def test_another_error_stays_itself(monkeypatch):
    program, _ = program_over(2)
    Pools(monkeypatch, lambda number: False)

    def fails(*arguments):
        raise jax.errors.JaxRuntimeError("INTERNAL: of the test")

    monkeypatch.setattr(room, "hold", fails)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        room.secure(program, jax.devices()[:2])
