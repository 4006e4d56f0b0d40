"""Pictures in commands that ask a model, and models that read none."""

from __future__ import annotations

import argparse
import json

import pytest
from tiny_models import shaken, tiny_model

import jaxtune
from jaxtune import cli
from jaxtune.commands import serve
from jaxtune.commands.answers import has_pictures
from tests.test_cli import word_tokenizer
from tests.train.data.pictures import drawn, file_of
from tests.train.picture_runs import write_model

PART = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "What?"}]


@pytest.mark.parametrize(
    ("row", "shown"),
    [
        ({"prompt": "What?"}, False),
        ({"prompt": "What?", "images": ["a.png"]}, True),
        ({"prompt": "What?", "images": []}, False),
        ({"prompt": "<image>What?", "image": "a.png"}, True),
        ({"prompt": "What?", "image": "the address of one, beside a text"}, False),
        ({"messages": [{"role": "user", "content": PART}]}, True),
        ({"prompt": [{"role": "user", "content": PART}]}, True),
        ({"messages": [{"role": "user", "content": "an image"}], "id": {"image": None}}, False),
    ],
)
def test_which_rows_have_pictures(row, shown):
    assert has_pictures(row) is shown


def typed(monkeypatch, *lines: str) -> None:
    waiting = iter([*lines, "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(waiting))


def test_a_model_without_a_tower_refuses_them_by_name(tmp_path, capsys, monkeypatch):
    template = "{% for m in messages %}w7 {{ m['content'] }} {% endfor %}w8"
    jaxtune.save_pretrained(tiny_model(), tmp_path / "model", tokenizer=word_tokenizer(template))
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "w1"}) + "\n\n" + json.dumps({"prompt": "w1", "images": ["a.png"]}) + "\n")
    model, why = str(tmp_path / "model"), r"pictures of a 'llama' model are not supported"
    for flags, name in (
        (["--prompt", "w1", "--image", "a.png"], "--image has pictures"),
        (["--prompts", str(rows), "--output", str(tmp_path / "out.jsonl")], "rows.jsonl:3 has pictures"),
    ):
        assert cli.main(["generate", model, *flags]) == 2
        told = capsys.readouterr().err
        assert name in told and why in told and not (tmp_path / "out.jsonl").exists()
    typed(monkeypatch, "/image a.png", "/what")
    assert cli.main(["chat", model]) == 0
    told = capsys.readouterr().err
    assert why in told and "/what: unknown; there are /reset, /exit" in told and "/image FILE" not in told


def test_a_server_reads_pictures_where_its_model_can(tmp_path):
    folder = write_model(tmp_path / "model")
    options = dict(model=str(folder), adapter=[], dtype="float32", load_in=None, max_pixels=256, remote_images=True)
    [served] = serve._models(argparse.Namespace(**options, no_pictures=False), lambda *_: None)
    reader = served.readable.pictures
    assert served.model.vision is not None and reader is not None
    assert reader.access.remote and not reader.access.files
    assert reader.processor.features(reader.processor.grid(drawn(40, 40))) == 4
    [served] = serve._models(argparse.Namespace(**options, no_pictures=True), lambda *_: None)
    assert served.model.vision is None and served.readable.pictures is None
    assert served.readable.why_no_pictures == "the server was started with --no-pictures"


def test_what_cannot_be_read_is_told(tmp_path, capsys, monkeypatch):
    folder = write_model(tmp_path / "model")
    text, tokenizer = jaxtune.from_pretrained(folder, dtype="float32")
    adapter = shaken(jaxtune.get_peft_model(text, r=2, target_modules=["q_proj"]))  # trained without the tower
    jaxtune.save_adapter(adapter, tmp_path / "adapter", tokenizer)
    (tmp_path / "broken.png").write_bytes(b"no picture")
    (tmp_path / "whole.png").write_bytes(file_of(drawn(20, 20)))
    monkeypatch.chdir(tmp_path)
    for image, why in (
        ("broken.png", "broken.png is no picture of a known kind"),
        ("none.png", "there is no file 'none.png'"),
        ("https://localhost:9/a.png", "is remote, and fetched only with --remote-images"),
    ):
        assert cli.main(["generate", "model", "--dtype", "float32", "--prompt", "What?", "--image", image]) == 2
        assert why in capsys.readouterr().err
    typed(monkeypatch, "/image broken.png", "/image whole.png", "/reset", "/image whole.png", "What?")
    flags = ["--max-new-tokens", "2", "--dtype", "float32", "--max-pixels", "256"]
    assert cli.main(["chat", "adapter", *flags]) == 0
    told = capsys.readouterr().err
    assert "is no picture of a known kind" in told and told.count("a picture of 4 tokens") == 2
    (folder / "preprocessor_config.json").unlink()
    typed(monkeypatch, "/image whole.png", "What?")
    assert cli.main(["chat", "adapter", *flags]) == 0
    assert "there is no preprocessor_config.json" in capsys.readouterr().err
