"""What goes wrong is told in one line that names the file: full disks, damaged tables, processes that stand still,
strange files in folders that others can write."""

from __future__ import annotations

import array
import errno
import io
import json
import logging
import math
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from tiny_models import adapted_model, tiny_model

import jaxtune
from jaxtune import cli
from jaxtune.export import gguf_file
from jaxtune.export.gguf_tensors import Source, Tensor
from jaxtune.models.adapters.adapter_files import save_adapter
from jaxtune.models.files import shards
from jaxtune.models.hf import save_pretrained
from jaxtune.system import waiting
from jaxtune.system.files import atomic_write, remove_temporary, temporary_path
from jaxtune.system.program_cache import ProgramCache
from jaxtune.train.data import prepare
from jaxtune.train.data.rows.reading import open_sources, read_rows
from jaxtune.train.data.rows.row_files import Row
from jaxtune.train.data.tokens import cache, workers
from jaxtune.train.display import run_figures, watch
from jaxtune.train.folder.folder_lock import FolderLock
from jaxtune.train.log import metrics as m
from tests import patience
from tests.faults.command import make_folder
from tests.faults.test_files import no_room_beyond
from tests.train.data.conftest import make_tokenizer

# ---- full disks


def _tokens(folder: Path):
    rows = [{"prompt": "Name a colour:", "completion": f" red {i}"} for i in range(500)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with no_room_beyond(2048):
        prepare(str(folder / "rows.jsonl"), make_tokenizer(), length=64, cache_dir=str(folder / "cache"))


def _tensor(folder: Path):
    with no_room_beyond(2048):
        array = np.ones((64, 64), np.float32)
        shards.write_file(folder / "a.safetensors", [("a", array.shape, array.dtype)], lambda name: array)


def _gguf(folder: Path):
    source = Source(lambda: np.ones((64, 64), np.float32), (Tensor("a", (64, 64), lambda made: made, False),))
    with no_room_beyond(2048):
        gguf_file.write(folder / "a.gguf", "llama", {}, [source], "f32")


def _tokenizer(folder: Path):
    model = tiny_model(vocab_size=53)
    with no_room_beyond(10_000):  # holds the adapter, and not the tokenizer
        save_adapter(adapted_model(model, r=1, target_modules=["q_proj"]), folder / "adapter", make_tokenizer())


def _model(folder: Path):
    with no_room_beyond(2048):
        save_pretrained(tiny_model(vocab_size=53), folder / "model")


@pytest.mark.parametrize(
    ("write", "file"),
    [
        (lambda folder: _limited_write(folder), "config.yaml"),
        (_tensor, "a.safetensors"),
        (_gguf, "a.gguf"),
        (_tokenizer, "tokenizer.json"),
        (_model, "model.safetensors"),
        (_tokens, ".bin"),
    ],
    ids=["file", "tensors", "gguf", "tokenizer", "model", "token cache"],
)
def test_a_full_disk_names_the_file_and_the_bytes(write, file, tmp_path):
    """A limit on the size of files fails as a full disk does, in the middle of a file."""
    with pytest.raises((OSError, ValueError), match=r"(too large|written), with [\d,]{3,} bytes to write") as caught:
        write(tmp_path)
    assert file in str(caught.value) and "\n" not in str(caught.value)
    assert not list(tmp_path.glob(".*")) and not (tmp_path / "adapter").exists()


def _limited_write(folder: Path):
    with no_room_beyond(2048):
        atomic_write(folder / "config.yaml", "x" * 10_000)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_library_on_a_full_disk_is_one_line_too(number, monkeypatch, capsys):
    def full(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setitem(cli.COMMANDS, "info", full)
    assert cli.main(["info"]) == cli.USER_ERROR
    assert capsys.readouterr().err == f"jaxtune: error: [Errno {number}] {os.strerror(number)}\n"


@pytest.mark.full
def test_a_run_on_a_full_disk_says_so_in_a_line(tmp_path, capfd):
    recipe = make_folder(tmp_path)
    with no_room_beyond(20_000):  # holds the adapter, and not the merged model
        assert cli.main(["train", str(recipe), "steps=1", "data.eval=null"]) == cli.USER_ERROR
    lines = [line for line in capfd.readouterr().err.splitlines() if "jaxtune: error" in line]
    assert len(lines) == 1 and "bytes to write: " in lines[0] and "model.safetensors" in lines[0]
    assert cli.main(["train", str(recipe), "steps=1", "data.eval=null"]) == 0  # the same command goes on
    assert not list((tmp_path / "run").glob(".*"))


# ---- what others are writing

_WRITES = """
import sys
from pathlib import Path
from jaxtune.system import files
from jaxtune.models.files.folders import new_folder
replace = files.os.replace
def slow(source, target):
    print(source, flush=True); sys.stdin.readline(); replace(source, target)
with new_folder(sys.argv[1] + "/merged", "test") as folder:
    (folder / "model.safetensors").write_bytes(b"half")
    print(folder, flush=True)
    files.os.replace = slow
    files.atomic_write(sys.argv[1] + "/config.yaml", "whole")
"""


@pytest.mark.parametrize("killed", [False, True])
def test_what_a_living_process_writes_into_a_run_s_folder_stays(tmp_path, killed):
    environment = os.environ | {"PYTHONPATH": str(Path(jaxtune.__file__).parents[1])}
    command = [sys.executable, "-c", _WRITES, str(tmp_path)]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with subprocess.Popen(command, env=environment, **pipes) as other:
        folder, file = (Path(other.stdout.readline().strip()) for _ in range(2))
        assert folder.is_dir() and file.is_file()
        if killed:
            other.kill()
            other.wait()
        remove_temporary(tmp_path)
        assert folder.exists() == file.exists() == (not killed)
        if not killed:
            other.communicate("\n")  # the folder's own names are written by the same function
    assert sorted(path.name for path in tmp_path.iterdir()) == ([] if killed else ["config.yaml", "merged"])


# ---- tables


def _table(rows, **options) -> bytes:
    import pyarrow
    import pyarrow.parquet

    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), buffer, **options)
    return buffer.getvalue()


