"""`jaxtune generate --prompts`: a file of answers, also after a kill, a full disk and beside another process."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from flax import nnx

import jaxtune
from jaxtune import cli
from jaxtune.commands import answers
from jaxtune.system import files
from tests import patience
from tests.test_cli import tiny_model, word_tokenizer

TEMPLATE = "{% for m in messages %}w7 {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}w8{% endif %}"
ROWS = [
    {"prompt": "w1 w2", "id": 3},
    {"messages": [{"role": "user", "content": "w3"}, {"role": "assistant", "content": "w4"}], "where": ["x\u2028"]},
    {"prompt": [{"role": "user", "content": "w5 w6 w9"}]},
]
ASKED = [[7, 1, 2, 8], [7, 3, 8], [7, 5, 6, 9, 8]]


@pytest.fixture
def model(tmp_path) -> Path:
    jaxtune.save_pretrained(tiny_model(), tmp_path / "model", tokenizer=word_tokenizer(TEMPLATE))
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS))
    return tmp_path / "model"


def command(model: Path, *flags: str, output: str = "answers.jsonl") -> list[str]:
    folder = model.parent
    paths = ["--prompts", str(folder / "prompts.jsonl"), "--output", str(folder / output)]
    return ["generate", str(model), *paths, "--max-new-tokens", "5", "--dtype", "float32", "--slots", "2", *flags]


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().split("\n") if line]


def test_each_line_is_the_row_with_its_answer(model, capsys):
    assert cli.main(command(model, "--num-answers", "3", "--temperature", "1.5", "--seed", "4")) == 0
    prompts = [ids for ids in ASKED for _ in range(3)]
    expected = jaxtune.generate(tiny_model(), prompts, 5, 1.5, 4)
    found = [json.loads(line) for line in (model.parent / "answers.jsonl").read_text().split("\n")[:-1]]
    for index, (row, ids) in enumerate(zip(found, expected, strict=True)):
        text = " ".join(f"w{i}" for i in ids if i != 0)
        assert row == {**ROWS[index // 3], "answer": text, "finish_reason": "length"}
    assert len({row["answer"] for row in found}) > 3
    assert "9 answers of 45 tokens" in capsys.readouterr().err


TOOL = {"name": "add", "description": "Adds", "parameters": {"type": "object", "properties": {}}}


@pytest.mark.parametrize("column", answers.TOOLS)
@pytest.mark.parametrize("form", [[TOOL], json.dumps([TOOL]), [{"type": "function", "function": TOOL}]])
def test_an_answer_is_read_with_the_tools_of_its_prompt(monkeypatch, column, form):
    seen, tokenizer = [], word_tokenizer(TEMPLATE)
    prompt, reader = answers.picture_prompt, answers.AnswerReader.of

    def asked(*arguments, tools=None, **named):
        seen.append(tools)
        return prompt(*arguments, tools=tools, **named)

    def of(tokenizer, tools=None):
        seen.append(tools)
        return reader(tokenizer, tools)

    monkeypatch.setattr(answers, "picture_prompt", asked)
    monkeypatch.setattr(answers.AnswerReader, "of", of)
    row = {"prompt": "w1", column: form}
    ids = answers.prompt_of(row, tokenizer, False, "here").ids
    answers.read_answer(tokenizer, row, ids, [3], False)
    assert seen == [[{"type": "function", "function": TOOL}]] * 2


def test_the_same_command_continues_after_a_full_disk(model, capsys, monkeypatch):
    flags = ("--num-answers", "4", "--temperature", "1.0")
    assert cli.main(command(model, *flags, output="whole.jsonl")) == 0
    whole, written = (model.parent / "whole.jsonl").read_bytes(), 0

    class Full:
        """A file whose disk has room for five lines and a half."""

        def __init__(self, file):
            self._file = file

        def __getattr__(self, name):
            return getattr(self._file, name)

        def write(self, data):
            nonlocal written
            written += 1
            if written == 6:
                return self._file.write(data[: len(data) // 2])
            if written == 7:
                raise OSError(errno.ENOSPC, "No space left on device")
            return self._file.write(data)

    append = answers.append
    with monkeypatch.context() as patch:
        patch.setattr(answers, "append", lambda file, row: append(Full(file), row))
        assert cli.main(command(model, *flags)) == 2
    assert "No space left" in capsys.readouterr().err
    file = model.parent / "answers.jsonl"
    assert whole.startswith(file.read_bytes()) and len(lines(file)) == 5
    file.write_bytes(file.read_bytes() + b'{"messages": [{"ro')  # as a power cut leaves it
    assert cli.main(command(model, *flags)) == 0
    assert file.read_bytes() == whole
    assert "has 5 of 12 answers, which are kept" in capsys.readouterr().err
    assert cli.main(command(model, *flags)) == 0
    assert file.read_bytes() == whole


@pytest.mark.full
def test_a_kill_leaves_whole_lines(model):
    flags = ("--num-answers", "400", "--temperature", "1.0")
    file = model.parent / "answers.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxtune", *command(model, *flags)], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    patience.wait_until(lambda: file.exists() and file.stat().st_size >= 200, lambda: process.poll() is None)
    process.send_signal(signal.SIGKILL)
    process.wait()
    left = file.read_bytes()
    assert left.endswith(b"\n") and 0 < len(lines(file)) < 1200
    assert cli.main(command(model, *flags)) == 0
    assert file.read_bytes().startswith(left) and len(lines(file)) == 1200
    assert cli.main(command(model, *flags, output="whole.jsonl")) == 0
    assert (model.parent / "whole.jsonl").read_bytes() == file.read_bytes()


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ('{"prompt": "w1"}\n{"prompt"', "prompts.jsonl:2 is not JSON"),
        ('{"question": "w1"}\n', "prompts.jsonl:1: each line must be an object with either 'messages' or 'prompt'"),
        ('{"prompt": "w1", "answer": 3}\n', "prompts.jsonl:1 has a column 'answer'"),
        ("\n", "has no prompts"),
        ('{"prompt": 3}\n', "prompts.jsonl:1: prompt: the conversation is not a list of turns but int"),
        ('{"messages": [{"content": "w1"}]}\n', "prompts.jsonl:1: messages[0]: a message has no role; it has content"),
        ('{"messages": "w1"}\n', "prompts.jsonl:1: messages: the conversation is text, and not the JSON of a list of"),
        ('{"messages": 3}\n', "prompts.jsonl:1: messages: the conversation is not a list of turns but int"),
        ('{"messages": null}\n', "prompts.jsonl:1: messages: the conversation is not a list of turns but NoneType"),
        ('{"messages": []}\n', "prompts.jsonl:1: 'messages' has no message to answer"),
        ('\n{"prompt": "w1"}\n \n{"prompt": 3}\n', "prompts.jsonl:4: prompt: the conversation is not a list of turns"),
        ('\n{"prompt": "w1"}\n\n' + json.dumps({"prompt": "w1 " * 60}), "prompts.jsonl:4: the prompt of 62 tokens"),
        (json.dumps({"prompt": "w1 " * 60}), "62 tokens and --max-new-tokens 5 are more than the model's 64 positions"),
    ],
)
def test_what_cannot_be_asked_is_said_with_its_line(model, capsys, prompts, message):
    (model.parent / "prompts.jsonl").write_text(prompts)
    assert cli.main(command(model)) == 2
    assert message in capsys.readouterr().err and not (model.parent / "answers.jsonl").exists()


def test_prompts_that_are_not_utf_8_are_said_to_be_so(model, capsys):
    (model.parent / "prompts.jsonl").write_bytes(b'{"prompt": "w1 \xff"}\n')
    assert cli.main(command(model)) == 2
    assert "prompts.jsonl is not UTF-8: " in capsys.readouterr().err


def test_answers_to_a_row_with_nan_go_on(model, capsys):
    (model.parent / "prompts.jsonl").write_text('{"prompt": "w1", "score": NaN}\n{"prompt": "w2"}\n')
    assert cli.main(command(model)) == 0
    file = model.parent / "answers.jsonl"
    whole = file.read_text()
    file.write_text(whole.split("\n")[0] + "\n")
    assert cli.main(command(model)) == 0 and file.read_text() == whole


def test_an_output_of_something_else_is_left_alone(model, capsys):
    file = model.parent / "answers.jsonl"
    for content in (
        "some notes",
        "some\nnotes\n",
        '{"other": 3}',
        '{"prompt": "w1"}\n',
        '{"prompt": "w9", "answer": "x"}\n',
        "\n",
        json.dumps({**ROWS[0], "answer": "w1", "finish_reason": "length"}) + "\n\n",
    ):
        file.write_text(content)
        assert cli.main(command(model)) == 2
        assert "name another output" in capsys.readouterr().err and file.read_text() == content
    file.unlink()
    descriptor = os.open(file, os.O_CREAT | os.O_RDWR)
    files.hold(descriptor)
    assert cli.main(command(model)) == 2
    assert "is being written by another process" in capsys.readouterr().err
    os.close(descriptor)


@pytest.mark.full
def test_answers_go_on_with_the_model_and_the_settings_that_began_them(model, capsys):
    file, prompts = model.parent / "answers.jsonl", model.parent / "prompts.jsonl"
    assert cli.main(command(model, "--temperature", "1.0")) == 0
    whole = file.read_text()
    for unfinished in (False, True):
        file.write_text(whole.split("\n")[0] + "\n" if unfinished else whole)
        left = file.read_text()
        for flags, named in (
            (("--temperature", "0.5"), "temperature: 1.0, now 0.5"),
            (("--temperature", "1.0", "--seed", "1"), "seed: 0, now 1"),
            (("--temperature", "1.0", "--max-new-tokens", "6"), "max_new_tokens: 5, now 6"),
            (("--temperature", "1.0", "--stop", "w3"), "stop_strings: [], now ['w3']"),
            (("--temperature", "1.0", "--dtype", "bfloat16"), "dtype: 'float32', now 'bfloat16'"),
        ):
            assert cli.main(command(model, *flags)) == 2
            said = capsys.readouterr().err
            assert named in " ".join(said.split()) and "name another output" in said and file.read_text() == left
    other = tiny_model()
    nnx.update(other, jax.tree.map(lambda x: 1.01 * x, nnx.state(other)))
    jaxtune.save_pretrained(other, model.parent / "other", tokenizer=word_tokenizer(TEMPLATE))
    assert cli.main(command(model.parent / "other", "--temperature", "1.0")) == 2
    assert "weights: " in capsys.readouterr().err
    with open(prompts, "a") as more:  # answers to further prompts follow
        more.write('{"prompt": "w4"}\n')
    assert cli.main(command(model, "--temperature", "1.0")) == 0
    assert file.read_text().startswith(whole) and len(lines(file)) == 4
    (model.parent / "answers.jsonl.settings.json").unlink()
    assert cli.main(command(model, "--temperature", "1.0")) == 2
    assert "says what made them" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompts", "x.jsonl"], "--prompts and --output go with each other"),
        (["--prompt", "x", "--output", "x.jsonl"], "--prompts and --output go with each other"),
        (["--prompt", "x", "--num-answers", "2"], "--num-answers, --slots and --cache are of --prompts"),
        (
            ["--prompts", "x.jsonl", "--output", "y", "--num-answers", "0"],
            "--num-answers 0: must be a positive integer",
        ),
    ],
)
def test_flags_that_do_not_go_together(capsys, arguments, message):
    with pytest.raises(SystemExit):
        cli.main(["generate", "folder", *arguments])
    assert message in capsys.readouterr().err
