"""The token cache: built once, whole or not there, and never trusted blindly."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from jaxtune.train.data import dataset, prepare
from jaxtune.train.data.rows.reading import open_sources, read_rows
from jaxtune.train.data.rows.row_files import Row
from jaxtune.train.data.tokens import cache, workers
from jaxtune.train.data.tokens.cache import cache_key, identities, open_or_build
from jaxtune.train.data.tokens.chunks import Chunk
from jaxtune.train.data.tokens.documents import Documents
from jaxtune.train.data.tokens.workers import _Process, encode_rows
from tests.train.data.conftest import make_tokenizer

ROWS = [{"prompt": f"Add {i} and {i}: ", "completion": f"It is {2 * i}."} for i in range(30)]


def same(first: Documents, second: Documents) -> None:
    for name in ("tokens", "mask", "starts", "lengths", "trained", "origins"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))
    assert first.files == second.files


def test_a_second_run_maps_what_the_first_one_wrote(write, tmp_path, tokenizer):
    path = write("a.jsonl", ROWS)
    first = prepare(path, tokenizer, length=64, cache_dir=tmp_path / "cache")
    second = prepare(path, tokenizer, length=64, cache_dir=tmp_path / "cache")
    assert (first.cached, second.cached) == (False, True)
    assert isinstance(second.documents.tokens, np.memmap)
    same(first.documents, second.documents)
    assert first.summary == second.summary
    in_memory = prepare(ROWS, tokenizer, length=64)
    np.testing.assert_array_equal(in_memory.documents.tokens, second.documents.tokens)
    assert second.documents.source(2) == f"{path}:3"
    assert in_memory.documents.source(2) == "rows:3"
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_the_default_folder_follows_the_environment(write, tmp_path, tokenizer, monkeypatch):
    monkeypatch.setenv("JAXTUNE_CACHE", str(tmp_path / "from_env"))
    prepare(write("a.jsonl", ROWS), tokenizer, length=64)
    assert len(list((tmp_path / "from_env").iterdir())) == 1


def test_a_tokenizer_is_written_out_once_for_rows_that_are_not_cached(write, tmp_path, tokenizer, monkeypatch):
    """A fifth of a second with Python's lock for 128,000 tokens."""
    fingerprints, fingerprint = [], cache.tokenizer_fingerprint

    def noting(tokenizer):
        fingerprints.append(fingerprint(tokenizer))
        return fingerprints[-1]

    monkeypatch.setattr(cache, "tokenizer_fingerprint", noting)
    path = write("a.jsonl", ROWS)
    assert not prepare(path, tokenizer, length=64, cache_dir=tmp_path / "cache").cached
    assert len(fingerprints) == 1
    assert prepare(path, tokenizer, length=64, cache_dir=tmp_path / "cache").cached


def test_whatever_decides_the_tokens_decides_the_key(write, tokenizer):
    def key(path, tokenizer=tokenizer, **options):
        rows = identities(open_sources(path))
        assert rows is not None
        return cache_key(rows, tokenizer, options)

    path = write("a.jsonl", ROWS)
    first = key(path)
    assert first == key(path)
    others = [
        key(path, template="chatml"),
        key(path, tokenizer=make_tokenizer(eos="<|eos|>")),
        key(path, tokenizer=make_tokenizer(template="{{ messages }}")),
        key(write("b.jsonl", ROWS)),
        key(write("a.jsonl", ROWS[1:])),
    ]
    assert len({first, *others}) == 6
    assert identities(open_sources(ROWS)) is None
    assert identities([*open_sources(path), *open_sources(ROWS)]) is None


def test_code_that_makes_tokens_decides_the_key(write, tokenizer, monkeypatch, tmp_path):
    """Versions of the packages that render and split, and every module that rows go through."""
    rows = identities(open_sources(write("a.jsonl", ROWS)))
    assert rows is not None

    def key() -> str:
        cache._code_fingerprint.cache_clear()
        return cache_key(rows, tokenizer, {})

    found, keys = cache._imported(cache._ROOTS), [key()]
    through = {
        "conversations.dates",
        "train.data.rendering.formats",
        "train.data.rendering.markers",
        "conversations.tokenizing",
    }
    assert {f"jaxtune.{name}" for name in through} <= found.keys() and "jaxtune.train.data.dataset" not in found
    for package in ("transformers", "tokenizers", "jinja2"):
        with monkeypatch.context() as patch:
            patch.setattr(cache.metadata, "version", lambda name, of=package: "0" if name == of else "1")
            keys.append(key())
    (tmp_path / "dates.py").write_text("changed")
    changed = found | {"jaxtune.conversations.dates": tmp_path / "dates.py"}
    monkeypatch.setattr(cache, "_imported", lambda modules: changed)
    keys.append(key())
    assert len({*keys}) == 5
    cache._code_fingerprint.cache_clear()


