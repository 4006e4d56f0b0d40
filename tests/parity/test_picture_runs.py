"""What a run with pictures exports is read by transformers and PEFT."""

from __future__ import annotations

import json

import numpy as np
import peft
import picture_rows as rows
import torch

from jaxtune import cli
from jaxtune.models.hf import from_pretrained
from tests.parity.test_pictures import load
from tests.train.picture_runs import write_model, write_rows


def test_exports_of_a_run_with_a_trained_tower(tmp_path):
    base, data = write_model(tmp_path / "model"), write_rows(tmp_path / "rows", 8)
    settings = {
        "model": {"path": str(base), "tower": "all"},
        "data": {"train": str(data), "length": 128},
        "adapter": {"r": 2},
        "optim": {"learning_rate": 0.02},
        "precision": "fp32",
        "steps": 3,
        "rows_per_step": 1,
        "export": {"adapter": True, "merged": True},
        "output": str(tmp_path / "out"),
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(settings))
    assert cli.main(["train", str(tmp_path / "recipe.yaml")]) == 0
    picture = json.loads((base / "config.json").read_text())["image_token_id"]
    pieces = rows.document(np.random.default_rng(1), 3, (4, 6), 5, (2, 4), 2)
    tokens, segments, positions, pictures = rows.packed([[pieces]], *rows.size(pieces))
    tokens = np.where(tokens == rows.PICTURE, picture, tokens)
    ids, drawn = torch.from_numpy(tokens).long(), [piece for piece in pieces if not isinstance(piece, int)]
    given = {
        "input_ids": ids,
        "mm_token_type_ids": (ids == picture).int(),
        "pixel_values": torch.from_numpy(np.concatenate([rows.in_blocks(piece) for piece in drawn])),
        "image_grid_thw": torch.tensor([(1, *piece.shape[:2]) for piece in drawn]),
    }
    model, _ = from_pretrained(tmp_path / "out/adapter", dtype="float32", pictures=True)
    ours = model(tokens, segments, positions, pictures)
    adapted = peft.PeftModel.from_pretrained(load(base), tmp_path / "out/adapter")
    with torch.no_grad():
        plain, merged = load(base)(**given).logits, load(tmp_path / "out/merged")(**given).logits
        np.testing.assert_allclose(ours, adapted(**given).logits, atol=2e-4, rtol=1e-3)
    np.testing.assert_allclose(ours, merged, atol=2e-4, rtol=1e-3)
    assert np.abs(ours - plain.numpy()).max() > 0.01
