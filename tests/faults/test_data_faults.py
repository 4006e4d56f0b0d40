"""What rows, rows' files, templates, workers and shared caches may do to a run: cost a row, or end it in words."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import psutil
import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

import jaxtune
from jaxtune.conversations import tokenizing
from jaxtune.system.sealed import write_manifest
from jaxtune.train.data import prepare
from jaxtune.train.data.rendering.preview import preview
from jaxtune.train.data.rows import row_files
from jaxtune.train.data.rows.reading import open_sources, read_rows
from jaxtune.train.data.tokens import cache, workers
from jaxtune.train.data.tokens.workers import encode_rows
from tests.train.data.conftest import PLAIN_TEMPLATE, make_tokenizer

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}" + PLAIN_TEMPLATE
CHAT = {"messages": [{"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "I am a bot."}]}
GOOD = {"prompt": "Add 2 and 2: ", "completion": "It is 4."}


class Stop(Exception):
    pass


def stop_at_call(number: int):
    calls = iter(range(number))

    def poll():
        if next(calls, None) is None:
            raise Stop

    return poll


# --- hung, killed and idle workers


def tokenising_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "tokenising"]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_template_that_loops_ends_when_the_run_is_stopped(num_workers):
    before = set(psutil.Process().children())  # another test's, or of a library that keeps one
    with pytest.raises(Stop):
        prepare([CHAT] * 3, make_tokenizer(LOOP), length=64, num_workers=num_workers, poll=stop_at_call(4))
    for thread in tokenising_threads():
        thread.join(600)
    assert tokenising_threads() == [] and set(psutil.Process().children()) <= before


def test_a_template_that_loops_is_an_error_in_the_end(monkeypatch):
    monkeypatch.setattr(workers, "PATIENCE_SECONDS", 0.0)
    with pytest.raises(ValueError, match=r"tokenising rows:1 to rows:3 has taken more than 0 s .* template may loop"):
        prepare([CHAT] * 3, make_tokenizer(LOOP), length=64)


SCRIPT = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have told its background jobs to ignore it
from jaxtune.train.data import prepare
from jaxtune.train.data.tokens import workers
from tests.faults.test_data_faults import CHAT, LOOP
from tests.train.data.conftest import make_tokenizer
class Told(workers._Process):
    def __init__(self, setup):
        super().__init__(setup)
        print(self.process.pid, flush=True)
workers._Process = Told
prepare([CHAT], make_tokenizer(LOOP), length=64, num_workers=2)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_one_signal_ends_a_run_and_its_hung_worker(number):
    root = Path(jaxtune.__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, cwd=root
    ) as process:
        try:
            assert process.stdout is not None
            worker = psutil.Process(int(process.stdout.readline()))
            process.send_signal(number)
            process.wait(600)
            worker.wait(600)
        finally:
            process.kill()


def test_more_workers_than_chunks_are_not_started_and_say_nothing(capfd, monkeypatch, tokenizer):
    made = []
    start = workers._Process.__init__
    monkeypatch.setattr(workers._Process, "__init__", lambda self, setup: (made.append(self), start(self, setup))[1])
    assert sum(chunk.rows for chunk in encode_rows(read_rows(open_sources([GOOD] * 3)), tokenizer, {}, 4)) == 3
    assert len(made) == 1 and made[0].process.returncode == 0
    idle = workers._Process(b"")  # one that gets nothing to do leaves as quietly
    idle.close()
    assert idle.process.returncode == 0
    assert capfd.readouterr().err == ""


def test_a_worker_killed_in_its_work_is_told_in_words(monkeypatch):
    start = workers._Process.__init__

    def killed(self, setup):
        start(self, setup)
        self.process.kill()

    monkeypatch.setattr(workers._Process, "__init__", killed)
    with pytest.raises(ValueError, match=r"was killed by SIGKILL .out of memory.. while it had rows:1 to rows:3; set"):
        prepare([CHAT] * 3, make_tokenizer(), length=64, num_workers=2)


# --- rows that eat the machine


@pytest.mark.full
def test_a_long_text_is_tokenised_as_if_whole(test_data, monkeypatch):
    from transformers import AutoTokenizer

    prose = (test_data / "datasets" / "text" / "tinyshakespeare.txt").read_text()[:60_000]
    # No spaces to cut at, and tokens of several characters, or several tokens a character.
    mixed = "".join(chr(0x4E00 + (i * i * 7) % 900) for i in range(9000)) + "naïve 👩‍🚀 " * 700 + prose[:9000]
    run = "ab" * 10 + "a" * 9000  # longer than an overlap: it may be divided elsewhere, and nothing is lost
    for name in ("qwen2.5", "llama-2", "gpt-oss"):
        tokenizer = AutoTokenizer.from_pretrained(test_data / "tokenizers" / name)
        for text in (prose, mixed):
            with monkeypatch.context() as patch:
                patch.setattr(tokenizing, "WINDOW", 4096)
                patch.setattr(tokenizing, "OVERLAP", 512)
                found = tokenizing.tokenize(tokenizer, [text])[0]
                start = tokenizing.tokenize(tokenizer, [text], max_tokens=500)[0]
            whole = tokenizing.tokenize(tokenizer, [text])[0]
            for field in ("ids", "starts", "ends"):
                np.testing.assert_array_equal(getattr(found, field), getattr(whole, field))
            assert not found.is_cut and start.is_cut and len(start) >= 500
            np.testing.assert_array_equal(start.ids, whole.ids[: len(start)])
        with monkeypatch.context() as patch:
            patch.setattr(tokenizing, "WINDOW", 4096)
            found = tokenizing.tokenize(tokenizer, [run])[0]
        assert tokenizer.decode(found.ids).strip() == run


@pytest.mark.full
def test_a_book_costs_its_beginning(monkeypatch, tokenizer):
    """With overflow: truncate, characters beyond the cut are given to no tokenizer; the row and its mask stay."""
    given = []
    at_once = tokenizing._at_once
    monkeypatch.setattr(
        tokenizing, "_at_once", lambda tokenizer, texts: given.append(sum(map(len, texts))) or at_once(tokenizer, texts)
    )
    text = "It is 4, of course. " * 50_000
    cut = prepare([{"text": text}, {"text": "It is 4."}], tokenizer, length=64)
    assert sum(given) < 0.5 * len(text) and max(given) < 2 * tokenizing.WINDOW
    assert (cut.summary.cut, cut.report.truncated) == (1, 1)
    assert any("not tokenised" in warning for warning in cut.warnings())
    given.clear()
    split = prepare([{"text": text}], tokenizer, length=64, overflow="split")
    assert sum(given) >= len(text) and split.summary.cut == 0
    np.testing.assert_array_equal(split.documents[0].tokens[:1000], cut.documents[0].tokens[:1000])
    pairs = prepare(
        [{"prompt": "2 + 2?", "chosen": text, "rejected": text}], tokenizer, length=64, pairs=True, format="preference"
    )
    assert any(warning.startswith("2 documents are so long") for warning in pairs.warnings())  # both of one row


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_a_line_longer_than_a_row_may_be_costs_that_row(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(row_files, "MAX_ROW_SIZE", 1000)
    path = tmp_path / f"rows{suffix}"
    texts = ["It is 4.", "x" * 2500, "I am a bot."]
    path.write_text(
        "text\n" * (suffix == ".csv")
        + "".join((json.dumps({"text": text}) if suffix == ".jsonl" else text) + "\n" for text in texts)
    )
    rows = list(read_rows(open_sources(path)))
    assert [row.value and row.value["text"] for row in rows] == [texts[0], None, texts[2]]
    assert "the most that one row may have; divide it" in rows[1].error


def test_rows_after_a_line_that_is_too_long_keep_their_numbers(tmp_path, monkeypatch):
    """Also where that line is not the first one of its row."""
    monkeypatch.setattr(row_files, "MAX_ROW_SIZE", 1000)
    path = tmp_path / "rows.csv"
    path.write_text('text\nfirst\n"two lines\n' + "x" * 2500 + '"\nlast\n')
    found = [(row.number, row.value and row.value["text"]) for row in read_rows(open_sources(path))]
    assert found == [(2, "first"), (3, None), (5, "last")]


def test_a_csv_field_may_be_long(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("text\n" + "word " * 50_000 + "\n")
    (row,) = read_rows(open_sources(path))
    assert row.value is not None and len(row.value["text"]) == 250_000


def parquet_file(path: Path, columns: dict, **options) -> Path:
    parquet.write_table(arrow.table(columns), path, **options)
    return path


def test_a_parquet_bomb_is_refused_in_words(tmp_path):
    text = "a" * 2**20
    shared = arrow.DictionaryArray.from_arrays(np.zeros(5000, np.int32), [text])  # 5 GB of text
    bombs = [
        parquet_file(tmp_path / "shared.parquet", {"text": shared}, compression="zstd"),
        parquet_file(tmp_path / "plain.parquet", {"text": [text] * 64}, compression="zstd", use_dictionary=False),
        parquet_file(
            tmp_path / "list.parquet", {"text": ["a"], "n": arrow.array([np.zeros(2**24, np.int8)])}, compression="zstd"
        ),
    ]
    for bomb in bombs:
        assert bomb.stat().st_size < 20_000
        with pytest.raises(
            ValueError, match=r"parquet: its [\d,]+ bytes expand to rows of more than 33,554,432, which is not read"
        ):
            for _ in read_rows(open_sources(bomb)):
                pass


def test_parquet_rows_that_share_a_long_prompt_are_read(tmp_path):
    rows = [[{"role": "system", "content": "s" * 5000}, {"role": "user", "content": str(i)}] for i in range(3000)]
    path = parquet_file(tmp_path / "rows.parquet", {"messages": rows})
    read = list(read_rows(open_sources(path)))
    assert [row.value["messages"] for row in read if row.value] == rows


def test_parquet_text_that_is_not_utf8_costs_its_row(tmp_path):
    broken = arrow.array([b"good", b"\xff\xfe", b"better"]).view(arrow.string())
    rows = list(read_rows(open_sources(parquet_file(tmp_path / "rows.parquet", {"text": broken}))))
    assert [row.value and row.value["text"] for row in rows] == ["good", None, "better"]


def test_a_conversation_of_too_many_turns_costs_that_row(tokenizer):
    turns = CHAT["messages"] * 1001
    data = prepare([CHAT, {"messages": turns}], tokenizer, length=64, on_bad_row="skip")
    assert (data.summary.documents, data.summary.bad_rows) == (1, 1)
    assert "1,001 responses; a template without {% generation %} marks" in data.summary.offenders[0]


# --- rows that raise


def deep(levels: int) -> str:
    return '{"messages": ' + "[" * levels + "]" * levels + "}"


def chat(**changes) -> str:
    return json.dumps({"messages": [CHAT["messages"][0], CHAT["messages"][1] | changes]})


BAD = [
    "{}",
    deep(90),
    deep(150),
    deep(100_000),
    chat(tool_calls=5),
    chat(tool_calls={"a": 1}),
    chat(content=[{"type": "text", "text": 5}]),
    chat(role="\ud800"),
    chat(role=["assistant"]),
    chat(role="tool", **{"\ud83d": "x"}, content=5),
    chat(tool_calls=[{"function": {"name": "f", "arguments": {"\udfff": 1}}}]),
    json.dumps(CHAT | {"tools": deep(100_000)}),
    json.dumps(CHAT | {"tools": [5]}),
    json.dumps(CHAT | {"system": 5}),
    '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "\\u001b[2J", "tool_calls": 5}]}',
    '{"\\u001b]0;title\\u0007": 1}',
    '{"chosen": "a", "rejected": "b"}',
    '{"messages": ' + "9" * 5000 + "}",
    "[" * 100_000,
    "\x00",
    '"text"',
]
TEMPLATE = "{% if tools %}{{ tools | tojson }}{% endif %}" + PLAIN_TEMPLATE.replace(
    "{{ m.content }}",
    "{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}",
)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_whatever_one_row_does_costs_that_row(write, tmp_path, first, num_workers):
    lines = [*BAD, json.dumps(CHAT)] if first else [json.dumps(CHAT), *BAD]
    path = write("rows.jsonl", [*lines, CHAT])
    data = prepare(
        path, make_tokenizer(TEMPLATE), length=64, on_bad_row="skip", num_workers=num_workers, cache_dir=tmp_path / "c"
    )
    assert (data.summary.rows, data.summary.documents, data.summary.bad_rows) == (len(BAD) + 2, 2, len(BAD))
    said = str(data.summary) + "".join(data.summary.offenders)
    said.encode()
    assert "\x1b" not in said and "\x07" not in said


@pytest.mark.parametrize("line", BAD)
def test_with_on_bad_row_error_it_is_one_sentence(write, tmp_path, line):
    path = write("rows.jsonl", [CHAT, line])
    with pytest.raises(ValueError, match=r"rows.jsonl:2: .*\(data.on_bad_row: skip leaves such rows out") as raised:
        prepare(path, make_tokenizer(TEMPLATE), length=64, cache_dir=tmp_path / "c")
    str(raised.value).encode()
    assert "\x1b" not in str(raised.value) and len(str(raised.value)) < 1000


def test_rows_of_a_list_may_hold_anything(tokenizer):
    circle: dict = {"prompt": "a", "completion": "b"}
    circle["self"] = [circle]
    odd = {"prompt": "a", "completion": "b", "lock": threading.Lock()}
    for num_workers, kept in ((1, 2), (2, 1)):  # a lock goes into no pipe
        data = prepare([GOOD, circle, odd], tokenizer, length=64, on_bad_row="skip", num_workers=num_workers)
        assert data.summary.documents == kept
        assert data.summary.offenders[0] == "rows:2: nested deeper than 100 levels"


def test_an_array_of_json_that_cannot_be_read_further_is_a_bad_row(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text('[{"text": "a"},\n' + "[" * 100_000)
    rows = list(read_rows(open_sources(path)))
    assert [bool(row.value) for row in rows] == [True, False] and "nested deeper" in rows[1].error


def test_a_preview_shows_escapes_and_obeys_none(tokenizer):
    data = prepare([{"text": "a\x1b[2J\x07b\u202e"}], tokenizer, length=64)
    shown = preview(data.batches(1).batch_at(0), tokenizer).plain
    assert r"a\x1b[2J\x07b\u202e" in shown and "\x1b" not in shown


# --- a cache that others write


def cached(write, tmp_path, tokenizer, **options):
    path = write("a.jsonl", [GOOD] * 5)
    return prepare(path, tokenizer, length=64, cache_dir=tmp_path / "cache", **options)


def test_a_second_user_can_read_the_cache(write, tmp_path, tokenizer):
    old = os.umask(0o022)
    try:
        cached(write, tmp_path, tokenizer)
    finally:
        os.umask(old)
    (folder,) = (tmp_path / "cache").iterdir()
    assert folder.stat().st_mode & 0o777 == 0o755
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o644}


def test_a_folder_that_another_user_keeps_is_built_beside_it(write, tmp_path, tokenizer, monkeypatch):
    cached(write, tmp_path, tokenizer)
    (folder,) = (tmp_path / "cache").iterdir()
    read_meta = cache._read_meta

    def refused(at):
        if at == folder:
            raise PermissionError(13, "Permission denied", str(at))
        return read_meta(at)

    monkeypatch.setattr(cache, "_read_meta", refused)
    said: list[str] = []
    assert not cached(write, tmp_path, tokenizer, say=said.append).cached
    assert len(said) == 1 and "is another user's and cannot be read; it is built beside it" in said[0]
    assert cached(write, tmp_path, tokenizer, say=said.append).cached and len(said) == 1
    # One that is damaged, and cannot be removed.
    monkeypatch.setattr(cache, "_read_meta", read_meta)
    (folder / "meta.json").write_text("{}")
    shutil.rmtree(folder.with_name(f"{folder.name}-{os.getuid()}"))
    monkeypatch.setattr(shutil, "rmtree", lambda path, ignore_errors=False: None)
    assert not cached(write, tmp_path, tokenizer, say=said.append).cached
    assert cached(write, tmp_path, tokenizer, say=said.append).cached


@pytest.mark.parametrize(
    "lie",
    [
        {"max_token": 1},
        {"max_token": 10**6},
        {"documents": 4},
        {"trained_tokens": 1},
        {"tokens": 0},
        {"ended": 10**9},
        {"bad_rows": 3},
        {"rows": "many"},
        {"offenders": [5]},
        {"rows": None},
    ],
)
def test_what_a_cache_says_of_its_tokens_is_counted_again(write, tmp_path, tokenizer, lie):
    first = cached(write, tmp_path, tokenizer)
    (folder,) = (tmp_path / "cache").iterdir()
    meta = json.loads((folder / "meta.json").read_text())
    meta["summary"] |= lie
    (folder / "meta.json").write_text(json.dumps(meta))
    said: list[str] = []
    again = cached(write, tmp_path, tokenizer, say=said.append)
    assert not again.cached and again.summary == first.summary
    assert len(said) == 1 and "is damaged" in said[0] and "\n" not in said[0]


@pytest.mark.parametrize(
    ("field", "value"),
    [("mask", 2), ("tokens", -1), ("lengths", 2**40), ("lengths", -1), ("trained", 7), ("origins", 9)],
)
def test_arrays_with_right_checksums_and_wrong_content_are_built_anew(write, tmp_path, tokenizer, field, value):
    cached(write, tmp_path, tokenizer)
    (folder,) = (tmp_path / "cache").iterdir()
    array = np.fromfile(folder / f"{field}.bin", cache.FIELDS[field])
    array[0] = value
    array.tofile(folder / f"{field}.bin")
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").unlink()
    write_manifest(folder, "meta.json", meta)
    said: list[str] = []
    assert not cached(write, tmp_path, tokenizer, say=said.append).cached
    assert len(said) == 1 and "is damaged" in said[0]