def test_what_no_run_used_for_a_week_makes_room(write, tmp_path, tokenizer, monkeypatch):
    """The oldest first, while the cache takes more than the disk has free; nothing else in the folder."""
    folder, said = tmp_path / "cache", []
    paths = [write(f"{number}.jsonl", [{"prompt": f"Add {number}: ", "completion": "4"}] * 20) for number in range(4)]

    def made(number: int) -> bool:
        return prepare(paths[number], tokenizer, length=64, cache_dir=folder, say=said.append).cached

    def aged(file, days: float) -> None:
        os.utime(file, (time.time() - days * 86_400,) * 2)

    named = []
    for number in range(3):
        before = {*folder.iterdir()} if number else set()
        made(number)
        named += {*folder.iterdir()} - before
    reference, other = folder / f"reference_{'0' * 32}.npy", folder / "notes.txt"
    reference.write_bytes(bytes(500))
    other.write_text("not of the cache")
    for entry, days in zip((*named, reference, other), (30, 20, 10, 25, 40), strict=True):
        for file in entry.iterdir() if entry.is_dir() else [entry]:
            aged(file, days)
    size = sum(file.stat().st_size for file in named[1].iterdir())
    assert made(0)  # and so it is used now
    usage = shutil.disk_usage(folder)._replace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10**9))
    assert not made(3) and not said
    shutil.rmtree(({*folder.iterdir()} - {*named, reference, other}).pop())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=size))
    assert not made(3)  # three of this size and 500 bytes: the two that were not used longest make room
    assert [entry.exists() for entry in (*named, reference, other)] == [True, False, True, False, True]
    assert len(said) == 1 and "removed that no run used for a week; the disk was filling up" in said[0]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    aged(named[2] / "meta.json", 1)
    assert not made(1) and [entry.exists() for entry in named] == [True, True, True]


@pytest.mark.parametrize("damage", ["truncate", "flip", "no meta", "empty meta", "no file"])
def test_a_damaged_cache_is_built_anew_and_said_so(write, tmp_path, tokenizer, damage):
    path, said = write("a.jsonl", ROWS), []
    first = prepare(path, tokenizer, length=64, cache_dir=tmp_path / "cache")
    (folder,) = (tmp_path / "cache").iterdir()
    file = folder / "tokens.bin"
    expected = np.array(first.documents.tokens)
    if damage == "truncate":
        os.truncate(file, file.stat().st_size - 4)
    elif damage == "flip":
        data = bytearray(file.read_bytes())
        data[9] ^= 1
        file.write_bytes(data)
    elif damage == "no meta":
        (folder / "meta.json").unlink()
    elif damage == "empty meta":
        (folder / "meta.json").write_text("{}")
    else:
        (folder / "mask.bin").unlink()
    again = prepare(path, tokenizer, length=64, cache_dir=tmp_path / "cache", say=said.append)
    assert not again.cached
    assert len(said) == 1 and "is damaged" in said[0] and "it is built anew" in said[0]
    np.testing.assert_array_equal(again.documents.tokens, expected)
    assert prepare(path, tokenizer, length=64, cache_dir=tmp_path / "cache").cached


def chunks(tokenizer, rows=ROWS):
    return encode_rows(read_rows(open_sources(rows)), tokenizer, {})


def test_a_build_that_fails_leaves_nothing(tmp_path, tokenizer):
    def build():
        yield from chunks(tokenizer)
        raise ValueError("row 31 is bad")

    with pytest.raises(ValueError, match="row 31"):
        open_or_build(tmp_path / "cache" / "key", build)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_full_disk_is_a_clear_error_and_leaves_nothing(tmp_path, tokenizer):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, limits[1]))  # a write beyond fails, as on a full disk
    try:
        with pytest.raises(ValueError, match=r"the token cache cannot be written \(.*\); free space at data.cache_dir"):
            open_or_build(tmp_path / "cache" / "key", lambda: chunks(tokenizer))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list((tmp_path / "cache").iterdir()) == []


def test_where_no_folder_can_be_made_the_tokens_stay_in_memory(tmp_path, tokenizer, capsys):
    (tmp_path / "file").write_text("")
    found = open_or_build(tmp_path / "file" / "key", lambda: chunks(tokenizer))
    assert f"data.cache_dir={tmp_path / 'file'} cannot be written" in capsys.readouterr().out
    cached = open_or_build(tmp_path / "cache" / "key", lambda: chunks(tokenizer))
    assert found.documents.tokens_crc32 == cached.documents.tokens_crc32 and not found.was_cached


KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np
from jaxtune.train.data.tokens.cache import open_or_build
from jaxtune.train.data.tokens.workers import Chunk
def build():
    one = np.ones(1, np.int64)
    yield Chunk(1, np.ones(3, np.int32), np.ones(3, np.uint8), 3 * one, 2 * one, [("f", 1)], [], [], 1, 1)
    os.kill(os.getpid(), signal.SIGKILL)
