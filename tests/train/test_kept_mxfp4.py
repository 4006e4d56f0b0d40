"""gpt-oss's experts in the codes of their files (model.load_in=mxfp4): loaded and saved byte by byte, trained over as
over the decoded weights, resumed, sampled from, merged and planned; and refused where there are none."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file
from tiny import CONFIGS
from tiny_models import adapted_model, shaken

import jaxtune
from jaxtune import cli
from jaxtune.export import api
from jaxtune.models.adapters import trained_over
from jaxtune.models.components import common_format
from jaxtune.models.files.quant import dequantize, quantize
from jaxtune.models.heads import TEXT
from jaxtune.models.hf import Pretrained, from_pretrained, model_from_config, save_pretrained
from jaxtune.models.lora import experts, get_peft_model, linears
from jaxtune.models.placement import partition
from jaxtune.pallas.formats import MXFP4
from jaxtune.train import app
from jaxtune.train.config import AdapterConfig, CheckpointConfig, DataConfig, MeshConfig, ModelConfig
from jaxtune.train.folder.checkpoint import CheckpointError
from jaxtune.train.folder.record import model_sections
from jaxtune.train.planning.cost import abstract_model
from jaxtune.train.planning.step_spec import StepSpec
from jaxtune.train.spec.loading import adapted
from jaxtune.train.trainer import Trainer
from tests.test_cli import word_tokenizer
from tests.train.tiny_runs import assert_same, dataset, documents, make_config

HF = CONFIGS["gpt_oss"] | {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
HF |= {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 48}
MATRICES = ("experts.gate_up_proj", "experts.down_proj")
TOKENS = np.arange(24, dtype=np.int32).reshape(2, 12)
FILE = "model.safetensors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """gpt-oss as it is published, with a tokenizer."""
    made = model_from_config(HF, jax.random.key(0), "bfloat16")
    for _, linear in linears(made):  # of the size of a trained model's, so that the loss is about something
        linear.weight.set_value(4 * linear.weight.get_value())
    path, tokenizer = tmp_path_factory.mktemp("published") / "model", word_tokenizer(None)
    tokenizer.eos_token = "w39"
    api.export_model(made, path, "mxfp4", tokenizer=tokenizer)
    return path


def kept(folder: Path, dtype: str = "float32"):
    return from_pretrained(folder, dtype, load_in="mxfp4")[0]


def with_adapter(model):
    return shaken(get_peft_model(model, r=4, target_parameters=MATRICES))


def test_codes_and_scales_are_those_of_the_file(folder, tmp_path):
    stored, model, plain = load_file(folder / FILE), kept(folder, "bfloat16"), from_pretrained(folder)[0]
    for (name, matrix), (_, decoded) in zip(experts(model), experts(plain), strict=True):
        weight = matrix.stored_weight
        assert isinstance(weight, MXFP4) and weight.shape == decoded.weight.shape and not matrix.trains
        np.testing.assert_array_equal(weight.codes, stored[f"{name}_blocks"].reshape(weight.codes.shape))
        np.testing.assert_array_equal(weight.scales, stored[f"{name}_scales"])
        np.testing.assert_array_equal(weight.decode(), decoded.weight[...])
    assert not [name for name, linear in linears(model) if not isinstance(linear.stored_weight, jax.Array)]
    assert (model.base_digest, model.base_fingerprint) == (plain.base_digest, plain.base_fingerprint)
    pretrained = Pretrained(folder, load_in="mxfp4")
    assert (pretrained.packed, pretrained.stored_in) == (True, "mxfp4")
    assert pretrained.device_bytes() == sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
    save_pretrained(model, tmp_path / "again")
    again = load_file(tmp_path / "again" / FILE)
    assert again.keys() == stored.keys()
    for name, array in stored.items():
        np.testing.assert_array_equal(array.view(np.uint8), again[name].view(np.uint8), err_msg=name)
    wrote, read = (json.loads((each / "config.json").read_text()) for each in (tmp_path / "again", folder))
    assert wrote["quantization_config"] == read["quantization_config"]


@pytest.mark.full
def test_loss_and_gradients_are_those_over_the_decoded_weights(folder):
    packed = with_adapter(kept(folder))
    plain = dequantize(packed)
    assert common_format(plain) is None

    def gradients(model):
        graph, trainable, frozen = nnx.split(model, nnx.Param, ...)

        def loss(trainable):
            return jnp.sin(nnx.merge(graph, trainable, frozen)(TOKENS)).sum()

        return jax.jit(jax.value_and_grad(loss))(trainable)

    (loss, got), (want_loss, want) = gradients(packed), gradients(plain)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.linalg.norm(one - other) <= 1e-5 * np.linalg.norm(other) and np.asarray(one).any()


def write_compressed(folder: Path, path: Path) -> None:
    """The same model with its linears in compressed-tensors' MXFP4, which config.json says: of another layout."""
    model = model_from_config(CONFIGS["llama"] | {"num_hidden_layers": 1}, jax.random.key(0), "bfloat16")
    api.export_model(model, path, "mxfp4")


