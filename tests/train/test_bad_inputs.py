"""Slips of people at their first evening: each is answered before a model is read, by a line that names the fix."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import jaxtune
from jaxtune.cli import main
from jaxtune.train import app

OF_A_RUN = {"jaxtune.train.app", "jaxtune.train.trainer", "transformers.modeling_utils", "orbax", "datasets", "torch"}
BASE = Path(jaxtune.__file__).parent / "quickstart/base"
GOOD = {"prompt": "Capital of France?", "completion": " Paris."}


def rows(*values: object) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


FILES = {
    "rows.jsonl": rows(GOOD),
    "odd.jsonl": rows({"question_text": "a", "reply": "b"}),
    "broken.jsonl": '{"prompt": "a", "completion": \n',
    "empty.jsonl": "",
    "words.jsonl": rows("only words"),
    "pairs.jsonl": rows({"prompt": "a", "chosen": "b", "rejected": "c"}),
    "no_text.jsonl": rows({"text": ""}),
    "turns.jsonl": rows({"messages": "a string"}),
    "roles.jsonl": rows({"conversations": [{"from": "pupil", "value": "a"}, {"from": "gpt", "value": "b"}]}),
    "semicolons.csv": "prompt;completion\na;b\n",
    "tabs.csv": "prompt\tcompletion\na\tb\n",
    "twice.csv": "prompt,prompt\na,b\n",
    "short.csv": "prompt,completion\na\n",
    "rows.txt": "some text",
    "bad.parquet": "not parquet",
    "two/train.jsonl": rows(GOOD),
    "two/test.jsonl": rows(GOOD),
    "many/a.jsonl": rows(GOOD),
    "many/b.jsonl": rows(GOOD),
    "nothing/readme.md": "nothing",
    "not.yaml": "model: [",
    "unknown.yaml": "model: {path: base}\ndata: {train: rows.jsonl}\nlearning_rate: 1e-4\n",
    "bare/config.json": (BASE / "config.json").read_text(encoding="utf-8"),
    "plain/notes.txt": "no model",
}

# The arguments of `jaxtune train`, and what the line says.
SLIPS: dict[str, tuple[str, str]] = {
    "no recipe": ("", "the first argument is a recipe"),
    "a mistyped recipe": ("lora-0.5", "no packaged recipe 'lora-0.5' (nearest: lora-0.5b)"),
    "a recipe that is not there": ("mine.yaml", "no recipe file mine.yaml"),
    "not YAML": ("not.yaml", "not.yaml is not YAML"),
    "a key of elsewhere": ("unknown.yaml", "learning_rate"),
    "a mistyped key": ("quickstart data.trian=rows.jsonl", "data.trian"),
    "a word for a number": ("quickstart steps=many", "steps"),
    "steps and epochs": ("quickstart steps=3 epochs=1", "are both set: keep one"),
    "no rows named": ("lora-0.5b", "data.train"),
    "a mistyped file": (
        "quickstart data.train=row.jsonl",
        "data.train: no such data file or folder: row.jsonl; did you",
    ),
    "a file of a folder that is not there": ("quickstart data.train=data/rows.jsonl", "there is no folder data either"),
    "a mistyped file without suffix": ("quickstart data.train=rowsjsonl", "cannot be loaded; did you mean rows.jsonl?"),
    "a mistyped held-out file": ("quickstart data.eval=rows.json", "data.eval: no such data file or folder: rows.json"),
    "a file of text": ("quickstart data.train=rows.txt", "rows.txt: cannot read .txt; known: .jsonl"),
    "an empty file": ("quickstart data.train=empty.jsonl", "data.train = 'empty.jsonl': there are no rows in it"),
    "a folder without rows": ("quickstart data.train=nothing", "holds no data file"),
    "a folder of two splits": ("quickstart data.train=two", "holds files of several splits"),
    "columns that nobody knows": ("quickstart data.train=odd.jsonl", "columns question_text, reply fit no known form"),
    "a column of a map that is not there": (
        "quickstart data.train=odd.jsonl 'data.columns={prompt: question, completion: reply}'",
        "it has no column 'question', which data.columns names, but question_text, reply",
    ),
    "a map of what is no column": ("quickstart 'data.columns={ask: question}'", "data.columns = 'ask'"),
    "JSON that breaks off": ("quickstart data.train=broken.jsonl", "broken.jsonl:1: bad JSON"),
    "rows that are no objects": ("quickstart data.train=words.jsonl", "words.jsonl:1: not an object with columns"),
    "preferences without an objective": ("quickstart data.train=pairs.jsonl", "set objective=dpo, orpo or simpo"),
    "a text that is empty": ("quickstart data.train=no_text.jsonl", "no_text.jsonl:1: "),
    "messages that are a string": ("quickstart data.train=turns.jsonl", "turns.jsonl:1: "),
    "a role that nobody has": ("quickstart data.train=roles.jsonl", "pupil"),
    "semicolons": ("quickstart data.train=semicolons.csv", "separated by semicolons; write it with commas"),
    "tabs": ("quickstart data.train=tabs.csv", "separated by tabs; write it with commas"),
    "a column twice": ("quickstart data.train=twice.csv", "names the column 'prompt' more than once; rename one"),
    "a short row": ("quickstart data.train=short.csv", "short.csv:2: 1 fields, the header has 2"),
    "no Parquet": ("quickstart data.train=bad.parquet", "bad.parquet: not a readable Parquet file"),
    "the first rows of a folder": ("quickstart 'data.train=many[:2]'", "name one file or data set before [:2]"),
    "a share above all rows": (
        "quickstart data.eval=null data.eval_rows=1.5",
        "data.eval_rows = 1.5: must be a number",
    ),
    "a model's folder without a tokenizer": (
        "lora-0.5b data.train=rows.jsonl model.path=bare",
        "no tokenizer.json and",
    ),
    "a folder without a model": ("lora-0.5b data.train=rows.jsonl model.path=plain", "there is no config.json in it"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("slips")
    for name, text in FILES.items():
        (made / name).parent.mkdir(exist_ok=True)
        (made / name).write_text(text, encoding="utf-8")
    shutil.copytree(BASE, made / "base")
    return made


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_is_answered_before_a_model_is_read(slip, folder, monkeypatch, capsys):
    def never(*_, **__):
        raise AssertionError("a run was begun")

    monkeypatch.setattr(app, "run", never)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.chdir(folder)
    line, wanted = SLIPS[slip]
    assert main(["train", *shlex.split(line)]) == 2
    told = capsys.readouterr().err
    assert wanted in told and len(told.strip().splitlines()) <= 2, told
    assert not (folder / "runs").exists()


def test_there_are_thirty():
    assert len(SLIPS) >= 30


@pytest.mark.full
@pytest.mark.parametrize("slip", ["a mistyped file", "semicolons", "a model's folder without a tokenizer"])
def test_a_fresh_process_answers_before_it_imports_what_a_run_needs(slip, folder):
    line, wanted = SLIPS[slip]
    script = (
        "import sys\nfrom jaxtune import cli\ncode = cli.console(sys.argv[1:])\nprint(*sys.modules)\nsys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "train", *shlex.split(line)],
        cwd=folder,
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 2 and wanted in done.stderr
    assert not {*done.stdout.split()} & OF_A_RUN
