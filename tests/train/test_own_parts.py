"""A user's own objective, optimizer, schedule and callback, given to Trainer."""

from __future__ import annotations

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxtune.models.lora import without_adapter
from jaxtune.train.callbacks import Callback, TrainingStopped
from jaxtune.train.config import CheckpointConfig, EvaluationConfig, OptimConfig, ScheduleConfig
from jaxtune.train.objectives.sft import SFT
from jaxtune.train.optimizer.schedule import learning_rate_schedule
from jaxtune.train.trainer import Trainer
from tests.train.tiny_runs import dataset, documents, lora_model, make_config

# ---- what the user writes


@dataclasses.dataclass(frozen=True)
class NearTheBase(SFT):
    """Cross-entropy plus `weight` times the divergence KL(trained, base) of the tokens that are trained on."""

    weight: float = 0.5
    sums = ("kl",)

    def loss(self, model, batch, forward):
        hidden = forward(model, batch)
        loss, count = forward.cross_entropy(model, hidden, batch)
        base = without_adapter(model)
        ours = jax.nn.log_softmax(model.logits(hidden))
        theirs = jax.nn.log_softmax(base.logits(forward.frozen(base, batch)))
        kl = ((jnp.exp(ours) * (ours - theirs)).sum(-1) * batch.weights).sum()
        return loss + self.weight * kl, count, {"kl": kl}

    def metrics(self, sums):
        return {"kl": sums["kl"] / (sums["count"] + 1e-9)}


class Seen(Callback):
    def __init__(self):
        self.steps, self.evaluations, self.saves = [], [], []

    def stepped(self, step, metrics):
        metrics["twice"] = 2 * metrics["kl"]
        self.steps.append(step)

    def evaluated(self, step, metrics):
        self.evaluations.append((step, metrics["eval_kl"]))

    def saved(self, step):
        self.saves.append(step)


def lion(rate=2e-2, b1=0.9):
    return optax.chain(optax.scale_by_lion(b1), optax.scale_by_learning_rate(rate))


# ---- that it works

ROWS, HELD_OUT = documents(24), documents(6, seed=1)


def trainer_of(output, optimizer=None, model=None, **parts) -> Trainer:
    config = make_config(
        output,
        steps=8,
        optim=OptimConfig(),
        schedule=ScheduleConfig(),
        checkpoint=CheckpointConfig(every_steps=4, every_minutes=None, keep=3),
        evaluation=EvaluationConfig(at_start=True),
        data=dataclasses.replace(make_config(output).data, eval="held out"),
        **{key: parts.pop(key) for key in ("micro_batches",) if key in parts},
    )
    parts = dict(objective=NearTheBase(), optimizer=optimizer or lion()) | parts
    model = model or lora_model(layers=2, lora_dropout=0.1)
    return Trainer(model, None, config, dataset(ROWS), dataset(HELD_OUT), **parts)


def arrays(model):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    seen = Seen()
    trainer = trainer_of(tmp_path_factory.mktemp("own"), callbacks=[seen])
    return trainer, trainer.train(), seen


