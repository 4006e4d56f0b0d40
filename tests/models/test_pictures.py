"""Rows with pictures: packed rows equal each document alone, nothing leaks between neighbours, towers that are frozen
have no backward, files and what is refused. tests/parity/test_pictures.py compares with transformers."""

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
from jax.sharding import NamedSharding, PartitionSpec
from tiny_models import over, shaken

import jaxtune
from jaxtune.models.decoder import Decoder
from jaxtune.models.generation.requests import PromptPictures
from jaxtune.models.hf import from_pretrained, model_from_config, save_pretrained
from jaxtune.models.lora import linears, with_trained_tower
from jaxtune.models.placement import partition
from jaxtune.models.registry import config_from_hf, tower_config
from jaxtune.models.stack.residual_plan import RECOMPUTE, LayerPlan, ResidualPlan
from jaxtune.models.stack.stack import run_in_parts
from jaxtune.pallas.formats import Stored

LENGTH, PATCHES = 40, 56


@pytest.fixture(scope="module")
def models():
    configs = {"qwen3_5": rows.HF, "qwen3_vl": rows.QWEN3_VL}
    return {
        name: shaken(model_from_config(hf, jax.random.key(0), "float32", pictures=True)) for name, hf in configs.items()
    }


@pytest.fixture
def model(models):
    return models["qwen3_5"]


def losses(model, tokens, segments, positions, pictures, plan=None):
    """Sum of squared hidden states over real tokens, weighted by a number of each token's own, and these states."""
    hidden = model.hidden_states(tokens, segments, positions, plan=plan, pictures=pictures)
    weight = jnp.cos(tokens + 3.0 * positions[..., 0] + 5.0 * positions[..., 2])
    return (jnp.square(hidden).sum(-1) * weight * (segments > 0)).sum(), hidden


@jax.jit
def gradients(model_and_state, patches, batch):
    """((loss, hidden), (gradients of the model's tensors, of the patches))."""
    graph, state = model_and_state

    def of(state, patches):
        *tensors, pictures = batch
        return losses(nnx.merge(graph, state), *tensors, dataclasses.replace(pictures, patches=patches))

    return jax.value_and_grad(of, (0, 1), has_aux=True)(state, patches)


def run(model, batch):
    return gradients(nnx.split(model), batch[-1].patches, batch)


grids = st.tuples(st.integers(1, 4), st.integers(1, 4)).map(lambda grid: (2 * grid[0], 2 * grid[1]))
documents = st.lists(st.one_of(grids, st.integers(1, 5)), min_size=1, max_size=5)


def divided(shapes, seed):
    """Documents of these shapes as they fit two rows, in order: [documents of the first row, of the second]."""
    draw, filled = np.random.default_rng(seed), [[], []]
    for shape in shapes:
        pieces = rows.document(draw, *shape)
        for row in filled:
            sizes = np.sum([rows.size(each) for each in [*row, pieces]], 0)
            if (sizes <= (LENGTH, PATCHES)).all():
                row.append(pieces)
                break
    return filled


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_vl"])
@hypothesis.given(shapes=st.lists(documents, min_size=1, max_size=7), seed=st.integers(0, 2**16))
def test_packed_rows_are_each_document_alone(name, models, shapes, seed):
    """Hidden states, the sum of losses, and every gradient, of weights and of pixels."""
    model = models[name]
    filled = divided(shapes, seed)
    (loss, hidden), (dmodel, dpatches) = run(model, rows.packed(filled, LENGTH, PATCHES))
    total, dtotal = 0.0, None
    for row, packed in enumerate(filled):
        at = patch = 0
        for pieces in packed:
            length, patches = rows.size(pieces)
            (one, alone), (done, dalone) = run(model, rows.packed([[pieces], []], LENGTH, PATCHES))
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
    for got, want in zip(jax.tree.leaves(dmodel), jax.tree.leaves(dtotal), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4 * max(1.0, np.abs(want).max()))


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_vl"])
@hypothesis.given(
    shapes=st.lists(
        documents.filter(lambda shape: any(isinstance(part, tuple) for part in shape)), min_size=3, max_size=3
    ),
    changed=st.integers(0, 2),
    seed=st.integers(0, 2**16),
)
def test_nothing_leaks_between_documents_and_rows(name, models, shapes, changed, seed):
    """Other pixels and tokens in one document leave every other one as it was, bit for bit: in states of attention and
    of the delta rule, before it and behind it, in its row and in the other, forward and backward."""
    model = models[name]
    filled = divided(shapes, seed)
    where = [(row, number) for row, packed in enumerate(filled) for number in range(len(packed))]
    hypothesis.assume(where)
    row, number = where[changed % len(where)]
    draw = np.random.default_rng(seed + 1)
    filled_again = [list(packed) for packed in filled]
    filled_again[row][number] = [
        int(draw.integers(1, rows.PICTURE)) if isinstance(piece, int) else 50 * rows.picture(draw, *piece.shape[:2])
        for piece in filled[row][number]
    ]
    batches = [rows.packed(each, LENGTH, PATCHES) for each in (filled, filled_again)]
    (_, before), (_, dbefore) = run(model, batches[0])
    (_, after), (_, dafter) = run(model, batches[1])
    tokens = np.ones((2, LENGTH), bool)
    patches = np.ones((2, PATCHES), bool)
    start = np.sum([rows.size(pieces) for pieces in filled[row][:number]], 0, dtype=int) + np.zeros(2, int)
    end = start + rows.size(filled[row][number])
    tokens[row, start[0] : end[0]] = patches[row, start[1] : end[1]] = False
    np.testing.assert_array_equal(before[tokens], after[tokens])
    np.testing.assert_array_equal(dbefore[patches], dafter[patches])
    if not tokens.all():
        assert np.abs(before[~tokens] - after[~tokens]).max() > 1e-3


