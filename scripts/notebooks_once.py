"""Runs notebooks of Unsloth, TRL and PEFT as docs/notebooks.md says, once, and records what happened.

    .venv/bin/python -m scripts.notebooks_once FOLDER TOKENIZERS [NAME ...]

It writes benchmarks/results/notebooks_once.json.

FOLDER has NAME.ipynb for each row of notebooks.csv, from its repository at its commit (of a page, a cell for each block
of Python); their text is not ours and stays outside. TOKENIZERS has the tokenizers, a folder each. A tiny model stands
in for each model of the hub, the rows below for its data sets, and a folder for the hub itself; numbers are capped.
"""

from __future__ import annotations

import ast
import contextlib
import csv
import importlib.metadata
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "benchmarks/results/notebooks_once.json"
USER = "sergiopaniego"  # whose account TRL's notebooks name

# Cells that the page leaves out, by a pattern of their text, and why.
CELLS = {
    r"^\s*(%%capture|!(uv )?pip install|[!%]pip )": "installs",
    r"^%env UNSLOTH_": "a setting of Unsloth",
    r"torch\.cuda\.(get_device_properties|max_memory_reserved)": "PyTorch's memory",
    r'framework = "pt"': "reads tensors of PyTorch",
    r"from vllm import LLM\b|\bllm\.generate\(": "vLLM's own engine",
    r"\bAutoPeftModel\b|\.add_adapter\(": "not a causal language model, or several adapters",
    r"\bTrainer\(\n    model=peft_model|^training_args = TrainingArguments\(": "transformers' own Trainer",
}
# Lines that the page changes: pattern, what takes its place, name.
LINES = (
    (r"^( *)import torch\n", "", "import torch"),
    (r"^( *)torch\.cuda\.empty_cache\(\)\n", "", "torch.cuda.empty_cache()"),
    (r"\btorch\.(float16|bfloat16)\b", '"bfloat16"', "dtypes of torch"),
    (r"\[\"conversations\"\],\n", '["conversations"][:],\n', "columns of datasets 4 are no lists: [:]"),
    (
        r"(tokenizer\.apply_chat_template\()(x\)|x\[\"prompt\"\][^)]*\))",
        r"\1return_dict = False, conversation = \2",
        "transformers 5 needs return_dict = False",
    ),
    (r'report_to="trackio"', 'report_to="none"', "report_to: Trackio is not installed"),
    (r"\breward_function=", "reward_funcs=", "reward_function: an argument that TRL lacks, too"),
    (r"^( *)from trl\.rewards import ", r"\1from jaxtune.compat.rewards import ", "imports"),
    (r"^( *)from (?:unsloth|trl|peft|vllm)(?:\.\w+)* import ", r"\1from jaxtune.compat import ", "imports"),
)
CAPS = {
    "max_steps": "3",
    "num_train_epochs": "1",
    "max_new_tokens": "8",
    "max_tokens": "8",
    "max_completion_length": "16",
}
# Of models whose tokenizer is not among TOKENIZERS.
TEMPLATES = {
    "zephyr": "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
}

SAID = [
    ("Who are you?", "I am a bot."),
    ("What is two and two?", "It is 4."),
    ("Name a colour", "Blue, or green: 綠色."),
    ("Write a line of verse.", "The sea is calm to-night,\nthe tide is full."),
]


def _chat(question: str, answer: str, who: str = "role", what: str = "content") -> list[dict]:
    names = ("user", "assistant") if who == "role" else ("human", "gpt")
    return [{who: names[0], what: question}, {who: names[1], what: answer}]


def _thinking(q: str, a: str) -> dict:
    system = {"role": "system", "content": "reasoning language: French", "thinking": None}
    user = {"role": "user", "content": q, "thinking": None}
    answer = {"role": "assistant", "content": a, "thinking": "Je pense."}
    rest = {"reasoning_language": "French", "developer": "Be brief.", "user": q, "analysis": "Je pense.", "final": a}
    return rest | {"messages": [system, user, answer]}


