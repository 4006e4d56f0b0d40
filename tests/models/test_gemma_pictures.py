"""Gemma's rows with pictures: packed rows equal each document alone, nothing leaks between neighbours, limits of
linears, files and what is refused. tests/parity/test_gemma_pictures.py compares with transformers."""

from __future__ import annotations

import dataclasses
import json

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import picture_rows as rows
import pytest
from flax import nnx
from random_weights import rewrite
from safetensors.numpy import load_file
from tiny_models import shaken

import jaxtune
from jaxtune.conversations.picture_processors import PictureProcessor
from jaxtune.models.generation.requests import PromptPictures
from jaxtune.models.hf import from_pretrained, model_from_config, save_pretrained
from jaxtune.models.linear import clamped
from jaxtune.models.lora import freeze, with_trained_tower
from jaxtune.models.registry import tower_config

LENGTH, PATCHES = 40, 126
FORMS = {
    "gemma4": (rows.GEMMA4, rows.OF_GEMMA4),
    "unified": (rows.UNIFIED, rows.OF_UNIFIED),
    "wide": (rows.WIDE, rows.OF_GEMMA4),
    "gemma3": (rows.GEMMA3, rows.OF_GEMMA3),
}


@pytest.fixture(scope="module")
def models():
    return {
        name: limited(shaken(model_from_config(hf, jax.random.key(0), "float32", pictures=True)))
        for name, (hf, _) in FORMS.items()
    }


def limited(model):
    """Linears clamp some numbers."""
    for number, (_, linear) in enumerate(model.vision.linears()):
        if linear.clips is not None:
            for name, value in vars(linear.clips).items():
                if isinstance(value, nnx.Variable):
                    value.set_value(jnp.float32((1.0 + 0.1 * (number % 7)) * (-1 if "min" in name else 1)))
    return model


def losses(model, tokens, segments, positions, pictures):
    """Sum of squared hidden states over real tokens, weighted by a number of each token's own, and these states."""
    hidden = model.hidden_states(tokens, segments, positions, pictures=pictures)
    weight = jnp.cos(tokens + 3.0 * positions)
    return (jnp.square(hidden).sum(-1) * weight * (segments > 0)).sum(), hidden


@jax.jit
def gradients(model_and_state, patches, batch):
    """((loss, hidden), (gradients of what trains, of the patches))."""
    graph, trained, rest = model_and_state

    def of(trained, patches):
        *tensors, pictures = batch
        return losses(nnx.merge(graph, trained, rest), *tensors, dataclasses.replace(pictures, patches=patches))

    return jax.value_and_grad(of, (0, 1), has_aux=True)(trained, patches)


def run(model, batch):
    return gradients(nnx.split(model, nnx.Param, ...), batch[-1].patches, batch)


sides = st.integers(1, 3)
documents = st.lists(st.one_of(st.tuples(sides, sides), st.integers(1, 5)), min_size=1, max_size=5)


def divided(shapes, seed, form):
    """Documents of these shapes, in features, as they fit two rows: [documents of the first row, of the second]."""
    draw, filled = np.random.default_rng(seed), [[], []]
    for shape in shapes:
        parts = [rows.grid_of(part, form) if isinstance(part, tuple) else part for part in shape]
        spaced = [x for part in parts for x in ((1, part, 1) if isinstance(part, tuple) else (part,))]
        pieces = rows.document(draw, *spaced, form=form)
        for row in filled:
            sizes = np.sum([rows.size(each, form) for each in [*row, pieces]], 0)
            if (sizes <= (LENGTH, PATCHES)).all():
                row.append(pieces)
                break
    return filled


