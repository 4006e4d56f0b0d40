"""Files that people write, as editors on Windows save them: with a byte order mark, and CRLF."""

from __future__ import annotations

import dataclasses
import json

import pytest

from jaxtune.commands import answers
from jaxtune.compat.command_line import HfArgumentParser
from jaxtune.convert import llama_factory
from jaxtune.train.config.file import read_values
from jaxtune.train.data.rendering.templates import resolve_template


@dataclasses.dataclass
class Options:
    output_dir: str = ""


def _read_options(path, kind):
    return getattr(HfArgumentParser(Options), f"parse_{kind}_file")(str(path))[0].output_dir


READERS = {
    "prompts.jsonl": (
        '{"prompt": "a"}\n\n{"prompt": "b"}\n',
        lambda path: [(number, row["prompt"]) for number, row in answers.read_rows(path).items()],
    ),
    "recipe.yaml": ("steps: 3\nseed: 1\n", read_values),
    "chat.jinja": (
        "{% for m in messages %}\n{{ m.content }}\n{% endfor %}",
        lambda path: resolve_template(None, str(path)),
    ),
    "dataset_info.json": (
        '{"rows": {"file_name": "a.json"}}',
        lambda path: sorted(llama_factory._dataset_info(path.parent, "")),
    ),
    "options.json": ('{"output_dir": "x"}', lambda path: _read_options(path, "json")),
    "options.yaml": ("output_dir: x\n", lambda path: _read_options(path, "yaml")),
}


@pytest.mark.parametrize("name", READERS)
def test_a_file_with_a_mark_is_read_as_without(name, tmp_path):
    text, read = READERS[name]
    path = tmp_path / name
    path.write_bytes(text.encode())
    plain = read(path)
    path.write_bytes(text.replace("\n", "\r\n").encode("utf-8-sig"))
    assert plain and json.dumps(read(path)).replace("\\r", "") == json.dumps(plain)