# The columns of the hub's data sets, and how many rows there are.
DATA: dict[str, tuple[int, Callable[[str, str], dict]]] = {
    "yahma/alpaca-cleaned": (48, lambda q, a: {"instruction": q, "input": "", "output": a}),
    "mlabonne/FineTome-100k": (48, lambda q, a: {"conversations": _chat(q, a, "from", "value"), "score": 5.0}),
    "unsloth/OpenMathReasoning-mini": (
        24,
        lambda q, a: {"expected_answer": "4", "problem": q, "generated_solution": f"<think>Well.</think>{a}"},
    ),
    "HuggingFaceH4/ultrafeedback_binarized": (
        2400,
        lambda q, a: {"prompt": q, "chosen": _chat(q, a), "rejected": _chat(q, "No."), "score_chosen": 8.0},
    ),
    "reciperesearch/dolphin-sft-v0.1-preference": (
        48,
        lambda q, a: {"instruction": q, "input": "", "accepted": a, "rejected": "No."},
    ),
    "wikimedia/wikipedia": (2400, lambda q, a: {"id": "1", "url": "", "title": q, "text": f"{a} " * 9}),
    "FreedomIntelligence/alpaca-gpt4-korean": (48, lambda q, a: {"conversations": _chat(q, a, "from", "value")}),
    "openai/gsm8k": (12, lambda q, a: {"question": q, "answer": f"{a}\n#### 4"}),
    "open-r1/DAPO-Math-17k-Processed": (12, lambda q, a: {"prompt": q, "solution": "4"}),
    "HuggingFaceH4/Multilingual-Thinking": (120, _thinking),
    "AI-MO/NuminaMath-TIR": (12, lambda q, a: {"problem": q, "solution": "$4$", "messages": _chat(q, a)}),
    "trl-lib/Capybara": (16, lambda q, a: {"source": "here", "messages": _chat(q, a), "num_turns": 1}),
    "trl-lib/DeepMath-103K": (2, lambda q, a: {"prompt": _chat(q, a)[:1], "solution": "$4$"}),
    "trl-lib/tldr": (2, lambda q, a: {"prompt": f"{q}\nTL;DR:", "completion": f" {a}"}),
    "trl-lib/ultrafeedback_binarized": (16, lambda q, a: {"chosen": _chat(q, a), "rejected": _chat(q, "No.")}),
    "trl-lib/kto-mix-14k": (
        16,
        lambda q, a: {"prompt": _chat(q, a)[:1], "completion": _chat(q, a)[1:], "label": len(a) < 12},
    ),
}


class Cell(NamedTuple):
    number: int
    code: str
    reason: str  # why it is left out, or ""


class Notebook(NamedTuple):
    cells: list[Cell]
    changed: list[str]  # names of what was changed within cells


def as_the_page_says(path: Path) -> Notebook:
    """The cells of code, from 1, with the page's changes."""
    from jaxtune import compat

    cells, changed = [], []
    sources = [c["source"] for c in json.loads(path.read_text(encoding="utf-8"))["cells"] if c["cell_type"] == "code"]
    for number, source in enumerate(sources, 1):
        code = "".join(source) + "\n"
        reason = next((why for pattern, why in CELLS.items() if re.search(pattern, code, re.M)), "")
        if not reason:
            for pattern, instead, name in LINES:
                code, count = re.subn(pattern, instead, code, flags=re.M)
                changed += [name] * bool(count)
            code, count = re.subn(
                r"^( *)from transformers import (.+)$", lambda m: _split_import(m, compat.__all__), code, flags=re.M
            )
            changed += ["imports"] * bool(count)
            for key, most in CAPS.items():
                pattern = rf"^([^#\n]*\b{key} ?= ?)(?!max_seq_length//)[^,#)\n]+"
                code, count = re.subn(pattern, rf"\g<1>{most}", code, flags=re.M)
                changed += [f"{key} = {most}"] * bool(count)
        cells.append(Cell(number, code, reason))
    return Notebook(cells, sorted(set(changed)))


