"""Experts in a model: residual plans, how checkpoints store them, adapters, four bits."""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import load, shapes_of, tensors
from flax import nnx
from random_weights import random_tensor, write_checkpoint
from safetensors.numpy import load_file, save_file
from test_stack import assert_same, loss_and_gradients
from tiny import CONFIGS, golden_tokens
from tiny_models import adapted_model, golden_model, named, tiny_model

from jaxtune import get_peft_model, load_adapter, merge_adapter, save_adapter
from jaxtune.models.config import LayerSpec, MoEConfig
from jaxtune.models.files.headers import read_header
from jaxtune.models.files.quant import dequantize, quantize, stored_in
from jaxtune.models.hf import from_pretrained, model_from_config, save_pretrained
from jaxtune.models.lora import experts, linears
from jaxtune.models.placement import transfers
from jaxtune.models.stack.residual_plan import RECOMPUTE, LayerPlan, ResidualPlan
from jaxtune.pallas.attention import attention
from jaxtune.pallas.formats import NF4, FourBit, format_of
from jaxtune.train.display.model_report import trained_table

FILE = "model.safetensors"
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
GPT_OSS = dict(router_bias=True, expert_bias=True, transposed=True, interleaved=True, swiglu_limit=0.5)


def moe_model(layers: int = 2, **moe):
    specs = (LayerSpec(window=4), LayerSpec())[:layers]
    settings = MoEConfig(**(dict(num_experts=4, experts_per_token=2, expert_size=8) | moe))
    return tiny_model(layers=specs, moe=settings, attention_sinks=bool(moe))


def run_plainly(layers, specs, x, layout, plan, dropout_key):
    """The layers under JAX's own differentiation."""
    for block, spec in zip(layers, specs, strict=True):
        query, key, value = block.mixer.project(block.normed("mixer", x), layout.rotary[0])
        out = attention(query, key, value, layout, **block.mixer.options(spec.window))
        mid = block.added("mixer", x, block.mixer.output(out))
        normed = block.normed("mlp", mid)
        choice = block.mlp.choose(normed, jnp.arange(x.shape[1]) < layout.doc_end)
        x = block.added("mlp", mid, block.mlp.down(block.mlp.gate_up(normed, choice), choice, normed))
    return x, {}


@functools.cache
def full(name):
    """(a model that trains whole, its results under JAX's own differentiation)"""
    model = moe_model(**(GPT_OSS if name == "gpt_oss" else {}))
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        if path[-1] in ("bias", "sinks"):  # zero at the start
            variable.set_value(0.3 * jax.random.normal(jax.random.key(len(path)), variable.shape))
    return model, loss_and_gradients(model, run=run_plainly)


@pytest.mark.full
@pytest.mark.parametrize("name", ["gpt_oss", "plain"])
def test_full_fine_tuning_equals_plain_differentiation(name):
    """Router, experts, biases and sinks; with padding, which is routed nowhere."""
    model, want = full(name)
    got = loss_and_gradients(model, ResidualPlan.uniform(RECOMPUTE, 2))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        where = jax.tree_util.keystr(path)
        if "layers" in where or "[1][1]" in where:
            assert np.abs(b).max() > 0 or "embedding" in where, where
        np.testing.assert_allclose(a, b, atol=4e-6 * max(1.0, np.abs(b).max()), rtol=0, err_msg=where)


@pytest.mark.full
@pytest.mark.usefixtures("compiled_in_full")
def test_plans_give_the_same_bits(monkeypatch):
    monkeypatch.setattr(transfers, "PIECE_BYTES", 256)  # sorted rows, tokens by experts: all of them in pieces
    model = adapted_model(moe_model(**GPT_OSS), r=2, target_parameters=BOTH)
    want = loss_and_gradients(model)
    offload = LayerPlan("offload")
    mix = LayerPlan(query="recompute", mid="recompute", gate_up="recompute", choice="offload")
    for plan in (ResidualPlan.uniform(RECOMPUTE, 2), ResidualPlan((offload, mix))):
        got = loss_and_gradients(model, plan)
        assert_same(got[1], want[1])
        # This sum is the test's own, and XLA fuses it with a layer's end, or not.
        np.testing.assert_allclose(got[0], want[0], rtol=1e-6)


