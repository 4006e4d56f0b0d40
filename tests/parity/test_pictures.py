"""Qwen3.5 with pictures against transformers itself: tower, positions, logits, loss, gradients, files, adapters."""

from __future__ import annotations

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
from jaxtune.models.lora import with_trained_tower
from jaxtune.models.registry import tensor_names, whole_tensor_name

LENGTH, PATCHES = 48, 64
EXPERTS = {
    "model_type": "qwen3_5_moe_text",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
CONFIGS = {
    "qwen3_5": rows.HF,
    "qwen3_5_moe": rows.HF
    | {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": rows.HF["text_config"] | EXPERTS,
        "vision_config": rows.HF["vision_config"] | {"model_type": "qwen3_5_moe_vision", "depth": 1},
    },
    "qwen3_vl": rows.QWEN3_VL,
}


def load(folder):
    model, info = transformers.AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[key], (key, info[key])
    model.generation_config = transformers.GenerationConfig(eos_token_id=None, pad_token_id=0)
    return model.eval()


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """name -> (folder, transformers' model, ours), fp32; made once."""
    made = {}

    def get(name="qwen3_5"):
        if name not in made:
            with torch.device("meta"):
                config = transformers.AutoConfig.for_model(**CONFIGS[name])
                empty = transformers.AutoModelForImageTextToText.from_config(config)
            shapes = {key: tuple(value.shape) for key, value in empty.state_dict().items()}
            folder = tmp_path_factory.mktemp(name) / "base"
            write_checkpoint(folder, CONFIGS[name], shapes)
            made[name] = folder, load(folder), from_pretrained(folder, dtype="float32", pictures=True)[0]
        return made[name]

    return get


def arguments(pieces) -> dict:
    """What transformers' model takes for one document, without its positions, which it makes itself."""
    pictures = [piece for piece in pieces if not isinstance(piece, int)]
    tokens, *_ = rows.packed([[pieces]], *rows.size(pieces))
    ids = torch.from_numpy(tokens).long()
    given = {"input_ids": ids, "mm_token_type_ids": (ids == rows.PICTURE).int()}
    if pictures:
        given["pixel_values"] = torch.from_numpy(np.concatenate([rows.in_blocks(piece) for piece in pictures]))
        given["image_grid_thw"] = torch.tensor([(1, *piece.shape[:2]) for piece in pictures])
    return given


grids = st.tuples(st.integers(1, 5), st.integers(1, 5)).map(lambda grid: (2 * grid[0], 2 * grid[1]))
shapes = st.lists(st.one_of(grids, st.integers(1, 6)), min_size=1, max_size=6)


def drawn(shape, seed):
    """A document of this shape as far as it fits, that begins with a token and has one after each picture."""
    draw, pieces = np.random.default_rng(seed), []
    for part in shape:
        more = rows.document(draw, 1, part, 1) if isinstance(part, tuple) else rows.document(draw, part)
        if all(size <= room for size, room in zip(rows.size([*pieces, *more]), (LENGTH, PATCHES), strict=True)):
            pieces += more
    return pieces or rows.document(draw, 3)


@jax.jit
def run(model_and_state, tokens, segments, positions, pictures):
    model = nnx.merge(*model_and_state)
    logits = model(tokens, segments, positions, pictures)
    return model.vision.patch_states(pictures)[-1], model.vision(pictures), logits


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_vl"])
@hypothesis.given(shape=shapes, seed=st.integers(0, 2**16))
def test_tower_positions_and_logits(name, both, shape, seed):
    """Of any document: the tower's states of patches, the merged features, the positions, the logits."""
    _, theirs, ours = both(name)
    pieces = drawn(shape, seed)
    given, (length, patches) = arguments(pieces), rows.size(pieces)
    batch = rows.packed([[pieces]], LENGTH, PATCHES)
    states, features, logits = run(nnx.split(ours), *batch)
    with torch.no_grad():
        if patches:
            seen = theirs.model.visual(given["pixel_values"], grid_thw=given["image_grid_thw"])
            np.testing.assert_allclose(states[0, :patches], seen.last_hidden_state, atol=2e-5, rtol=1e-4)
            wanted = [seen.pooler_output, *(getattr(seen, "deepstack_features", None) or [])]
            for got, want in zip(features, wanted, strict=True):
                np.testing.assert_allclose(got[0, : patches // 4], want, atol=2e-5, rtol=1e-4)
        grid = given.get("image_grid_thw", torch.zeros((0, 3), dtype=torch.int64))
        positions, _ = theirs.model.get_rope_index(given["input_ids"], given["mm_token_type_ids"], grid)
        np.testing.assert_array_equal(batch[2][0, :length], positions[:, 0].numpy().T)
        theirs.model.rope_deltas = None
        np.testing.assert_allclose(logits[0, :length], theirs(**given).logits[0], atol=1e-4, rtol=1e-4)


def test_published_sections_are_the_default():
    """Without mrope_section both take [11, 11, 10]."""
    hf = {**rows.HF, "text_config": {**rows.HF["text_config"], "rope_parameters": {"rope_type": "default"}}}
    config = transformers.AutoConfig.for_model(**hf).text_config
    rotary = transformers.models.qwen3_5.modeling_qwen3_5.Qwen3_5TextRotaryEmbedding(config)
    assert jaxtune.models.registry.config_from_hf(hf).rotary[0].sections == tuple(rotary.mrope_section)


@pytest.mark.parametrize("name", CONFIGS)
def test_loss_and_gradient_of_every_tensor(name, both):
    _, theirs, ours = both(name)
    draw = np.random.default_rng(5)
    documents = [rows.document(draw, 3, (4, 6), 5, (2, 2), 4), rows.document(draw, 2, (6, 2), 3, (4, 4), 1)]
    theirs.zero_grad()
    total = 0.0
    for pieces in documents:
        theirs.model.rope_deltas = None
        given = arguments(pieces)
        logits = theirs(**given).logits[0, :-1]
        total = total + torch.nn.functional.cross_entropy(logits, given["input_ids"][0, 1:], reduction="sum")
    total.backward()
    want = {key: p.grad.numpy() for key, p in theirs.named_parameters() if p.grad is not None}
    # Both documents in one row, and a row of padding and nothing else.
    tokens, segments, positions, pictures = rows.packed([documents, []], LENGTH, PATCHES)
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


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_vl"])
def test_folders_both_ways(name, both, tmp_path):
    """Saved with its tower, transformers loads it; its logits are the original's."""
    folder, theirs, ours = both(name)
    save_pretrained(ours, tmp_path / "out", max_shard_bytes=100_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    again = load(tmp_path / "out")
    _same_weights(again, theirs)
    text, _ = from_pretrained(folder, dtype="float32")
    assert text.vision is None and text.base_digest == ours.base_digest
    save_pretrained(text, tmp_path / "text")  # whose tower passes through
    _same_weights(load(tmp_path / "text"), theirs)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_vl"])
def test_greedy_generation(name, both):
    """Prompts of several pictures; new tokens go on from the pictures' largest side."""
    _, theirs, ours = both(name)
    draw = np.random.default_rng(11)
    for pieces in (rows.document(draw, 2, (4, 8), 3), rows.document(draw, 1, (2, 6), 2, (4, 4), 2)):
        theirs.model.rope_deltas = None
        given, (tokens, _, positions, pictures) = arguments(pieces), rows.packed([[pieces]], *rows.size(pieces))
        with torch.no_grad():
            want = theirs.generate(**given, max_new_tokens=10, do_sample=False)[0, tokens.shape[1] :].tolist()
        prompt = PromptPictures(pictures, positions[0])
        assert jaxtune.generate(ours, tokens.tolist(), 10, eos_token_ids=(), pictures=[prompt]) == [want]


def _same_weights(one, other):
    first, second = one.state_dict(), other.state_dict()
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("qwen3_5", dict(target_modules="all-linear")),
        ("qwen3_5", dict(target_modules="all-linear", exclude_modules=".*visual.*")),
        ("qwen3_5", dict(target_modules=r".*visual\.merger\.linear.*")),
        ("qwen3_5", dict(target_modules=["attn.proj", "qkv", "q_proj"], use_dora=True)),
        ("qwen3_vl", dict(target_modules="all-linear")),
    ],
    ids=["all", "text", "merger", "some", "deep"],
)
def test_adapters_both_ways(both, tmp_path, name, settings):
    folder, _, ours = both(name)
    pieces = rows.document(np.random.default_rng(1), 3, (4, 6), 5, (2, 4), 2)
    given, batch = arguments(pieces), rows.packed([[pieces]], *rows.size(pieces))
    torch.manual_seed(0)
    theirs = peft.get_peft_model(load(folder), peft.LoraConfig(r=4, init_lora_weights=False, **settings))
    with torch.no_grad():
        want = theirs(**given).logits.numpy()
    theirs.save_pretrained(tmp_path / "theirs")
    model = jaxtune.load_adapter(ours, tmp_path / "theirs")
    np.testing.assert_allclose(model(*batch), want, atol=2e-4, rtol=1e-4)
    assert np.abs(ours(*batch) - want).max() > 0.01

    adapted = shaken(jaxtune.get_peft_model(ours, r=4, **settings))
    assert {name for name, _ in _adapted(adapted)} == {name for name, _ in _adapted(model)}
    jaxtune.save_adapter(adapted, tmp_path / "ours")
    assert (
        load_file(tmp_path / "ours/adapter_model.safetensors").keys()
        == load_file(tmp_path / "theirs/adapter_model.safetensors").keys()
    )
    again = peft.PeftModel.from_pretrained(load(folder), tmp_path / "ours")
    with torch.no_grad():
        np.testing.assert_allclose(adapted(*batch), again(**given).logits, atol=2e-4, rtol=1e-4)
    save_pretrained(jaxtune.merge_adapter(adapted), tmp_path / "merged")
    with torch.no_grad():
        np.testing.assert_allclose(adapted(*batch), load(tmp_path / "merged")(**given).logits, atol=2e-4, rtol=1e-4)


def _adapted(model):
    return [(name, linear) for name, linear in jaxtune.models.lora.linears(model) if linear.lora is not None]