@pytest.mark.full
@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda _, path: save_pretrained(model_from_config(HF, jax.random.key(0)), path), "no experts are stored so"),
        (lambda folder, path: save_pretrained(from_pretrained(folder)[0], path), "no experts are stored so here"),
        (write_compressed, r"no experts are stored so here \(as gpt-oss's in MXFP4\): take load_in = 'nf4'"),
        (
            lambda _, path: save_pretrained(quantize(model_from_config(CONFIGS["llama"], jax.random.key(0))), path),
            "load_in = 'mxfp4', but its weights are stored in nf4: leave load_in out",
        ),
    ],
    ids=["bf16", "decoded", "compressed-tensors", "nf4"],
)
def test_a_checkpoint_without_such_experts_is_refused(folder, tmp_path, write, message):
    write(folder, tmp_path / "model")
    with pytest.raises(ValueError, match=message):
        from_pretrained(tmp_path / "model", load_in="mxfp4")


def test_what_contradicts_it_is_refused(folder, tmp_path, capsys):
    with pytest.raises(ValueError, match="precision names model.layers.0.mlp.experts.down_proj.*itself stores quant"):
        from_pretrained(folder, load_in="mxfp4", precision={"experts.down_proj": "bf16"})
    with pytest.raises(ValueError, match="precision names .*q_proj.weight.*in a format, beside weights that"):
        from_pretrained(folder, load_in="mxfp4", precision={"q_proj": "nf4"})
    with pytest.raises(ValueError, match=r"'mxfp4': is no precision; a module can have bf16, .*nf4"):
        from_pretrained(folder, precision={"experts.down_proj": "mxfp4"})
    with pytest.raises(ValueError, match="quantize: load_in = 'mxfp4' is for checkpoints that store it"):
        quantize(model_from_config(HF, jax.random.key(0)), "mxfp4")
    plain = json.loads((folder / "config.json").read_text())
    del plain["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(plain))
    planned = ["train", "gpt-oss-120b", "--plan", "plan.device=RTX 4090", f"model.path={tmp_path}"]
    assert cli.main(planned) != 0
    assert "load_in = 'mxfp4' keeps experts in the codes of their files" in capsys.readouterr().err


@pytest.mark.full
def test_a_model_that_is_planned_has_the_shapes_of_the_one_that_is_loaded(folder, capsys):
    wanted = make_config("unused", model=ModelConfig(path=str(folder), load_in="mxfp4"), adapter=AdapterConfig(r=2))
    pretrained = Pretrained(folder, "float32", "mxfp4")
    states = (
        nnx.state(abstract_model(pretrained.config, StepSpec.of(wanted).model)),
        nnx.state(adapted(pretrained.load(), TEXT, wanted.model, wanted.adapter, wanted.seed)),
    )
    one, other = (jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), state) for state in states)
    assert one == other and jax.tree.structure(states[0]) == jax.tree.structure(states[1])
    changes = [f"model.path={folder}", "plan.device=RTX 4090", "data.length=128"]
    assert cli.main(["train", "gpt-oss-120b", "--plan", *changes]) == 0
    assert "predicted peak" in capsys.readouterr().out


@pytest.mark.full
def test_a_mesh_divides_codes_as_it_divides_the_decoded_weights(folder, tmp_path):
    mesh = partition.make_mesh(1, 2)
    whole, divided = (Pretrained(folder, "float32", "mxfp4").load(mesh=over) for over in (None, mesh))
    for (name, one), (_, other) in zip(experts(whole), experts(divided), strict=True):
        for a, b in zip(*map(jax.tree.leaves, (one.stored_weight, other.stored_weight)), strict=True):
            np.testing.assert_array_equal(a, b, err_msg=name)
            assert b.sharding.shard_shape(b.shape)[0] == b.shape[0] // 2
    losses = []
    for name, sizes in (("one", MeshConfig()), ("four", MeshConfig(data=2, fsdp=2))):
        config = make_config(tmp_path / name, steps=3, mesh=sizes)
        trainer = Trainer(with_adapter(kept(folder)), None, config, dataset(documents(24)))
        trainer.train()
        losses.append([line["loss"] for line in trainer.history])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("parts", [2, 3])