def test_a_choice_of_experts_is_never_made_anew():
    plan = ResidualPlan.uniform(LayerPlan(choice="recompute"), 2)
    with pytest.raises(ValueError, match="residual choice: it can be kept or offloaded, but nothing can recompute it"):
        loss_and_gradients(moe_model(), plan)


# ---- checkpoints


@pytest.mark.parametrize(
    ("name", "piece"),
    [
        ("mixtral", "model.layers.1.block_sparse_moe.experts.3.w2.weight"),
        ("qwen3_moe", "model.layers.1.mlp.experts.5.up_proj.weight"),
    ],
)
def test_pieces_and_fused_tensors_are_the_same_model(tmp_path, name, piece):
    write_checkpoint(tmp_path / "fused", CONFIGS[name], shapes_of(CONFIGS[name]))  # names of transformers' classes
    fused = load(tmp_path / "fused")
    save_pretrained(fused, tmp_path / "pieces", max_shard_bytes=100_000)
    index = json.loads((tmp_path / "pieces" / "model.safetensors.index.json").read_text())["weight_map"]
    assert piece in index and not any("gate_up_proj" in key for key in index)
    again = load(tmp_path / "pieces")
    assert again.base_fingerprint == fused.base_fingerprint
    one, other = tensors(fused), tensors(again)
    assert one.keys() == other.keys()
    for key in one:
        np.testing.assert_array_equal(one[key], other[key], err_msg=key)
    # A piece that is missing, and one of another shape.
    file = tmp_path / "pieces" / index[piece]
    arrays = load_file(file)
    broken = tmp_path / "pieces" / "model.safetensors.index.json"
    arrays[piece] = arrays[piece][:-1]
    save_file(arrays, file)
    with pytest.raises(ValueError, match=rf"{piece} is F32\[\d+, \d+\], model.layers.1"):
        load(tmp_path / "pieces")
    del arrays[piece]
    save_file(arrays, file)
    broken.write_text(json.dumps({"weight_map": {key: shard for key, shard in index.items() if key != piece}}))
    with pytest.raises(ValueError, match=r"model.layers.1.mlp.experts.\w+ of \d experts: pieces missing or too many"):
        load(tmp_path / "pieces")


def mxfp4(weight: np.ndarray):
    """(blocks, scales, decoded) of weight [E, in, out], written down number by number."""
    numbers = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    moved = weight.swapaxes(1, 2)
    groups = moved.reshape(*moved.shape[:2], -1, 32)
    scales = np.floor(np.log2(np.abs(groups).max(-1))).astype(int) - 2
    nearest = np.abs(np.abs(groups / 2.0 ** scales[..., None])[..., None] - numbers).argmin(-1)
    codes = (nearest + 8 * (groups < 0)).astype(np.uint8)
    decoded = np.where(groups < 0, -1, 1) * np.take(numbers, nearest) * 2.0 ** scales[..., None]
    blocks = codes[..., 0::2] | codes[..., 1::2] << 4
    return blocks, (scales + 127).astype(np.uint8), decoded.reshape(moved.shape).swapaxes(1, 2).astype(np.float32)


