"""Exports that were killed, and what travels with a model: nothing half written is taken for whole, nothing is lost."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import jax.numpy as jnp
import pytest
from tiny_models import adapted_model, tiny_model

import jaxtune
from jaxtune.models.adapters.adapter_files import save_adapter
from jaxtune.models.adapters.merge import merge_adapter
from jaxtune.models.files.folders import new_folder
from jaxtune.pallas import dispatch, targets

_KILLED = """
import os, signal, sys
from jaxtune.models.files.folders import new_folder
with new_folder(sys.argv[1], "test") as folder:
    (folder / "model.safetensors").write_bytes(b"half")
    if sys.argv[2] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    print(folder, flush=True)
    sys.stdin.read()
"""


def _start(path: Path, how: str) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": str(Path(jaxtune.__file__).parents[1])}
    command = [sys.executable, "-c", textwrap.dedent(_KILLED), str(path), how]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def test_what_a_killed_export_left_is_removed_by_the_next(tmp_path):
    _start(tmp_path / "merged", "kill").communicate()
    (tmp_path / ".merged-2.5-abcd0123.tmp").mkdir()  # of another folder
    assert len(list(tmp_path.glob(".merged.*.tmp"))) == 1
    assert not (tmp_path / "merged").exists()
    with new_folder(tmp_path / "merged", "test") as folder:
        (folder / "model.safetensors").write_bytes(b"whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".merged-2.5-abcd0123.tmp", "merged"]
    assert (tmp_path / "merged" / "model.safetensors").read_bytes() == b"whole"


def test_what_another_process_is_writing_is_left_alone(tmp_path):
    other = _start(tmp_path / "merged", "wait")
    theirs = Path(other.stdout.readline().strip())
    with pytest.raises(KeyError), new_folder(tmp_path / "merged", "test"):
        raise KeyError("an export that fails")
    assert (theirs / "model.safetensors").read_bytes() == b"half"
    other.communicate("")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["merged"]


@pytest.mark.full
def test_merging_says_nothing_of_kernels_that_it_has_no_use_for(monkeypatch):
    said = []
    choose = dispatch.choose
    monkeypatch.setattr(dispatch, "choose", lambda *call: said.append(dispatch._unsaid) or choose(*call))
    merge_adapter(adapted_model(tiny_model(vocab_size=53), r=2))
    assert said and all(said)
    said.clear()
    tiny_model(vocab_size=53, hidden_size=24)(jnp.zeros((1, 5), jnp.int32))
    assert said and not any(said)


def test_what_is_unsaid_is_not_logged(caplog):
    table = {"fast": lambda: "not in float32", "slow": lambda: None}
    with targets.compile_for((9, 0)):
        with dispatch.unsaid():
            assert dispatch.choose("an op of this test", table, None) == "slow"
        assert not caplog.records
        dispatch.choose("an op of this test", table, None)
    assert "an op of this test runs on slow (fast: not in float32)" in caplog.text


# ---- what a model was trained with


class _Tokenizer:
    """What save_adapter asks of one."""

    def save_pretrained(self, folder):
        (Path(folder) / "chat_template.jinja").write_text("a template")


def test_a_tokenizer_is_saved_beside_the_adapter(tmp_path):
    save_adapter(adapted_model(tiny_model(), r=2), tmp_path / "adapter", _Tokenizer())
    assert (tmp_path / "adapter" / "chat_template.jinja").read_text() == "a template"
