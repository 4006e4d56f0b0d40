"""A hub that holds one tiny model under the names that the pages use, and a folder with rows, for all blocks."""

from __future__ import annotations

import functools
import json
import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

import jaxtune
from jaxtune.cli import main
from jaxtune.models.files.model_folder import load_tokenizer
from jaxtune.models.hf import model_from_config, save_pretrained
from jaxtune.models.registry import FAMILIES

QUICKSTART = Path(jaxtune.__file__).parent / "quickstart"
QWEN = "Qwen/Qwen2.5-0.5B-Instruct"
HUB_NAMES = (
    "meta-llama/Llama-3.1-8B-Instruct",
    "meta-llama/Llama-3.2-1B-Instruct",
    "unsloth/Llama-3.1-8B-Instruct",
    "unsloth/Llama-3.2-1B-Instruct",
    QWEN,
    "unsloth/gemma-3-4B-it",
    "unsloth/Phi-3.5-mini-instruct",
    "Qwen/Qwen2.5-0.5B",
)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """The packaged model's first layer with random weights, and its tokenizer: compiled in a moment."""
    folder = tmp_path_factory.mktemp("hub") / "tiny"
    config = json.loads((QUICKSTART / "base/config.json").read_text()) | {"num_hidden_layers": 1}
    model = model_from_config(config, jax.random.key(0), "float32")
    save_pretrained(model, folder, tokenizer=load_tokenizer(QUICKSTART / "base"))
    return folder


@pytest.fixture(scope="session")
def hub(tiny_model, tmp_path_factory) -> Iterator[Path]:
    """The Hugging Face cache, which answers to the names of the pages."""
    from huggingface_hub import constants

    cache = tmp_path_factory.mktemp("cache")
    for name in HUB_NAMES:
        repository = cache / f"models--{name.replace('/', '--')}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs/main").write_text("0" * 40)
        (repository / "snapshots").mkdir()
        os.symlink(tiny_model, repository / "snapshots" / ("0" * 40))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_CACHE", str(cache))
        patch.setenv("JAXTUNE_CACHE", str(tmp_path_factory.mktemp("tokens")))
        yield cache


@pytest.fixture(scope="session")
def desk(hub, tiny_model, tmp_path_factory) -> Path:
    """A folder with rows.jsonl, held_out.jsonl, documents.jsonl, my_template.jinja, a model in base/, and a run in
    runs/quickstart and in runs/my-run."""
    folder = tmp_path_factory.mktemp("desk")
    for name, source in (("rows.jsonl", "train.jsonl"), ("held_out.jsonl", "eval.jsonl")):
        lines = (QUICKSTART / source).read_text(encoding="utf-8").splitlines(keepends=True)
        (folder / name).write_text("".join(lines[:48]), encoding="utf-8")
        text = " ".join(json.loads(line)["messages"][1]["content"] for line in lines[:40])
        (folder / "documents.jsonl").write_text((json.dumps({"text": text}) + "\n") * 8)
    shutil.copytree(tiny_model, folder / "base")
    shutil.copy(QUICKSTART / "base/chat_template.jinja", folder / "my_template.jinja")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run_command("python -m jaxtune.train quickstart") == 0
    shutil.copytree(folder / "runs/quickstart", folder / "runs/my-run")  # of the same model of the hub, here
    return folder


@pytest.fixture(autouse=True)
def families_are_as_they_were() -> Iterator[None]:
    """An example adds a family, which is for its own process."""
    before = dict(FAMILIES)
    yield
    FAMILIES.clear()
    FAMILIES.update(before)


@pytest.fixture
def workplace(desk, tmp_path, monkeypatch) -> Path:
    """A copy of the desk, in which the test stands."""
    folder = tmp_path / "work"
    shutil.copytree(desk, folder)
    monkeypatch.chdir(folder)
    return folder


# What a training command gets here beyond what the page says, so that it takes seconds.
SHORTER = {
    "steps": "2",
    "epochs": "null",
    "rows_per_step": "2",
    "micro_batches": "null",
    "data.length": "64",
    "data.num_workers": "1",
    "evaluation.exact_match_rows": "0",
    "evaluation.at_start": "false",
}


def run_command(line: str) -> int:
    """Runs a command line of a page in this process; training runs are made short. Returns its exit code."""
    words = shlex.split(line)
    if words[:3] == ["python", "-m", "jaxtune.train"]:
        words = ["train", *words[3:]]
    elif words[0] == "jaxtune":
        words = words[1:]
    else:
        raise ValueError(f"{line}: neither jaxtune nor python -m jaxtune.train")
    if any(word.startswith("plan.device=") for word in words):
        return planned(tuple(words))
    if words[0] == "train" and "--help" not in words:
        given = {word.split("=")[0] for word in words}
        shorter = SHORTER | ({"model.path": QWEN} if "quickstart" in words else {})
        if "quickstart-rewards" in words:  # its answers come in groups, and its prompts are longer
            shorter |= {"model.path": QWEN, "rows_per_step": "8", "data.length": "88", "data.eval": "null"}
        words += [f"{key}={value}" for key, value in shorter.items() if key not in given]
    return main(words)


@functools.cache
def planned(words: tuple[str, ...]) -> int:
    """A plan for a device that is not here depends on nothing else: it is made once for all pages."""
    return main(list(words))
