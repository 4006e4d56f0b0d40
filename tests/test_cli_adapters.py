"""Commands take the base of an adapter as it was trained over it, and the numbers that a run's folders record."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_models import adapted_model, tiny_model

import jaxtune
from jaxtune import cli
from jaxtune.compat import FastLanguageModel
from jaxtune.models.config import LayerSpec
from jaxtune.models.files.quant import prepare_qat, stored_in
from tests.test_cli import word_tokenizer

SIZES = dict(hidden_size=32, intermediate_size=64, head_dim=16, layers=(LayerSpec(),))
KINDS = {
    "nf4": dict(load_in="nf4"),
    "float32 over nf4": dict(load_in="nf4", dtype="float32"),
    "fp8": dict(load_in="fp8"),
    "qat": {},
}


def trained(folder: Path, kind: str):
    """(a model as a run leaves it, its folder: the adapter and the merged model)"""
    tokenizer = word_tokenizer(None)
    jaxtune.save_pretrained(tiny_model("bfloat16", **SIZES), folder / "base", tokenizer=tokenizer)
    model = adapted_model(jaxtune.from_pretrained(folder / "base", **KINDS[kind])[0], r=4)
    if kind == "qat":
        model = prepare_qat(model, group_size=32)
    jaxtune.save_adapter(model, folder / "run/adapter", tokenizer)
    jaxtune.save_pretrained(jaxtune.merge_adapter(model), folder / "run/merged", tokenizer=tokenizer)
    return model, folder / "run"


def same_files(one: Path, other: Path) -> bool:
    first, second = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert first.keys() == second.keys()
    return all(first[key].dtype == second[key].dtype and np.array_equal(first[key], second[key]) for key in first)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_export_of_the_adapter_gives_the_numbers_of_the_merged_model(tmp_path, kind):
    _, run = trained(tmp_path, kind)
    assert cli.main(["export", str(run / "adapter"), str(tmp_path / "out")]) == 0
    assert same_files(tmp_path / "out", run / "merged")
    wrote, merged = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "out", run / "merged"))
    assert wrote == merged
    if kind != "qat":
        arguments = ["export", str(run / "adapter"), str(tmp_path / "other"), "--load-in", "stored"]
        assert cli.main(arguments) == 0
        assert not same_files(tmp_path / "other", run / "merged")


@pytest.mark.full
def test_generate_computes_as_in_training_unless_it_is_told_otherwise(tmp_path, capsys, caplog):
    model, run = trained(tmp_path, "float32 over nf4")

    def output(*flags: str) -> str:
        arguments = ["generate", str(run / "adapter"), "--prompt", "w1 w2", "--max-new-tokens", "24", *flags]
        assert cli.main(arguments) == 0
        return capsys.readouterr().out

    def expected(over) -> str:
        [answer] = jaxtune.generate(over, [[1, 2]], 24)
        return " ".join(f"w{i}" for i in answer if 0 < i < 40) + "\n"  # words

    whole = jaxtune.from_pretrained(tmp_path / "base", dtype="float32")[0]
    whole = jaxtune.load_adapter(whole, run / "adapter")
    assert output() == expected(model) != expected(whole)
    caplog.clear()
    assert output("--load-in", "stored") == expected(whole)
    assert "trained over weights in four bits (NF4), and this base's are not quantised" in caplog.text


@pytest.mark.full
def test_a_model_that_a_run_wrote_is_loaded_in_the_precision_of_the_run(tmp_path, capsys):
    _, run = trained(tmp_path, "nf4")
    proof = {"format": 1, "run": {"config.precision": "fp32"}, "step": 1, "files": {}}
    (run / "merged/jaxtune_run.json").write_text(json.dumps(proof))
    for arguments, dtype in ((["--to", "fp8"], "float32"), (["--to", "fp8", "--dtype", "float16"], "float16")):
        out = tmp_path / dtype
        assert cli.main(["export", str(run / "merged"), str(out), *arguments]) == 0
        assert json.loads((out / "config.json").read_text())["torch_dtype"] == dtype
    capsys.readouterr()


@pytest.mark.parametrize(
    ("kind", "load_in", "dtype"), [("float32 over nf4", "nf4", "float32"), ("fp8", "fp8", "bfloat16")]
)
def test_unsloths_loader_takes_the_base_of_the_adapter_unless_it_is_told_otherwise(tmp_path, kind, load_in, dtype):
    model, run = trained(tmp_path, kind)
    tokens = np.arange(12, dtype=np.int32)[None]

    def loaded(**settings):
        return FastLanguageModel.from_pretrained(str(run / "adapter"), 64, **settings)[0].module

    assert (stored_in(loaded()), loaded().dtype) == (load_in, dtype)
    np.testing.assert_array_equal(loaded()(tokens), model(tokens))
    assert stored_in(loaded(load_in_4bit=True)) == "nf4"
    told = loaded(load_in_4bit=False, dtype="float16")
    assert (stored_in(told), told.dtype) == (None, "float16")
    adapter = run / "adapter/adapter_model.safetensors"  # as PEFT writes it: Unsloth's default
    save_file(load_file(adapter), adapter, {"format": "pt"})
    assert (stored_in(loaded()), loaded().dtype) == ("nf4", "bfloat16")


def test_a_format_that_no_weights_are_loaded_in_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["generate", str(tmp_path), "--prompt", "x", "--load-in", "int3"])
    assert left.value.code == 2 and "invalid choice: 'int3'" in capsys.readouterr().err