open_or_build(Path(sys.argv[1]) / "key", build)
"""


def test_a_killed_build_is_built_again(tmp_path, tokenizer):
    ended = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], env={**os.environ, "PYTHONPATH": os.getcwd()})
    assert ended.returncode == -signal.SIGKILL
    assert [path.name.startswith(".key.") for path in tmp_path.iterdir()] == [True]
    documents, _, cached = open_or_build(tmp_path / "key", lambda: chunks(tokenizer))
    assert not cached and len(documents) == len(ROWS)
    # What the killed run left is taken away once it is surely nobody's.
    (left,) = tmp_path.glob(".key.*")
    os.utime(left, (0, 0))
    open_or_build(tmp_path / "other", lambda: chunks(tokenizer))
    assert left.exists()  # a run that has tokenised for days writes its files all the time, and makes none
    for file in (*left.iterdir(), left):
        os.utime(file, (0, 0))
    open_or_build(tmp_path / "one more", lambda: chunks(tokenizer))
    assert not left.exists()


def test_files_that_cannot_be_made_name_the_setting(tmp_path, tokenizer, monkeypatch):
    def full(path, mode):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr("jaxtune.train.data.tokens.cache.open", full, raising=False)
    with pytest.raises(ValueError, match="token cache cannot be written .*No space left.* data.cache_dir="):
        open_or_build(tmp_path / "key", lambda: chunks(tokenizer))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("at", [1, 2, 7, 13])
def test_a_disk_that_fills_midway_leaves_nothing_that_a_later_run_takes(tmp_path, tokenizer, monkeypatch, at):
    rows, writes = ROWS * 60, 0
    real = cache.writing

    @contextlib.contextmanager
    def full(*arguments):
        nonlocal writes
        writes += 1
        with real(*arguments):
            yield
            if writes == at:
                raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(cache, "writing", full)
        with pytest.raises(
            ValueError, match="token cache cannot be written .*No space left.* free space at data.cache_d"
        ):
            open_or_build(tmp_path / "key", lambda: chunks(tokenizer, rows))
    assert writes == at and not list(tmp_path.iterdir())
    documents, _, cached = open_or_build(tmp_path / "key", lambda: chunks(tokenizer, rows))
    assert not cached and len(documents) == len(rows)


# --- processes


def flat(parts: list[Chunk]):
    tokens, masks = (np.concatenate([getattr(part, name) for part in parts]) for name in ("tokens", "mask"))
    return tokens.tolist(), masks.tolist(), [o for part in parts for o in part.origins], [p.problems for p in parts]


def test_processes_give_what_one_process_gives(tokenizer):
    rows = [*ROWS * 60, {"prompt": "x"}, *ROWS]  # several chunks, one of them with a bad row
    expected = list(chunks(tokenizer, rows))
    assert len(expected) > 3 and any(chunk.problems for chunk in expected)
    found = list(encode_rows(read_rows(open_sources(rows)), tokenizer, {}, num_workers=2))
    assert flat(found) == flat(expected)


def test_a_worker_that_dies_is_told():
    import pickle

    process = _Process(pickle.dumps(None))
    process.process.kill()
    with pytest.raises(
        ValueError, match=r"was killed by SIGKILL .out of memory.* while it had a:1 to b:7; set data.num_w"
    ):
        process.encode([Row("a", 1, {}), Row("b", 7, {})])
    process.close()


@pytest.mark.parametrize("change", ["in place", "appended", "another file of that name", "template"])
def test_rows_that_change_while_they_are_tokenised_are_not_cached(change, write, tmp_path, tokenizer, monkeypatch):
    path, template = write("a.jsonl", ROWS), tmp_path / "own.jinja"
    template.write_text(tokenizer.chat_template)
    text, options = path.read_text(), dict(length=64, cache_dir=tmp_path / "cache", template=str(template))

    def encode_rows(rows, *arguments):
        rows = list(rows)  # what is read is of before
        if change == "template":
            template.write_text(tokenizer.chat_template + "{# another #}")
        elif change == "another file of that name":
            (tmp_path / "new").write_text(text.replace("Add", "Sum"))
            os.replace(tmp_path / "new", path)
        else:
            path.write_text(text.replace("Add", "Sum") if change == "in place" else text + text)
        return workers.encode_rows(rows, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(dataset, "encode_rows", encode_rows)
        with pytest.raises(ValueError, match="a.jsonl.*: changed while the rows were tokenised.* were discarded"):
            prepare(path, tokenizer, **options)
    assert not list((tmp_path / "cache").iterdir())
    again = prepare(path, tokenizer, **options)  # what stands there now
    assert not again.cached and prepare(path, tokenizer, **options).cached
    path.write_text(text)
    template.write_text(tokenizer.chat_template)
    assert not prepare(path, tokenizer, **options).cached
