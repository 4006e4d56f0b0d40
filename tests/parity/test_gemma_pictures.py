"""Gemma with pictures against transformers itself: tower, features, logits, loss, gradients, files, adapters."""

from __future__ import annotations

import dataclasses
import json

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import peft
import picture_rows as rows
import pytest
import torch
import transformers
from flax import nnx
from random_weights import write_checkpoint
from safetensors.numpy import load_file
from tiny_models import shaken

import jaxtune
from jaxtune.models.generation.requests import PromptPictures
from jaxtune.models.hf import from_pretrained, save_pretrained
from jaxtune.models.lora import linears, with_trained_tower
from jaxtune.models.registry import tensor_names, whole_tensor_name
from tests.parity.test_pictures import load
from tests.train.test_gemma_picture_runs import run_of

LENGTH, PATCHES = 64, 144
CONFIGS = {
    "gemma4": (rows.GEMMA4, rows.OF_GEMMA4),
    "unified": (rows.UNIFIED, rows.OF_UNIFIED),
    "wide": (rows.WIDE, rows.OF_GEMMA4),
    "gemma3": (rows.GEMMA3, rows.OF_GEMMA3),
}


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """name -> (folder, transformers' model, ours, form), fp32; made once."""
    made = {}

    def get(name):
        if name not in made:
            hf, form = CONFIGS[name]
            with torch.device("meta"):
                empty = transformers.AutoModelForImageTextToText.from_config(transformers.AutoConfig.for_model(**hf))
            shapes = {key: tuple(value.shape) for key, value in empty.state_dict().items()}
            folder = tmp_path_factory.mktemp(name) / "base"
            write_checkpoint(folder, hf, {key: shape for key, shape in shapes.items() if key != "lm_head.weight"})
            made[name] = folder, load(folder), from_pretrained(folder, dtype="float32", pictures=True)[0], form
        return made[name]

    return get


def masked(name, model, given):
    """The arguments with masks made ahead where transformers' plain forward of 12B differs from its own generation: in
    full layers, too, it lets a picture's tokens see each other."""
    if name != "unified":
        return given
    from transformers.models.gemma4_unified import modeling_gemma4_unified as modeling

    ids, types = given["input_ids"], given["mm_token_type_ids"]
    masks = modeling.create_masks_for_vision_model(
        config=model.config.get_text_config(),
        inputs_embeds=torch.zeros((*ids.shape, 1)),
        attention_mask=None,
        past_key_values=None,
        position_ids=None,
        block_sequence_ids=modeling.get_block_sequence_ids_for_mask(types, device=ids.device),
    )
    return given | {"attention_mask": masks}


def arguments(pieces, form) -> dict:
    """What transformers' model takes for one document: pictures padded to the largest, row by row."""
    tokens, *_ = rows.packed([[pieces]], *rows.size(pieces, form), form=form)
    ids = torch.from_numpy(tokens).long()
    types = "token_type_ids" if form is rows.OF_GEMMA3 else "mm_token_type_ids"
    given = {"input_ids": ids, types: (ids == rows.PICTURE).int()}
    pictures = [piece for piece in pieces if not isinstance(piece, int)]
    if not pictures:
        return given
    if form is rows.OF_GEMMA3:
        squares = [piece.reshape(*piece.shape[:2], 3, 4, 4).transpose(2, 0, 3, 1, 4) for piece in pictures]
        return given | {"pixel_values": torch.from_numpy(np.stack([s.reshape(3, 24, 24) for s in squares]))}
    most = max(piece.shape[0] * piece.shape[1] for piece in pictures)
    pixels, places = np.zeros((len(pictures), most, form.numbers), np.float32), np.full((len(pictures), most, 2), -1)
    for index, piece in enumerate(pictures):
        height, width = piece.shape[:2]
        pixels[index, : height * width] = piece.reshape(-1, form.numbers)
        columns, lines = np.meshgrid(np.arange(width), np.arange(height))
        places[index, : height * width] = np.stack([columns, lines], -1).reshape(-1, 2)
    return given | {"pixel_values": torch.from_numpy(pixels), "image_position_ids": torch.from_numpy(places)}


sides = st.integers(1, 3)
shapes = st.lists(st.one_of(st.tuples(sides, sides), st.integers(1, 6)), min_size=1, max_size=6)


def drawn(shape, seed, form):
    """A document of this shape, in features, as far as it fits, with a token around each picture."""
    draw, pieces = np.random.default_rng(seed), []
    for part in shape:
        grid = rows.grid_of(part, form) if isinstance(part, tuple) else None
        more = rows.document(draw, *((1, grid, 1) if grid else (part,)), form=form)
        if all(s <= room for s, room in zip(rows.size([*pieces, *more], form), (LENGTH, PATCHES), strict=True)):
            pieces += more
    return pieces or rows.document(draw, 3, form=form)


