"""Distillation: the loss over packed rows, the teacher beside the student, and whole runs."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rich.console import Console
from tiny_models import adapted_model, tiny_config, tiny_model

import jaxtune
from jaxtune.models.config import LayerSpec
from jaxtune.models.files.quant import quantize
from jaxtune.models.generation.division import Division
from jaxtune.models.hf import model_from_config, save_pretrained
from jaxtune.models.lora import freeze, get_peft_model, without_adapter
from jaxtune.train.callbacks import Callback
from jaxtune.train.config import (
    CheckpointConfig,
    ConfigError,
    DataConfig,
    EvaluationConfig,
    MemoryConfig,
    MeshConfig,
    OptimConfig,
)
from jaxtune.train.config.objective import ObjectiveConfig
from jaxtune.train.display.rows_report import check
from jaxtune.train.folder.checkpoint import CheckpointError
from jaxtune.train.objectives.distillation import Distill, generalized_jsd
from jaxtune.train.objectives.loss import Forward
from jaxtune.train.objectives.named import objective_of
from jaxtune.train.objectives.sft import SFT
from jaxtune.train.objectives.teachers import with_teacher, without_teacher
from jaxtune.train.planning.choice import choose
from jaxtune.train.planning.cost import abstract_model, step_cost
from jaxtune.train.planning.devices import find_device
from jaxtune.train.planning.forecasts import forecast
from jaxtune.train.planning.parts import TEACHER
from jaxtune.train.planning.step_spec import StepSpec
from jaxtune.train.sampled.own_samples import OwnSamples, own_samples
from jaxtune.train.sampled.prompts import AnswerSteps
from jaxtune.train.spec.loading import loading
from jaxtune.train.trainer import Trainer
from tests.train.data.conftest import make_tokenizer
from tests.train.tiny_runs import dataset, documents, make_config

CAPPED = dict(final_soft_cap=5.0, logit_scale=0.7)


def teacher_model(seed: int = 7, **changes):
    return tiny_model(seed=seed, layers=(LayerSpec(),), **(dict(hidden_size=32, intermediate_size=40) | changes))


def student_model(**changes):
    return tiny_model(layers=(LayerSpec(),), **changes)


# ---- the loss


@pytest.mark.full
@pytest.mark.parametrize("name", ["a teacher", "the base"])
def test_packed_rows_have_the_loss_and_gradients_of_rows_alone(name):
    made = documents(4, longest=9)
    objective = Distill(beta=0.3, temperature=1.4)
    model = adapted_model(student_model(**CAPPED), r=2)
    teacher = teacher_model() if name == "a teacher" else without_adapter(model)
    model = with_teacher(model, teacher) if name == "a teacher" else model
    rows = dataset(made, length=30)
    batch = rows.batches(len(rows.rows), shuffle=False).batch_at(0)
    assert int(batch.segment_ids.max()) > 1  # packed
    graph, trainable, frozen = nnx.split(model, nnx.Param, ...)

    def packed(trainable):
        loss, count, sums = objective.loss(nnx.merge(graph, trainable, frozen), batch, Forward(chunk_tokens=20))
        return loss / count, objective.metrics(sums | {"count": count})["entropy"]

    def alone(trainable):
        student, total, count = nnx.merge(graph, trainable, frozen), 0.0, 0
        entropy = 0.0
        for document in made:
            tokens, counted = document.tokens[None], jnp.asarray(document.mask[1:])
            own = student(tokens)[0, :-1]
            losses = generalized_jsd(own, teacher(tokens)[0, :-1], beta=0.3, temperature=1.4)
            log_probs = jax.nn.log_softmax(own / 1.4)
            entropy -= ((jnp.exp(log_probs) * log_probs).sum(-1) * counted).sum()
            total, count = total + (losses * counted).sum(), count + counted.sum()
        return total / count, entropy / count

    (got, entropy), gradients = jax.jit(jax.value_and_grad(packed, has_aux=True))(trainable)
    (want, want_entropy), want_gradients = jax.jit(jax.value_and_grad(alone, has_aux=True))(trainable)
    np.testing.assert_allclose(got, want, rtol=2e-5)
    np.testing.assert_allclose(entropy, want_entropy, rtol=2e-5)
    for one, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(want_gradients), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


# ---- runs


def trainer_of(folder, model=None, teacher=None, **changes) -> Trainer:
    settings = dict(
        steps=10,
        rows_per_step=8,
        optim=OptimConfig(learning_rate=2e-2, weight_decay=0.0),
        objective=ObjectiveConfig("distill", teacher="given", beta=0.5, on_policy=0.0),
        evaluation=EvaluationConfig(at_start=True),
        data=dataclasses.replace(make_config(folder).data, eval="held out"),
        checkpoint=CheckpointConfig(every_steps=4, every_minutes=None),
    )
    config = make_config(folder, **(settings | changes))
    model = with_teacher(model or student_model(), teacher or teacher_model())
    return Trainer(model, None, config, dataset(documents(64)), dataset(documents(24, seed=1)))


def of_metric(trainer: Trainer, name: str) -> list[float]:
    return [line[name] for line in trainer.history if name in line]


def same_bits(one, other):
    for a, b in zip(*(jax.tree.leaves(nnx.state(model)) for model in (one, other)), strict=True):
        np.testing.assert_array_equal(a, b)


class Cut(Callback):
    def between(self, moment):
        if moment.step == 6:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    trainer = trainer_of(tmp_path_factory.mktemp("distill"))
    return trainer, trainer.train()


@pytest.mark.full
def test_a_student_comes_closer_to_its_teacher_on_held_out_rows(run):
    trainer, trained = run
    before, after = of_metric(trainer, "eval_loss")
    assert after < 0.7 * before
    assert trained.teacher is None and without_teacher(trained) is trained
    assert all(line["entropy"] > 0 for line in trainer.history if "entropy" in line)
    shown = trainer.data_summary().splitlines()[0]
    assert re.fullmatch(r"teacher: as it was given, llama, 0.00 B parameters in float32, .* beside the student", shown)


@pytest.mark.full
def test_an_interrupted_run_goes_on_to_the_same_bits(run, tmp_path):
    cut = trainer_of(tmp_path)
    cut.callbacks = (Cut(),)
    with pytest.raises(KeyboardInterrupt):
        cut.train()
    again = trainer_of(tmp_path)
    same_bits(again.train(), run[1])
    assert of_metric(again, "loss") == of_metric(run[0], "loss")[6:]  # an error saves


@pytest.mark.full
def test_another_teacher_is_another_run(tmp_path):
    teachers = [teacher_model(seed) for seed in (7, 8)]
    for index, teacher in enumerate(teachers):
        teacher.base_digest = f"{index:064x}"
    trainer_of(tmp_path, teacher=teachers[0], steps=4).train()
    with pytest.raises(CheckpointError, match="teacher_digest"):
        trainer_of(tmp_path, teacher=teachers[1], steps=4).train()


@pytest.mark.full
@pytest.mark.parametrize("mesh", [(2, 1), (1, 2)], ids=["rows divided", "weights divided"])
def test_a_mesh_leads_where_one_device_leads(run, mesh, tmp_path):
    off = dict(evaluation=EvaluationConfig(at_end=False), checkpoint=CheckpointConfig(every_minutes=None))
    trained = trainer_of(tmp_path, mesh=MeshConfig(*mesh), **off).train()
    begun = nnx.state(student_model(), nnx.Param)
    states = [jax.tree.leaves(jax.device_get(nnx.state(model, nnx.Param))) for model in (run[1], trained)]

    def distance(ours, theirs):
        return np.sqrt(sum(((a - b) ** 2).sum() for a, b in zip(ours, theirs, strict=True)))

    assert distance(*states) < 1e-3 * distance(states[0], jax.tree.leaves(begun))


@pytest.mark.full
def test_an_adapter_learns_from_a_quantised_teacher_and_from_its_base(tmp_path):
    wide = dict(hidden_size=64, intermediate_size=128, num_heads=2, num_kv_heads=2, head_dim=32)
    student = get_peft_model(student_model(**wide), r=4)
    trainer = trainer_of(tmp_path, student, quantize(teacher_model(**wide), "nf4"), steps=4)
    trainer.train()
    before, after = of_metric(trainer, "eval_loss")
    assert after < before and "in nf4" in trainer.data_summary()
    base = ObjectiveConfig("distill", teacher="base", on_policy=0.0)
    config = make_config(tmp_path / "base", objective=base, steps=1)
    trainer = Trainer(student, None, config, dataset(documents(16)))
    trainer.train()
    assert of_metric(trainer, "loss") == [pytest.approx(0.0, abs=1e-6)]  # the adapter does nothing yet
    config = make_config(tmp_path / "none", steps=1)
    unnamed = Trainer(student, None, config, dataset(documents(16)), objective=Distill(on_policy=0.0))
    for each in (trainer, unnamed):
        assert each.data_summary().splitlines()[0] == "teacher: the model itself with its adapter off"


# ---- on the student's own samples

ROWS = [
    {"messages": [{"role": "user", "content": ask}, {"role": "assistant", "content": answer}]}
    for ask, answer in zip(
        ("one", "two of them", "three", "and four", "five"), ("a", "bc", "def", "gh", "i"), strict=True
    )
]


def source_of(on_policy: float, rows=ROWS, mesh=None, micro_batches=None) -> OwnSamples:
    objective = Distill.of(on_policy=on_policy, max_completion_length=8, sampling_temperature=0.8)
    tokenizer = make_tokenizer()
    data = DataConfig(train="rows that the test made", length=64, template="chatml")
    return own_samples(objective, rows, tokenizer, AnswerSteps(data, 4, micro_batches, mesh, seed=0), [1], 128)


@pytest.mark.full
def test_rows_are_sampled_or_keep_their_own_answers():
    tokenizer = make_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer), layers=(LayerSpec(),))
    own, half, all_ = (source_of(share) for share in (1e-9, 0.5, 1.0))
    documents = (
        SFT()
        .prepare(
            ROWS,
            tokenizer,
            DataConfig(train="x", length=64, template="chatml"),
            vocab_size=len(tokenizer),
            max_rows=None,
        )
        .documents
    )
    expected = {tuple(one.tokens.tolist()): one.mask for one in map(documents.__getitem__, range(len(documents)))}
    found = parts_of(own.batch_at(0, lambda: model))
    assert len(found) == 4  # with the tokens and masks of supervised fine-tuning
    for tokens, weights in found.items():
        np.testing.assert_array_equal(weights[:-1] > 0, expected[tokens][1:])
    assert own.metrics_at(0) == {"on_policy": 0.0}
    batches = [half.batch_at(step, lambda: model) for step in range(6)]
    shares = [half.metrics_at(step)["on_policy"] for step in range(6)]
    assert 0 < np.mean(shares) < 1
    kept = [sum(tokens in expected for tokens in parts_of(batch)) / 4 for batch in batches]
    assert kept == [1 - share for share in shares]
    drawn = parts_of(all_.batch_at(0, lambda: model))
    metrics = all_.metrics_at(0)
    assert sum(int(weights.sum()) for weights in drawn.values()) == 4 * metrics["completions/mean_length"]
    prompts = {row.prompt for row in all_.rows}
    assert all(any(tokens[: len(prompt)] == prompt for prompt in prompts) for tokens in drawn)
    again = source_of(1.0)
    again.resume(0, None)
    np.testing.assert_array_equal(again.batch_at(0, lambda: model).tokens, all_.batch_at(0, None).tokens)
    assert all_.identity() != own.identity() and "all answers are sampled" in all_.described(3)[0]


def test_the_rows_of_a_step_can_be_divided_among_devices_and_micro_batches():
    alone = source_of(1.0).rows_per_step
    for micro_batches, multiple in ((None, 2), (2, 4)):
        made = source_of(1.0, mesh=MeshConfig(data=2), micro_batches=micro_batches).rows_per_step
        assert made % multiple == 0 and alone <= made < alone + multiple


def parts_of(batch) -> dict[tuple[int, ...], np.ndarray]:
    """{the tokens of a document: its weights}"""
    found = {}
    for row in range(len(batch.tokens)):
        for number in range(1, batch.segment_ids[row].max() + 1):
            here = batch.segment_ids[row] == number
            found[tuple(batch.tokens[row, here].tolist())] = batch.weights[row, here]
    return found


@pytest.mark.parametrize(
    "rows, on_policy, told",
    [
        ([{"prompt": "no answer"}], 0.5, "rows:1: "),
        ([{"prompt": "long " * 80}], 1.0, "its prompt has .* tokens"),
        ("a TokenDataset", 1.0, "objective.on_policy = 1.0: rows that are tokenised already"),
    ],
)
def test_rows_that_cannot_be_answered_are_named(rows, on_policy, told):
    with pytest.raises(ConfigError, match=told):
        source_of(on_policy, dataset(documents(4)) if isinstance(rows, str) else rows)


def on_policy_trainer(folder, **changes) -> Trainer:
    tokenizer = make_tokenizer()
    student, teacher = (make(vocab_size=len(tokenizer)) for make in (student_model, teacher_model))
    settings = dict(
        steps=6,
        rows_per_step=8,
        optim=OptimConfig(learning_rate=2e-2, weight_decay=0.0),
        objective=ObjectiveConfig("distill", teacher="given", max_completion_length=8, on_policy=0.7),
        data=DataConfig(train="rows that the test made", length=64, template="chatml", eval="held out"),
        evaluation=EvaluationConfig(at_start=True),
        checkpoint=CheckpointConfig(every_steps=2, every_minutes=None),
        mesh=MeshConfig(data=2),
    )
    config = make_config(folder, **(settings | changes))
    return Trainer(with_teacher(student, teacher), tokenizer, config, ROWS, ROWS[:3])


@pytest.mark.full
def test_a_run_on_own_samples_learns_on_two_devices_and_goes_on_to_the_same_bits(tmp_path, capsys):
    whole, cut = (on_policy_trainer(tmp_path / name) for name in ("whole", "cut"))
    trained = whole.train()
    before, after = of_metric(whole, "eval_loss")
    assert after < 0.8 * before
    assert "a sample: " in (shown := capsys.readouterr()).out + shown.err
    assert all(0 < value <= 8 for value in of_metric(whole, "completions/mean_length"))
    load, killed = cut.batches._sampled, []

    def killed_while_sampling(*arguments):
        if cut.steps_done == 0 and len(cut.history) >= 4 and not killed:
            killed.append(True)
            raise KeyboardInterrupt
        return load(*arguments)

    cut.batches._sampled = killed_while_sampling
    with pytest.raises(KeyboardInterrupt):
        cut.train()
    again = on_policy_trainer(tmp_path / "cut")
    same_bits(again.train(), trained)
    losses = of_metric(again, "loss")
    assert 0 < len(losses) < 6 and losses == of_metric(whole, "loss")[-len(losses) :]


@pytest.mark.parametrize("mesh", [(1, 2), (2, 1), pytest.param((2, 4), marks=pytest.mark.full)])
def test_own_samples_of_several_devices_are_those_of_one(mesh, tmp_path):
    """And so are its losses, and answers that an evaluation samples."""
    asked = EvaluationConfig(generate=("brevity",), generate_rows=3, temperature=0.8, max_new_tokens=4, at_end=True)
    changes = dict(steps=3, evaluation=asked)
    alone, divided = (
        on_policy_trainer(tmp_path / name, mesh=MeshConfig(*sizes), memory=MemoryConfig(plan="keep"), **changes)
        for name, sizes in (("alone", (1, 1)), ("divided", mesh))
    )
    alone.train()
    assert Division.of(jax.tree.leaves(nnx.state(divided.train()))) is not None
    written = [(trainer.output / "rollouts.jsonl").read_text().splitlines() for trainer in (alone, divided)]
    answers = [[json.loads(line)["answer"] for line in lines] for lines in written]
    assert answers[0] == answers[1] and len(answers[0]) > 3
    for name in ("loss", "grad_norm", "eval_answers/brevity", "eval_answer_tokens"):
        found, wanted = (of_metric(trainer, name) for trainer in (divided, alone))
        assert found
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-5, err_msg=name)


def test_check_shows_a_prompt_where_rows_are_sampled(tmp_path):
    trainer, screen = on_policy_trainer(tmp_path), Console(file=io.StringIO(), width=100)
    check(trainer.model.given, trainer.data_summary(), trainer.batches, trainer.tokenizer, screen)
    shown = screen.file.getvalue()
    assert "A prompt, to which the model samples answers during the run:" in shown and "one<|im_end|>" in shown


# ---- from a config


def folder_of(model, path):
    save_pretrained(model, path, make_tokenizer())
    return str(path)


@pytest.mark.parametrize("load_in", [None, "nf4"])
def test_the_command_loads_a_teacher_as_the_planner_expects_it(load_in, tmp_path):
    tokenizer = make_tokenizer()
    wide = dict(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_heads=2, num_kv_heads=2, head_dim=32
    )
    folders = [folder_of(make(**wide), tmp_path / name) for name, make in (("s", student_model), ("t", teacher_model))]
    config = make_config(
        tmp_path / "out",
        model=dataclasses.replace(make_config("x").model, path=folders[0]),
        objective=ObjectiveConfig("distill", teacher=folders[1], teacher_load_in=load_in),
    )
    assert objective_of(config.objective) == Distill(teacher=folders[1])
    with loading(config) as (weights, _, model):
        loaded = weights.result().take()
    ahead, there = (nnx.split(each, nnx.Param, ...) for each in (model, loaded))
    for expected, found in zip(jax.tree.leaves(ahead[1:]), jax.tree.leaves(there[1:]), strict=True):
        assert (expected.shape, expected.dtype) == (found.shape, found.dtype)
    assert loaded.teacher.name_or_path == folders[1] and loaded.teacher.base_digest
    assert not jax.tree.leaves(nnx.state(loaded.teacher, nnx.Param))
    make_tokenizer(special=False).save_pretrained(folders[1])
    with pytest.raises(ConfigError, match="its tokenizer gives .* the id .* and the student's"), loading(config):
        pass


def test_the_plan_counts_the_teacher(tmp_path):
    config = make_config(tmp_path, objective=ObjectiveConfig("distill", teacher="base"))
    alone = abstract_model(tiny_config(), StepSpec.of(config).model)
    teacher = nnx.eval_shape(lambda: freeze(teacher_model()))
    plain, taught = (
        step_cost(model, dataclasses.replace(StepSpec.of(config), length=64))
        for model in (alone, with_teacher(alone, teacher))
    )
    size = sum(leaf.size * 4 for leaf in jax.tree.leaves(nnx.state(teacher)))
    assert taught.fixed[TEACHER] == size and TEACHER not in plain.fixed
    assert taught.fixed["frozen weights"] == plain.fixed["frozen weights"]
    assert taught.frozen_bytes == plain.frozen_bytes + size
    card = find_device("RTX 4090")
    plan = choose(plain, StepSpec.of(config), card, None).plan
    one, other = (forecast(parts, plan, card) for parts in (plain, taught))
    assert other.peak_bytes > one.peak_bytes + size
    assert other.device_seconds != one.device_seconds


@pytest.mark.parametrize(
    "changes, told",
    [
        (dict(), "objective.teacher"),
        (dict(teacher="t", beta=1.5), "objective.beta = 1.5"),
        (dict(teacher="t", temperature=0.0), "objective.temperature = 0.0"),
        (dict(teacher="base", teacher_load_in="nf4"), "objective.teacher_load_in"),
        (dict(teacher="t", loss_type="ipo"), "objective.loss_type"),
        (dict(teacher="t", on_policy=1.2), "objective.on_policy = 1.2"),
        (dict(teacher="t", sampling_temperature=0.0), "objective.sampling_temperature"),
    ],
)
def test_settings_that_cannot_be_are_named(changes, told):
    with pytest.raises(ConfigError, match=re.escape(told)):
        ObjectiveConfig("distill", **changes)


def test_a_teacher_that_does_not_fit_is_refused(tmp_path):
    with pytest.raises(ValueError, match="the student's vocabulary has 48 entries and the teacher's 50"):
        with_teacher(student_model(), teacher_model(vocab_size=50))
    config = make_config(tmp_path, objective=ObjectiveConfig("distill", teacher="t"))
    with pytest.raises(ValueError, match="objective.teacher = 't': the model has no teacher attached"):
        Trainer(student_model(), None, config, dataset(documents(8)))
    config = make_config(tmp_path, objective=ObjectiveConfig("distill", teacher="base", on_policy=0.0))
    with pytest.raises(ValueError, match="has no adapter"):
        Trainer(student_model(), None, config, dataset(documents(8)))


@pytest.mark.full
def test_a_small_student_learns_from_the_packaged_model(tmp_path):
    """Its own layers are fewer and narrower, and its weights are random."""
    folder = Path(jaxtune.__file__).parent / "quickstart"
    teacher, tokenizer = jaxtune.from_pretrained(folder / "base", dtype="float32")
    small = dict(num_hidden_layers=1, hidden_size=64, intermediate_size=128)
    hf = json.loads((folder / "base/config.json").read_text()) | small
    student = model_from_config(hf, jax.random.key(0))
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()[:400]]
    config = make_config(
        tmp_path,
        steps=30,
        rows_per_step=8,
        objective=ObjectiveConfig("distill", teacher="given", beta=0.0, on_policy=0.0),
        data=DataConfig(train="the packaged rows", length=64, eval="the packaged rows", train_on="all"),
        optim=OptimConfig(learning_rate=1e-2, weight_decay=0.0),
        evaluation=EvaluationConfig(at_start=True),
    )
    trainer = Trainer(with_teacher(student, teacher), tokenizer, config, rows[:-40], rows[-40:])
    trainer.train()
    before, after = of_metric(trainer, "eval_loss")
    assert after < 0.4 * before  # 5.4 nats and 1.1