def _split_import(line: re.Match[str], ours: list[str]) -> str:
    names = [name.strip() for name in line[2].split(",")]
    groups = {
        "jaxtune.compat": [n for n in names if n in ours],
        "transformers": [n for n in names if n not in ours],
    }
    return "; ".join(f"{line[1]}from {room} import {', '.join(some)}" for room, some in groups.items() if some)


def stand_in(folder: Path, tokenizer: Path, family: str, template: str) -> None:
    """A tiny random model with this tokenizer, for transformers. template: of TEMPLATES, or "" for its own."""
    import jax
    from transformers import AutoTokenizer

    from jaxtune.models.hf import model_from_config, save_pretrained

    loaded = AutoTokenizer.from_pretrained(tokenizer)
    if template:
        loaded.chat_template = TEMPLATES[template]
    config = {
        "architectures": [f"{family.capitalize()}ForCausalLM"],
        "model_type": family,
        "vocab_size": len(loaded),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
    }
    save_pretrained(model_from_config(config, jax.random.key(0), "bfloat16"), folder, tokenizer=loaded)


class Hub:
    """The calls of huggingface_hub.HfApi that upload, into the folder of a hub's cache."""

    cache: Path

    def __init__(self, **_: object):
        pass

    def whoami(self, **_: object) -> dict[str, str]:
        return {"name": USER}

    def create_repo(self, name: str, **_: object) -> None:
        pass

    def upload_folder(self, repo_id: str, folder_path: str, **_: object) -> None:
        name = repo_id if "/" in repo_id else f"{USER}/{repo_id}"
        shutil.copytree(folder_path, in_cache(self.cache, name), dirs_exist_ok=True)


def push_tokenizer(tokenizer: PreTrainedTokenizerBase, name: str, **_: object) -> None:
    tokenizer.save_pretrained(in_cache(Hub.cache, name))


def in_cache(cache: Path, name: str) -> Path:
    """The folder of a model's only revision."""
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs/main").write_text("0" * 40)
    (repository / "snapshots").mkdir(exist_ok=True)
    return repository / "snapshots" / ("0" * 40)


def load_dataset(name: str, config: str | None = None, split: str | None = None, **_: object):
    import datasets

    count, row = DATA[name]
    made = datasets.Dataset.from_list([row(*SAID[index % len(SAID)]) for index in range(count)])
    return made if split else datasets.DatasetDict({"train": made, "test": made})


@contextlib.contextmanager
def without_network(folder: Path, model: Path, names: list[str]) -> Iterator[None]:
    """A hub that has `model` under these names, and the data sets; `folder` is the working directory."""
    import datasets
    import huggingface_hub
    import transformers
    from huggingface_hub import constants

    from jaxtune.compat import defaults

    key = "max_completion_length"
    defaults._schema("trl")["keys"]["grpo"][key] = int(CAPS[key])  # of scripts that do not set it
    Hub.cache = folder / "hub"
    for name in names:
        in_cache(Hub.cache, name).symlink_to(model)
    constants.HF_HUB_CACHE = str(Hub.cache)
    setattr(datasets, "load_dataset", load_dataset)  # noqa: B010
    setattr(transformers.PreTrainedTokenizerBase, "push_to_hub", push_tokenizer)  # noqa: B010
    setattr(huggingface_hub, "HfApi", Hub)  # noqa: B010
    setattr(huggingface_hub, "notebook_login", lambda: None)  # noqa: B010
    work = folder / "work"
    work.mkdir()
    with contextlib.chdir(work):
        yield


