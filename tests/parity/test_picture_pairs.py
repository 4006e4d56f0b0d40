"""Preferences over rows with pictures against plain computations in transformers and PEFT."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import peft
import pytest
import torch
from flax import nnx
from picture_rows import QWEN3_VL
from safetensors.numpy import load_file
from tiny_models import shaken

import jaxtune
from jaxtune.conversations.picture_processors import PictureProcessor
from jaxtune.models.hf import from_pretrained
from jaxtune.models.lora import copy_structure
from jaxtune.train.config import DataConfig
from jaxtune.train.data.packing.pairs import LABELS
from jaxtune.train.data.rendering.pictures import PictureOptions
from jaxtune.train.objectives.kto import KTO
from jaxtune.train.objectives.loss import Forward
from jaxtune.train.objectives.preference import DPO, ORPO, SimPO
from tests.parity.test_pictures import load
from tests.train.data.pictures import file_of
from tests.train.picture_runs import draw, write_model

LENGTH = 160


def _turn(role, *content):
    parts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in content]
    return {"role": role, "content": parts}


def _shown(colour, seed):
    return {"type": "image", "image": file_of(draw(colour, seed))}


def _answers(chosen, rejected):
    return {side: [_turn("assistant", text)] for side, text in (("chosen", chosen), ("rejected", rejected))}


# As people have them: messages with parts and a column of pictures (TRL), one picture beside texts (RLAIF-V), two
# pictures of which one is also another row's, and text alone.
PAIRS = [
    {
        "prompt": [_turn("user", {"type": "image"}, "Which?")],
        "images": [draw("red", 1)],
        **_answers("It is a red one.", "Blue."),
    },
    {"question": "Which is it?", "image": draw("green", 2), "chosen": "Green.", "rejected": "It is not seen here."},
    {
        "prompt": [_turn("user", _shown("blue", 3), "And", _shown("red", 1), "both?")],
        **_answers("Blue, red", "White and green"),
    },
    {"prompt": [_turn("user", "Say seven.")], **_answers("Seven", "Eight, or nine.")},
]
LABELLED = [
    {"prompt": PAIRS[number]["prompt"], "completion": PAIRS[number][side], "label": side == "chosen"}
    | ({"images": PAIRS[number]["images"]} if "images" in PAIRS[number] else {})
    for number, side in ((0, "chosen"), (2, "rejected"), (3, "chosen"), (0, "rejected"))
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    return {"qwen3_5": write_model(folder / "qwen3_5"), "qwen3_vl": write_model(folder / "qwen3_vl", QWEN3_VL)}


def _prepared(objective, folder, tokenizer, **options):
    data = DataConfig(train="rows", length=LENGTH, **options)
    config = json.loads((folder / "config.json").read_text())
    written = json.loads((folder / "preprocessor_config.json").read_text())
    pictures = PictureOptions(PictureProcessor.of(config, written, tokenizer.convert_tokens_to_ids))
    rows = LABELLED if objective.name == "kto" else PAIRS
    return objective.prepare(rows, tokenizer, data, vocab_size=10**6, max_rows=None, pictures=pictures)


def _log_probs(model, documents, index, picture_token):
    """(Sum over the answer, its tokens, sum over all but the first token, their number) of a document, by itself."""
    document, pictures = documents[index], documents.pictures
    ids = torch.from_numpy(document.tokens).long()[None]
    given = {"input_ids": ids, "mm_token_type_ids": (ids == picture_token).int()}
    if inside := list(pictures.of(index, len(document.tokens))):
        patches = [pictures.made_by.patches(pictures.pictures[int(pictures.entries[i])].decoded()) for i in inside]
        given["pixel_values"] = torch.from_numpy(np.concatenate(patches))
        given["image_grid_thw"] = torch.tensor([(1, *pictures.grids[i].tolist()) for i in inside])
    whole = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    whole.model.rope_deltas = None
    log_probs = torch.log_softmax(model(**given).logits[0, :-1], -1).gather(1, ids[0, 1:, None])[:, 0]
    mask = torch.from_numpy(document.mask[1:]).float()
    words = (ids[0, 1:] != picture_token).float()  # no loss has pictures
    return (log_probs * mask).sum(), mask.sum(), (log_probs * words).sum(), words.sum()


def _plain_loss(objective, model, data, picture_token):
    """The mean loss over the pairs, of documents alone, by the formulas of the papers."""
    documents, log = data.documents, torch.nn.functional.logsigmoid
    policy = [_log_probs(model, documents, index, picture_token) for index in range(len(documents))]
    sums = torch.stack([values[0] for values in policy]).reshape(-1, 2)
    means = sums / torch.stack([values[1] for values in policy]).reshape(-1, 2)
    if objective.name == "simpo":
        return -log(objective.beta * (means[:, 0] - means[:, 1]) - objective.simpo_gamma).mean()
    if objective.name == "orpo":
        odds = means - torch.log1p(-means.exp())
        chosen = policy[::2]
        likelihood = sum(values[2] for values in chosen) / sum(values[3] for values in chosen)
        return -likelihood - objective.beta * log(odds[:, 0] - odds[:, 1]).mean()
    with torch.no_grad(), model.disable_adapter():
        base = [_log_probs(model, documents, index, picture_token)[0] for index in range(len(documents))]
    ratios = sums - torch.stack(base).reshape(-1, 2)
    if objective.name == "dpo":
        return -log(objective.beta * (ratios[:, 0] - ratios[:, 1])).mean()
    divergence = ratios[:, 1].mean().clamp(min=0).detach()
    signs = torch.from_numpy(2 * data.labels - 1)
    return torch.sigmoid(objective.beta * signs * (divergence - ratios[:, 0])).mean()


CASES = {
    "frozen tower": (DPO(), "qwen3_5", dict(exclude_modules=".*visual.*"), 1),
    "trained tower": (DPO(), "qwen3_5", {}, 2),
    "deep": (DPO(), "qwen3_vl", {}, 2),
    "deep and frozen": (DPO(), "qwen3_vl", dict(exclude_modules=".*visual.*"), 1),
    "orpo": (ORPO(), "qwen3_5", {}, 1),
    "simpo": (SimPO(), "qwen3_5", {}, 1),
    "kto": (KTO(), "qwen3_5", {}, 2),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("packing", [True, False])
def test_loss_and_gradient_of_every_adapter(folders, tmp_path, monkeypatch, case, packing):
    """Both answers of a pair, and a reference that has the same tower, see features that were made once."""
    objective, name, settings, passes = CASES[case]
    base, tokenizer = from_pretrained(folders[name], dtype="float32", pictures=True)
    model = shaken(jaxtune.get_peft_model(base, r=2, target_modules="all-linear", **settings))
    jaxtune.save_adapter(model, tmp_path / "adapter")
    theirs = peft.PeftModel.from_pretrained(load(folders[name]), tmp_path / "adapter", is_trainable=True)
    data = _prepared(objective, folders[name], tokenizer, packing=packing)
    batch, rows = data.rows.empty(len(data.rows)), data.rows
    for row in range(len(rows)):
        rows.fill(batch, row, row)
    assert (len(rows) < 4) == packing
    if objective.name == "kto":
        assert sorted(batch.extra[LABELS].sum(1)) and rows.without_second == 0
    tower, calls = type(model.vision), []
    run = tower.__call__
    monkeypatch.setattr(tower, "__call__", lambda *arguments: calls.append(1) or run(*arguments))

    @nnx.jit
    def mean_loss(model):
        forward = Forward(max_documents=rows.max_documents, max_pictures=rows.max_pictures)
        loss, count, _ = objective.loss(model, batch, forward)
        return loss / count

    loss, gradients = nnx.value_and_grad(mean_loss)(model)
    assert len(calls) == passes
    want = _plain_loss(objective, theirs, data, base_token(folders[name]))
    want.backward()
    np.testing.assert_allclose(float(loss), want.item(), rtol=2e-5)
    graded = copy_structure(model)
    nnx.update(graded, gradients)
    jaxtune.save_adapter(graded, tmp_path / "gradients")
    ours = load_file(tmp_path / "gradients/adapter_model.safetensors")
    named = {n.replace(".default", ""): p.grad.numpy() for n, p in theirs.named_parameters() if p.grad is not None}
    assert set(ours) == set(named) and any("visual" in n for n in ours) == (not settings)
    for key, value in named.items():
        np.testing.assert_allclose(ours[key], value, atol=2e-5 * max(1, np.abs(value).max()), rtol=5e-3, err_msg=key)


def base_token(folder):
    return json.loads((folder / "config.json").read_text())["image_token_id"]


def test_a_reference_computed_before_is_that_of_every_step(folders):
    base, tokenizer = from_pretrained(folders["qwen3_5"], dtype="float32", pictures=True)
    model = shaken(jaxtune.get_peft_model(base, r=2, target_modules="all-linear"))
    objective = DPO(precompute_ref_log_probs=True)
    data = _prepared(objective, folders["qwen3_5"], tokenizer)
    assert np.isnan(data.reference).all()
    losses = []
    for stored in (None, data.reference):
        rows = dataclasses.replace(data, reference=stored).rows
        batch = rows.empty(len(rows))
        for row in range(len(rows)):
            rows.fill(batch, row, row)
        losses.append(objective.loss(model, batch, Forward())[0])
        if stored is None:
            values = objective.reference(model, batch, Forward())
            for row in range(len(rows)):
                for slot, pair in enumerate(rows.pairs(row)):
                    data.reference[2 * pair : 2 * pair + 2] = values[row, slot]
    assert np.isfinite(jax.device_get(losses)).all()
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)
