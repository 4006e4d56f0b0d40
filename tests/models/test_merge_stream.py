"""Merging and exporting with one tensor on the device at a time: a second model is never there."""

from __future__ import annotations

import gc
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from llama_cpp_models import made
from tiny_models import adapted_model, tiny_model

from jaxtune.export import api
from jaxtune.models.adapters import merge, merged_logits
from jaxtune.models.adapters.merge import merge_adapter, merge_bytes, merged_weights
from jaxtune.models.config import LayerSpec
from jaxtune.models.files import byte_files
from jaxtune.models.files.quant import prepare_qat, quantize, round_to_grid
from jaxtune.models.files.weights import tensors_of
from jaxtune.models.hf import from_pretrained, save_pretrained, save_weights
from jaxtune.models.lora import experts, linears
from jaxtune.models.placement import partition
from tests import patience

WIDE = dict(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=256,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    layers=(LayerSpec(),) * 4,
    attention_scale=0.25,
)
MODELS = {
    "lora": lambda: adapted_model(tiny_model("bfloat16", **WIDE), r=2),
    "dora": lambda: adapted_model(tiny_model("bfloat16", **WIDE), r=2, use_dora=True),
    "over nf4": lambda: adapted_model(quantize(tiny_model("bfloat16", **WIDE)), r=2),
    "some over nf4": lambda: adapted_model(
        quantize(tiny_model("bfloat16", **WIDE)), r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]
    ),
    "qat": lambda: prepare_qat(adapted_model(tiny_model("bfloat16", **WIDE), r=2), "int4", 32),
    "experts": lambda: adapted_model(
        made("qwen3_moe", "bfloat16", num_hidden_layers=6),
        r=2,
        target_modules=["q_proj"],
        target_parameters=["gate_up_proj", "down_proj"],
    ),
}


class Peak:
    """The most bytes of arrays that live beside those that lived at first, whenever it is asked to look."""

    def __init__(self, monkeypatch):
        for name in ("append", "append_pieces"):
            monkeypatch.setattr(byte_files.Writer, name, self._waiting(getattr(byte_files.Writer, name)))
        gc.collect()  # arrays of earlier tests are not to go while this one counts
        self.before, self.bytes, self.looks = self._now(), 0, 0
        for module, name in (
            (merge, "_merge_and_check"),
            (merge, "_merge_experts"),
            (merged_logits, "_logits"),
            (byte_files.Writer, "append"),
            (byte_files.Writer, "append_pieces"),
        ):
            monkeypatch.setattr(module, name, self._looking(getattr(module, name)))

    @staticmethod
    def _waiting(append):
        def append_and_wait(writer, data):  # on the CPU what waits to be written is the device's own memory
            sums = append(writer, data)
            while writer._waiting:
                writer._collect()
            return sums

        return append_and_wait

    def _looking(self, function):
        def look(*arguments, **options):
            self.look()
            result = function(*arguments, **options)
            self.look()
            return result

        return look

    def look(self):
        self.looks += 1
        self.bytes = max(self.bytes, self._now() - self.before)

    @staticmethod
    def _now() -> int:
        return sum(array.nbytes for array in jax.live_arrays())


@pytest.mark.full
@pytest.mark.parametrize("kind", MODELS)
def test_a_merge_has_one_matrix_on_the_device(kind, tmp_path, monkeypatch):
    model = MODELS[kind]()
    wanted = {name: variable.get_value() for name, variable in tensors_of(merge_adapter(model)).items()}
    largest = max(value.size for value in wanted.values())
    whole = sum(value.nbytes for value in wanted.values())
    save_pretrained(merge_adapter(model), tmp_path / "former")
    expected = {name: np.asarray(value) for name, value in wanted.items()}
    wanted.clear()
    peak = Peak(monkeypatch)
    save_weights(merged_weights(model), tmp_path / "out")
    assert peak.looks > len(expected)
    # In 16 bits what it was decoded to and what it was merged to; and what it is checked with.
    assert peak.bytes <= 5 * largest < whole / 4, (peak.bytes, largest, whole)
    assert peak.bytes <= merge_bytes(model)[0]
    for file in (tmp_path / "former").iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()
    loaded, _ = from_pretrained(tmp_path / "out")
    for name, variable in tensors_of(loaded).items():
        np.testing.assert_array_equal(variable.get_value(), expected[name], err_msg=name)


@pytest.mark.full
def test_an_embedding_and_a_head_are_both_there_while_logits_are_checked(tmp_path, monkeypatch):
    model = tiny_model("bfloat16", **WIDE | dict(vocab_size=4096))
    model = adapted_model(model, r=2, modules_to_save=["embed_tokens", "lm_head"])
    one = model.embedding.weight.size * 2
    peak = Peak(monkeypatch)
    save_weights(merged_weights(model), tmp_path / "out")
    assert 2 * one <= peak.bytes <= merge_bytes(model)[0]