@pytest.mark.parametrize("name", FORMS)
@hypothesis.settings(max_examples=8)
@hypothesis.given(shapes=st.lists(documents, min_size=1, max_size=6), seed=st.integers(0, 2**16))
def test_packed_rows_are_each_document_alone(name, models, shapes, seed):
    """Hidden states, the sum of losses, and every gradient, of weights and of pixels."""
    model, form = models[name], FORMS[name][1]
    filled = divided(shapes, seed, form)
    (loss, hidden), (dmodel, dpatches) = run(model, rows.packed(filled, LENGTH, PATCHES, form=form))
    total, dtotal = 0.0, None
    for row, packed in enumerate(filled):
        at = patch = 0
        for pieces in packed:
            length, patches = rows.size(pieces, form)
            batch = rows.packed([[pieces], []], LENGTH, PATCHES, form=form)
            (one, alone), (done, dalone) = run(model, batch)
            np.testing.assert_allclose(hidden[row, at : at + length], alone[0, :length], atol=2e-5, rtol=1e-4)
            np.testing.assert_allclose(
                dpatches[row, patch : patch + patches], dalone[0, :patches], atol=2e-4, rtol=1e-3
            )
            total += one
            dtotal = done if dtotal is None else jax.tree.map(jnp.add, dtotal, done)
            at, patch = at + length, patch + patches
        np.testing.assert_array_equal(dpatches[row, patch:], 0.0)
    if dtotal is None:
        return
    np.testing.assert_allclose(loss, total, rtol=1e-4, atol=1e-3)
    largest = max(1.0, *(float(np.abs(want).max()) for want in jax.tree.leaves(dtotal)))  # whose rounding is in all
    for got, want in zip(jax.tree.leaves(dmodel), jax.tree.leaves(dtotal), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-5 * largest)


@pytest.mark.parametrize("name", FORMS)
@hypothesis.settings(max_examples=8)
@hypothesis.given(
    shapes=st.lists(
        documents.filter(lambda shape: any(isinstance(part, tuple) for part in shape)), min_size=3, max_size=3
    ),
    changed=st.integers(0, 2),
    seed=st.integers(0, 2**16),
)
def test_nothing_leaks_between_documents_and_rows(name, models, shapes, changed, seed):
    """Other pixels and tokens in one document leave every other one as it was, bit for bit: before it and behind it, in
    its row and in the other, forward and backward."""
    model, form = models[name], FORMS[name][1]
    filled = divided(shapes, seed, form)
    where = [(row, number) for row, packed in enumerate(filled) for number in range(len(packed))]
    hypothesis.assume(where)
    row, number = where[changed % len(where)]
    draw = np.random.default_rng(seed + 1)
    filled_again = [list(packed) for packed in filled]
    filled_again[row][number] = [
        int(draw.integers(1, rows.PICTURE))
        if isinstance(piece, int)
        else 5 * rows.picture(draw, *piece.shape[:2], form)
        for piece in filled[row][number]
    ]
    batches = [rows.packed(each, LENGTH, PATCHES, form=form) for each in (filled, filled_again)]
    (_, before), (_, dbefore) = run(model, batches[0])
    (_, after), (_, dafter) = run(model, batches[1])
    ends = np.cumsum([(0, 0), *(rows.size(pieces, form) for pieces in filled[row])], 0)
    tokens, patches = np.ones((2, LENGTH), bool), np.ones((2, PATCHES), bool)
    tokens[row, slice(*ends[number : number + 2, 0])] = False
    patches[row, slice(*ends[number : number + 2, 1])] = False
    np.testing.assert_array_equal(np.asarray(before)[tokens], np.asarray(after)[tokens])
    np.testing.assert_array_equal(np.asarray(dbefore)[patches], np.asarray(dafter)[patches])
    assert (np.asarray(before)[~tokens] != np.asarray(after)[~tokens]).any()


def test_gradient_of_limits():
    """At a limit it passes, beyond it is 0; infinite limits change nothing."""
    x = jnp.asarray([-3.0, -1.0, 0.5, 2.0, 2.5])
    value, dx = jax.vjp(lambda x: clamped(x, jnp.float32(-1), jnp.float32(2)), x)
    np.testing.assert_array_equal(value, [-1.0, -1.0, 0.5, 2.0, 2.0])
    np.testing.assert_array_equal(dx(jnp.ones(5))[0], [0.0, 1.0, 1.0, 1.0, 0.0])
    value, dx = jax.vjp(lambda x: clamped(x, jnp.float32(-jnp.inf), jnp.float32(jnp.inf)), x)
    np.testing.assert_array_equal(value, x)
    np.testing.assert_array_equal(dx(jnp.ones(5))[0], 1.0)


