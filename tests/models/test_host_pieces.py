"""A tensor is copied to the host and written in pieces, by several threads."""

from __future__ import annotations

import os
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxtune.models.files import byte_files, headers, shards
from jaxtune.models.placement import partition
from jaxtune.models.placement.host_pieces import pieces_of
from tests import patience

SHAPES = [(7, 10), (1, 300), (3, 5, 16), (64,), (1000,), (), (2, 0)]


def bytes_of(array) -> bytes:
    return np.ascontiguousarray(np.asarray(array)).tobytes()


def random(shape, dtype="bfloat16"):
    return jax.random.normal(jax.random.key(len(shape)), shape, dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("piece_bytes", [1, 40, 64, 1 << 20])
def test_pieces_are_the_tensor_s_bytes_in_order(shape, piece_bytes):
    array = random(shape)
    for given in (array, np.asarray(array), np.asarray(array).T.copy().T):
        pieces = pieces_of(given, piece_bytes)
        made = [make() for _, make in pieces]
        assert [size for size, _ in pieces] == [len(part) for part in made]
        assert b"".join(part.tobytes() for part in made) == bytes_of(array)
        row = 2 * (shape[-1] if shape else 1)
        assert len(shape) < 2 or max(map(len, made)) <= max(piece_bytes, row)


def test_a_tensor_on_several_devices_is_copied_whole():
    mesh = partition.make_mesh(1, 2)
    array = random((8, 16))
    for spec in (PartitionSpec(), PartitionSpec(partition.TENSORS)):
        pieces = pieces_of(jax.device_put(array, NamedSharding(mesh, spec)), 64)
        assert len(pieces) == 4
        assert b"".join(make().tobytes() for _, make in pieces) == bytes_of(array)


def test_a_file_written_in_pieces_is_that_of_whole_tensors(tmp_path, monkeypatch):
    tensors = {f"t{index}": random(shape) for index, shape in enumerate(SHAPES)}
    plan = [(name, array.shape, array.dtype) for name, array in tensors.items()]
    shards.write_file(tmp_path / "whole", plan, tensors.__getitem__)
    monkeypatch.setattr(byte_files, "CHUNK_BYTES", 40)
    written = shards.write_file(tmp_path / "pieces", plan, tensors.__getitem__)
    assert (tmp_path / "pieces").read_bytes() == (tmp_path / "whole").read_bytes()
    entries = headers.read_header(tmp_path / "pieces")
    assert len(written["t0"].sums.sizes) == 4
    assert all(shards.is_as_written(entries[name], written[name]) for name in tensors)
    content = bytearray((tmp_path / "pieces").read_bytes())
    content[entries["t0"].offset + 139] ^= 1  # its last byte
    (tmp_path / "pieces").write_bytes(content)
    assert [name for name in tensors if not shards.is_as_written(entries[name], written[name])] == ["t0"]


@pytest.mark.full
def test_a_tensor_is_free_while_its_pieces_are_written(tmp_path, monkeypatch):
    """So that the device has one merged matrix at a time, although writes go on when the next one is computed."""
    go_on, pwrite = threading.Event(), byte_files.os.pwrite
    monkeypatch.setattr(byte_files.os, "pwrite", lambda *rest: (go_on.wait(patience.SECONDS), pwrite(*rest))[1])
    array = jnp.ones((4, 8)) + 1
    seen = weakref.ref(array)
    with byte_files.Writer(tmp_path / "file") as out:
        pieces = [(size, lambda make=make: make().copy()) for size, make in pieces_of(array, 32)]
        out.append_pieces(pieces)
        del array, pieces
        freed = seen() is None
        go_on.set()
    assert freed
    assert (tmp_path / "file").read_bytes() == bytes_of(jnp.full((4, 8), 2.0))


def test_each_chunk_is_on_its_way_to_the_disk_once_it_is_written(tmp_path, monkeypatch):
    """So that the flush at the end waits for little."""
    monkeypatch.setattr(byte_files, "CHUNK_BYTES", 40)
    file, started, written, closed = tmp_path / "file", [], threading.Event(), threading.Event()
    close = byte_files.os.close

    def start(descriptor, at, size):
        assert written.wait(patience.SECONDS)  # nobody waits for it: the file may be read back meanwhile
        started.append((at, size, os.fstat(descriptor).st_size >= at + size))

    monkeypatch.setattr(byte_files, "start_flush", start)
    monkeypatch.setattr(byte_files.os, "close", lambda descriptor: (close(descriptor), closed.set()))
    with byte_files.Writer(file) as out:
        out.append(bytes(100))
        out.append_pieces([(30, lambda: np.zeros(30, np.uint8))])
    written.set()
    assert closed.wait(patience.SECONDS)
    assert sorted(started) == [(0, 40, True), (40, 40, True), (80, 20, True), (100, 30, True)]


@pytest.mark.parametrize("error", [OSError(28, "no room"), ArithmeticError("not finite")])
def test_a_piece_that_cannot_be_made_ends_the_write(error, tmp_path):
    def fails():
        raise error

    with pytest.raises(type(error), match=str(error.args[-1])), byte_files.Writer(tmp_path / "file") as out:
        out.append_pieces([(4, lambda: np.zeros(4, np.uint8)), (4, fails), (4, lambda: np.zeros(4, np.uint8))])
