"""int8 by rows against bitsandbytes' LLM.int8() itself, and checkpoints both ways through transformers."""

from __future__ import annotations

import json

import bitsandbytes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import torch
import transformers
from safetensors.torch import load_file
from tiny import CONFIGS

from jaxtune.compat import AutoModelForCausalLM
from jaxtune.export import api
from jaxtune.models.files.quant import stored_in
from jaxtune.models.hf import from_pretrained, save_pretrained
from jaxtune.models.lora import linears
from jaxtune.pallas.formats.int8 import Int8
from tests.train.data.conftest import make_tokenizer

CONFIG = CONFIGS["llama"] | {"num_hidden_layers": 1}


def theirs(tensor: torch.Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(codes, SCB, the float32 numbers that they stand for) of a weight, as a Linear8bitLt has them. Its other
    quantiser, int8_double_quant, which also quantises by columns, is not implemented on a CPU."""
    made = bitsandbytes.nn.Int8Params(tensor.clone(), requires_grad=False).to("cpu")
    decoded = bitsandbytes.functional.int8_vectorwise_dequant(made.data, made.SCB)
    return made.data.numpy(), made.SCB.numpy(), decoded.numpy()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("kind", ["normal", "small", "tiny", "wide", "large", "zeros", "halves"])
def test_bytes_are_theirs(dtype, kind):
    draw = np.random.default_rng(0)
    values = draw.standard_normal((257, 384)).astype(np.float32)
    values *= {"small": 1e-4, "tiny": 1e-7, "large": 1e4}.get(kind, 1.0)
    if kind == "wide":
        values *= np.exp2(draw.integers(-12, 12, values.shape)).astype(np.float32)
    if kind == "zeros":
        values[3:60] = 0.0
    if kind == "halves":  # between codes, and on them
        values = draw.integers(-254, 255, values.shape).astype(np.float32) / 2
        values[:, 0] = 127
    tensor = torch.tensor(values).to(getattr(torch, dtype))
    ours = Int8.encode(jnp.asarray(values, dtype))
    codes, absmax, decoded = theirs(tensor)
    np.testing.assert_array_equal(ours.codes, codes)
    assert np.asarray(ours.absmax).tobytes() == absmax.tobytes()
    np.testing.assert_array_equal(ours.decode("float32"), decoded)


def load(folder):
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, device_map="cpu", output_loading_info=True)
    for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[key], (key, info[key])
    return model


def weights(model) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """{name: (codes, SCB)} of the linears of a model of transformers in int8."""
    modules = {n: m for n, m in model.named_modules() if isinstance(m, bitsandbytes.nn.Linear8bitLt)}
    return {name: (m.weight.data.numpy(), m.weight.SCB.numpy()) for name, m in modules.items()}


def assert_ours(model, found) -> None:
    assert {name for name, linear in linears(model) if isinstance(linear.stored_weight, Int8)} == found.keys()
    for name, linear in linears(model):
        if isinstance(linear.stored_weight, Int8):
            np.testing.assert_array_equal(linear.stored_weight.codes, found[name][0], err_msg=name)
            np.testing.assert_array_equal(linear.stored_weight.absmax, found[name][1], err_msg=name)


@pytest.mark.parametrize("skipped", [None, ["lm_head", "o_proj"]])
def test_checkpoints_of_bitsandbytes_load_and_go_back_byte_for_byte(tmp_path, skipped):
    base = reference.make_checkpoint(tmp_path / "base", CONFIG)
    config = transformers.BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=skipped)
    made = transformers.AutoModelForCausalLM.from_pretrained(
        base, quantization_config=config, device_map="cpu", dtype=torch.float32
    )
    made.save_pretrained(tmp_path / "theirs")
    model, _ = from_pretrained(tmp_path / "theirs", dtype="float32")
    assert_ours(model, weights(made))
    save_pretrained(model, tmp_path / "ours")
    want, got = (load_file(tmp_path / folder / "model.safetensors") for folder in ("theirs", "ours"))
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape), name
        assert got[name].numpy().tobytes() == tensor.numpy().tobytes(), name
    assert_ours(model, weights(load(tmp_path / "ours")))


def test_what_we_quantise_and_export_loads_in_transformers(tmp_path):
    """The same codes and magnitudes, and the logits of transformers over its own decoding of them."""
    base = reference.make_checkpoint(tmp_path / "base", CONFIG)
    model, _ = from_pretrained(base, dtype="float32", load_in="int8")
    save_pretrained(model, tmp_path / "ours")
    api.export_model(from_pretrained(base, dtype="float32")[0], tmp_path / "export", "int8")
    exported = (tmp_path / "export/model.safetensors").read_bytes()
    assert exported == (tmp_path / "ours/model.safetensors").read_bytes()
    again = load(tmp_path / "export")
    assert_ours(model, weights(again))
    said = json.loads((tmp_path / "export/config.json").read_text())["quantization_config"]
    config = transformers.BitsAndBytesConfig.from_dict(said)
    assert config.load_in_8bit and config.llm_int8_threshold == transformers.BitsAndBytesConfig().llm_int8_threshold
    tokens = np.random.default_rng(0).integers(3, CONFIG["vocab_size"], (2, 24), np.int32)
    decoded = again.dequantize().float()
    np.testing.assert_allclose(reference.logits(decoded, tokens), jax.device_get(model(tokens)), atol=2e-4)


def test_our_loader_takes_transformers_own_description(tmp_path):
    """Its unused defaults of four bits, FP4 among them, are not refused with eight bits."""
    base = reference.make_checkpoint(tmp_path / "base", CONFIG)
    make_tokenizer().save_pretrained(base)
    for settings, stored in (
        ({"load_in_8bit": True}, "int8"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "nf4"),
    ):
        config = transformers.BitsAndBytesConfig(**settings)
        model = AutoModelForCausalLM.from_pretrained(base, quantization_config=config)
        assert stored_in(model.module) == stored