def test_with_room_logits_are_verified_while_tensors_are_written(tmp_path, monkeypatch):
    """As on a GPU with memory to spare: the files are the same, and none is there if the logits differ."""
    model = MODELS["lora"]()
    save_weights(merged_weights(model), tmp_path / "former")
    begun, ended = threading.Event(), []

    def slowly(*given):
        begun.wait()
        check(*given)
        ended.append(True)

    check = merge.check_logits
    monkeypatch.setattr(merge, "_has_room", lambda model: True)
    monkeypatch.setattr(merge, "check_logits", slowly)
    weights = merged_weights(model)
    *former, last = weights.makers.values()
    for make in former:
        make()
    assert not ended
    begun.set()
    last()
    assert ended
    save_weights(merged_weights(model), tmp_path / "out")
    for file in (tmp_path / "former").iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()

    def differ(*_):
        raise ArithmeticError("the logits differ")

    monkeypatch.setattr(merge, "check_logits", differ)
    with pytest.raises(ArithmeticError, match="the logits differ"):
        api.export_model(model, tmp_path / "wrong", "merged")
    with pytest.raises(ArithmeticError, match="the logits differ"):
        save_weights(merged_weights(model), tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()


def test_logits_are_verified_once_tensors_are_made_or_soon_after(monkeypatch):
    """So that their tracing does not hold up the first writes; and nobody waits if a writer fails before."""
    monkeypatch.setattr(merge, "_has_room", lambda model: True)
    for seconds, makes in ((patience.SECONDS, True), (0.1, False)):
        verified = threading.Event()
        monkeypatch.setattr(merge, "_HEAD_START_SECONDS", seconds)
        monkeypatch.setattr(merge, "check_logits", lambda *_, verified=verified: verified.set())
        weights = merged_weights(MODELS["lora"]())
        assert not (makes and verified.wait(0.3))
        if makes:
            next(iter(weights.makers.values()))()
        assert verified.wait(patience.SECONDS)


@pytest.mark.full
@pytest.mark.parametrize("to", ["merged", "bnb-4bit", "fp8", "w4a16", "mxfp4", "gguf"])
def test_an_export_has_one_matrix_on_the_device(to, tmp_path, monkeypatch):
    if to == "gguf":
        pytest.importorskip("gguf")
        from jaxtune.export import gguf_blocks

        # A few runs are on their way to the host beside the matrix: small ones, beside matrices as small as these.
        monkeypatch.setattr(gguf_blocks, "_RUNS", (512, 64))
        from tests.export.conftest import byte_tokenizer

        tokenizer = byte_tokenizer()
    else:
        tokenizer = None
    if to == "mxfp4":
        settings = dict(r=2, target_parameters=["gate_up_proj", "down_proj"], target_modules=["q_proj"])
        model = made("gpt_oss", hidden_size=64, intermediate_size=64)
        model = adapted_model(model, **settings)
    else:
        base = made("qwen2", "bfloat16", hidden_size=128, intermediate_size=256, num_hidden_layers=6)
        model = adapted_model(quantize(base), r=2)
    matrices = (*linears(model), *experts(model))
    largest = max(matrix.stored_weight.size for _, matrix in matrices)
    whole = 2 * sum(matrix.stored_weight.size for _, matrix in matrices)
    peak = Peak(monkeypatch)
    api.export_model(model, tmp_path / "out", to, tokenizer=tokenizer)
    assert peak.looks > len(matrices)
    assert peak.bytes <= 5 * largest < whole / 2, (peak.bytes, largest, whole)


@pytest.mark.parametrize("devices", [1, 2])
def test_reading_a_tensor_leaves_no_copy_of_it_in_host_memory(devices):
    """JAX keeps with an array that lives on what it was asked for on the host: in the end, a second model."""
    mesh = partition.make_mesh(1, devices)
    for spec in (partition.WHOLE, PartitionSpec(partition.TENSORS)):
        array = jax.device_put(jnp.arange(64.0).reshape(8, 8), NamedSharding(mesh, spec))
        np.testing.assert_array_equal(partition.on_host(array), np.arange(64.0).reshape(8, 8))
        for held in (array, *(shard.data for shard in array.addressable_shards)):
            assert held._npy_value is None


@pytest.mark.parametrize("form", ["int4", "int8", "fp8", "nvfp4", "mxfp4"])
def test_stated_bytes_hold_what_rounding_a_matrix_without_an_adapter_takes(form):
    """After QAT every matrix of the merged model is on the grid, those without an adapter too: here the experts."""
    base = prepare_qat(made("qwen3_moe", "bfloat16", hidden_size=128, moe_intermediate_size=128), form)
    model = adapted_model(base, r=2, target_modules=["q_proj"])
    for _, own in experts(model):
        assert own.lora is None
        program = jax.jit(lambda weight, own=own: round_to_grid(weight, own.fake_quant, own.transposed))
        need = program.lower(own.stored_weight).compile().memory_analysis()
        assert need.temp_size_in_bytes + need.output_size_in_bytes <= merge_bytes(model)[0]


@pytest.mark.full
def test_a_matrix_that_fails_its_check_leaves_no_folder(tmp_path):
    model = adapted_model(tiny_model("float16"), r=2)
    weights = merged_weights(model)
    lora = model.layers[1].mlp.up_proj.lora
    lora.b.set_value(lora.b.get_value().at[3].set(1e6))
    with pytest.raises(ArithmeticError, match=r"layers\.1\.mlp\.up_proj is not finite in float16"):
        save_weights(weights, tmp_path / "out")
    assert not any(tmp_path.iterdir())