@pytest.mark.full
def test_mxfp4_as_published(tmp_path):
    hf = CONFIGS["gpt_oss"]
    plain, packed = {}, {}
    for name, shape in shapes_of(hf).items():
        value = random_tensor(name, shape)
        if name.endswith(("gate_up_proj", "down_proj")):
            packed[f"{name}_blocks"], packed[f"{name}_scales"], value = mxfp4(value)
        else:
            packed[name] = value
        plain[name] = value
    for folder, arrays, config in (
        ("plain", plain, hf),
        ("packed", packed, hf | {"quantization_config": {"quant_method": "mxfp4"}}),
    ):
        (tmp_path / folder).mkdir()
        save_file({key: np.ascontiguousarray(array) for key, array in arrays.items()}, tmp_path / folder / FILE)
        (tmp_path / folder / "config.json").write_text(json.dumps(config))
    one, other = tensors(load(tmp_path / "plain")), tensors(load(tmp_path / "packed"))
    for key in one:
        np.testing.assert_array_equal(one[key], other[key], err_msg=key)
    # On the way to NF4, and out again in 16 bits, without the setting.
    nf4, _ = from_pretrained(tmp_path / "packed", load_in="nf4")
    assert all(isinstance(matrix.stored_weight, FourBit) for _, matrix in experts(nf4))
    save_pretrained(load(tmp_path / "packed"), tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    scales = packed["model.layers.0.mlp.experts.down_proj_scales"]
    scales[1, 2, 0] = 255  # NaN in e8m0
    save_file({key: np.ascontiguousarray(array) for key, array in packed.items()}, tmp_path / "packed" / FILE)
    with pytest.raises(ValueError, match=r"down_proj_scales\[1, 2, 0\] is 255, which is NaN in MXFP4, as 1 of its "):
        load(tmp_path / "packed")
    del packed["model.layers.0.mlp.experts.down_proj_scales"]
    save_file({key: np.ascontiguousarray(array) for key, array in packed.items()}, tmp_path / "packed" / FILE)
    with pytest.raises(ValueError, match=r"down_proj_blocks is there, but .*down_proj_scales is missing"):
        load(tmp_path / "packed")


# ---- four bits


@pytest.mark.full
def test_four_bits_of_experts():
    model = golden_model("qwen3_moe")
    packed = quantize(model)
    tokens = jnp.asarray(golden_tokens())
    assert stored_in(packed) == "nf4"
    assert all(isinstance(matrix.stored_weight, FourBit) for _, matrix in experts(packed))
    opened = dequantize(packed)
    np.testing.assert_array_equal(packed(tokens), opened(tokens))
    adapted = adapted_model(packed, r=2, target_parameters=BOTH)
    merged = merge_adapter(adapted)
    np.testing.assert_allclose(merged(tokens), adapted(tokens), atol=1e-4)
    assert np.abs(np.asarray(adapted(tokens) - opened(tokens))).max() > 0.01


def four_bit_model(name, layers: int, **changes):
    """NF4 experts and linears; the embedding's dtype is that of compute."""
    hf = CONFIGS[name] | {"num_hidden_layers": layers} | changes
    return quantize(model_from_config(hf, jax.random.key(0)))


@pytest.mark.parametrize(
    ("name", "size", "nested"),
    # experts' sizes: 96 x 64 is no whole group of 256 blocks
    [("mixtral", 96, False), ("qwen3_moe", 256, True), ("gemma4_experts", 256, True)],
)
def test_four_bit_experts_are_saved_as_linears_and_load_again(tmp_path, name, size, nested):
    """What is saved is what bitsandbytes makes of each expert's matrix; it loads as the same numbers."""
    key = "intermediate_size" if name == "mixtral" else "moe_intermediate_size"
    model = four_bit_model(name, 2 if name == "gemma4_experts" else 1, **{key: size})
    with pytest.warns(UserWarning, match="transformers 5 does not"):
        save_pretrained(model, tmp_path / "out")
    stored = load_file(tmp_path / "out" / FILE)
    module, matrix = ("block_sparse_moe.experts", "w3") if name == "mixtral" else ("mlp.experts", "up_proj")
    module = "experts" if name == "gemma4_experts" else module
    prefix = f"model.layers.0.{module}.2.{matrix}.weight"
    assert stored[prefix].shape == (size * 64 // 2, 1)
    assert (f"{prefix}.nested_absmax" in stored) == nested
    assert json.loads(stored[f"{prefix}.quant_state.bitsandbytes__nf4"].tobytes())["shape"] == [size, 64]
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    router = "router.proj" if name == "gemma4_experts" else module.replace("experts", "gate")
    assert f"model.layers.0.{router}" in config["llm_int8_skip_modules"]
    again, _ = from_pretrained(tmp_path / "out", dtype="float32")
    for (where, one), (_, other) in zip(experts(model), experts(again), strict=True):
        one, other = one.stored_weight, other.stored_weight
        assert isinstance(other, FourBit) and (other.offset is not None) == nested, where
        np.testing.assert_array_equal(one.codes, other.codes, err_msg=where)
        np.testing.assert_array_equal(one.decode(), other.decode(), err_msg=where)
    if nested:  # the same bytes
        with pytest.warns(UserWarning):
            save_pretrained(again, tmp_path / "twice")
        for tensor, value in load_file(tmp_path / "twice" / FILE).items():
            np.testing.assert_array_equal(value, stored[tensor], err_msg=tensor)


@pytest.mark.full
def test_experts_of_gemma_4_in_fp8_are_saved_as_linears(tmp_path):
    """One linear for each expert and matrix; what is not quantised stays one tensor, as transformers has it."""
    model = model_from_config(CONFIGS["gemma4_experts"], jax.random.key(0))
    save_pretrained(model, tmp_path / "plain")
    assert "model.layers.0.experts.gate_up_proj" in load_file(tmp_path / "plain" / FILE)
    packed = quantize(model, "fp8")
    save_pretrained(packed, tmp_path / "out")
    stored = read_header(tmp_path / "out" / FILE)
    kinds = {stored[f"model.layers.0.{name}.weight"].dtype for name in ("mlp.down_proj", "experts.7.up_proj")}
    assert kinds == {"F8_E4M3"} and stored["model.layers.0.router.proj.weight"].dtype == "F32"
    assert not any(key.endswith(("gate_up_proj", "router.proj.weight_scale")) for key in stored)
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert "model.layers.0.router.proj" in ignored
    again, _ = from_pretrained(tmp_path / "out", dtype="float32")
    for (where, one), (_, other) in zip(experts(packed), experts(again), strict=True):
        np.testing.assert_array_equal(one.stored_weight.decode(), other.stored_weight.decode(), err_msg=where)


@pytest.mark.full
def test_four_bit_experts_as_the_hub_has_them(tmp_path):
    """Each expert's matrix quantised for itself, with an offset of its own, and the router too."""
    hf = CONFIGS["qwen3_moe"] | {"num_hidden_layers": 1, "moe_intermediate_size": 256}
    plain = model_from_config(hf, jax.random.key(0), "float32")
    save_pretrained(plain, tmp_path / "plain")
    arrays, packed = load_file(tmp_path / "plain" / FILE), {}
    wanted = {}
    for key, array in arrays.items():
        if ".experts." in key or key.endswith("mlp.gate.weight"):
            wanted[key] = NF4.encode(array)
            layout = format_of(wanted[key]).layout(wanted[key])
            for part, tensor in layout.tensors(wanted[key], float(wanted[key].offset)).items():
                packed[key.removesuffix(".weight") + part] = np.asarray(tensor.array_of(wanted[key])).reshape(
                    tensor.shape
                )
        else:
            packed[key] = array
    assert len({float(weight.offset) for weight in wanted.values()}) > 2
    (tmp_path / "hub").mkdir()
    save_file({key: np.ascontiguousarray(array) for key, array in packed.items()}, tmp_path / "hub" / FILE)
    (tmp_path / "hub" / "config.json").write_text(json.dumps(hf))
    model, _ = from_pretrained(tmp_path / "hub", dtype="float32")
    found = {name: matrix.stored_weight for name, matrix in experts(model)}["model.layers.0.mlp.experts.gate_up_proj"]
    assert isinstance(found, FourBit)
    decoded = np.asarray(found.decode())
    for expert in range(8):
        for half, matrix in ((slice(256), "gate_proj"), (slice(256, None), "up_proj")):
            want = wanted[f"model.layers.0.mlp.experts.{expert}.{matrix}.weight"].decode()
            np.testing.assert_array_equal(decoded[expert, half], want)
    router = wanted["model.layers.0.mlp.gate.weight"].decode()
    np.testing.assert_array_equal(model.layers[0].mlp.router.weight[...], router)
    # Some in four bits and some not.
    key = "model.layers.0.mlp.experts.3.down_proj.weight"
    mixed = {name: array for name, array in packed.items() if not name.startswith(f"{key}.")} | {key: arrays[key]}
    save_file({name: np.ascontiguousarray(array) for name, array in mixed.items()}, tmp_path / "hub" / FILE)
    with pytest.raises(ValueError, match=r"experts.down_proj: its experts' matrices are stored in different formats"):
        load(tmp_path / "hub")


@pytest.mark.full
def test_four_bit_experts_that_no_file_can_hold(tmp_path):
    with pytest.raises(ValueError, match=r"no checkpoint of this family stores its experts so: use dequantize"):
        save_pretrained(quantize(golden_model("gpt_oss")), tmp_path / "out")
    odd = four_bit_model("qwen3_moe", 1, moe_intermediate_size=33, hidden_size=48)
    with pytest.raises(ValueError, match=r"are not whole blocks of 64"):
        save_pretrained(odd, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---- adapters


def test_attention_only_and_the_table():
    model = golden_model("gpt_oss")
    attention_only = get_peft_model(model, r=2)
    assert not any(matrix.lora is not None for _, matrix in experts(attention_only))
    assert all(linear.lora is not None for _, linear in linears(attention_only))
    table = trained_table(get_peft_model(model, r=2, target_parameters=BOTH))
    names, shapes, layers = (list(column.cells) for column in table.columns[:3])
    row = names.index("mlp.experts.gate_up_proj.lora.a")
    assert (shapes[row], layers[row]) == ("6 x 2 x 64", "0-2")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(target_parameters=["mlp.experts.w1"]), "'mlp.experts.w1' matches no experts' matrix.*experts.down_proj"),
        (dict(target_parameters="down_proj"), "must be a list"),
        (dict(target_parameters=BOTH, lora_dropout=0.1), "lora_dropout = 0.1: experts"),
        (dict(target_parameters=BOTH, use_dora=True), "use_dora = True: experts"),
        (dict(target_modules=["q_proj", "gate_proj"]), "'gate_proj' matches no linear.*target_parameters"),
    ],
)
def test_refused_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        get_peft_model(moe_model(1), r=2, **settings)