CHATS = [
    {"messages": [{"role": "user", "content": f"q {i} {'x' * (i % 17)}"}, {"role": "assistant", "content": str(i)}]}
    for i in range(2500)
]


@pytest.mark.parametrize("group", [400, 1000, 2500])
def test_conversations_of_several_row_groups_are_read(tmp_path, group):
    """Of 1,000 rows each, as `datasets` writes them: no batch may reach over the end of a group."""
    (tmp_path / "a.parquet").write_bytes(_table(CHATS, row_group_size=group))
    assert [row.value for row in read_rows(open_sources(tmp_path / "a.parquet"))] == CHATS


@pytest.mark.full
@pytest.mark.parametrize("compression", ["snappy", "none"])
def test_a_flipped_bit_of_a_parquet_file_is_told(tmp_path, compression):
    """Wherever it is: an error that names the file. With checksums of pages no other value is read either."""
    rows = [{"prompt": f"q {i}", "completion": f" a {i}", "kind": "abc"[i % 3]} for i in range(800)]
    good = _table(rows, row_group_size=300, compression=compression, write_page_checksum=True)
    file, draw = tmp_path / "a.parquet", random.Random(0)
    footer = 8 * (len(good) - 8 - int.from_bytes(good[-8:-4], "little"))
    # In the pages, in what describes them, and in the names of columns.
    bits = [draw.randrange(footer) for _ in range(40)] + [draw.randrange(footer, 8 * len(good)) for _ in range(80)]
    bits += [8 * good.rindex(name) + 1 for name in (b"prompt", b"completion", b"kind")]
    told = 0
    for bit in bits:
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        file.write_bytes(bad)
        try:
            (source,) = open_sources(file)
            source.count()
            found = [row.value for row in read_rows([source])]
        except ValueError as error:
            told += 1
            assert str(error).startswith(f"{file}: ") and type(error) is ValueError, error
        else:
            assert bit >= footer or found == rows, bit  # no page of another value
    assert told > 60