def test_parts_of_the_arrays_are_parts_of_the_tensor(axis, parts):
    draw = np.random.default_rng(0)
    weight = dataclasses.replace(MXFP4.encode(jnp.asarray(draw.standard_normal((6, 12, 192)))), swapped=True)
    assert weight.shape == (6, 192, 12)
    axes = weight.shard_axes(axis, parts)
    assert axes is not None
    leaves, structure = jax.tree.flatten(weight)
    cut = [np.split(np.asarray(leaf), parts, at) for leaf, at in zip(leaves, axes, strict=True)]
    found = [jax.tree.unflatten(structure, each).decode("float32") for each in zip(*cut, strict=True)]
    np.testing.assert_array_equal(np.concatenate(found, axis), weight.decode("float32"))
    assert (
        weight.shard_axes(1, 4) is None and weight.shard_axes(2, 4) is not None
    )  # blocks of 32 are along the second axis


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    """A run of the command over the kept experts, to its end."""
    home = tmp_path_factory.mktemp("run")
    rows = [{"text": " ".join(f"w{(3 * row + at) % 38 + 1}" for at in range(12))} for row in range(16)]
    (home / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = make_config(
        home / "run",
        model=ModelConfig(path=str(folder), load_in="mxfp4"),
        data=DataConfig(train=str(home / "rows.jsonl"), length=16, train_on="all", cache_dir=str(home / "cache")),
        adapter=AdapterConfig(r=4, target_parameters=MATRICES),
        checkpoint=CheckpointConfig(every_steps=2, every_minutes=None, keep=3),
        precision="bf16",
        steps=4,
    )
    assert app.run(config) == 0
    return config


@pytest.mark.full
def test_a_run_goes_on_bit_for_bit_and_on_no_other_format(run, tmp_path):
    shutil.copytree(run.output, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/checkpoints/step_00000004")
    shutil.rmtree(tmp_path / "run/adapter")
    again = dataclasses.replace(run, output=str(tmp_path / "run"))
    other = dataclasses.replace(again, model=dataclasses.replace(run.model, load_in=None))
    with pytest.raises(CheckpointError, match="config.model.load_in: saved 'mxfp4', now None"):
        app.run(other)
    assert app.run(again) == 0
    one, two = (load_file(Path(each.output) / "adapter/adapter_model.safetensors") for each in (run, again))
    assert one.keys() == two.keys()
    for name, array in one.items():
        np.testing.assert_array_equal(array, two[name], err_msg=name)


@pytest.mark.full
def test_commands_take_the_very_base(run, folder, capsys, caplog):
    adapter = Path(run.output) / "adapter"
    over = trained_over.read(adapter)
    assert over is not None and over.load_in == "mxfp4"
    model, _ = from_pretrained(adapter)
    assert common_format(model) == "mxfp4" and model.dtype == "bfloat16"
    base, _ = from_pretrained(folder)
    caplog.clear()
    assert_same(dequantize(model), jaxtune.load_adapter(base, adapter))
    assert not caplog.text  # decoded, the base is the same
    jaxtune.load_adapter(from_pretrained(folder, load_in="nf4")[0], adapter)
    assert "over weights in four bits (MXFP4), and this base's are in four bits (NF4)" in caplog.text
    capsys.readouterr()
    assert cli.main(["generate", str(adapter), "--prompt", "w1 w2", "--max-new-tokens", "8"]) == 0
    [answer] = jaxtune.generate(model, [[1, 2]], 8)
    assert capsys.readouterr().out == " ".join(f"w{token}" for token in answer if 0 < token < 39) + "\n"
    rows = run.data.train
    assert cli.main(["evaluate", str(Path(run.output) / "config.yaml"), f"data.eval={rows}"]) == 0
    assert np.isfinite(json.loads(capsys.readouterr().out)["eval_loss"])


@pytest.mark.full
@pytest.mark.parametrize("to", ["merged", "mxfp4"])
def test_an_export_is_that_over_the_decoded_weights(run, tmp_path, to):
    adapter = Path(run.output) / "adapter"
    models = from_pretrained(adapter)[0], from_pretrained(adapter, load_in="stored")[0]
    for name, model in zip(("kept", "decoded"), models, strict=True):
        api.export_model(model, tmp_path / name, to)
    assert (tmp_path / "kept" / FILE).read_bytes() == (tmp_path / "decoded" / FILE).read_bytes()
    if to == "merged":  # and what the run itself wrote
        assert (Path(run.output) / "merged" / FILE).read_bytes() == (tmp_path / "kept" / FILE).read_bytes()


@pytest.mark.full
def test_experts_that_no_adapter_changed_are_exported_with_the_same_codes(folder, tmp_path):
    stored, model = load_file(folder / FILE), adapted_model(kept(folder, "bfloat16"), r=2)
    api.export_model(model, tmp_path / "out", "mxfp4")
    wrote = load_file(tmp_path / "out" / FILE)
    assert wrote.keys() == stored.keys()
    changed = {
        name for name, array in stored.items() if not np.array_equal(array.view(np.uint8), wrote[name].view(np.uint8))
    }
    assert changed == {f"{name}.weight" for name, _ in linears(model)}


@pytest.mark.full
def test_a_model_that_is_given_is_recorded_with_its_format(folder):
    model = adapted_model(kept(folder), r=2)
    plain = make_config("out", adapter=AdapterConfig(r=2))
    config = dataclasses.replace(plain, **model_sections(model, plain.model, plain.adapter, plain.numbers))
    assert config.model.load_in == "mxfp4" and config.components == {}