def test_target_parameters_of_a_model_without_experts():
    with pytest.raises(ValueError, match="none, for it has no experts"):
        get_peft_model(tiny_model(), target_parameters=BOTH)


def old_layout(folder, version, model):
    """Rewrites an adapter of [out, in] experts as PEFT before 0.19 did: (B A)^T with A [E r, out], B [in, r E]."""
    file = folder / "adapter_model.safetensors"
    arrays = load_file(file)
    for key in [key for key in arrays if ".experts." in key and "lora_A" in key]:
        key_b = key.replace("lora_A", "lora_B")
        matrix = model.layers[0].mlp.experts.down_proj
        count, rank = matrix.sizes[0], matrix.lora.rank
        a, b = matrix.lora.a[...], matrix.lora.b[...]
        arrays[key] = np.asarray(b).transpose(0, 2, 1).reshape(count * rank, -1)
        arrays[key_b] = np.ascontiguousarray(np.asarray(a).transpose(2, 1, 0).reshape(-1, rank * count))
    save_file(arrays, file, metadata={"format": "pt"})
    config = json.loads((folder / "adapter_config.json").read_text())
    config["peft_version"] = version
    (folder / "adapter_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("square", [False, True])
def test_layout_of_peft_before_0_19(tmp_path, square):
    """Told by the shapes, or where those are square by the version."""
    base = moe_model(1, expert_size=16 if square else 8)
    model = adapted_model(base, r=2, target_modules=["q_proj"], target_parameters=BOTH[1:])
    save_adapter(model, tmp_path / "a")
    want = named(merge_adapter(model))["model.layers.0.mlp.experts.down_proj"].get_value()
    old_layout(tmp_path / "a", "0.18.1", model)
    got = named(merge_adapter(load_adapter(base, tmp_path / "a")))["model.layers.0.mlp.experts.down_proj"].get_value()
    np.testing.assert_array_equal(got, want)
    if square:
        old_layout(tmp_path / "a", None, model)
        with pytest.raises(ValueError, match="peft_version is missing.*is square"):
            load_adapter(base, tmp_path / "a")


def test_square_experts_that_are_in_by_out_need_no_version_of_peft(tmp_path):
    base = moe_model(1, expert_size=16, transposed=True)
    model = adapted_model(base, r=2, target_modules=["q_proj"], target_parameters=BOTH[1:])
    save_adapter(model, tmp_path / "a")
    file = tmp_path / "a" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"peft_version": None}))
    name = "model.layers.0.mlp.experts.down_proj"
    wanted, found = (dict(experts(one))[name] for one in (model, load_adapter(base, tmp_path / "a")))
    np.testing.assert_array_equal(found.lora.a[...], wanted.lora.a[...])


