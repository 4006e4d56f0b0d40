"""GGUF files: read with gguf's reader, every tensor is the model's, and the metadata is what llama.cpp asks for."""

from __future__ import annotations

import copy
import dataclasses
import re
import threading

import jax.numpy as jnp
import numpy as np
import pytest
from llama_cpp_models import CHANGES, made
from tiny import CONFIGS
from tiny_models import adapted_model, named, tiny_model

from tests import patience

gguf = pytest.importorskip("gguf")

from jaxtune.export import api, gguf_blocks, gguf_file, gguf_tensors, gguf_types  # noqa: E402
from jaxtune.export.architectures import architecture, hyperparameters  # noqa: E402
from jaxtune.models.adapters.merge import merge_adapter  # noqa: E402
from jaxtune.models.files import byte_files  # noqa: E402
from jaxtune.models.files.weights import Weights  # noqa: E402
from tests.export.test_gguf_tokenizer import changed  # noqa: E402


def written(model, tmp_path, outtype="f32"):
    """(the reader of the file that was written, its keys)"""
    arch = architecture(model.config)
    keys, _ = hyperparameters(model.config, arch)
    fields = {f"{arch.name}.{key}": value for key, value in keys.items()}
    file = tmp_path / "model.gguf"
    stored = gguf_file.write(file, arch.name, fields, gguf_tensors.of_model(Weights(model), arch), outtype)
    gguf_file.verify(file, arch.name, fields, stored)
    reader = gguf.GGUFReader(file)
    return reader, {key: field.contents() for key, field in reader.fields.items()}


def dequantised(reader) -> dict[str, np.ndarray]:
    return {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1])
        for tensor in reader.tensors
    }