def batch_of(*shape, most=None):
    return rows.packed([[rows.document(np.random.default_rng(0), *shape)], []], LENGTH, PATCHES, most)


def test_a_feature_stands_where_it_is_told():
    """The same pictures under other numbers, in the other order of patches: what counts is picture_features."""
    model = shaken(model_from_config(rows.HF, jax.random.key(1), "float32", pictures=True))
    draw = np.random.default_rng(3)
    first, second = rows.picture(draw, 4, 2), rows.picture(draw, 2, 6)
    tokens, segments, positions, pictures = rows.packed([[[5, first, 6, second, 7]]], LENGTH, PATCHES)
    _, _, _, swapped = rows.packed([[[5, second, 6, first, 7]]], LENGTH, PATCHES)
    at = np.full((1, LENGTH), -1, np.int32)
    at[0, 1:3], at[0, 4:7] = (3, 4), (0, 1, 2)
    swapped = dataclasses.replace(swapped, picture_features=at)
    want, got = (model(tokens, segments, positions, each) for each in (pictures, swapped))
    np.testing.assert_allclose(got[0, :8], want[0, :8], atol=1e-5)


def test_text_is_as_without_a_tower(model):
    """Bit for bit, with positions of one axis and of three."""
    text = model_from_config(rows.HF, jax.random.key(0), "float32")
    nnx.update(text, nnx.State({name: value for name, value in nnx.state(model).items() if name != "vision"}))
    tokens, segments, positions, pictures = batch_of(20)
    want = text(tokens, segments)
    np.testing.assert_array_equal(model(tokens, segments), want)
    np.testing.assert_array_equal(model(tokens, segments, positions[..., 0]), want)
    np.testing.assert_array_equal(model(tokens, segments, positions), want)
    for most in (None, 0):
        padding = dataclasses.replace(pictures, max_pictures=most)
        np.testing.assert_array_equal(model(tokens, segments, positions, padding), want)


def _products(jaxpr, size) -> int:
    """Products with an operand that has an axis of this size, in a program and all that it calls."""
    count = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            count += any(size in variable.aval.shape for variable in equation.invars)
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                count += _products(inner, size) if hasattr(inner, "eqns") else 0
    return count


