"""QAT in the Trainer: when rounding starts, what a resume gives, what comes out, and what is refused."""

from __future__ import annotations

import shutil

import jax
import numpy as np
import pytest
from flax import nnx
from tiny_models import tiny_model

from jaxtune.models.adapters.merge import merge_adapter
from jaxtune.models.config import LayerSpec, MoEConfig
from jaxtune.models.fake_quant import FakeQuant
from jaxtune.models.files.quant import qat_spec
from jaxtune.models.lora import get_peft_model, linears
from jaxtune.train.config import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    MeshConfig,
    QatConfig,
)
from jaxtune.train.config.file import config_from_dict, config_to_dict
from jaxtune.train.trainer import Trainer
from tests.train.tiny_runs import LENGTH, dataset, documents, make_config

pytestmark = pytest.mark.usefixtures("compiled_quickly")

ROWS, HELD_OUT = dataset(documents(32)), dataset(documents(8, seed=2))
STEPS, START = 4, 2
FROM_STEP_2 = QatConfig(group_size=32, start=START)


def model_of(dtype="float32", rank=4):
    # o_proj's input is 16: no group fits.
    model = tiny_model(dtype, hidden_size=32, intermediate_size=64, layers=(LayerSpec(),))
    return get_peft_model(model, r=rank) if rank else model


def trainer_of(output, model, qat=FROM_STEP_2, **changes) -> Trainer:
    data = DataConfig(train="rows", eval="rows", length=LENGTH)
    settings = dict(
        steps=STEPS, data=data, qat=qat, checkpoint=CheckpointConfig(every_steps=2, every_minutes=None, keep=9)
    )
    return Trainer(model, None, make_config(output, **(settings | changes)), ROWS, HELD_OUT)


def losses(trainer) -> list[float]:
    return [line["loss"] for line in trainer.history if "loss" in line]


def eval_losses(trainer) -> dict[int, float]:
    return {line["step"]: line["eval_loss"] for line in trainer.history if "eval_loss" in line}