# llama.cpp's names -> ours, written down once more.
LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_sinks": "self_attn.sinks",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
OTHERS = {
    "gemma2": {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    "olmo2": {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"},
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "gpt_oss": {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"},
    "qwen2_moe": {
        "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
        "ffn_up_shexp": "mlp.shared_expert.up_proj",
        "ffn_down_shexp": "mlp.shared_expert.down_proj",
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    },
    "seed_oss": {"post_attention_norm": "post_attention_layernorm"},
    "glm4": {
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
        "ffn_up": "mlp.gate_up_proj",
    },
}
OTHERS["gemma3"] = OTHERS["gemma2"]
OTHERS |= dict.fromkeys(
    ("gemma4", "gemma4_experts", "gemma4_shared", "gemma4_unified"),
    OTHERS["gemma2"]
    | {
        "ffn_gate_inp": "router.proj",
        "ffn_gate_up_exps": "experts.gate_up_proj",
        "ffn_down_exps": "experts.down_proj",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
        "layer_output_scale": "layer_scalar",
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
    },
)
TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}


def expected_tensors(name, model) -> dict[str, np.ndarray]:
    """{our name: value as the file should have it}, gate and up of experts apart and not transposed."""
    config, found = model.config, {}
    for key, variable in named(model).items():
        value = np.asarray(variable.get_value(), np.float32)
        if name.startswith("gemma") and not name.startswith("gemma4") and "norm" in key:
            value = value + 1
        rotates = re.search(r"\.([qk])_proj", key)
        if rotates and name in ("llama", "llama_yarn", "mistral", "mixtral", "smollm3", "granite"):
            heads = config.num_heads if rotates[1] == "q" else config.num_kv_heads
            order = [
                h * config.head_dim + i + half
                for h in range(heads)
                for i in range(config.head_dim // 2)
                for half in (0, config.head_dim // 2)
            ]
            value = value[order]
        if ".experts." in key:
            if config.moe.transposed and not key.endswith("_bias"):
                value = value.swapaxes(1, 2)
            suffix = ".bias" if key.endswith("_bias") else ".weight"
            stem = key.removesuffix("_bias")
            if "gate_up_proj" in stem and name != "gemma4_experts":
                half = value.shape[1] // 2
                gate, up = (value[:, 0::2], value[:, 1::2]) if name == "gpt_oss" else (value[:, :half], value[:, half:])
                found[stem.replace("gate_up_proj", "gate_proj") + suffix] = gate
                found[stem.replace("gate_up_proj", "up_proj") + suffix] = up
            else:
                found[stem + suffix] = value
        else:
            found[key] = value
    return found


def our_name(name: str, theirs: str) -> str:
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias|scale)", theirs)
    if match is None:
        stem, suffix = theirs.rsplit(".", 1)
        return f"{TOP[stem]}.{suffix}"
    ours = (LAYER | OTHERS.get(name, {}))[match[2]]
    if match[3] == "scale":
        ours = {"router.proj": "router.scale", "experts.down_proj": "router.per_expert_scale"}[ours]
    named_so = ours.endswith(("sinks", "layer_scalar")) or match[3] == "scale"
    return f"model.layers.{match[1]}.{ours}" + ("" if named_so else f".{match[3]}")


# Without these llama.cpp does not load an architecture.
REQUIRED = {"context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count"}
ALSO_REQUIRED = {
    "gpt-oss": {"expert_count", "expert_used_count", "expert_feed_forward_length", "attention.sliding_window"},
    "qwen3moe": {"expert_count", "expert_used_count"},
    "gemma3": {"attention.sliding_window"},
    "cohere2": {"attention.sliding_window", "logit_scale"},
    "granite": {"logit_scale"},
    "gemma4": {f"attention.{key}" for key in ("sliding_window", "sliding_window_pattern", "key_length_swa")}
    | {"attention.value_length_swa", "embedding_length_per_layer_input"},
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_tensor_and_every_key(name, tmp_path):
    model = made(name)
    reader, keys = written(model, tmp_path)
    found = dequantised(reader)
    factors = {key: found.pop(key) for key in list(found) if key.startswith("rope_")}
    expected = expected_tensors(name, model)
    if name in ("olmo2", "gpt_oss", "qwen2_moe"):  # for which llama.cpp wants a head of its own
        expected.setdefault("lm_head.weight", expected["model.embed_tokens.weight"])
    assert {our_name(name, key) for key in found} == set(expected)
    for key, value in found.items():
        np.testing.assert_array_equal(value, expected[our_name(name, key)], err_msg=key)
    config, arch = model.config, keys["general.architecture"]
    assert {key.removeprefix(f"{arch}.") for key in keys} >= REQUIRED | ALSO_REQUIRED.get(arch, set())
    heads = {"gemma4": [2, 1, 1], "gemma4_experts": [2, 1]}.get(name, config.num_kv_heads)
    assert keys[f"{arch}.attention.head_count_kv"] == heads
    assert keys[f"{arch}.rope.freq_base"] == config.rotary[0].theta
    epsilon = "layer_norm_epsilon" if name == "cohere2" else "layer_norm_rms_epsilon"
    assert keys[f"{arch}.attention.{epsilon}"] == np.float32(config.norm_eps)
    wide = {"gemma4_unified": 48}.get(name, 64) if arch == "gemma4" else config.head_dim
    assert keys[f"{arch}.attention.key_length"] == wide
    assert set(factors) == {
        "llama": {"rope_freqs.weight"},
        "phi3": {"rope_factors_long.weight", "rope_factors_short.weight"},
    }.get(name, {"rope_freqs.weight"} if arch == "gemma4" else set())
    if arch == "gemma4":
        turned = {"gemma4_unified": (6, 24)}.get(name, (8, 32))  # a quarter of the pairs of a head
        np.testing.assert_array_equal(
            factors["rope_freqs.weight"], np.float32([1.0] * turned[0] + [1e30] * (turned[1] - turned[0]))
        )
        assert keys["gemma4.attention.key_length_swa"] == keys["gemma4.rope.dimension_count_swa"] == config.head_dim
        assert keys["gemma4.final_logit_softcapping"] == (0.0 if name == "gemma4_unified" else 5.0)
    if name == "gemma4_shared":
        assert keys["gemma4.attention.shared_kv_layers"] == 2
        assert keys["gemma4.feed_forward_length"] == [96, 96, 192, 192]
        assert keys["gemma4.attention.sliding_window_pattern"] == [True, False, True, False]
    if name == "gemma2":
        assert keys["gemma2.attn_logit_softcapping"] == 2.0 and keys["gemma2.final_logit_softcapping"] == 5.0
        assert keys["gemma2.attention.sliding_window"] == 8
    if name == "gemma3":
        assert (keys["gemma3.rope.scaling.type"], keys["gemma3.rope.scaling.factor"]) == ("linear", 8.0)
    if name == "gpt_oss":
        assert keys["gpt-oss.rope.scaling.type"] == "yarn" and keys["gpt-oss.expert_feed_forward_length"] == 96
    if name == "granite":
        factors = [keys[f"granite.{key}_scale"] for key in ("embedding", "residual", "logit")]
        assert factors == [12.0, np.float32(0.22), 3.0] and keys["granite.attention.scale"] == 0.125
    if name == "cohere2":
        assert keys["cohere2.logit_scale"] == np.float32(0.3) and keys["cohere2.attention.sliding_window"] == 6
    if name == "qwen2_moe":
        assert keys["qwen2moe.expert_shared_feed_forward_length"] == 40
    if name == "glm4":
        assert keys["glm4.rope.dimension_count"] == 16
    if name == "mistral":
        assert keys["llama.context_length"] == 7  # its window, which llama.cpp has not
    if name == "phi3":
        assert keys["phi3.rope.dimension_count"] == 12
        assert keys["phi3.rope.scaling.attn_factor"] == np.float32((1 + np.log(4) / np.log(16)) ** 0.5)


def test_a_stretched_context_is_written_as_training_takes_it():
    config = made("gpt_oss").config
    config = dataclasses.replace(config, rotary=(dataclasses.replace(config.rotary[0], factor=100.0),))
    keys, _ = hyperparameters(config, architecture(config))
    assert keys["context_length"] == config.context_length > config.max_position_embeddings


def test_neighbours_of_interleaved_rows_rotate_as_halves_do():
    """The reason of the reordering: its rotation of neighbours is Hugging Face's of halves, reordered."""
    head, half = 8, 4
    rows = np.random.default_rng(0).standard_normal(2 * head)
    angle = np.linspace(0.1, 1.0, half)

    def turn(first, second):
        return first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)

    halves = np.concatenate([np.concatenate(turn(part[:half], part[half:])) for part in rows.reshape(2, head)])
    neighbours = gguf_tensors.interleaved(rows, 2).reshape(2, half, 2)
    turned = np.stack([np.stack(turn(part[:, 0], part[:, 1]), -1) for part in neighbours]).reshape(-1)
    np.testing.assert_allclose(turned, gguf_tensors.interleaved(halves, 2))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gemma2", dict(query_pre_attn_scalar=24), "query_pre_attn_scalar = 24, where it has 32"),
        ("gemma3", dict(final_logit_softcapping=4.0), "final_logit_softcapping = 4.0"),
        ("gemma3", dict(sliding_window_pattern=3), "layer_types of layer 2: llama.cpp has full attention in every 6th"),
        ("gpt_oss", dict(swiglu_limit=0.7), r"swiglu_limit, swiglu_alpha = \(0.7, 1.702\)"),
        ("qwen3", dict(attention_bias=True), "biases of the q/k/v projections: llama.cpp cannot run it"),
        ("qwen3_moe", dict(norm_topk_prob=False), "norm_topk_prob = false"),
        ("smollm3", dict(no_rope_layers=[1, 0, 1, 0]), "the position encoding of layer 1"),
        ("olmo2", dict(head_dim=32), "head_dim = 32 is not hidden_size / num_attention_heads"),
        ("qwen2", dict(rope_scaling=CONFIGS["llama"]["rope_scaling"]), "rope_type 'llama3'"),
        ("qwen2_moe", dict(mlp_only_layers=[0]), "layers of another kind"),
        ("qwen2_moe", dict(norm_topk_prob=True), "norm_topk_prob = true"),
        ("cohere2", dict(layer_types=CONFIGS["cohere2"]["layer_types"] * 2), "layer_types of layer 0: llama.cpp has"),
        ("gemma4", dict(attention_bias=True), "biases of the attention output projections"),
        ("gemma4_shared", dict(vocab_size_per_layer_input=160), "vocab_size_per_layer_input = 160: llama.cpp has"),
        (
            "gemma4_shared",
            dict(layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"]),
            "num_kv_shared_layers: layer 2 does not take the keys of layer 0",
        ),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(name, changes, message):
    with pytest.raises(ValueError, match=message):
        architecture(made(name, **changes).config)


def test_an_unknown_family_is_refused():
    with pytest.raises(
        ValueError, match="models of the family 'toy' cannot be written for llama.cpp; these can: llama, mistral"
    ):
        architecture(tiny_model(family="toy").config)


@pytest.mark.parametrize("outtype", gguf_types.OUTTYPES)
def test_types(outtype, tmp_path):
    """Rows of 64 are whole blocks, of 80 are not; embedding and vectors have types of their own."""
    reader, _ = written(made("llama", intermediate_size=80, vocab_size=64), tmp_path, outtype)
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    shorter = {"q6_k": "Q8_0", "q4_k_m": "Q5_0"}  # of types with 256 numbers a block
    assert types["blk.0.attn_q.weight"] == shorter.get(outtype, outtype.upper())
    assert types["blk.0.ffn_down.weight"] == ("F16" if outtype.startswith("q") else outtype.upper())
    # It is the head too.
    assert types["token_embd.weight"] == ("Q8_0" if outtype in ("q4_0", *shorter) else outtype.upper())
    assert types["blk.0.attn_norm.weight"] == types["blk.0.attn_q.bias"] == types["rope_freqs.weight"] == "F32"


def test_bfloat16_is_kept_bit_for_bit_and_f16_refuses_what_it_cannot_hold(tmp_path):
    model = made("qwen2", "bfloat16")
    reader, _ = written(model, tmp_path, "bf16")
    np.testing.assert_array_equal(
        dequantised(reader)["blk.1.ffn_up.weight"], np.asarray(model.layers[1].mlp.up_proj.weight[...], np.float32)
    )
    weight = model.layers[1].mlp.up_proj.weight
    weight.set_value(weight.get_value().at[3, 4].set(1e5))
    with pytest.raises(
        ArithmeticError, match=r"layers\.1\.mlp\.up_proj\.weight has values above 65504, too large for f16"
    ):
        written(model, tmp_path, "f16")


def encoded(array, kind) -> np.ndarray:
    return np.concatenate([fetch() for fetch in gguf_blocks.encode("x", array, kind)])


@pytest.mark.parametrize("kind", [*gguf_blocks.BLOCK_TYPES, "F16", "BF16"])
def test_an_encoder_that_errs_is_caught(kind, monkeypatch):
    """By what its bytes stand for, and by what gguf's reader says that they do."""
    right = gguf_blocks._encoded
    wrong = 1.02 if kind in ("Q8_0", "F16", "BF16") else 1.5  # a whole step of Q4_0 is an eighth
    monkeypatch.setattr(gguf_blocks, "_encoded", lambda array, kind: right(wrong * array, kind))
    array = np.random.default_rng(0).standard_normal((8, 256)).astype(np.float32)
    for checked in (gguf_blocks._checked, lambda *_: (True, True, True)):
        monkeypatch.setattr(gguf_blocks, "_checked", checked)
        with pytest.raises(ArithmeticError, match=f"in {kind} its values are further off than that type's rounding"):
            encoded(array, kind)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_bytes_are_those_of_gguf(kind, dtype):
    """Of numbers of any size, of halves between two codes, of zeros and of equal numbers."""
    draw = np.random.default_rng(0)
    wide = (draw.standard_normal((300, 96)) * 10.0 ** draw.integers(-7, 5, (300, 1))).astype(np.float32)
    wide[:40] = draw.integers(-254, 255, (40, 96)) / 2  # halves of steps of 127
    wide[:40, ::32] = 127
    wide[40:80] = draw.integers(-16, 17, (40, 96)) / 2
    wide[40:80, ::32] = -8
    wide[80:90] = 0
    wide[90:95] = 1.5
    array = jnp.asarray(np.clip(wide, -6e4, 6e4), dtype)
    theirs = gguf.quants.quantize(np.asarray(array, np.float32), gguf.GGMLQuantizationType[kind])
    np.testing.assert_array_equal(encoded(array, kind), theirs.reshape(-1).view(np.uint8))


@pytest.mark.full
def test_large_tensors_are_encoded_in_parts(tmp_path, monkeypatch):
    reader, _ = written(made("qwen3_moe"), tmp_path, "q8_0")
    whole = {tensor.name: tensor.data.tobytes() for tensor in reader.tensors}
    monkeypatch.setattr(gguf_blocks, "_RUNS", (2048, 64))
    monkeypatch.setattr(gguf_blocks, "_PART", 5000)
    monkeypatch.setattr(byte_files, "CHUNK_BYTES", 300)
    reader, _ = written(made("qwen3_moe"), tmp_path, "q8_0")
    assert {tensor.name: tensor.data.tobytes() for tensor in reader.tensors} == whole


def test_encoders_are_compiled_for_no_shape_of_a_model(tmp_path):
    """Compiling them again for each shape took longer than encoding an 8B."""
    encoders = (gguf_blocks._encoded, gguf_blocks._checked)
    written(made("llama"), tmp_path, "q8_0")
    programs = [encoder._cache_size() for encoder in encoders]
    written(made("llama", hidden_size=96, intermediate_size=160, vocab_size=64), tmp_path, "q8_0")
    assert [encoder._cache_size() for encoder in encoders] == programs


def test_a_value_that_is_not_finite_ends_the_writing(tmp_path):
    """Whichever run of whichever tensor it is in, and whatever is on its way to the host then."""
    model = made("qwen2")
    weight = model.layers[0].mlp.down_proj.weight
    weight.set_value(weight.get_value().at[-1, -1].set(jnp.nan))
    with pytest.raises(ArithmeticError, match=r"layers\.0\.mlp\.down_proj\.weight has values that are not finite"):
        written(model, tmp_path, "q8_0")


def exported(model, path, tokenizer) -> tuple[dict, tuple[str, ...]]:
    """(the keys of the file, the notes)"""
    done = api.export_model(model, path, "gguf", tokenizer=tokenizer)
    fields = gguf.GGUFReader(done.folder / done.files[0]).fields
    return {key: field.contents() for key, field in fields.items()}, done.notes


def test_other_ends_of_turns(tmp_path, tokenizer):
    """llama.cpp ends a text where these keys say, and knows neither token of GLM-4 by its text, nor Gemma 4's; to
    others they are no ends."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_tokens(["<|user|>", "<|observation|>", "<turn|>"], special_tokens=True)
    ids = dict(zip(("eot", "eom"), tokenizer.convert_tokens_to_ids(["<|user|>", "<|observation|>"]), strict=True))
    turn = {"eot": tokenizer.convert_tokens_to_ids("<turn|>")}
    for name, wanted in (("glm4", ids), ("gemma4", turn), ("phi3", {})):
        keys, _ = exported(made(name), tmp_path / name, tokenizer)
        found = {end: keys.get(f"tokenizer.ggml.{end}_token_id") for end in ("eot", "eom")}
        assert {end: number for end, number in found.items() if number is not None} == wanted
        assert keys["tokenizer.ggml.eos_token_id"] == tokenizer.eos_token_id


def test_name_by_which_line_breaks_after_marks_are_dropped(tmp_path, tokenizer):
    """By it alone llama.cpp drops them; it then asks for four tokens, and does not load a file without them."""

    def stripping(parts, room=2):
        added = parts["added_tokens"]
        del added[room:]
        for content in ("</s>", "<unk>", "<s>", "<|endoftext|>")[: 6 - room]:
            added.append(added[0] | {"id": len(parts["model"]["vocab"]) + len(added), "content": content})
        for token in added:
            token["rstrip"] = token["content"] not in ("<unk>", "<s>", "<|endoftext|>")

    as_phi3 = changed(tokenizer, stripping)
    assert as_phi3("<|end|>\nthe")["input_ids"] == as_phi3("<|end|>the")["input_ids"]
    lacking = changed(tokenizer, lambda parts: stripping(parts, 3))
    for path, which, name in (
        ("mine", as_phi3, "mine (Phi-3)"),
        ("Phi-3-mine", as_phi3, "Phi-3-mine"),
        ("plain", tokenizer, "plain"),
        ("no-phi3", tokenizer, "no-phi_3"),
        ("My-Phi-3", lacking, "My-Phi_3"),
    ):
        keys, notes = exported(made("phi3"), tmp_path / path, which)
        assert keys["general.name"] == name
        assert any("general.name" in note for note in notes) == (name != path)


@pytest.mark.parametrize("where", ["tensor", "key", "type", "place", "magic"])
def test_a_flipped_bit_is_noticed_and_nothing_is_left(where, tmp_path, monkeypatch, tokenizer):
    model = made("qwen2")
    real = gguf_file.write

    def write_and_flip(file, *rest):
        stored = real(file, *rest)
        data = bytearray(file.read_bytes())
        at = {
            "tensor": len(data) - 200,
            "key": data.index(b"qwen2.block_count") + 22,
            "type": data.index(b"blk.0.attn_q.weight") + 24,
            "place": data.index(b"blk.0.attn_q.weight") + 43,
            "magic": 0,
        }[where]
        data[at] ^= 1
        file.write_bytes(data)
        return stored

    api.export_model(model, tmp_path / "right", "gguf", tokenizer=tokenizer)
    monkeypatch.setattr(gguf_file, "write", write_and_flip)
    with pytest.raises(ArithmeticError, match="read back"):
        api.export_model(model, tmp_path / "out", "gguf", tokenizer=tokenizer)
    assert [path.name for path in tmp_path.iterdir()] == ["right"]


def test_bytes_are_read_back_while_the_reader_goes_over_the_keys(tmp_path, monkeypatch):
    """Over Llama 3's vocabulary it takes seconds, of one core."""
    began, reader, check = threading.Event(), gguf_file._reader, byte_files.is_as_written

    def waiting_reader(file):
        assert began.wait(patience.SECONDS)
        return reader(file)

    monkeypatch.setattr(gguf_file, "_reader", waiting_reader)
    monkeypatch.setattr(byte_files, "is_as_written", lambda *rest: began.set() or check(*rest))
    written(made("qwen2"), tmp_path)


# ---- adapters


def test_an_adapter_that_is_not_finite_is_refused(tmp_path):
    model = adapted_model(made("qwen2"), r=2)
    b = model.layers[1].mlp.up_proj.lora.b
    b.set_value(b.get_value().at[-1, -1].set(jnp.inf))
    with pytest.raises(ArithmeticError, match=r"blk\.1\.ffn_up\.weight\.lora_b has values that are not finite"):
        api.export_model(model, tmp_path / "out", "gguf-adapter")
    assert not any(tmp_path.iterdir())


def added(reader, name: str) -> np.ndarray:
    """What llama.cpp adds to a tensor: alpha / rank times B A."""
    tensors = dequantised(reader)
    a, b = tensors[f"{name}.lora_a"], tensors[f"{name}.lora_b"]
    return reader.fields["adapter.lora.alpha"].contents() / a.shape[-2] * (b @ a)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", dict(r=4, rank_pattern={"q_proj": 2}, alpha_pattern={"up_proj": 3})),
        ("phi3", dict(r=4, use_rslora=True)),
        ("mixtral", dict(r=2, target_modules=["k_proj"], target_parameters=["gate_up_proj", "down_proj"])),
        ("gpt_oss", dict(r=2, target_modules=["v_proj"], target_parameters=["gate_up_proj"])),
        ("gemma4_shared", dict(r=4, target_modules=["q_proj", "k_proj", "per_layer_input_gate", "down_proj"])),
        ("gemma4_experts", dict(r=2, target_parameters=["experts.gate_up_proj", "experts.down_proj"])),
    ],
)
def test_an_adapter_adds_what_merging_adds(name, settings, tmp_path):
    base = made(name)
    model = adapted_model(base, **settings)
    done = api.export_model(model, tmp_path / "out", "gguf-adapter")
    reader = gguf.GGUFReader(done.folder / "adapter-f32.gguf")
    assert reader.fields["general.type"].contents() == "adapter"
    before, after = expected_tensors(name, base), expected_tensors(name, merge_adapter(model))
    changed = {key for key, value in after.items() if not np.array_equal(value, before[key])}
    names = {tensor.name.rsplit(".", 1)[0] for tensor in reader.tensors}
    assert {our_name(name, key) for key in names} == changed
    for key in names:
        ours = our_name(name, key)
        np.testing.assert_allclose(added(reader, key), after[ours] - before[ours], atol=2e-6, err_msg=key)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("mistral", None, "this model has no adapter"),
        ("mistral", dict(use_dora=True), "use_dora, which llama.cpp does not support"),
        ("mistral", dict(modules_to_save=["lm_head"]), "modules_to_save has lm_head"),
        ("gemma4_shared", dict(target_modules=["per_layer_model_projection"]), "llama.cpp ignores that adapter"),
    ],
)
def test_adapters_that_llama_cpp_cannot_hold(name, settings, message, tmp_path):
    model = made(name) if settings is None else adapted_model(made(name), r=2, **settings)
    with pytest.raises(ValueError, match=message):
        api.export_model(model, tmp_path / "out", "gguf-adapter")
    assert not any(tmp_path.iterdir())