def execute(code: str, namespace: dict[str, object], name: str) -> None:
    """Runs a cell, and shows its last expression as a notebook does."""
    tree = ast.parse(code, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec", dont_inherit=True), namespace)
    if isinstance(last, ast.Expr):
        repr(eval(compile(ast.Expression(last.value), name, "eval", dont_inherit=True), namespace))


def run(path: Path, tokenizer: Path, family: str, template: str, folder: Path) -> dict[str, object]:
    """The record of a notebook. `folder` is an empty one."""
    notebook = as_the_page_says(path)
    text = "\n".join(cell.code for cell in notebook.cells if not cell.reason)
    names = sorted({n for n in re.findall(r"[\"']([\w.-]+/[\w.-]+)[\"']", text) if n not in DATA and USER not in n})
    stand_in(folder / "model", tokenizer, family, template)
    namespace: dict[str, object] = {"__name__": "__main__"}
    runs: list[dict[str, object]] = []
    seen: set[int] = set()
    error = None
    heard = io.StringIO()
    start = time.monotonic()
    with without_network(folder, folder / "model", names), contextlib.redirect_stdout(heard):
        for cell in notebook.cells:
            if cell.reason:
                continue
            try:
                execute(cell.code, namespace, f"{path.name}, cell {cell.number}")
            except Exception as raised:
                error = {"cell": cell.number, "type": type(raised).__name__, "message": str(raised)[:600]}
                traceback.print_exc()
                break
            runs += finished(namespace, cell.number, seen)
    (folder / "heard.txt").write_text(heard.getvalue(), encoding="utf-8")
    return {
        "cells": len(notebook.cells),
        "left_out": {str(cell.number): cell.reason for cell in notebook.cells if cell.reason},
        "changed": notebook.changed,
        "models": names,
        "data": sorted(name for name in DATA if name in text),
        "runs": runs,
        "error": error,
        "seconds": round(time.monotonic() - start),
    }


def finished(namespace: dict[str, object], number: int, seen: set[int]) -> list[dict[str, object]]:
    """Of the trainers that have trained since the last cell: rows, updates and losses."""
    from jaxtune.compat import SFTTrainer

    found = []
    for value in list(namespace.values()):
        if isinstance(value, SFTTrainer) and id(value) not in seen and value.state.global_step:
            seen.add(id(value))
            losses = [line["loss"] for line in value.state.log_history if "loss" in line]
            found.append(
                {
                    "cell": number,
                    "trainer": type(value).__name__,
                    "rows": len(value._rows["train"]),
                    "updates": value.state.global_step,
                    "losses": [round(loss, 4) for loss in losses],
                    "finite": bool(losses) and all(map(math.isfinite, losses)),
                }
            )
    return found


def main(folder: Path, tokenizers: Path, only: list[str]) -> None:
    with open(Path(__file__).with_name("notebooks.csv"), encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if not only or row["file"] in only]
    for row in rows:
        with tempfile.TemporaryDirectory() as place:
            answer = Path(place) / "record.json"
            order = [str(folder / f"{row['file']}.ipynb"), str(tokenizers / row["tokenizer"])]
            order += [row["family"], row["template"], place]
            environment = os.environ | {
                "HF_HUB_OFFLINE": "1",
                "HF_DATASETS_CACHE": f"{place}/datasets",
                "JAXTUNE_CACHE": f"{place}/tokens",
            }
            subprocess.run([sys.executable, "-m", "scripts.notebooks_once", "--one", *order], cwd=ROOT, env=environment)
            made = json.loads(answer.read_text()) if answer.exists() else {"error": {"type": "the process ended"}}
        known = json.loads(RECORD.read_text(encoding="utf-8"))["notebooks"] if RECORD.exists() else {}
        known[row["file"]] = {key: row[key] for key in ("repository", "path", "commit")} | made
        print(row["file"], made.get("error") or made["runs"], flush=True)
        write(known)


def write(known: dict[str, dict]) -> None:
    versions = {name: importlib.metadata.version(name) for name in ("jax", "transformers", "datasets")}
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(known[name])}" for name in known)
    RECORD.write_text(f'{{\n "versions": {json.dumps(versions)},\n "notebooks": {{\n{lines}\n }}\n}}\n', "utf-8")


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        notebook_path, tokenizer_path, of_family, of_template, out = sys.argv[2:]
        record = run(Path(notebook_path), Path(tokenizer_path), of_family, of_template, Path(out))
        (Path(out) / "record.json").write_text(json.dumps(record))
    else:
        main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve(), sys.argv[3:])