def same(one, other):
    jax.tree.map(np.testing.assert_array_equal, nnx.state(one), nnx.state(other))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(trainer after its run, trained model, the same without QAT)"""
    evaluation = EvaluationConfig(every_steps=1, at_start=True)
    trainer = trainer_of(tmp_path_factory.mktemp("qat"), model_of(), evaluation=evaluation)
    plain = trainer_of(tmp_path_factory.mktemp("plain"), model_of(), qat=None, evaluation=evaluation)
    trained = trainer.train()
    plain.train()
    return trainer, trained, plain


def test_rounding_begins_at_its_step(run):
    trainer, _, plain = run
    assert losses(trainer)[:START] == losses(plain)[:START]
    assert losses(trainer)[START] != losses(plain)[START]
    ours, theirs = eval_losses(trainer), eval_losses(plain)
    # An evaluation sees the weights as the next step does.
    assert [step for step in ours if ours[step] != theirs[step]] == list(range(START, STEPS + 1))


def test_the_run_says_what_is_rounded(run):
    assert run[0].notes()[1] == (
        "QAT: weights rounded to int4, groups of 32, from step 2; not rounded, as groups do not divide their input: "
        "o_proj (1)"
    )
    assert len(run[2].notes()) == 1


def test_what_is_exported_has_the_loss_of_the_run(run, tmp_path):
    trainer, trained, _ = run
    assert qat_spec(trained) == FakeQuant("int4", 32, "float32")
    merged = merge_adapter(trained)
    again = trainer_of(tmp_path, merged, qat=None).evaluate()["eval_loss"]
    assert again == pytest.approx(eval_losses(trainer)[STEPS], rel=1e-6)


@pytest.mark.parametrize("saved", [START, STEPS])
def test_a_resumed_run_is_the_same_run(run, tmp_path, saved):
    trainer, trained, _ = run
    shutil.copytree(trainer.output, tmp_path, dirs_exist_ok=True)
    for folder in (tmp_path / "checkpoints").glob("step_*"):
        if int(folder.name[5:]) > saved:
            shutil.rmtree(folder)
    same(trainer_of(tmp_path, model_of(), evaluation=trainer.config.evaluation).train(), trained)


def test_another_qat_is_another_run(run, tmp_path):
    shutil.copytree(run[0].output, tmp_path, dirs_exist_ok=True)
    with pytest.raises(ValueError, match=r"config\.qat\.start"):
        trainer_of(tmp_path, model_of(), qat=QatConfig(group_size=32, start=1)).train()


def test_full_fine_tuning_gives_weights_on_the_grid(tmp_path):
    """In bf16 compute over float32 masters: the grid is that of the masters, not of their bf16 copies."""
    model = model_of("bfloat16", rank=0)
    trainer = trainer_of(
        tmp_path / "run", model, QatConfig(group_size=32), precision="bf16", evaluation=EvaluationConfig()
    )
    trained = trainer.train()
    assert trained.qat == FakeQuant("int4", 32, "bfloat16") and qat_spec(trained) is None
    for name, linear in linears(trained):
        if not name.endswith("o_proj"):
            groups = np.asarray(linear.weight[...], np.float32).reshape(-1, 32)
            assert max(len(np.unique(group)) for group in groups) <= 16, name
    again = trainer_of(tmp_path / "again", trained, qat=None, precision="bf16").evaluate()["eval_loss"]
    assert again == pytest.approx(eval_losses(trainer)[STEPS], abs=1e-3)  # embeddings and norms lose digits
    assert losses(trainer)[-1] < losses(trainer)[0]


def test_clipped_gradients_train_otherwise_and_are_said(tmp_path):
    """Over adapters: the first loss is the same, and later ones are not."""
    runs = {}
    for gradients in ("straight_through", "clipped"):
        trainer = trainer_of(tmp_path / gradients, model_of(), QatConfig("mxfp4", gradients=gradients))
        spec = qat_spec(trainer.train())
        assert spec.grid == FakeQuant("mxfp4", None, "float32") and spec.clips == (gradients == "clipped")
        runs[gradients] = losses(trainer)
        said = "; numbers outside the range of their scale get no gradient" in trainer.notes()[1]
        assert said == (gradients == "clipped")
    straight, clipped = runs.values()
    assert straight[0] == clipped[0] and straight[1:] != clipped[1:]


@pytest.mark.parametrize("of_experts", [False, True])
def test_rounded_activations_are_resumed_and_divided(tmp_path, of_experts):
    """With dropout and DoRA, or with experts: a resume gives equal bits, and two devices that divide the weights give
    the losses of one until an activation between two codes is rounded apart."""

    def trainer(output, **changes):
        more = dict(moe=MoEConfig(4, 2, 32)) if of_experts else {}
        base = tiny_model("float32", hidden_size=32, intermediate_size=64, layers=(LayerSpec(),), **more)
        which = (
            dict(target_parameters=["experts.gate_up_proj"]) if of_experts else dict(lora_dropout=0.1, use_dora=True)
        )
        return trainer_of(output, get_peft_model(base, r=4, **which), QatConfig("int8-int4", 32, 1), **changes)

    one = trainer(tmp_path / "one")
    trained = one.train()
    shutil.copytree(tmp_path / "one", tmp_path / "again")
    for folder in (tmp_path / "again" / "checkpoints").glob("step_*"):
        if int(folder.name[5:]) > START:
            shutil.rmtree(folder)
    same(trainer(tmp_path / "again").train(), trained)
    divided = trainer(tmp_path / "divided", mesh=MeshConfig(fsdp=2))
    divided.train()
    np.testing.assert_allclose(losses(divided), losses(one), rtol=2e-3)


def test_the_config_says_it_briefly_and_refuses(tmp_path):
    config = make_config(tmp_path, qat=QatConfig())
    values = config_to_dict(config)
    assert values["qat"] == {"format": "int4", "group_size": 128, "start": 0, "gradients": "straight_through"}
    assert config_from_dict(values | {"qat": "int4"}) == config_from_dict(values) == config
    with pytest.raises(ValueError, match="qat.start = 900: the run has only"):
        trainer_of(tmp_path, model_of(), qat=QatConfig(group_size=32, start=900), steps=None, epochs=1.0)
