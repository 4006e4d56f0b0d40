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
from jaxtune.models.files.quant import qat_spec
from jaxtune.models.lora import get_peft_model, linears
from jaxtune.models.observed_inputs import known_scales, observed_scales
from jaxtune.models.qat.fake_quant import FakeQuant
from jaxtune.train.config import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    MeshConfig,
    QatConfig,
)
from jaxtune.train.config.file import config_from_dict, config_to_dict
from jaxtune.train.engine import trained_model
from jaxtune.train.objectives.objective import RunNeeds
from jaxtune.train.spec import checks
from jaxtune.train.trainer import Trainer
from tests.train.tiny_runs import LENGTH, dataset, documents, make_config

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


@pytest.mark.full
def test_rounding_begins_at_its_step(run):
    trainer, _, plain = run
    assert losses(trainer)[:START] == losses(plain)[:START]
    assert losses(trainer)[START] != losses(plain)[START]
    ours, theirs = eval_losses(trainer), eval_losses(plain)
    # An evaluation sees the weights as the next step does.
    assert [step for step in ours if ours[step] != theirs[step]] == list(range(START, STEPS + 1))


@pytest.mark.full
def test_the_run_says_what_is_rounded(run):
    assert run[0].notes()[1] == (
        "QAT: weights rounded to int4, groups of 32, from step 2; not rounded, as groups do not divide their input: "
        "o_proj (1)"
    )
    assert len(run[2].notes()) == 1


@pytest.mark.full
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


@pytest.mark.full
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


@pytest.mark.full
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


@pytest.mark.full
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


def copied_until(run, output, step):
    """A copy of a run's folder without the checkpoints after `step`."""
    shutil.copytree(run, output)
    for folder in (output / "checkpoints").glob("step_*"):
        if int(folder.name[5:]) > step:
            shutil.rmtree(folder)
    return output


@pytest.mark.full
@pytest.mark.parametrize("rank", [4, 0])
@pytest.mark.parametrize(("start", "saved"), [(0, START), (3, START)])
def test_observed_scales_are_those_of_the_first_rows_and_stay(tmp_path, monkeypatch, rank, start, saved):
    """They are observed once, before the first step, also if rounding begins later, after a resume: that takes them
    from the checkpoint and gives equal bits."""
    evaluation = EvaluationConfig(every_steps=1, at_start=True)

    def trainer(output, **changes):
        return trainer_of(
            output, model_of(rank=rank), QatConfig("nvfp4-nvfp4", start=start), evaluation=evaluation, **changes
        )

    one = trainer(tmp_path / "one")
    rows = one.batches.batch_at(0)
    wanted = observed_scales(model_of(rank=rank), "nvfp4-nvfp4", rows.tokens, rows.segment_ids, rows.positions)
    trained = one.train()
    assert known_scales(trained) == wanted and len(wanted) == 7
    assert one.model.recorded() == {"input_global_scales": wanted}
    monkeypatch.setattr(trained_model, "observed_scales", None)  # nothing is observed after this
    other = trainer(tmp_path / "other").evaluate_checkpoint(tmp_path / "one" / "checkpoints")[0]["eval_loss"]
    assert other == eval_losses(one)[STEPS]
    again = trainer(copied_until(tmp_path / "one", tmp_path / "again", saved))
    trained_again = again.train()
    same(trained_again, trained)
    assert known_scales(trained_again) == wanted and losses(again) == losses(one)[saved:]
    if rank:  # a model that has scales keeps them
        more = trainer_of(tmp_path / "more", trained, QatConfig("nvfp4-nvfp4"))
        assert more.evaluate()["eval_loss"] == pytest.approx(eval_losses(one)[STEPS], rel=1e-6)


@pytest.mark.full
def test_observed_scales_are_equal_on_every_mesh_and_the_loss_sees_them(tmp_path):
    def trainer(name, **changes):
        return trainer_of(tmp_path / name, model_of(), QatConfig("nvfp4-nvfp4"), steps=1, **changes)

    one = trainer("one")
    wanted = known_scales(one.train())
    for name, mesh in (("data", MeshConfig(data=2)), ("fsdp", MeshConfig(fsdp=2))):
        divided = trainer(name, mesh=mesh)
        assert known_scales(divided.train()) == wanted
        np.testing.assert_allclose(losses(divided), losses(one), rtol=1e-5)
    wide = trainer("wide")
    wide.model._set_scales({name: scale / 1000 for name, scale in wanted.items()})
    wide.train()
    assert losses(wide) != pytest.approx(losses(one), rel=1e-3)


@pytest.mark.full
def test_what_cannot_be_observed_is_refused(tmp_path, monkeypatch):
    of_run = trainer_of(tmp_path / "run", model_of(), QatConfig("nvfp4-nvfp4"))
    before = "nvfp4-nvfp4 observes activations on the rows of the first step"
    with pytest.raises(ValueError, match=f"{before}, and objective = grpo samples them during it: take nvfp4 or"):
        checks.require_observable(of_run.model.qat, RunNeeds("objective = grpo"))
    monkeypatch.setattr(checks.processes, "count", lambda: 2)
    with pytest.raises(ValueError, match=f"{before}, in a run of one process: this one has 2"):
        checks.require_observable(of_run.model.qat, of_run.spec.step.needs)
    monkeypatch.undo()
    model = model_of()
    _, linear = next(linears(model))
    halves = jax.sharding.NamedSharding(jax.make_mesh((2,), ("half",)), jax.sharding.PartitionSpec("half"))
    linear.weight.set_value(jax.device_put(linear.weight[...], halves))
    with pytest.raises(ValueError, match="the range of activations: the model's weights are divided over 2 devices"):
        trainer_of(tmp_path / "halves", model, QatConfig("nvfp4-nvfp4")).evaluate()


def test_the_config_says_it_briefly_and_refuses(tmp_path):
    config = make_config(tmp_path, qat=QatConfig())
    values = config_to_dict(config)
    assert values["qat"] == {"format": "int4", "group_size": 128, "start": 0, "gradients": "straight_through"}
    assert config_from_dict(values | {"qat": "int4"}) == config_from_dict(values) == config
    with pytest.raises(ValueError, match="qat.start = 900: the run has only"):
        trainer_of(tmp_path, model_of(), qat=QatConfig(group_size=32, start=900), steps=None, epochs=1.0)