def test_limits_are_saved_and_do_not_train(models, tmp_path):
    """Infinite ones are read, too; other infinite numbers are refused."""
    plain = model_from_config(rows.GEMMA4, jax.random.key(0), "float32", pictures=True)
    for index, model in enumerate((models["gemma4"], plain)):
        save_pretrained(model, tmp_path / str(index))
        again, _ = from_pretrained(tmp_path / str(index), dtype="float32", pictures=True)
        got, want = (nnx.to_flat_state(nnx.state(m)) for m in (again, model))
        for (path, one), (_, other) in zip(got, want, strict=True):
            np.testing.assert_array_equal(one.get_value(), other.get_value(), err_msg=str(path))
    trained = with_trained_tower(freeze(models["gemma4"]))
    names = {str(path[-1]) for path, _ in nnx.to_flat_state(nnx.state(trained, nnx.Param))}
    assert "weight" in names and not names & {"input_min", "output_max", "bias", "scale"}
    plain.vision.projection.weight.set_value(plain.vision.projection.weight[...].at[0, 0].set(jnp.inf))
    save_pretrained(plain, tmp_path / "broken")
    with pytest.raises(ValueError, match=r"not finite in float32: model\.vision_tower\.patch_embedder\.input_proj"):
        from_pretrained(tmp_path / "broken", dtype="float32", pictures=True)


def greedily(model, pieces, count, form):
    """One token after the other, each from the whole row."""
    pieces = list(pieces)
    for _ in range(count):
        batch = rows.packed([[pieces]], LENGTH + 16, PATCHES, form=form)
        pieces.append(int(model(*batch)[0, rows.size(pieces, form)[0] - 1].argmax()))
    return pieces[-count:]


@pytest.mark.parametrize("name", FORMS)
def test_generation_steps_as_the_whole_row_says(name, models):
    """Prompts with pictures beside text."""
    model, form = models[name], FORMS[name][1]
    draw = np.random.default_rng(7)
    wide, tall, small = (rows.grid_of(sides, form) for sides in ((2, 3), (3, 1), (1, 1)))
    prompted = [
        rows.document(draw, 2, wide, 3, form=form),
        rows.document(draw, 5, form=form),
        rows.document(draw, 1, tall, 2, small, 1, form=form),
    ]
    prompts, pictures = [], []
    for pieces in prompted:
        tokens, _, positions, of_row = rows.packed([[pieces]], *rows.size(pieces, form), form=form)
        prompts.append(tokens[0].tolist())
        pictures.append(PromptPictures(of_row, positions[0]) if of_row.patches.shape[1] else None)
    answers = jaxtune.generate(model, prompts, 5, eos_token_ids=(), pictures=pictures)
    assert answers == [greedily(model, pieces, 5, form) for pieces in prompted]


def with_vision(of=rows.GEMMA4, **changes):
    return {**of, "vision_config": {**of["vision_config"], **changes}}


@pytest.mark.parametrize(
    ("hf", "message"),
    [
        (with_vision(head_dim=22), r"vision_config\.head_dim = 22: turned by two axes, it must be a multiple of 4"),
        (with_vision(attention_bias=True), r"vision_config\.attention_bias = true is not supported"),
        (with_vision(hidden_activation="relu"), r"vision_config\.hidden_activation 'relu' is not supported"),
        (with_vision(num_hidden_layers=0), r"vision_config\.num_hidden_layers = 0"),
        (with_vision(use_clipped_linears="yes"), r"vision_config\.use_clipped_linears = 'yes'"),
        (
            with_vision(rows.UNIFIED, output_proj_dims=8),
            r"vision_config\.output_proj_dims = 8: must be 56, mm_embed_dim",
        ),
        (with_vision(rows.GEMMA3, vision_use_head=True), r"vision_config\.vision_use_head = true is not supported"),
        (with_vision(rows.GEMMA3, num_attention_heads=5), "hidden_size 48 is not a multiple of num_attention_heads 5"),
        (with_vision(rows.GEMMA3, image_size=20), "mm_tokens_per_image = 9: must be a square that divides .* 5 x 5"),
        ({**rows.GEMMA3, "mm_tokens_per_image": 8}, "mm_tokens_per_image = 8: must be a square"),
    ],
)
def test_refused_towers(hf, message):
    with pytest.raises(ValueError, match=message):
        tower_config(hf)