def test_a_frozen_tower_has_no_backward(model):
    """Two products a layer with its MLP's width, of the forward alone; trained, several times as many."""
    inner = rows.HF["vision_config"]["intermediate_size"]
    batch = batch_of(2, (4, 4), 3)

    def products(model):
        graph, trained, rest = nnx.split(model, nnx.Param, ...)
        of = lambda trained: losses(nnx.merge(graph, trained, rest), *batch)[0]  # noqa: E731
        assert all(jax.tree.leaves(jax.tree.map(jnp.any, jax.grad(of)(trained))))
        return _products(jax.make_jaxpr(jax.grad(of))(trained).jaxpr, inner)

    frozen = jaxtune.get_peft_model(model, r=2, exclude_modules=".*visual.*")
    for _, linear in linears(frozen):
        if linear.lora is not None:
            linear.lora.b.set_value(linear.lora.b.get_value() + 0.1)
    assert not frozen.vision.trains and products(frozen) == 2 * 2
    adapted = shaken(jaxtune.get_peft_model(model, r=2))
    assert adapted.vision.trains and products(adapted) > 3 * 2 * 2


@pytest.mark.parametrize(("layers", "merger"), [(True, True), (True, False), (False, True)])
def test_what_trains_of_a_tower(model, layers, merger):
    trained = with_trained_tower(jaxtune.models.lora.freeze(model), layers, merger)
    paths = {path[:2] for path, _ in nnx.to_flat_state(nnx.state(trained, nnx.Param))}
    of_layers = {("vision", name) for name in ("projection", "positions", "layers")}
    assert paths == (of_layers if layers else set()) | ({("vision", "merger")} if merger else set())


def test_plans_and_dropout(model):
    """Whatever is recomputed in tower and text; dropout changes the result, the same way each time."""
    batch = batch_of(2, (4, 4), 3, (2, 2), 1, most=2)
    pictures = batch[-1]
    want = model.vision(pictures)[0]
    for layer in (RECOMPUTE, LayerPlan("offload")):
        np.testing.assert_allclose(model.vision(pictures, ResidualPlan.uniform(layer, 2))[0], want, atol=1e-6)
    loss, _ = losses(model, *batch)
    again, _ = losses(model, *batch, plan=ResidualPlan.uniform(RECOMPUTE, 2))
    np.testing.assert_allclose(loss, again, rtol=1e-5)
    adapted = shaken(jaxtune.get_peft_model(model, r=2, lora_dropout=0.5))
    tokens, segments, positions, _ = batch

    def dropped(seed):
        return adapted.run(tokens, segments, positions, pictures=pictures, dropout_key=jax.random.key(seed))[0]

    np.testing.assert_array_equal(dropped(1), dropped(1))
    assert np.abs(dropped(1) - dropped(2)).max() > 1e-3


@pytest.mark.parametrize("deep", [(), (1,), (1, 2)])
def test_a_stack_in_parts(models, deep):
    """Its output and gradients, also added to sums, are those of the whole stack, whatever is recomputed."""
    model = models["qwen3_vl"]
    graph, trained, rest = nnx.split(model, nnx.Param, ...)
    layout = model.layout((2, 8))
    x = jax.random.normal(jax.random.key(1), (2, 8, 64))
    mixed = ResidualPlan((RECOMPUTE, LayerPlan("offload"), LayerPlan()), whole_weights=2)
    sums = jax.tree.map(lambda a: jnp.ones(a.shape), trained["layers"])

    def total(trained, x, sums, ends, plan):
        model = nnx.merge(graph, trained, rest)
        between = lambda x, index: 2 * x  # noqa: E731
        x, _ = run_in_parts(ends, between, model.layers, model.config.layers, x, layout, plan, None, sums)
        return jnp.square(x).sum() / 4 ** len(ends)

    whole = jax.grad(total, (0, 1))(trained, x, None, deep, None)
    for plan in (None, mixed):
        (dtrained, dx, dsums) = jax.grad(total, (0, 1, 2))(trained, x, sums, deep, plan)
        np.testing.assert_allclose(dx, whole[1], rtol=1e-4, atol=1e-4 * np.abs(whole[1]).max())
        for got, want in zip(jax.tree.leaves(dsums), jax.tree.leaves(whole[0]["layers"]), strict=True):
            np.testing.assert_allclose(got - 1, want, rtol=1e-3, atol=1e-4 * max(1, np.abs(want).max()))
        assert not any(np.any(leaf) for leaf in jax.tree.leaves(dtrained["layers"]))
    with pytest.raises(ValueError, match="the residual plan has 2 layers, the model 3"):
        total(trained, x, None, (1,), ResidualPlan.uniform(RECOMPUTE, 2))