# ---- processes that stand still


@pytest.mark.parametrize("woken", [True, False])
def test_a_stopped_worker_is_told_at_once(woken, monkeypatch, caplog):
    start, stopped = workers._Process.__init__, []

    def stops(self, setup):
        start(self, setup)
        self.process.send_signal(signal.SIGSTOP)
        stopped.append(self.process)

    monkeypatch.setattr(workers._Process, "__init__", stops)
    if not woken:
        monkeypatch.setattr(workers, "PATIENCE_SECONDS", 1.0)
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}

    def wake():
        while "kill -CONT continues it" not in caplog.text:
            time.sleep(0.05)
        for process in stopped:
            process.send_signal(signal.SIGCONT)

    with caplog.at_level(logging.WARNING):
        if woken:
            threading.Thread(target=wake, daemon=True).start()
            assert len(prepare([chat] * 3, make_tokenizer(), length=64, num_workers=2).documents) == 3
        else:
            with pytest.raises(
                ValueError, match=r"was stopped .SIGSTOP., has not continued for 1 s, and has rows:1 to"
            ):
                prepare([chat] * 3, make_tokenizer(), length=64, num_workers=2)
    assert caplog.text.count(f"process {stopped[0].pid}, which was stopped (SIGSTOP), makes no progress") == 1


@pytest.mark.full
def test_time_in_which_this_process_was_stopped_does_not_count(monkeypatch):
    """After Ctrl-Z and fg an hour later the worker has had no hour."""
    clock = iter(range(0, 10**9, 3600))
    monkeypatch.setattr(waiting.time, "monotonic", lambda: next(clock))
    future: workers.concurrent.futures.Future = workers.concurrent.futures.Future()
    polls = iter([None] * 20)

    def poll():
        if next(polls, "last") == "last":
            future.set_result("chunk")

    assert workers._wait_for([Row("rows", 1, {}, 2)], future, [], poll) == "chunk"


# ---- pages of runs


def test_watch_reads_only_what_is_new(tmp_path, monkeypatch):
    parsed, made, real = [], [], run_figures._page
    monkeypatch.setattr(m, "parsed", lambda text, of=m.parsed: (parsed.append(text), of(text))[1])
    monkeypatch.setattr(run_figures, "_page", lambda *given: (made.append(given[0]), real(*given))[1])
    lines = [json.dumps({"step": n, "loss": 2 + (n * 7 % 11) / 10, "step_seconds": 1}) for n in range(1, 20_001)]
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(lines[:-2]) + "\n")
    files = run_figures.RunFiles(tmp_path)
    first = files.page()
    assert len(parsed) == 19_998 and len(json.dumps(first)) < 100_000  # not every point of a line
    parsed.clear(), made.clear()
    assert files.page() is first and not parsed and not made
    with path.open("a") as file:
        file.write(lines[-2] + "\n" + lines[-1][:9])  # the last one is torn
    assert ["steps", "19,999"] in files.page()["facts"] and len(parsed) == 1 and made
    with path.open("a") as file:
        file.write(lines[-1][9:] + "\n")
    assert ["steps", "20,000"] in files.page()["facts"] and files.page() == run_figures.RunFiles(tmp_path).page()
    m._drop_after(path, 10)  # a run that was resumed
    assert ["steps", "10"] in files.page()["facts"]


