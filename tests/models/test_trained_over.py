"""What an adapter's folder records of the base, and that whoever loads it gets that very model."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tiny_models import adapted_model, tiny_model

import jaxtune
from jaxtune.models.adapters import trained_over
from jaxtune.models.adapters.trained_over import TrainedOver
from jaxtune.models.config import LayerSpec
from jaxtune.models.ends import end_token_ids, with_end_token_ids
from jaxtune.models.files.quant import (
    compute_in_fp8,
    computes_in_fp8,
    prepare_qat,
    qat_spec,
    quantize,
    stored_in,
)
from jaxtune.models.lora import linears
from jaxtune.models.qat.fake_quant import FakeQuant
from jaxtune.pallas import formats

TOKENS = jnp.arange(12, dtype=jnp.int32)[None]
SIZES: dict[str, Any] = dict(hidden_size=32, intermediate_size=64, head_dim=16, layers=(LayerSpec(),))


@pytest.fixture
def base(tmp_path) -> Path:
    jaxtune.save_pretrained(tiny_model("bfloat16", **SIZES), tmp_path / "base")
    return tmp_path / "base"


FORMS: dict[str, dict[str, Any]] = {
    "16 bits": dict(dtype="bfloat16"),
    "float32": dict(dtype="float32"),
    "nf4": dict(dtype="bfloat16", load_in="nf4"),
    "fp8": dict(dtype="float32", load_in="fp8"),
}


def without_record(folder: Path) -> None:
    """As PEFT, or an older version, writes an adapter."""
    file = folder / "adapter_model.safetensors"
    save_file(load_file(file), file, {"format": "pt"})


@pytest.mark.parametrize("form", FORMS)
def test_an_adapter_is_loaded_over_what_it_was_trained_over(tmp_path, base, form):
    settings = FORMS[form]
    model = adapted_model(jaxtune.from_pretrained(base, **settings)[0], r=2)
    jaxtune.save_adapter(model, tmp_path / "adapter")
    again, _ = jaxtune.from_pretrained(tmp_path / "adapter")
    assert (again.dtype, stored_in(again)) == (settings["dtype"], settings.get("load_in"))
    np.testing.assert_array_equal(again(TOKENS), model(TOKENS))
    # What is asked for comes before the record, and no record is as the files are.
    other, _ = jaxtune.from_pretrained(tmp_path / "adapter", dtype="float16", load_in="stored")
    assert (other.dtype, stored_in(other)) == ("float16", None)
    without_record(tmp_path / "adapter")
    plain, _ = jaxtune.from_pretrained(tmp_path / "adapter")
    assert (plain.dtype, stored_in(plain)) == ("bfloat16", None)


def test_a_checkpoint_in_four_bits_needs_no_word(tmp_path, base):
    packed, _ = jaxtune.from_pretrained(base, load_in="nf4")
    jaxtune.save_pretrained(packed, tmp_path / "packed")
    model = adapted_model(jaxtune.from_pretrained(tmp_path / "packed")[0], r=2)
    jaxtune.save_adapter(model, tmp_path / "adapter")
    for load_in in (None, "nf4", "stored"):
        again, _ = jaxtune.from_pretrained(tmp_path / "adapter", load_in=load_in)
        np.testing.assert_array_equal(again(TOKENS), model(TOKENS))


def test_linears_that_were_left_alone_are_so_again(tmp_path, base):
    whole, _ = jaxtune.from_pretrained(base)
    model = adapted_model(quantize(whole, skip_modules=["o_proj", "down_proj"]), r=2)
    jaxtune.save_adapter(model, tmp_path / "adapter")
    again, _ = jaxtune.from_pretrained(tmp_path / "adapter")
    np.testing.assert_array_equal(again(TOKENS), model(TOKENS))
    over = trained_over.read(tmp_path / "adapter")
    left = [name for name, _ in linears(model) if name.endswith(("o_proj", "down_proj"))]
    assert over is not None and over.precision == dict.fromkeys(left, "bf16")


def test_products_in_fp8_are_so_again(tmp_path, base):
    model = adapted_model(compute_in_fp8(jaxtune.from_pretrained(base, load_in="fp8")[0]), r=2)
    jaxtune.save_adapter(model, tmp_path / "adapter")
    again, _ = jaxtune.from_pretrained(tmp_path / "adapter")
    assert computes_in_fp8(again)
    np.testing.assert_array_equal(again(TOKENS), model(TOKENS))
    assert not computes_in_fp8(jaxtune.from_pretrained(tmp_path / "adapter", load_in="nf4")[0])


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_adapter_of_qat_rounds_as_it_was_trained(tmp_path, base, dtype):
    """Over a base in another dtype, too, the grid is that of the training."""
    model = prepare_qat(adapted_model(jaxtune.from_pretrained(base)[0], r=2), group_size=32)
    jaxtune.save_adapter(model, tmp_path / "adapter")
    again, _ = jaxtune.from_pretrained(tmp_path / "adapter", dtype=dtype)
    assert qat_spec(again) == FakeQuant("int4", 32, "bfloat16")
    merged, wanted = jaxtune.merge_adapter(again), jaxtune.merge_adapter(model)
    assert merged.qat == wanted.qat
    for (name, ours), (_, theirs) in zip(linears(merged), linears(wanted), strict=True):
        np.testing.assert_array_equal(*(np.asarray(m.weight[...], np.float32) for m in (ours, theirs)), err_msg=name)


def test_texts_end_where_the_trained_model_s_did(tmp_path, base):
    model = with_end_token_ids(adapted_model(jaxtune.from_pretrained(base)[0], r=2), [7, 9])
    jaxtune.save_adapter(model, tmp_path / "adapter")
    plain, _ = jaxtune.from_pretrained(base)
    assert end_token_ids(jaxtune.load_adapter(plain, tmp_path / "adapter")) == end_token_ids(model)
    assert not {7, 9} & set(end_token_ids(plain))


def test_another_format_of_the_base_is_told(tmp_path, base, caplog):
    plain, packed = (jaxtune.from_pretrained(base, load_in=load_in)[0] for load_in in (None, "nf4"))
    for trained, given, words in (
        (packed, plain, "trained over weights in four bits (NF4), and this base's are not quantised"),
        (plain, packed, "trained over weights not quantised, and this base's are in four bits (NF4)"),
    ):
        folder = tmp_path / str(stored_in(trained))
        jaxtune.save_adapter(adapted_model(trained, r=2), folder)
        with caplog.at_level(logging.WARNING, "jaxtune"):
            jaxtune.load_adapter(trained, folder)
            assert not caplog.records
            jaxtune.load_adapter(given, folder)
        assert words in caplog.text and f"from_pretrained({str(folder)!r})" in caplog.text
        caplog.clear()
        without_record(folder)
        jaxtune.load_adapter(given, folder)
        assert not caplog.records


def test_a_folder_of_an_older_run_says_it_in_the_run_s_record(tmp_path, base):
    model = adapted_model(jaxtune.from_pretrained(base, dtype="float32", load_in="nf4")[0], r=2)
    jaxtune.save_adapter(model, tmp_path / "adapter")
    without_record(tmp_path / "adapter")
    run = {"config.model.load_in": "nf4", "config.model.compute": None, "config.precision": "fp32", "config.qat": None}
    (tmp_path / "adapter" / "jaxtune_run.json").write_text(json.dumps({"format": 1, "run": run}))
    assert trained_over.read(tmp_path / "adapter") == TrainedOver(load_in="nf4", dtype="float32")
    np.testing.assert_array_equal(jaxtune.from_pretrained(tmp_path / "adapter")[0](TOKENS), model(TOKENS))
    run |= {"config.precision": "bf16", "config.qat.format": "int4", "config.qat.group_size": 128}
    (tmp_path / "adapter" / "jaxtune_run.json").write_text(json.dumps({"run": run}))
    over = trained_over.read(tmp_path / "adapter")
    assert over is not None and over.qat == FakeQuant("int4", 128, "bfloat16")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("{", "jaxtune_trained_over is not JSON"),
        ("[]", "jaxtune_trained_over = \\[\\]: must be"),
        ('{"load_in": "int3"}', "load_in = 'int3' is unknown to this version of jaxtune; it knows nf4, fp8"),
        ('{"load_in": ["nf4"]}', "load_in = \\['nf4'\\] is unknown"),
        ('{"compute": "int8"}', "compute = 'int8' is unknown"),
        ('{"dtype": "float8"}', "dtype = 'float8' is unknown"),
        ('{"later": 1}', "later is unknown to this version"),
        ('{"skip_modules": 3}', "skip_modules = 3"),
        ('{"eos_token_ids": [-1]}', "eos_token_ids"),
        ('{"qat": {"format": "nf4", "group_size": 64, "dtype": "bfloat16"}}', "qat: qat format 'nf4' is not supported"),
        ('{"qat": {"format": "int4", "group_size": 48, "dtype": "bfloat16"}}', "has groups of 32, 64 or 128"),
        ('{"qat": "int4"}', "qat = 'int4': must be an object with format, group_size and dtype"),
    ],
)
def test_a_record_that_cannot_be_followed_is_refused(tmp_path, record, message):
    save_file({"a": np.zeros(1)}, tmp_path / "adapter_model.safetensors", {trained_over.METADATA: record})
    with pytest.raises(ValueError, match=f"adapter_model.safetensors: .*{message}"):
        trained_over.read(tmp_path)


def test_the_record_is_where_peft_does_not_look(tmp_path, base):
    """Of an unknown key in adapter_config.json PEFT warns."""
    jaxtune.save_adapter(adapted_model(jaxtune.from_pretrained(base, load_in="nf4")[0], r=2), tmp_path / "adapter")
    assert not [key for key in json.loads((tmp_path / "adapter/adapter_config.json").read_text()) if "jaxtune" in key]
    with safe_open(tmp_path / "adapter/adapter_model.safetensors", "numpy") as file:
        assert json.loads(file.metadata()[trained_over.METADATA])["load_in"] == "nf4"


def test_every_format_can_be_recorded():
    for load_in in formats.load_in():
        assert TrainedOver(load_in=load_in) == trained_over._from_record("x", {"load_in": load_in})
