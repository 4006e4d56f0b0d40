"""benchmarks/train/quality.py: what it compares is what it says."""

from __future__ import annotations

import json
import re
import sys

import jax
import numpy as np
import pytest

from benchmarks.train import quality
from jaxtune.models.hf import model_from_config


def test_made_outliers_change_no_number():
    model = model_from_config(quality.config(128, 2), jax.random.key(0), "bfloat16")
    spiked = quality.with_outliers(model, 6)
    tokens, answers = quality.rows_of_tasks(2, 0, in_words=True)
    np.testing.assert_array_equal(model(tokens), spiked(tokens))
    assert float(spiked.layers[0].mlp_norm.weight[...].max()) == 64 and answers.any(1).all()


@pytest.mark.parametrize("in_words", [False, True])
def test_an_answer_follows_what_is_asked(in_words):
    tokens, answers = quality.rows_of_tasks(2, 0, in_words)
    for row, answer in zip(tokens.reshape(-1, quality.WIDTH), answers.reshape(-1, quality.WIDTH), strict=True):
        text, wanted = (bytes(part[part > 0].tolist()).decode() for part in (row, row[answer]))
        words = re.findall(r"\w+", text)
        given, found = words[:-1], words[-1]
        if given[-1].isdigit():
            assert int(found) == int(given[-2]) + int(given[-1])
        else:
            assert found == (given[-1] if given[0][0] == "c" else given[-1][::-1])
        assert text.endswith(wanted) and wanted == found + "\n"


def test_pieces_of_a_text_are_drawn_once():
    text = "".join(chr(97 + n % 26) * quality.LENGTH for n in range(5)) + "\u00fc" * 8
    tokens, answers = quality.rows_of_text(text, 4, 0)
    assert sorted({*tokens[:, 0].tolist()}) == sorted(tokens[:, 0].tolist()) and answers.all()
    assert not quality.rows_of_text("\u00fc" * quality.LENGTH, 1, 0)[1].any()
    with pytest.raises(ValueError, match="5 pieces of 256 characters, of 6"):
        quality.rows_of_text(text, 6, 0)


def test_arms_of_one_seed_are_compared(tmp_path, monkeypatch):
    arguments = "--steps 2 --pretrain-steps 1 --seeds 1 --rows 1 --hidden 128 --layers 1 --scale 256"
    arguments += f" --bases outliers --output {tmp_path / 'q.json'} --arms "

    monkeypatch.setattr(quality, "LIBRARIES", ("optax",))  # the smallest

    def main(arms: str) -> int:
        monkeypatch.setattr(sys, "argv", ["quality.py", *(arguments + arms).split()])
        return quality.main()

    assert main("bf16,fp8,bf16_nudged") == 0
    assert main("bf16") == 0  # from the same weights: what is there is not made again
    record = json.loads((tmp_path / "q.json").read_text())
    assert {run["arm"] for run in record["runs"]} == {"bf16", "fp8", "bf16_nudged"}
    assert len(record["runs"]) == 3 and len(record["pretrained"]) == 1
    with pytest.raises(SystemExit, match="--steps 3: .* holds runs of 2"):
        main("bf16 --steps 3")
    found = record["summary"]
    plain, fp8, nudged = (found[f"outliers, {arm}"] for arm in ("bf16", "fp8", "bf16_nudged"))
    assert 0 < abs(nudged["loss_over_bf16"]) < 0.001
    assert plain["loss_over_bf16"] == 0 and plain["least_cosine"] == pytest.approx(1, abs=1e-5)
    assert 0 < abs(fp8["loss_over_bf16"]) < 0.01 and 0.9 < fp8["least_cosine"] < 0.9999