def test_quantised_text_beside_a_tower_in_16_bits(model, tmp_path):
    save_pretrained(model, tmp_path / "base")
    quantised, _ = from_pretrained(tmp_path / "base", dtype="float32", load_in="nf4", pictures=True)
    for name, linear in linears(quantised):
        assert isinstance(linear.stored_weight, Stored) != name.startswith("model.visual."), name
    assert not quantised.vision.trains
    batch = batch_of(2, (4, 4), 3)
    np.testing.assert_array_equal(quantised.vision(batch[-1])[0], model.vision(batch[-1])[0])
    adapted = jaxtune.get_peft_model(quantised, r=2)
    assert {name for name, linear in linears(adapted) if linear.lora is not None} == {n for n, _ in linears(model)}
    # Written as it is, with the tower among the modules that are not quantised.
    save_pretrained(quantised, tmp_path / "nf4")
    skipped = json.loads((tmp_path / "nf4/config.json").read_text())["quantization_config"]["llm_int8_skip_modules"]
    assert {name for name, _ in linears(quantised) if name.startswith("model.visual.")} <= set(skipped)
    again, _ = from_pretrained(tmp_path / "nf4", dtype="float32", pictures=True)
    np.testing.assert_array_equal(again(*batch), quantised(*batch))


def test_adapters_of_a_tower_need_it(model, tmp_path):
    save_pretrained(model, tmp_path / "base")
    base, _ = from_pretrained(tmp_path / "base", dtype="float32", pictures=True)
    adapted = shaken(jaxtune.get_peft_model(base, r=2, target_modules=["q_proj", "linear_fc1"]))
    jaxtune.save_adapter(adapted, tmp_path / "adapter")
    batch = batch_of(2, (4, 4), 3)
    again, _ = from_pretrained(tmp_path / "adapter", dtype="float32", pictures=True)
    np.testing.assert_array_equal(again(*batch), adapted(*batch))
    with pytest.raises(ValueError, match=r"model\.visual\.\S+ and \d+ more tensors of a tower.*pictures=True"):
        from_pretrained(tmp_path / "adapter", dtype="float32")
    # One of the text alone serves both.
    jaxtune.save_adapter(shaken(jaxtune.get_peft_model(base, r=2, target_modules=["q_proj"])), tmp_path / "text")
    for pictures in (False, True):
        assert from_pretrained(tmp_path / "text", dtype="float32", pictures=pictures)[0].config == base.config


def test_a_convolution_has_no_adapter(model):
    for targets in (["proj"], r".*visual\.patch_embed\.proj|.*q_proj"):
        with pytest.raises(ValueError, match=r"model\.visual\.patch_embed\.proj too, which is no linear"):
            jaxtune.get_peft_model(model, r=2, target_modules=targets)
    adapted = jaxtune.get_peft_model(model, r=2, target_modules=["proj", "qkv"], exclude_modules=["patch_embed.proj"])
    assert sum(linear.lora is not None for _, linear in linears(adapted)) == 4


@pytest.mark.parametrize(
    ("hf", "count"), [(rows.HF, 456_010_480), (rows.QWEN3_VL, 576_388_336)], ids=["Qwen3.5-9B", "Qwen3-VL-8B"]
)
def test_published_towers(hf, count):
    vision = {"depth": 27, "hidden_size": 1152, "num_heads": 16, "intermediate_size": 4304, "out_hidden_size": 4096}
    text = {**hf["text_config"], "hidden_size": 4096}
    config = tower_config({**hf, "text_config": text, "vision_config": vision})
    shapes = nnx.state(nnx.eval_shape(lambda: config.make(jax.random.key(0), "bfloat16")))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == count
    assert (config.blocks.head_dim, config.side, config.patch_numbers) == (72, 48, 1536)


def with_deep(indices):
    return {**rows.QWEN3_VL, "vision_config": {**rows.QWEN3_VL["vision_config"], "deepstack_visual_indexes": indices}}


def with_vision(**changes):
    return {**rows.HF, "vision_config": {**rows.HF["vision_config"], **changes}}


