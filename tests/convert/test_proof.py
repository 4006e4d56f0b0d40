"""A converted recipe is tried on the first rows of local files: what does not render is named, and exits with 3."""

from __future__ import annotations

import json

import pytest
import yaml

from jaxtune.cli import main

PAIR = {"prompt": "a?", "chosen": "b", "rejected": "c"}
TALK = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}]
ALPACA = {"instruction": "a?", "input": "", "output": "b"}
AXOLOTL = {"base_model": "m", "learning_rate": 1e-4, "adapter": "lora", "lora_target_linear": True}
TRL = {"model_name_or_path": "m", "use_peft": True, "lora_target_modules": "all-linear", "max_length": 512}
# {name: (the config without its rows, a row that renders, one that does not, what is said of it)}
CASES = {
    "alpaca": ({**AXOLOTL, "type": "alpaca"}, ALPACA, {"question": "a?"}, "columns question fit no known form"),
    "renamed": (
        {**AXOLOTL, "type": "chat_template", "field_messages": "talk", "chat_template": "chatml"},
        {"talk": TALK},
        {"messages": TALK},
        "no column 'talk'",
    ),
    "pairs": ({**AXOLOTL, "rl": "dpo", "type": "chatml.ultra"}, PAIR, ALPACA, "chosen"),
    "labels": ({**AXOLOTL, "rl": "kto"}, {"prompt": "a?", "completion": "b", "label": True}, PAIR, "label"),
    "prompts": (
        {**AXOLOTL, "rl": "grpo", "trl": {"reward_funcs": ["a.b"], "num_generations": 2}},
        {"prompt": "a?", "answer": "b"},
        {"answer": "b"},
        "prompt",
    ),
    "factory": ({"stage": "sft", "template": "qwen3"}, ALPACA, {"instruction": "a?", "input": ""}, "output"),
    "factory pairs": ({"stage": "dpo", "template": "llama3", "ranking": True}, PAIR, ALPACA, "chosen"),
    "trl": ({**TRL, "assistant_only_loss": True}, {"messages": TALK}, {"messages": []}, "empty conversation"),
    "nothing": ({**AXOLOTL, "type": "alpaca"}, ALPACA, None, "there are no rows in it"),
    "no JSON": ({**AXOLOTL, "type": "alpaca"}, ALPACA, "{", "rows.jsonl:1"),
}


def convert(config, row, folder, capsys):
    rows = folder / "rows.jsonl"
    rows.write_text("" if row is None else (row if isinstance(row, str) else json.dumps(row)) + "\n")
    config = dict(config)
    if "stage" in config:
        names = ("prompt", "query", "response") if "instruction" in (row or ()) else ()
        columns = dict(zip(names, ("instruction", "input", "output"), strict=False))
        if config.pop("ranking", False):
            columns = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
        entry = {"file_name": "rows.jsonl", "ranking": "chosen" in columns, "columns": columns}
        (folder / "dataset_info.json").write_text(json.dumps({"mine": entry}))
        config |= {"model_name_or_path": "m", "dataset": "mine", "dataset_dir": str(folder)}
    elif "base_model" in config:
        keys = [key for key in ("type", "field_messages") if key in config]
        config["datasets"] = [{"path": str(rows)} | {key: config.pop(key) for key in keys}]
    else:
        config["datasets"] = [{"path": "json", "data_files": str(rows)}]
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    trainer = ("--trainer", "sft") if "use_peft" in config else ()
    code = main(["convert", str(path), *trainer])
    return code, capsys.readouterr()


@pytest.mark.parametrize("name", CASES)
def test_rows_that_do_not_render_are_named(name, tmp_path, capsys):
    config, row, other_row, said = CASES[name]
    code, shown = convert(config, row, tmp_path, capsys)
    assert code == 0 and not shown.err, shown.err
    assert f"the first 1 of {tmp_path}/rows.jsonl" in shown.out.replace("\n#   ", " ")
    code, shown = convert(config, other_row, tmp_path, capsys)
    [line] = [line for line in shown.err.splitlines() if "rows of " in line]
    assert code == 3 and f"rows of {tmp_path}/rows.jsonl" in line and said in line
    assert "Rows that were rendered" not in shown.out


def test_calls_without_a_place_in_the_template_are_named(tmp_path, capsys):
    function = {"name": "add", "description": "", "parameters": {"type": "object", "properties": {}}}
    row = {"conversations": [{"from": "human", "value": "a?"}, {"from": "gpt", "value": "b"}]}
    row["tools"] = json.dumps([{"type": "function", "function": function}])
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    entry = {"file_name": "rows.jsonl", "formatting": "sharegpt", "columns": {"tools": "tools"}}
    (tmp_path / "dataset_info.json").write_text(json.dumps({"mine": entry}))
    config = {"model_name_or_path": "m", "stage": "sft", "template": "qwen3", "dataset": "mine"}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config | {"dataset_dir": str(tmp_path)}))
    assert main(["convert", str(tmp_path / "config.yaml")]) == 3
    assert "has no place for tools" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["book.txt", "rows.arrow", "rows.jsonl.gz"])
def test_files_of_other_forms_are_named_though_they_are_elsewhere(name, tmp_path, capsys):
    config = {**AXOLOTL, "datasets": [{"path": f"./there/{name}", "type": "completion"}]}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    assert main(["convert", str(tmp_path / "config.yaml")]) == 3
    assert f"rows of ./there/{name}" in capsys.readouterr().err


def test_a_local_tokenizer_renders_with_its_own_template(tmp_path, capsys, test_data):
    folder = test_data / "tokenizers" / "qwen2.5"
    config = {**AXOLOTL, "base_model": str(folder), "type": "chat_template"}
    code, shown = convert(config, {"messages": TALK}, tmp_path, capsys)
    assert code == 0 and "with another tokenizer" not in shown.out.replace("\n#   ", " ")


@pytest.mark.parametrize(
    ("tokenizer", "kind", "told"),
    [
        ("qwen3", "chat_template", "data.template: what it writes before an answer"),
        ("qwen2.5", "chat_template", None),
        ("llama-2", "chat_template", "the tokenizer has no chat template"),
        ("llama-3.2", "alpaca", None),
        ("llama-2", "alpaca", "data.train: a prompt and its answer are tokenised together"),
    ],
)
def test_the_models_tokenizer_decides_what_differs(tokenizer, kind, told, tmp_path, capsys, test_data):
    """As axolotl 0.21.0 rendered rows with these tokenizers; without one it is a note."""
    config = {**AXOLOTL, "datasets": [{"path": "org/rows", "type": kind}]}
    for folder in (str(test_data / "tokenizers" / tokenizer), "org/model"):
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(config | {"base_model": folder}))
        code = main(["convert", str(tmp_path / "config.yaml")])
        shown = capsys.readouterr()
        here = folder != "org/model"
        assert code == (3 if here and told else 0)
        assert (told or "no counterpart") in shown.err if here and told else not shown.err
        assert here or "data." in shown.out.partition("It differs in")[2]
