"""The quickstart of pictures is real: its files, and a run from a base that has seen no digit to a model that reads."""

from __future__ import annotations

import base64
import functools
import importlib.util
import io
import json
import random
import sys
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

import jaxtune
from jaxtune import cli
from jaxtune.train import app
from jaxtune.train.config.file import load_config

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "jaxtune" / "quickstart" / "pictures"


@functools.cache
def script():
    folder = ROOT / "scripts" / "quickstart"
    sys.path.insert(0, str(folder))
    try:
        spec = importlib.util.spec_from_file_location("make_pictures", folder / "make_pictures.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(folder))
        for name in ("skills", "make_tokenizer"):
            sys.modules.pop(name, None)


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (PACKAGE / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def answer(row: dict) -> str:
    return row["messages"][1]["content"]


def data_url(row: dict) -> str:
    return row["messages"][0]["content"][0]["image"]


def picture(row: dict) -> Image.Image:
    head, _, data = data_url(row).partition(",")
    assert head == "data:image/png;base64"
    return Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")


# ---- the files


def test_the_script_makes_these_rows():
    """Their pixels with the Pillow of constraints.txt; another may draw characters a little differently."""
    for name, made in script().rows().items():
        assert [list(map(answer, made)), len(made)] == [list(map(answer, rows(name))), len(rows(name))]
        assert all(picture(a).tobytes() == picture(b).tobytes() for a, b in zip(made, rows(name), strict=True))


def test_the_base_is_small_and_of_the_scripts_shape():
    assert sum(file.stat().st_size for file in PACKAGE.rglob("*") if file.is_file()) < 4_500_000
    hf = json.loads((PACKAGE / "base" / "config.json").read_text(encoding="utf-8"))
    model, tokenizer = jaxtune.from_pretrained(PACKAGE / "base", pictures=True)
    config = script().config(tokenizer)
    for part in ("text_config", "vision_config"):
        for key, value in config[part].items():
            assert key == "dtype" or hf[part][key] == value, (part, key)
    assert script().tokenizer().get_vocab() == tokenizer.get_vocab()
    assert model.vision is not None and "generation" in tokenizer.chat_template


def test_no_word_or_number_that_is_asked_for_was_shown():
    train, held_out = ([*map(answer, rows(name))] for name in ("train", "eval"))
    read = [text for text in held_out if text.isupper() or text.isdigit()]
    assert len(read) == 160 and not set(read) & set(train)
    pictures = [data_url(row) for name in ("train", "eval") for row in rows(name)]
    assert len(set(pictures)) == len(pictures)
    # Little is won by always giving the same answer.
    assert all(Counter(texts).most_common(1)[0][1] / len(texts) < 0.05 for texts in (train, held_out))


@pytest.mark.full
def test_the_base_was_shown_no_digit_and_no_held_out_word():
    stated, held_out = script().statements(), set(map(answer, rows("eval")))
    shown = [row for row in stated if isinstance(row["messages"][0]["content"], list)]
    assert len(shown) == 32_000 and not any(character.isdigit() for row in shown for character in answer(row))
    assert not {text for row in shown if (text := answer(row)).isupper()} & held_out
    assert not {data_url(row) for row in shown} & {data_url(row) for row in rows("eval")}


# ---- the run


def train(output: Path, *overrides: str) -> tuple[dict, str]:
    """(results.json, what was printed)."""
    config, printed = load_config("quickstart-pictures", [f"output={output}", *overrides]), io.StringIO()
    assert app.run(config, console=Console(file=printed, soft_wrap=True)) == 0
    return json.loads((output / "results.json").read_text(encoding="utf-8")), printed.getvalue()


@pytest.mark.full
def test_it_learns_to_read(tmp_path):
    results, printed = train(tmp_path / "run")
    assert results["before"]["rows"] == results["after"]["rows"] == len(rows("eval"))
    assert results["before"]["exact_match"] <= 0.05
    assert results["after"]["exact_match"] >= 0.75
    assert "warning" not in printed


def shortened(tmp_path: Path, *overrides: str) -> dict:
    less = ["epochs=null", "steps=170", "evaluation.exact_match_rows=80", "export.merged=false"]
    return train(tmp_path / "run", *less, *overrides)[0]


def test_a_shortened_run_learns_to_read(tmp_path):
    results = shortened(tmp_path)
    assert results["before"]["rows"] == results["after"]["rows"] == 80
    assert results["before"]["exact_match"] <= 0.05
    assert results["after"]["exact_match"] >= 0.25
    assert results["eval_loss"]["last"] < 0.15 * results["eval_loss"]["first"]


def with_pictures(made: list[dict], shown: list[dict]) -> str:
    """Rows with the pictures of others."""
    for row, other in zip(made, shown, strict=True):
        row["messages"][0]["content"][0] = other["messages"][0]["content"][0]
    return "".join(json.dumps(row) + "\n" for row in made)


@pytest.mark.full
def test_with_shuffled_pictures_it_learns_nothing(tmp_path):
    """The score comes from what the pictures show: not from questions, nor from the base."""
    shuffled = tmp_path / "shuffled.jsonl"
    shuffled.write_text(with_pictures(rows("train"), random.Random(0).sample(made := rows("train"), len(made))))
    results = shortened(tmp_path, "evaluation.at_start=false", f"data.train={shuffled}")
    assert results["after"]["exact_match"] < 0.15


def test_check_shows_where_pictures_stand(capsys):
    assert cli.main(["train", "quickstart-pictures", "--check"]) == 0
    shown = capsys.readouterr().out
    assert "<|vision_start|>" in shown and "⟦" in shown
