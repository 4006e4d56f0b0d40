"""Damaged weights under every command that loads: exit code 2, a sentence with the file and the remedy, at once."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy
from drawn import draws
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

import jaxtune
from jaxtune import cli
from jaxtune.models.files.model_folder import INDEX
from jaxtune.models.hf import from_pretrained, save_pretrained
from tests.faults.command import make_folder

ROOT = Path(jaxtune.__file__).parents[1]
_LATE = """
import sys, threading
from jaxtune import cli
from jaxtune.models.files import reading
from jaxtune.models.programs import kept
from tests import patience
read, compiled, compiles = reading._read_plain, kept.compiled, threading.Event()
def late(*arguments):  # as from a slow disk: programs are compiled meanwhile
    compiles.wait(10)
    return read(*arguments)
def endless(*arguments):
    compiles.set()
    patience.Sleep()()
    print("slept")
reading._read_plain, kept.compiled = late, endless
cli.process()
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A model in two files, a recipe over it, and an adapter."""
    folder = tmp_path_factory.mktemp("whole")
    make_folder(folder)
    model, tokenizer = from_pretrained(folder / "model")
    shutil.rmtree(folder / "model")
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
    save_pretrained(model, folder / "model", tokenizer, max_shard_bytes=size * 2 // 3)
    assert (folder / "model" / INDEX).is_file()
    adapted = jaxtune.get_peft_model(model, r=2)
    jaxtune.save_adapter(adapted, folder / "adapter", tokenizer)
    return folder


def with_header(file: Path, change: Callable[[dict], None]) -> None:
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def damage(file: Path, kind: str, where: float) -> None:
    """where: of 1, how far into what is damaged."""
    data = file.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    names = sorted(name for name in safetensors.numpy.load_file(file))
    name = names[int(where * len(names))]
    match kind:
        case "header ends":
            file.write_bytes(data[: int(where * header)])
        case "data end":
            file.write_bytes(data[: header + int(where * (len(data) - header))])
        case "missing":
            file.unlink()
        case "noise":
            file.write_bytes(np.random.default_rng(int(1000 * where)).bytes(len(data)))
        case "dtype":
            with_header(file, lambda entries: entries[name].update(dtype="I16"))
        case "shape":
            with_header(file, lambda entries: entries[name].update(shape=[1, *entries[name]["shape"]]))
        case "name":
            with_header(file, lambda entries: entries.update(other=entries.pop(name)))
        case "not finite":
            at = header + 2 * int(where * (len(data) - header) / 2)
            file.write_bytes(data[:at] + b"\xff\x7f" + data[at + 2 :])


KINDS = ("header ends", "data end", "missing", "noise", "dtype", "shape", "name", "not finite")


def commands(folder: Path) -> dict[str, list[str]]:
    model, adapter, recipe = (str(folder / name) for name in ("model", "adapter", "recipe.yaml"))
    return {
        "generate": ["generate", model, "--prompt", "red"],
        "generate, adapter": ["generate", adapter, "--prompt", "red"],
        "chat": ["chat", adapter],
        "serve": ["serve", model, "--port", "0"],
        "train": ["train", recipe, "steps=1"],
        "evaluate": ["evaluate", recipe],
        "merge": ["export", adapter, str(folder / "merged")],
        "gguf": ["export", model, str(folder / "gguf"), "--to", "gguf"],
    }


def broken(whole: Path, folder: Path, kind: str, where: float, number: int) -> Path:
    shutil.copytree(whole, folder)
    for file in (folder / "recipe.yaml", folder / "adapter" / "adapter_config.json"):
        file.write_text(file.read_text().replace(str(whole), str(folder)))
    files = sorted((folder / "model").glob("*.safetensors"))
    damage(files[number], kind, where)
    return folder


@draws(12)
@given(
    kind=st.sampled_from(KINDS),
    where=st.floats(0, 0.999),
    number=st.integers(0, 1),
    command=st.sampled_from([name for name in commands(Path("unused")) if name != "serve"]),
)
def test_each_damage_is_a_sentence_of_each_command(whole, tmp_path_factory, capsys, kind, where, number, command):
    folder = broken(whole, tmp_path_factory.mktemp("broken") / "x", kind, where, number)
    capsys.readouterr()
    assert cli.main(commands(folder)[command]) == cli.USER_ERROR
    said = capsys.readouterr().err
    errors = [line for line in said.splitlines() if line.startswith("jaxtune: error: ")]
    assert len(errors) == 1 and str(folder / "model") in errors[0], said
    assert re.search(r"fetch (it|them|it or them|the file|its weights) again|supported: ", errors[0]), errors[0]


@pytest.mark.parametrize("command", commands(Path("unused")))
def test_a_process_ends_once_it_has_said_it(whole, tmp_path, command):
    """Though its threads compile, for ever: nothing is cached, and what is wrong is read late."""
    folder = broken(whole, tmp_path / "x", "not finite", 0.999, 1)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    environment |= {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs"), "JAXTUNE_CACHE": str(tmp_path / "cache")}
    words = [sys.executable, "-c", _LATE, *commands(folder)[command]]
    with subprocess.Popen(
        words, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        said, errors = process.communicate()
    assert process.returncode == cli.USER_ERROR and "slept" not in said, errors
    assert "not finite" in errors.splitlines()[-1] and "Traceback" not in errors, errors