@jax.jit
def run(model_and_state, tokens, segments, positions, pictures):
    model = nnx.merge(*model_and_state)
    scaled = dataclasses.replace(pictures, patches=model.vision.inputs(pictures.patches, "float32"))
    return model.vision(scaled)[0], model(tokens, segments, positions, pictures)


@pytest.mark.parametrize("name", CONFIGS)
@hypothesis.given(shape=shapes, seed=st.integers(0, 2**16))
def test_features_and_logits(name, both, shape, seed):
    """Of any document: merged features and logits."""
    _, theirs, ours, form = both(name)
    pieces = drawn(shape, seed, form)
    given, (length, patches) = arguments(pieces, form), rows.size(pieces, form)
    features, logits = run(nnx.split(ours), *rows.packed([[pieces]], LENGTH, PATCHES, form=form))
    with torch.no_grad():
        if patches:
            inputs = (given[key] for key in ("pixel_values", "image_position_ids") if key in given)
            seen = theirs.model.get_image_features(*inputs).pooler_output
            want = torch.cat(list(seen)).flatten(0, -2)
            np.testing.assert_allclose(features[0, : len(want)], want, atol=5e-5, rtol=1e-3)
        np.testing.assert_allclose(
            logits[0, :length], theirs(**masked(name, theirs, given)).logits[0], atol=1e-4, rtol=1e-3
        )


def documents_of(form, seed=5):
    draw = np.random.default_rng(seed)
    wide, tall, small, flat = (rows.grid_of(sides, form) for sides in ((2, 3), (3, 1), (1, 1), (1, 2)))
    return [
        rows.document(draw, 3, wide, 5, small, 4, form=form),
        rows.document(draw, 2, tall, 3, flat, 1, form=form),
    ]


@pytest.mark.parametrize("name", CONFIGS)
def test_loss_and_gradient_of_every_tensor(name, both):
    _, theirs, ours, form = both(name)
    documents = documents_of(form)
    theirs.zero_grad()
    total = 0.0
    for pieces in documents:
        given = arguments(pieces, form)
        logits = theirs(**masked(name, theirs, given)).logits[0, :-1]
        total = total + torch.nn.functional.cross_entropy(logits, given["input_ids"][0, 1:], reduction="sum")
    total.backward()
    want = {key: p.grad.numpy() for key, p in theirs.named_parameters() if p.grad is not None}
    # Both documents in one row, and a row of padding and nothing else.
    tokens, segments, positions, pictures = rows.packed([documents, []], LENGTH, PATCHES, form=form)
    counted = (segments[:, :-1] == segments[:, 1:]) & (segments[:, 1:] > 0)

    @nnx.jit
    def loss(model):
        logits = jax.nn.log_softmax(model(tokens, segments, positions, pictures)[:, :-1])
        return -(jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0] * counted).sum()

    value, grads = nnx.value_and_grad(loss)(with_trained_tower(ours))
    assert abs(float(value) - total.item()) < 1e-4 * abs(total.item())
    name_of = tensor_names(ours)
    got = {whole_tensor_name(name_of(path)): v.get_value() for path, v in nnx.to_flat_state(grads)}
    assert set(got) == set(want)
    for key in want:
        np.testing.assert_allclose(
            got[key], want[key], atol=2e-5 * max(1, np.abs(want[key]).max()), rtol=2e-3, err_msg=key
        )