@pytest.mark.full
def test_it_trains_and_its_numbers_are_in_the_metrics(run):
    trainer, _, seen = run
    lines = [json.loads(line) for line in (trainer.output / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert steps[0]["kl"] == pytest.approx(0.0, abs=1e-6) and steps[-1]["kl"] > 1e-3  # B begins at zero
    assert all(line["twice"] == 2 * line["kl"] and "learning_rate" not in line for line in steps)
    before, after = [line for line in lines if "eval_loss" in line]
    assert after["eval_loss"] < before["eval_loss"] - 0.03
    assert after["eval_kl"] > 1e-3 and seen.evaluations == [(0, before["eval_kl"]), (8, after["eval_kl"])]
    assert seen.steps == list(range(1, 9)) and seen.saves == [4, 8]


@pytest.mark.full
def test_it_goes_on_bit_for_bit(run, tmp_path):
    trainer, trained, _ = run
    output = tmp_path / "run"
    shutil.copytree(trainer.output, output)
    shutil.rmtree(output / "checkpoints" / "step_00000008")
    resumed = trainer_of(output)
    for one, other in zip(arrays(resumed.train()), arrays(trained), strict=True):
        np.testing.assert_array_equal(one, other)
    losses = {line["step"]: line["loss"] for line in trainer.history if "loss" in line}
    assert [(line["step"], line["loss"]) for line in resumed.history if "loss" in line] == list(losses.items())[4:]


@pytest.mark.full
@pytest.mark.parametrize(
    ("changes", "key"),
    [
        (dict(optimizer=lion(b1=0.8)), "own.optimizer.update"),
        (dict(optimizer=optax.sgd(1e-3, 0.9)), "own.optimizer.states"),
        (dict(objective=NearTheBase(weight=0.25)), "own.objective"),
        (dict(schedule=optax.constant_schedule(1e-3)), r"own\.schedule"),
    ],
)
def test_other_parts_are_another_run(run, changes, key):
    trainer, _, _ = run
    with pytest.raises(ValueError, match=f"this run cannot continue that checkpoint(.|\n)*{key}"):
        trainer_of(trainer.output, **changes).train()


@pytest.mark.full
def test_gradients_of_more_than_one_run_of_the_model_add_up(tmp_path):
    """Layers' gradients are added to sums in the first run of the model, whatever else the loss runs."""

    @dataclasses.dataclass(frozen=True)
    class Twice(SFT):
        times: int = 2

        def loss(self, model, batch, forward):
            found = [forward.cross_entropy(model, forward(model, batch), batch) for _ in range(self.times)]
            return sum(loss for loss, _ in found) / self.times, found[0][1], {}

    moved = []
    for times in (1, 2):
        optimizer = optax.sgd(1.0)
        trainer = trainer_of(tmp_path / str(times), optimizer, lora_model(), objective=Twice(times), micro_batches=2)
        moved.append(arrays(trainer.train()))
    assert any(np.abs(one - other).max() > 1e-3 for one, other in zip(moved[0], arrays(lora_model()), strict=True))
    for one, other in zip(*moved, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_its_states_are_planned_for(tmp_path):
    trainer = trainer_of(tmp_path)
    state, _, _ = trainer.model.first_state(trainer.engine)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(state.opt_state))
    assert trainer.planner.cost.fixed["optimizer states"] == held
    assert held < 1.1 * sum(leaf.nbytes for leaf in jax.tree.leaves(state.trainable))  # Lion has one moment, not two


def test_a_schedule_of_ones_own_moves_the_configs_optimizer(tmp_path):
    schedule = optax.exponential_decay(1e-2, 1, 0.5)
    config = make_config(tmp_path, schedule=ScheduleConfig())
    trainer = Trainer(lora_model(), None, config, dataset(ROWS), schedule=schedule)
    trainer.train()
    rates = [line["learning_rate"] for line in trainer.history]
    np.testing.assert_allclose(rates, [1e-2, 5e-3, 2.5e-3, 1.25e-3], rtol=1e-6)
    assert learning_rate_schedule(ScheduleConfig(), 1e-2, 4)(1) != rates[1]


@pytest.mark.parametrize(
    ("changes", "parts", "message"),
    [
        (dict(optim=OptimConfig(beta1=0.8)), dict(optimizer=lion()), r"optim\.beta1 = 0\.8: it has no effect"),
        (
            dict(optim=OptimConfig(offload=True)),
            dict(optimizer=lion()),
            r"optim\.offload = True: .* stay on the device",
        ),
        (dict(optim=OptimConfig()), dict(schedule=lambda step: 0.1), r"schedule\.name = 'constant': it has no effect"),
        (dict(optim=OptimConfig()), dict(optimizer=lion()), r"schedule\.name = 'constant': .* beside the optimizer"),
    ],
)
def test_settings_without_effect_are_refused(tmp_path, changes, parts, message):
    with pytest.raises(ValueError, match=message):
        Trainer(lora_model(), None, make_config(tmp_path, **changes), dataset(ROWS), **parts)


def test_sums_that_are_not_named_are_refused(tmp_path):
    class Unnamed(NearTheBase):
        sums = ("divergence",)

        def metrics(self, sums):
            return {}

    with pytest.raises(
        ValueError, match=r"Unnamed\.loss returned the sums \['kl'\], but its `sums` declares \('divergence',\)"
    ):
        trainer_of(tmp_path, objective=Unnamed()).train()


@pytest.mark.full
def test_a_callback_ends_a_run(tmp_path):
    class Enough(Callback):
        def stepped(self, step, metrics):
            if step == 3:
                raise TrainingStopped("that is enough")

    with pytest.raises(TrainingStopped, match="that is enough"):
        trainer_of(tmp_path, callbacks=[Enough()]).train()