@pytest.mark.parametrize(
    ("hf", "message"),
    [
        (with_vision(num_position_embeddings=50), "num_position_embeddings = 50: must be a square"),
        (with_vision(num_heads=5), r"vision_config\.hidden_size 48 is not a multiple of num_heads 5"),
        (with_vision(num_heads=8), "heads of 6 numbers .* multiple of 4"),
        (with_vision(out_hidden_size=32), r"out_hidden_size = 32: must be 64, text_config\.hidden_size"),
        (with_vision(deepstack_visual_indexes=[8]), r"deepstack_visual_indexes = \[8\] is not supported"),
        (with_deep([1, 0]), r"deepstack_visual_indexes = \[1, 0\]: must ascend, below the 3 layers"),
        (with_deep([0, 3]), r"deepstack_visual_indexes = \[0, 3\]: must ascend, below the 3 layers"),
        (with_deep([0, 1, 2, 3]), r"deepstack_visual_indexes = \[0, 1, 2, 3\]: text_config has 3 layers"),
        (with_vision(depth=0), r"vision_config\.depth = 0"),
        (with_vision(hidden_act="relu"), r"vision_config\.hidden_act 'relu' is not supported"),
        (
            rows.HF["text_config"],
            "pictures of a 'qwen3_5_text' model are not supported; they are of qwen3_vl, .*qwen3_5, qwen3_5_moe",
        ),
        ({k: v for k, v in rows.HF.items() if k != "vision_config"}, "lacks 'vision_config', which pictures need"),
    ],
)
def test_refused_towers(hf, message):
    with pytest.raises(ValueError, match=message):
        tower_config(hf)


def test_sections_need_three_numbers():
    rope = {**rows.HF["text_config"]["rope_parameters"], "mrope_section": [8, 8]}
    with pytest.raises(ValueError, match=r"mrope_section = \[8, 8\]: must have 3 numbers"):
        config_from_hf({**rows.HF["text_config"], "rope_parameters": rope})


def test_pictures_need_a_tower(model):
    text = Decoder(model.config, jax.random.key(0), "float32")
    with pytest.raises(ValueError, match="loaded without its tower; load it with pictures=True"):
        text(*batch_of(2, (2, 2), 3))
    with pytest.raises(ValueError, match="with_trained_tower: this model has no tower"):
        with_trained_tower(text)


def prompt_of(pieces):
    tokens, _, positions, pictures = rows.packed([[pieces]], *rows.size(pieces))
    return tokens[0].tolist(), PromptPictures(pictures, positions[0])


def greedily(model, pieces, count):
    """One token after the other, each from the whole row."""
    pieces = list(pieces)
    for _ in range(count):
        batch = rows.packed([[pieces]], LENGTH, PATCHES)
        pieces.append(int(model(*batch)[0, rows.size(pieces)[0] - 1].argmax()))
    return pieces[-count:]


def test_generation_steps_as_the_whole_row_says(model):
    """Prompts with pictures, equal ones too, beside text; their new tokens' positions differ from their indices."""
    draw = np.random.default_rng(7)
    documents = [
        rows.document(draw, 2, (4, 6), 3),
        rows.document(draw, 5),
        rows.document(draw, 1, (6, 4), 2, (2, 2), 1),
        rows.document(draw, 2, (4, 6), 3),
    ]
    documents.append(documents[0])
    prompts, pictures = zip(*map(prompt_of, documents), strict=True)
    assert [each.delta for each in pictures] == [-3, 0, -3, -3, -3]
    pictures = [None if index == 1 else each for index, each in enumerate(pictures)]
    answers = jaxtune.generate(model, prompts, 6, eos_token_ids=(), pictures=pictures)
    assert answers == [greedily(model, pieces, 6) for pieces in documents]
    assert answers[0] != answers[3]  # the same tokens but for pixels and a few ids
    text = [prompts[1]]
    assert jaxtune.generate(model, text, 6, eos_token_ids=()) == [answers[1]]
    assert jaxtune.generate(over(model, 2), prompts, 6, eos_token_ids=(), pictures=pictures) == answers