@pytest.mark.parametrize("name", CONFIGS)
def test_folders_both_ways(name, both, tmp_path):
    """Saved with its tower, transformers loads it; its weights are the original's."""
    folder, theirs, ours, _ = both(name)
    save_pretrained(ours, tmp_path / "out", max_shard_bytes=100_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    _same_weights(load(tmp_path / "out"), theirs)
    text, _ = from_pretrained(folder, dtype="float32")
    assert text.vision is None and text.base_digest == ours.base_digest
    if text.source.passthrough is None:  # Gemma 3, of which the text model is saved alone
        return
    save_pretrained(text, tmp_path / "text")  # whose tower passes through
    _same_weights(load(tmp_path / "text"), theirs)


def _same_weights(one, other):
    first, second = one.state_dict(), other.state_dict()
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def generated(name, model, given, count):
    """transformers' greedy tokens: by generate, of 12B each from the whole row, with its masks."""
    ids = given["input_ids"]
    if name != "unified":
        return model.generate(**given, max_new_tokens=count, do_sample=False)[0, ids.shape[1] :].tolist()
    for _ in range(count):
        types = (ids == rows.PICTURE).int()
        logits = model(**masked(name, model, given | {"input_ids": ids, "mm_token_type_ids": types})).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
    return ids[0, -count:].tolist()


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_generation(name, both):
    """Prompts of several pictures."""
    _, theirs, ours, form = both(name)
    for pieces in documents_of(form, 11):
        given, batch = arguments(pieces, form), rows.packed([[pieces]], *rows.size(pieces, form), form=form)
        tokens, _, positions, pictures = batch
        with torch.no_grad():
            want = generated(name, theirs, given, 8)
        prompt = PromptPictures(pictures, positions[0])
        assert jaxtune.generate(ours, tokens.tolist(), 8, eos_token_ids=(), pictures=[prompt]) == [want]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gemma4", dict(target_modules="all-linear")),
        ("gemma4", dict(target_modules="all-linear", exclude_modules=r".*(vision_tower|embed_vision)\..*")),
        ("gemma4", dict(target_modules=r".*(vision_tower.*\.linear|embedding_projection|input_proj)", use_dora=True)),
        ("unified", dict(target_modules="all-linear")),
        ("gemma3", dict(target_modules="all-linear")),
    ],
    ids=["all", "text", "tower", "embedder", "gemma3"],
)
def test_adapters_both_ways(both, tmp_path, name, settings):
    folder, plain, ours, form = both(name)
    pieces = documents_of(form)[0]
    given, batch = arguments(pieces, form), rows.packed([[pieces]], *rows.size(pieces, form), form=form)
    torch.manual_seed(0)
    theirs = peft.get_peft_model(load(folder), peft.LoraConfig(r=4, init_lora_weights=False, **settings))
    given = masked(name, plain, given)
    with torch.no_grad():
        want = theirs(**given).logits.numpy()
    theirs.save_pretrained(tmp_path / "theirs")
    model = jaxtune.load_adapter(ours, tmp_path / "theirs")
    np.testing.assert_allclose(model(*batch), want, atol=2e-4, rtol=1e-3)
    assert np.abs(ours(*batch) - want).max() > 0.01

    adapted = shaken(jaxtune.get_peft_model(ours, r=4, **settings))
    assert _adapted(adapted) == _adapted(model)
    jaxtune.save_adapter(adapted, tmp_path / "ours")
    assert (
        load_file(tmp_path / "ours/adapter_model.safetensors").keys()
        == load_file(tmp_path / "theirs/adapter_model.safetensors").keys()
    )
    again = peft.PeftModel.from_pretrained(load(folder), tmp_path / "ours")
    with torch.no_grad():
        np.testing.assert_allclose(adapted(*batch), again(**given).logits, atol=2e-4, rtol=1e-3)
    save_pretrained(jaxtune.merge_adapter(adapted), tmp_path / "merged")
    with torch.no_grad():
        np.testing.assert_allclose(adapted(*batch), load(tmp_path / "merged")(**given).logits, atol=2e-4, rtol=1e-3)


def _adapted(model):
    return {name for name, linear in linears(model) if linear.lora is not None}


@pytest.mark.parametrize("name", CONFIGS)
def test_exports_of_a_run_with_a_trained_tower(name, tmp_path):
    """transformers reads the merged folder, and PEFT the adapter."""
    _, form = CONFIGS[name]
    adapter = {"r": 2, "lora_dropout": 0.0}
    export = {"adapter": True, "merged": True}
    base, run = run_of(tmp_path, name, model={"tower": "all"}, adapter=adapter, export=export, steps=3)
    config = json.loads((base / "config.json").read_text())
    picture = config.get("image_token_id", config.get("image_token_index"))
    pieces = documents_of(form)[0]
    tokens, segments, positions, pictures = rows.packed([[pieces]], *rows.size(pieces, form), form=form)
    tokens = np.where(tokens == rows.PICTURE, picture, tokens)
    given = arguments(pieces, form) | {"input_ids": torch.from_numpy(tokens).long()}
    given = masked(name, load(base), given)
    model, _ = from_pretrained(run / "adapter", dtype="float32", pictures=True)
    ours = model(tokens, segments, positions, pictures)
    adapted = peft.PeftModel.from_pretrained(load(base), run / "adapter")
    with torch.no_grad():
        plain, merged = load(base)(**given).logits, load(run / "merged")(**given).logits
        np.testing.assert_allclose(ours, adapted(**given).logits, atol=2e-4, rtol=1e-3)
    np.testing.assert_allclose(ours, merged, atol=2e-4, rtol=1e-3)
    assert np.abs(ours - plain.numpy()).max() > 0.01