MARKS = {
    "of the file": lambda layout: {"lora_B_layout": layout},
    "of each matrix": lambda layout: {
        "unsloth_fused_expert_lora": {
            "parameters": {f"mlp.experts.{name}": {"lora_B_layout": layout} for name in ("gate_up_proj", "down_proj")}
        }
    },
}


@pytest.mark.parametrize("mark", MARKS.values(), ids=MARKS)
def test_the_order_of_experts_is_what_the_file_says(tmp_path, mark):
    base = moe_model(1)
    model = adapted_model(base, r=3, target_parameters=BOTH)
    save_adapter(model, tmp_path / "a")
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    tensors, count = load_file(tmp_path / "a" / "adapter_model.safetensors"), model.config.moe.num_experts
    grouped = dict(tensors)
    for key in (key for key in tensors if "experts" in key and "lora_B" in key):
        grouped[key] = tensors[key].reshape(-1, 3, count).swapaxes(1, 2).reshape(tensors[key].shape)
    unsloth = {"auto_mapping": {"unsloth_fixed": True}}
    cases = [(tensors, {}), (tensors, mark("rank_major") | unsloth), (grouped, mark("grouped_by_expert") | unsloth)]
    for arrays, said in cases:
        save_file(arrays, tmp_path / "a" / "adapter_model.safetensors")
        (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(config | said))
        for (name, wanted), (_, found) in zip(experts(model), experts(load_adapter(base, tmp_path / "a")), strict=True):
            np.testing.assert_array_equal(found.lora.b[...], wanted.lora.b[...], err_msg=name)
    for said, words in ((mark("mixed"), "is 'mixed'"), (unsloth, "order of lora_B's columns is not known")):
        (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(config | said))
        with pytest.raises(ValueError, match=words):
            load_adapter(base, tmp_path / "a")


@pytest.mark.full
def test_a_wrong_merge_of_one_expert_is_noticed(monkeypatch):
    """The check is of each expert: one that is off among many is found."""
    from jaxtune.models.adapters import merge

    model = adapted_model(moe_model(1), r=2, target_parameters=BOTH)
    right = merge.merged_weight

    def wrong(weight, lora):
        off = jnp.abs(weight).max() == biggest
        return right(weight, lora) * jnp.where(off, 1.001, 1.0)

    weight = dict(experts(model))["model.layers.0.mlp.experts.down_proj"].stored_weight
    biggest = jnp.abs(weight[2]).max()
    monkeypatch.setattr(merge, "merged_weight", wrong)
    merge._merge_experts.clear_cache()
    merge._merge_and_check.clear_cache()
    try:
        with pytest.raises(ArithmeticError, match="mlp.experts.down_proj does not act like its adapter"):
            merge_adapter(model)
    finally:
        merge._merge_experts.clear_cache()
        merge._merge_and_check.clear_cache()