TOWERS = (rows.HF, rows.QWEN3_VL, rows.GEMMA4, rows.UNIFIED, rows.GEMMA3)


@hypothesis.given(st.sampled_from(TOWERS), st.data())
def test_null_stands_for_a_missing_key(hf, data):
    vision = hf["vision_config"]
    left_out = data.draw(st.sets(st.sampled_from(sorted(vision))))

    def read(changed):
        try:
            return tower_config({**hf, "vision_config": changed})
        except ValueError as error:
            return str(error)

    missing = {key: value for key, value in vision.items() if key not in left_out}
    assert read(missing) == read({key: missing.get(key) for key in vision})


@pytest.mark.parametrize("hf", TOWERS)
def test_every_tensor_of_a_tower_has_a_name_of_its_own(hf):
    config = tower_config(hf)
    state = nnx.state(nnx.eval_shape(lambda: config.make(jax.random.key(0), "float32")))
    names = [config.tensor_name(path) for path in nnx.to_flat_state(state).paths]
    assert len({*names}) == len(names) and all(name.startswith(config.prefixes) for name in names)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("gemma-4-e4b-it", 167_364_608 + 1_966_080 + 16 * 7 * 4),  # tower, embedder, limits
        ("gemma-4-12b-it", 49_922_304),
        ("gemma-3-4b-it", 416_866_032 + 2_950_272),
    ],
)
def test_published_towers(name, count, test_data):
    config = tower_config(json.loads((test_data / "configs/vision" / f"{name}.json").read_text()))
    shapes = nnx.state(nnx.eval_shape(lambda: config.make(jax.random.key(0), "bfloat16")))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == count
    settings = json.loads((test_data / "configs/vision" / f"preprocessor_config-{name}.json").read_text())
    assert config.both_ways == {"gemma-4-e4b-it": None, "gemma-4-12b-it": "windows", "gemma-3-4b-it": "all"}[name]
    hf = json.loads((test_data / "configs/vision" / f"{name}.json").read_text())
    processor = PictureProcessor.of(hf, settings, {}.get)
    assert (processor.size, processor.merge) == (config.patch_numbers, config.merge_size)


def test_names_of_older_files(models, tmp_path):
    """Gemma 3's of transformers 4, and those that the 12B is published with."""
    model = models["gemma3"]
    save_pretrained(model, tmp_path / "new")
    save_pretrained(model, tmp_path / "old")

    def older(content):
        for name in list(content):
            value = content.pop(name)
            name = name.replace("model.language_model.", "language_model.model.")
            content[name.removeprefix("model.")] = value

    rewrite(tmp_path / "old", older)
    names = load_file(tmp_path / "old/model.safetensors").keys()
    assert "vision_tower.vision_model.post_layernorm.weight" in names
    for folder in ("new", "old"):
        again, _ = from_pretrained(tmp_path / folder, dtype="float32", pictures=True)
        got, want = (nnx.to_flat_state(nnx.state(m)) for m in (again, model))
        for (path, one), (_, other) in zip(got, want, strict=True):
            np.testing.assert_array_equal(one.get_value(), other.get_value(), err_msg=str(path))
    save_pretrained(models["unified"], tmp_path / "unified")
    names = load_file(tmp_path / "unified/model.safetensors").keys()
    assert {"model.vision_embedder.patch_ln1.weight", "model.vision_embedder.pos_embedding"} <= names
    assert "model.embed_vision.embedding_projection.weight" in names