def test_a_thinned_line_keeps_means_and_extremes():
    values = [float(n % 1000) for n in range(50_000)]
    values[777], values[40_001], values[5] = 1e6, -1e6, math.nan
    curve = run_figures.Curve(array.array("q", range(50_000)), array.array("d", values))
    few = run_figures.thinned(curve)
    assert len(few["x"]) <= run_figures.MOST_POINTS and few["x"] == sorted(few["x"]) and few["x"][-1] == 49_999
    assert max(few["high"]) == 1e6 and min(few["low"]) == -1e6
    assert np.mean(few["y"]) == pytest.approx(np.nanmean(values), rel=0.02)
    short = run_figures.Curve(curve.steps[:500], curve.values[:500])
    assert run_figures.thinned(short) == {
        "x": [n for n in range(500) if n != 5],
        "y": [n for n in range(500) if n != 5],
    }


STRANGE = [
    "[" * 100_000,
    "7",
    "[]",
    "{}",
    "\0",
    '{"before": 7, "after": []}',
    '{"after": {"exact_match": true, "samples": 3}}',
    '{"after": {"exact_match": 1, "samples": [7, {}, {"question": [], "expected": {}, "given": null}]}}',
    '{"after": {"exact_match": 1' + "0" * 400 + "}}",
    '{"before": {"exact_match": 0, "samples": [{}]}, "after": {"exact_match": 1, "samples": [{"question": "q"}]}}',
]


def test_watch_survives_strange_files_of_one_run(tmp_path):
    lines = ['{"step": 1, "loss": 1e308, "seconds": "x"}', '{"step": 2, "loss": 1' + "0" * 400 + ', "steps": []}']
    lines += ['{"step": 3, "step_seconds": 1e308, "steps": 1e308}', '{"step": 4, "eval_seconds": "nan", "plan": [[1]]}']
    runs = [tmp_path / name for name in ("strange", "good")]
    for run in runs:
        run.mkdir()
        (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5}\n')
    with watch.server(runs) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()

        def shown() -> str:
            with urllib.request.urlopen(
                f"http://{watch.HOST}:{server.server_port}/runs", timeout=patience.SECONDS
            ) as answer:
                return answer.read().decode()

        for text in STRANGE:
            (runs[0] / "results.json").write_text(text)
            assert shown().count('"2.5000"') == 2, text
        (runs[0] / "metrics.jsonl").write_text("\n".join(lines))
        assert '"2.5000"' in shown()
        (runs[0] / "config.yaml").mkdir()
        (runs[0] / "results.json").unlink()
        os.mkfifo(runs[0] / "results.json")
        assert '"name": "good"' in shown() and '"2.5000"' in shown()
        server.shutdown()


@pytest.mark.full
def test_strange_results_do_not_end_a_run(tmp_path):
    recipe = make_folder(tmp_path)
    for text in ("[" * 100_000, '{"run": [], "before": 1}'):
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / "results.json").write_text(text)
        assert cli.main(["train", str(recipe), "steps=1", "data.eval=null", "export.merged=false"]) == 0
        shutil.rmtree(tmp_path / "run" / "adapter", ignore_errors=True)


# ---- named pipes, where a plain file is meant


def test_a_named_pipe_among_compiled_programs_is_not_waited_for(tmp_path, caplog):
    kept = ProgramCache(tmp_path)
    os.mkfifo(kept._file("key"), 0o600)
    assert kept.get("key") is None and "it is no plain file" in caplog.text
    kept.put("key", b"program")
    assert kept.get("key") == b"program"


def test_a_named_pipe_among_tokens_and_locks_is_not_waited_for(tmp_path):
    (tmp_path / "key").mkdir()
    os.mkfifo(tmp_path / "key" / "meta.json")
    with pytest.raises(OSError, match=r"meta.json is not a regular file"):
        cache._open(tmp_path / "key")
    os.mkfifo(tmp_path / "run.lock")
    with pytest.raises(ValueError, match="cannot write to"):
        FolderLock(tmp_path)


def test_limits_are_as_they_were():
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    assert temporary_path("a").name.endswith(".tmp")
