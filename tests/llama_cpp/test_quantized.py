"""llama.cpp's own quantiser makes of our f32 files what export writes: the same type for every tensor, and errors of
the same size. It reads our quantised files and computes what their numbers say."""

from __future__ import annotations

import ctypes

import gguf
import jax.numpy as jnp
import llama_cpp
import numpy as np
import pytest
from llama_cpp_models import made
from tiny_models import named

from jaxtune.export import api
from tests.export.conftest import tokenizer  # noqa: F401, a fixture
from tests.export.test_gguf import our_name

FLOAT32 = 0  # GGML's number of the type, for keys and values
FTYPES = {"q4_k_m": 15, "q6_k": 18}
WIDE = dict(hidden_size=256, intermediate_size=512, vocab_size=128, num_attention_heads=8, num_key_value_heads=2)
# The layers of which llama.cpp stores down and v in more bits differ in their kinds only from eight layers on.
CASES = {
    "llama": WIDE | dict(num_hidden_layers=10),
    "qwen2": WIDE | dict(num_hidden_layers=9, tie_word_embeddings=False),
    "mixtral": WIDE | dict(num_hidden_layers=2, num_local_experts=8),
    "qwen3_moe": WIDE | dict(num_hidden_layers=8, moe_intermediate_size=96),
    "phi3": dict(hidden_size=256, intermediate_size=512, vocab_size=128, num_hidden_layers=8, num_attention_heads=16)
    | dict(num_key_value_heads=8),
    "gpt_oss": dict(hidden_size=320, vocab_size=128),  # no rows of whole blocks
    "gemma2": dict(hidden_size=256, intermediate_size=512, vocab_size=128),
    # Values that are keys, so that not every layer has a v; shared keys and embeddings of each layer; experts.
    "gemma4": dict(hidden_size=256, intermediate_size=512, vocab_size=128, num_hidden_layers=9)
    | dict(layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 3),
    "gemma4_shared": dict(hidden_size=256, intermediate_size=512, vocab_size=128, num_hidden_layers=10)
    | dict(layer_types=["sliding_attention", "full_attention"] * 5, num_kv_shared_layers=4),
    "gemma4_experts": dict(hidden_size=256, intermediate_size=512, vocab_size=128, moe_intermediate_size=256)
    | dict(num_experts=16),
}


def read(file) -> dict[str, tuple[str, np.ndarray]]:
    """{tensor's name: (type, values)}"""
    return {
        tensor.name: (tensor.tensor_type.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        for tensor in gguf.GGUFReader(file).tensors
    }


@pytest.mark.parametrize("outtype", FTYPES)
@pytest.mark.parametrize("name", CASES)
def test_types_and_errors_are_those_of_llama_quantize(name, outtype, tmp_path, tokenizer):  # noqa: F811
    model = made(name, **CASES[name])
    files = {}
    for kind in ("f32", outtype):
        done = api.export_model(model, tmp_path / kind, "gguf", tokenizer=tokenizer, outtype=kind)
        files[kind] = done.folder / done.files[0]
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = FTYPES[outtype]
    theirs_file = tmp_path / "theirs.gguf"
    assert not llama_cpp.llama_model_quantize(
        str(files["f32"]).encode(), str(theirs_file).encode(), ctypes.byref(options)
    )
    exact, ours, theirs = read(files["f32"]), read(files[outtype]), read(theirs_file)
    assert {key: kind for key, (kind, _) in ours.items()} == {key: kind for key, (kind, _) in theirs.items()}
    for key, (kind, values) in ours.items():
        error, their_error = (
            float(np.sqrt(np.square(found - exact[key][1]).mean())) for found in (values, theirs[key][1])
        )
        assert error <= 1.02 * their_error, (key, kind, error, their_error)


@pytest.fixture
def without_tiles(monkeypatch):
    """Weights stay as the file has them: llama-cpp-python 0.3.36 dies where it repacks any quantised weights, its own
    too, for a processor whose tiles (AMX) it may not use."""
    defaults = llama_cpp.llama_model_default_params

    def params():
        found = defaults()
        found.use_extra_bufts = False
        return found

    monkeypatch.setattr("llama_cpp.llama_cpp.llama_model_default_params", params)


@pytest.mark.parametrize("outtype", ["q8_0", *FTYPES])
def test_llama_cpp_computes_what_the_numbers_say(outtype, tmp_path, without_tiles, tokenizer):  # noqa: F811
    """The logits are those of the model whose weights are what gguf's reader reads, but that llama.cpp rounds
    activations to eight bits before each product, in every type."""
    model = made("qwen2", **CASES["qwen2"])
    done = api.export_model(model, tmp_path / "out", "gguf", tokenizer=tokenizer, outtype=outtype)
    file = done.folder / done.files[0]
    for key, (_, values) in read(file).items():
        variable = named(model)[our_name("qwen2", key)]
        variable.set_value(jnp.asarray(values, variable.dtype).reshape(variable.shape))
    prompt = [5, 17, 3, 42, 9, 77, 30]
    theirs = llama_cpp.Llama(
        str(file), n_ctx=256, n_threads=2, verbose=False, logits_all=True, type_k=FLOAT32, type_v=FLOAT32
    )
    theirs.eval(prompt)
    wanted = np.asarray(model(np.asarray([prompt])))[0]
    difference = np.asarray(theirs.scores[: len(prompt)]) - wanted
    assert np.sqrt(np.square(difference).mean()) < 0.1 * wanted.std()