def test_padded_pictures_stay_on_the_host(model):
    """Until a program takes them: those of several prompts are joined before."""
    _, given = prompt_of(rows.document(np.random.default_rng(0), 2, (4, 6), 3))
    positions, padded = given.padded(32, 64)
    assert all(type(array) is np.ndarray for array in (positions, *jax.tree.leaves(padded)))
    assert [array.shape[1] for array in jax.tree.leaves(padded)] == [64, 64, 64, 64, 32]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda prompt, given: (prompt[:-2], given), r"of 6 tokens has pictures with positions \(8, 3\)"),
        (lambda prompt, given: (prompt, given._replace(positions=given.positions[:, 0])), r"must be \(8, 3\)"),
        (lambda prompt, given: _cut(prompt, given, 6), "ends in a picture: a text token must follow"),
        (lambda prompt, given: (prompt, _moved(given)), "24 patches and feature 7: 4 patches are a feature"),
    ],
)
def test_refused_prompts(model, change, message):
    prompt, given = change(*prompt_of(rows.document(np.random.default_rng(7), 0, (4, 6), 2)))
    with pytest.raises(ValueError, match=message):
        jaxtune.generate(model, [prompt], 2, pictures=[given])


def _cut(prompt, given, count):
    features = given.pictures.picture_features[:, :count]
    pictures = dataclasses.replace(given.pictures, picture_features=features)
    return prompt[:count], PromptPictures(pictures, given.positions[:count])


def _moved(given):
    pictures = dataclasses.replace(given.pictures, picture_features=given.pictures.picture_features + 2)
    return given._replace(pictures=pictures)


def test_refused_generation(model):
    text = Decoder(model.config, jax.random.key(0), "float32")
    prompt, given = prompt_of(rows.document(np.random.default_rng(7), 1, (2, 2), 2))
    with pytest.raises(ValueError, match="the prompt has pictures, and the model was loaded without its tower"):
        jaxtune.generate(text, [prompt], 2, pictures=[given])
    with pytest.raises(ValueError, match="pictures of 1 prompts for 2 prompts"):
        jaxtune.generate(model, [prompt, prompt], 2, pictures=[given])
    with pytest.raises(ValueError, match="deterministic log-probabilities of prompts with pictures"):
        jaxtune.generate(model, [prompt], 2, pictures=[given], deterministic=True, output_logprobs=True)


@pytest.mark.full
def test_a_mesh_gives_what_one_device_gives(model):
    """Rows divided over two devices, with and without gradients of a tower."""
    draw = np.random.default_rng(2)
    batch = rows.packed([[rows.document(draw, 2, (4, 4), 3)], [rows.document(draw, 1, (2, 6), 4)]], LENGTH, PATCHES, 1)
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    divided = jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))
    (loss, hidden), (dmodel, dpatches) = run(model, batch)
    graph, state = nnx.split(model)
    state = jax.device_put(state, NamedSharding(mesh, PartitionSpec()))
    (loss2, hidden2), (dmodel2, dpatches2) = gradients((graph, state), divided[-1].patches, divided)
    for one, other in zip(
        jax.tree.leaves((loss, hidden, dmodel, dpatches)),
        jax.tree.leaves((loss2, hidden2, dmodel2, dpatches2)),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4 * max(1.0, np.abs(one).max()))


@pytest.mark.full
def test_a_tower_s_weights_are_divided_and_gathered(model):
    """As the engine runs a model over a mesh's shards: in a shard_map, whose layers gather weights one at a time."""
    batch = batch_of(2, (4, 4), 3, most=1)
    graph, trained, frozen = nnx.split(jaxtune.models.lora.freeze(model), nnx.Param, ...)
    mesh = partition.make_mesh(1, 2)
    divided = partition.divide(frozen, mesh)
    shards = jax.tree.leaves(divided, is_leaf=lambda leaf: isinstance(leaf, partition.Shard))
    assert sum(isinstance(shard, partition.Shard) for shard in shards) > 8

    def hidden(frozen, batch):
        *tensors, pictures = batch
        return nnx.merge(graph, trained, frozen).hidden_states(*tensors, pictures=pictures)

    run = partition.divided(hidden, mesh, (partition.specs(divided), partition.WHOLE), partition.WHOLE)
    np.testing.assert_allclose(jax.jit(run)(divided, batch), hidden(frozen, batch), atol=1e-5)
