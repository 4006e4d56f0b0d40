"""Checkpoints of any bytes: what was saved, or a CheckpointError in words."""

from __future__ import annotations

import json
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtune.train.folder.checkpoint import MANIFEST, META, Checkpointer, CheckpointError

STATE = {"w": np.arange(64, dtype=np.float32), "step": np.int32(1)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    with Checkpointer(folder) as checkpointer:
        checkpointer.save(1, STATE, {"cursor": 1})
    return folder


def restored_or_refused(folder: Path) -> None:
    with Checkpointer(folder) as checkpointer:
        try:
            step, state, meta = checkpointer.restore(like=STATE, check=lambda meta: None)
        except CheckpointError as error:
            assert str(error)
            return
        assert step == 1 and meta == {"cursor": 1}
        assert (state["w"] == STATE["w"]).all() and state["step"] == 1


def changed(saved: Path, name: str, content: bytes) -> Path:
    folder = saved.parent / "changed"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(saved, folder)
    (folder / "step_00000001" / name).write_bytes(content)
    return folder


@given(st.data())
def test_any_change_of_any_file(saved, data):
    root = saved / "step_00000001"
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
    name = data.draw(st.sampled_from(names))
    content = bytearray((root / name).read_bytes())
    kind = data.draw(st.sampled_from(["flip", "cut", "insert", "other"]))
    at = data.draw(st.integers(0, max(0, len(content) - 1)))
    if kind == "flip" and content:
        content[at] ^= data.draw(st.integers(1, 255))
    elif kind == "cut":
        del content[at:]
    elif kind == "insert":
        content[at:at] = data.draw(st.binary(min_size=1, max_size=9))
    else:
        content = bytearray(data.draw(st.binary(max_size=40)))
    restored_or_refused(changed(saved, name, bytes(content)))


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def paths(value, prefix=()):
    yield prefix
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from paths(item, (*prefix, key))


@given(st.sampled_from([META, MANIFEST]), st.data())
@settings(max_examples=100)
def test_records_of_any_values_whose_checksums_are_right(saved, name, data):
    """Nobody but a program writes such a thing; it must still not be a traceback."""
    root = saved / "step_00000001"
    record = json.loads((root / name).read_text())
    place = data.draw(st.sampled_from(list(paths(record))))
    value = data.draw(ANY)
    if not place:
        record = value
    else:
        at = record
        for key in place[:-1]:
            at = at[key]
        at[place[-1]] = value
    text = json.dumps(record).encode()
    folder = changed(saved, name, text)
    if name == META:
        manifest = json.loads((root / MANIFEST).read_text())
        manifest["files"][META] = {"bytes": len(text), "crc32": f"{zlib.crc32(text):08x}"}
        (folder / "step_00000001" / MANIFEST).write_text(json.dumps(manifest))
        with Checkpointer(folder) as checkpointer:
            try:
                checkpointer.restore(like=STATE)
            except CheckpointError as error:
                assert str(error)
        return
    restored_or_refused(folder)


def test_deep_and_long_records(saved):
    for text in (b"[" * 100_000, b'{"format": 1' + b"0" * 5000 + b"}", b'{"files": {"../../x": {}}}'):
        restored_or_refused(changed(saved, MANIFEST, text))
