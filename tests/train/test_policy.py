"""Learning from rewards: the loss over packed answers, batches of sampled answers, and whole runs."""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from step_costs import phase_sections
from tiny_models import adapted_model, golden_model, tiny_model

from jaxtune.models.config import LayerSpec, MoEConfig
from jaxtune.models.decoder import Decoder
from jaxtune.models.files.quant import compute_in_fp8, quantize
from jaxtune.models.generation.sampler import Sampler
from jaxtune.models.generation.slot_plan import SlotPlan, slots_for
from jaxtune.models.lora import get_peft_model, without_adapter
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
from jaxtune.train.config.file import load_config
from jaxtune.train.config.objective import ObjectiveConfig
from jaxtune.train.data.batches import SampledRows
from jaxtune.train.data.packing.answers import OLD_LOGPS, SAMPLED_LOGPS, Answer
from jaxtune.train.objectives.grpo import Answers, PolicyLoss, grpo_loss, rloo_loss
from jaxtune.train.objectives.loss import Forward
from jaxtune.train.objectives.named import objective_of
from jaxtune.train.objectives.policy import GRPO, RLOO
from jaxtune.train.planning.movables.streamed import Streamed
from jaxtune.train.planning.phases import phase_lines, phases_of, prefill_bytes
from jaxtune.train.sampled import answering
from jaxtune.train.sampled.answering import OneTurn, Prompt, Sampling
from jaxtune.train.sampled.prompts import read_prompts
from jaxtune.train.sampled.reward_functions import RewardFunctions
from jaxtune.train.sampled.rollouts import SampledAnswers
from jaxtune.train.spec.setup import slots_between
from jaxtune.train.trainer import Trainer
from tests.train.data.conftest import make_tokenizer
from tests.train.tiny_runs import make_config

VOCAB, LONGEST = 48, 8


def score_of_even_tokens(completion_ids, **columns):
    """The share of even tokens."""
    return [float(np.mean([token % 2 == 0 for token in ids] or [0])) for ids in completion_ids]


def source_of(objective: GRPO, count: int = 5, length: int = 40, **options) -> SampledAnswers:
    draw = np.random.default_rng(0)
    prompts = [
        Prompt(f"prompt {index}", tuple(draw.integers(3, VOCAB, size).tolist()), {"index": index})
        for index, size in enumerate(draw.integers(1, 9, count))
    ]
    rewards = RewardFunctions.of([score_of_even_tokens])
    settings = dict(answers_per_step=8, length=length, seed=3) | options
    advantages = functools.partial(objective.advantages, weights=np.array(rewards.weights))
    answering = OneTurn(Sampling(objective.settings, (1,), str))
    return SampledAnswers(prompts, rewards, objective.settings, advantages, answering, **settings)


def some_answers(source: SampledAnswers, count: int = 8) -> list[Answer]:
    draw = np.random.default_rng(1)
    made = []
    for index in range(count):
        size = int(draw.integers(1, LONGEST + 1))
        logps = (-draw.exponential(3.0, size)).astype(np.float32).tolist()
        reason = "length" if size == LONGEST else "stop"
        ids = tuple(draw.integers(3, VOCAB, size).tolist())
        prompt, value = index % len(source.prompts), float(draw.standard_normal())
        made.append(Answer(prompt, source.prompts[prompt].ids, ids, tuple(logps), reason, advantage=value))
    return made


def settings(**changes) -> dict:
    return dict(num_generations=4, max_completion_length=LONGEST) | changes


def plain_log_probs(model, source: SampledAnswers, answer: Answer, temperature: float):
    """(log-probabilities, entropies) of an answer's tokens, of its document alone and whole logits."""
    prompt = source.prompts[answer.prompt].ids
    ids = jnp.asarray([[*prompt, *answer.ids]], jnp.int32)
    logps = jax.nn.log_softmax(model(ids)[0].astype(jnp.float32) / temperature)
    own = logps[len(prompt) - 1 : -1]
    taken = jnp.take_along_axis(own, jnp.asarray(answer.ids)[:, None], axis=1)[:, 0]
    return taken, -(jnp.exp(own) * own).sum(-1)


def plain_loss(model, source: SampledAnswers, answers: list[Answer], objective: GRPO):
    """The loss of answers that go through the model one by one."""
    temperature = objective.settings.temperature
    base = without_adapter(model)

    def padded(values):
        return jnp.stack([jnp.pad(jnp.asarray(v, jnp.float32), (0, LONGEST - len(v))) for v in values])

    own = [plain_log_probs(model, source, answer, temperature) for answer in answers]
    reference = [plain_log_probs(base, source, answer, temperature)[0] for answer in answers]
    logps, masked = padded([o[0] for o in own]), objective.settings.mask_truncated_completions
    counted = [np.ones(len(a.ids)) * (not masked or a.finish_reason == "stop") for a in answers]
    mask = padded(counted)
    sampled = padded([a.logps for a in answers])
    given = Answers(
        logps,
        mask,
        jnp.array([a.advantage for a in answers]),
        padded([o[1] for o in own]),
        ref_logps=jax.lax.stop_gradient(padded(reference)),
        ratio=objective._ratio(jax.lax.stop_gradient(logps), sampled, mask),
    )
    return (rloo_loss if isinstance(objective, RLOO) else grpo_loss)(given, objective.losses)


CASES = {
    "dapo": GRPO.of(**settings()),
    "dr_grpo": GRPO.of(**settings(loss_type="dr_grpo", temperature=0.7)),
    "grpo, cut off": GRPO.of(**settings(loss_type="grpo", mask_truncated_completions=True)),
    "gspo": GRPO.of(**settings(loss_type="grpo", importance_sampling_level="sequence")),
    "cispo": GRPO.of(**settings(loss_type="cispo", epsilon_high=5.0)),
    "divergence": GRPO.of(**settings(beta=0.1, temperature=1.3, importance_sampling_mode="token_truncate")),
    "entropy": GRPO.of(**settings(entropy_coef=0.1, importance_sampling_correction=False)),
    "rloo": RLOO.of(**settings()),
    "rloo, by token": RLOO.of(**settings(importance_sampling_mode="token_truncate")),
    "rloo, told another loss": RLOO.of(**settings(loss_type="cispo", epsilon_high=0.3)),
}


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("length", [16, 40])
def test_packed_answers_have_the_loss_and_gradients_of_answers_alone(name, length):
    objective = CASES[name]
    model = adapted_model(tiny_model(), r=2)
    source = source_of(objective, length=length)
    answers = some_answers(source)
    batch = source.rows.packed(answers, sum(source.rows.counted(answer) for answer in answers))
    graph, trainable, frozen = nnx.split(model, nnx.Param, ...)

    def packed(trainable):
        loss, count, sums = objective.loss(nnx.merge(graph, trainable, frozen), batch, Forward())
        assert sums.keys() == set(objective.sums)
        return loss / count, objective.metrics(sums)

    def alone(trainable):
        return plain_loss(nnx.merge(graph, trainable, frozen), source, answers, objective)

    (loss, metrics), gradients = jax.jit(jax.value_and_grad(packed, has_aux=True))(trainable)
    (want, want_metrics), want_gradients = jax.jit(jax.value_and_grad(alone, has_aux=True))(trainable)
    np.testing.assert_allclose(loss, want, rtol=2e-5, atol=1e-6)
    for got, expected in zip(jax.tree.leaves(gradients), jax.tree.leaves(want_gradients), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)
    for key, value in want_metrics.items():
        np.testing.assert_allclose(metrics[key], value, rtol=1e-4, atol=1e-6, err_msg=key)
    assert metrics["answers"] == 8 if "answers" in metrics else sums_name(objective)
    if length == 40:
        assert (batch.segment_ids.max(1) > 1).any()  # answers share rows


def sums_name(objective: GRPO) -> bool:
    return objective.unit == "answers"


def test_answers_are_packed_whole_each_once():
    objective = CASES["dapo"]
    source = source_of(objective, length=33)
    answers = some_answers(source)
    batch = source.rows.packed(answers, 8.0)
    found = []
    for row in range(source.rows_per_step):
        for place in range(source.rows.most_answers):
            count, start = batch.extra["answer_lengths"][row, place], batch.extra["answer_starts"][row, place]
            if count:
                ids = batch.targets[row, start : start + count]
                assert (batch.weights[row, start : start + count] == 1).all()
                found.append((tuple(ids.tolist()), float(batch.extra["advantages"][row, place])))
                np.testing.assert_array_equal(batch.extra[SAMPLED_LOGPS][row, start : start + count] < 0, True)
    assert sorted(found) == sorted((a.ids, np.float32(a.advantage).item()) for a in answers)
    assert batch.weights.sum() == sum(len(a.ids) for a in answers)
    # Each document's positions restart, and its prompt stands before its answer.
    assert (batch.positions[batch.segment_ids > 0] < 16).all()


def test_answers_to_prompts_that_became_longer_are_not_written_over_others():
    """A rollout function or an environment can do that; what the error proposes then has room."""
    source = source_of(CASES["dapo"], length=33)
    answers = [dataclasses.replace(answer, prompt_ids=(5,) * 18) for answer in some_answers(source)]
    with pytest.raises(ConfigError, match="data.length = 33: the 8 answers .* do not fit into its 4 rows"):
        source.rows.packed(answers, 8.0)
    planned = max(len(prompt.ids) for prompt in source.prompts) + LONGEST
    places = source_of(CASES["dapo"], length=2 * planned - 1).rows.places_of(answers)
    assert sorted(places) == [(row, 0, 0) for row in range(8)]


@pytest.mark.full
def test_sampling_depends_on_the_seed_the_generation_and_the_weights_alone():
    objective, model = CASES["dapo"], tiny_model()
    first, second = source_of(objective), source_of(objective)
    batches = [first.batch_at(step, lambda: model) for step in range(3)]
    again = second.batch_at(2, lambda: model)  # as a run that continues from a checkpoint of step 2
    for a, b in zip(jax.tree.leaves(batches[2]), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(a, b)
    assert (batches[0].tokens != batches[1].tokens).any()
    metrics = first.metrics_at(1)
    assert 0 <= metrics["reward"] <= 1 and metrics["completions/max_length"] <= LONGEST
    assert {"rewards/score_of_even_tokens/mean", "frac_reward_zero_std", "sampling_seconds"} <= set(metrics)
    assert first.metrics_at(1) == {}
    told = first.news()
    assert any("a sample of reward" in text for text in told) and first.news() == []


def test_the_samplers_log_probabilities_are_the_trainers():
    objective, model = GRPO.of(**settings(temperature=0.8)), tiny_model()
    source = source_of(objective)
    batch = source.batch_at(0, lambda: model)
    _, _, sums = objective.loss(model, batch, Forward())
    assert objective.metrics(sums)["sampling/sampling_logp_difference/mean"] < 1e-5
    np.testing.assert_allclose(objective.metrics(sums)["sampling/importance_sampling_ratio/mean"], 1.0, atol=1e-4)


KINDS = {
    "experts": lambda: tiny_model(moe=MoEConfig(4, 2, 8)),
    "delta nets": lambda: golden_model("qwen3_5"),
    "nf4": lambda: quantize(tiny_model(hidden_size=64, intermediate_size=64, head_dim=32), "nf4"),
    "fp8": lambda: quantize(tiny_model(hidden_size=64, intermediate_size=64, head_dim=32), "fp8"),
    "fp8 products": lambda: compute_in_fp8(KINDS["fp8"]()),
}


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_is_sampled_and_trained(kind):
    objective, model = GRPO.of(**settings()), adapted_model(KINDS[kind](), r=2)
    batch = source_of(objective).batch_at(0, lambda: model)
    graph, trainable, frozen = nnx.split(model, nnx.Param, ...)

    def loss(trainable):
        value, count, sums = objective.loss(nnx.merge(graph, trainable, frozen), batch, Forward())
        return value / count, sums

    (_, sums), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(trainable)
    assert objective.metrics(sums)["sampling/sampling_logp_difference/mean"] < 1e-3
    leaves = jax.tree.leaves(gradients)
    assert all(np.isfinite(leaf).all() for leaf in leaves) and any(np.abs(leaf).max() > 0 for leaf in leaves)


def test_rloo_takes_the_divergence_of_an_answer_from_its_reward():
    objective = RLOO.of(**settings(beta=0.3))

    def reference(model, batch):  # every token of an answer is less likely under it by its number in the answer
        return batch.extra[SAMPLED_LOGPS] - np.cumsum(batch.weights, axis=1)

    plain = source_of(RLOO.of(**settings(beta=0.0)))
    source = source_of(objective, reference=reference, penalises=True)
    answers = some_answers(source)
    apart = source._divergences(tiny_model(), answers)
    # In a row of several answers the numbers go on; alone they begin at 1.
    alone = [source._divergences(tiny_model(), [answer])[0] for answer in answers]
    np.testing.assert_allclose(alone, [len(a.ids) * (len(a.ids) + 1) / 2 for a in answers])
    assert (apart >= alone).all()
    model = tiny_model()
    first, second = plain.batch_at(0, lambda: model), source.batch_at(0, lambda: model)
    np.testing.assert_array_equal(first.tokens, second.tokens)
    assert (first.extra["advantages"] != second.extra["advantages"]).any()
    assert source.metrics_at(0)["kl"] >= 1.0 and "kl" not in plain.metrics_at(0)
    rewards, kl = np.array([[1.0], [0.0], [0.5], [0.5]]), np.array([2.0, 0.0, 1.0, 3.0])
    want = np.array([1.0 - 0.6, 0.0, 0.5 - 0.3, 0.5 - 0.9])
    np.testing.assert_allclose(
        RLOO.of(beta=0.3, num_generations=2).advantages(rewards, np.ones(1), kl=kl),
        [want[0] - want[1], want[1] - want[0], want[2] - want[3], want[3] - want[2]],
        rtol=1e-6,
    )


@pytest.mark.full
def test_a_generation_that_serves_several_steps_is_resumed():
    objective = GRPO.of(**settings(num_iterations=2, steps_per_generation=2))
    model = tiny_model()

    def score(model, batch):
        return batch.extra[SAMPLED_LOGPS]

    first, second = source_of(objective, score=score), source_of(objective, score=score)
    batches = [first.batch_at(step, lambda: model) for step in range(5)]
    assert first.position(0) is None and first.position(4) is None
    position = source_of(objective, score=score)
    for step in range(3):
        position.batch_at(step, lambda: model)
    second.resume(3, json.loads(json.dumps(position.position(3))))

    def changed():
        raise AssertionError("a generation that was kept is not sampled again")

    for a, b in zip(jax.tree.leaves(batches[3]), jax.tree.leaves(second.batch_at(3, changed)), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(batches[0].tokens, batches[2].tokens)  # the second iteration
    assert (batches[0].tokens != batches[1].tokens).any() and (batches[4].tokens != batches[0].tokens).any()
    np.testing.assert_array_equal(batches[2].extra[OLD_LOGPS], batches[0].extra[OLD_LOGPS])


@pytest.mark.full
def test_old_log_probabilities_are_those_of_the_model_that_sampled():
    """For every step of a generation, as in TRL: each step before has changed the model."""
    objective = GRPO.of(**settings(num_iterations=2, steps_per_generation=2))
    source = source_of(objective, score=lambda model, batch: np.full(batch.tokens.shape, float(model.number)))
    model = tiny_model()
    for step in range(6):
        model.number = step
        found = source.batch_at(step, lambda: model).extra[OLD_LOGPS]
        np.testing.assert_array_equal(found, 0.0 if step < 4 else 4.0)


@pytest.mark.parametrize(
    "options, told",
    [
        (dict(answers_per_step=6), "rows_per_step = 6.*groups of objective.num_generations = 4"),
        (dict(length=12), "data.length = 12.*set at least"),
    ],
)
def test_what_cannot_be_sampled_is_refused(options, told):
    with pytest.raises(ConfigError, match=told):
        source_of(CASES["dapo"], **options)


def test_settings_are_checked():
    for wrong in (dict(num_generations=1), dict(temperature=0.0), dict(num_iterations=0), dict(loss_type="x")):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            GRPO.of(**wrong)
    assert (RLOO.of().losses.beta, RLOO.of().settings.num_generations, GRPO.of().settings.num_generations) == (
        0.05,
        2,
        8,
    )
    with pytest.raises(TypeError):
        GRPO.of(no_such_option=1)
    assert GRPO.of(max_completion_length=7).losses.max_completion_length == 7
    assert dataclasses.asdict(GRPO.of())["losses"] == dataclasses.asdict(PolicyLoss())


# ---- whole runs


REWARDS = """
def even(completion_ids, **columns):
    return [sum(token % 2 == 0 for token in ids) / max(len(ids), 1) for ids in completion_ids]
"""


def trainer_of(folder, steps: int = 12, adapter: bool = True, **changes) -> Trainer:
    file = folder / "rewards.py"
    file.write_text(REWARDS)
    tokenizer = make_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer), layers=(LayerSpec(),))
    model = get_peft_model(model, r=4, lora_alpha=8) if adapter else model
    rows = [{"prompt": text} for text in ("one", "two of them", "three", "and four", "five")]
    objective = dict(
        reward_funcs=(f"{file}:even",), num_generations=8, max_completion_length=LONGEST, loss_type="dr_grpo"
    )
    settings = dict(
        steps=steps,
        rows_per_step=32,
        optim=OptimConfig(learning_rate=3e-2, weight_decay=0.0),
        objective=ObjectiveConfig(**({"name": "grpo"} | objective | changes.pop("objective", {}))),
        data=DataConfig(train="rows that the test made", length=32),
    )
    return Trainer(model, tokenizer, make_config(folder / "run", **(settings | changes)), rows)


def of_metric(trainer: Trainer, name: str) -> list[float]:
    return [line[name] for line in trainer.history if name in line]


def test_a_run_earns_more_reward_and_says_what_it_sampled(tmp_path, capsys):
    trainer = trainer_of(tmp_path, steps=14, adapter=False)
    trainer.train()
    rewards = of_metric(trainer, "reward")
    assert len(rewards) == 14 and np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.15
    last = trainer.history[-1]
    assert last["answers"] == 32 and last["rewards/even/mean"] == pytest.approx(last["reward"])
    assert max(of_metric(trainer, "sampling/sampling_logp_difference/mean")) < 1e-4
    assert all(0 <= value <= 1 for value in of_metric(trainer, "completions/clipped_ratio"))
    shown = capsys.readouterr()
    assert "a sample of reward" in shown.out + shown.err
    assert "4 prompts x 8 answers" in trainer.batches.described(14)[1]


@pytest.mark.full
@pytest.mark.parametrize("more", [{}, dict(num_iterations=2, beta=0.05)])
def test_an_interrupted_run_goes_on_to_the_same_bits(tmp_path, more):
    checkpoint = CheckpointConfig(every_steps=3, every_minutes=None)
    runs = {}
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
        runs[name] = trainer_of(tmp_path / name, steps=5, objective=more, checkpoint=checkpoint)
    want = runs["whole"].train()

    class Cut(Callback):
        def between(self, moment):
            if moment.step == 3:
                raise KeyboardInterrupt

    runs["cut"].callbacks = (Cut(),)
    with pytest.raises(KeyboardInterrupt):
        runs["cut"].train()
    again = trainer_of(tmp_path / "cut", steps=5, objective=more, checkpoint=checkpoint)
    got = again.train()
    assert again.history[0]["step"] == 4
    for a, b in zip(jax.tree.leaves(nnx.state(got)), jax.tree.leaves(nnx.state(want)), strict=True):
        np.testing.assert_array_equal(a, b)
    assert of_metric(again, "loss") == of_metric(runs["whole"], "loss")[3:]


def batches_of(trainer: Trainer) -> list:
    """The batches of a run that then trains."""
    batches, make = [], trainer.batches.batch_at

    def kept(step, model=None):
        batches.append(make(step, model))
        return batches[-1]

    trainer.batches.batch_at = kept
    trainer.train()
    return batches


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """{objective: (trainer, batches) of two steps on one device}"""

    @functools.cache
    def of(name: str):
        trainer = trainer_of(tmp_path_factory.mktemp(name), **mesh_settings(name, None))
        return trainer, batches_of(trainer)

    return of


def mesh_settings(name: str, mesh: MeshConfig | None) -> dict:
    """Without layers that stay whole on each device."""
    objective = {"name": name} | ({"loss_type": "sigmoid"} if name == "rloo" else {})
    objective |= {"name": "grpo", "cache": "fp8"} if name == "fp8" else {}
    memory = MemoryConfig(plan="keep") if mesh is not None and mesh.fsdp > 1 else MemoryConfig()
    return dict(steps=2, mesh=mesh, memory=memory, objective=objective)


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("grpo", MeshConfig(1, 2)),
        ("grpo", MeshConfig(2, 1)),
        ("rloo", MeshConfig(2, 4)),
        ("fp8", MeshConfig(1, 2)),
        ("fp8", MeshConfig(2, 1)),
        pytest.param("grpo", MeshConfig(2, 4), marks=pytest.mark.full),
        pytest.param("rloo", MeshConfig(4, 1), marks=pytest.mark.full),
        pytest.param("rloo", MeshConfig(1, 2), marks=pytest.mark.full),
    ],
)
def test_devices_share_the_rows_and_the_answers(name, mesh, alone, tmp_path, monkeypatch):
    """Each samples its part: devices that have the weights whole, and those that divide them; also over caches in FP8
    (the name "fp8").
    """
    (one, wanted), samplers, dtypes = alone(name), [], set()

    class Seen(Sampler):
        def step(self):
            pieces = super().step()
            dtypes.update(str(leaf.dtype) for leaf in jax.tree.leaves(self._caches.states))
            return pieces

    def make(*arguments, **options) -> Sampler:
        samplers.append(Seen(*arguments, **options))
        return samplers[-1]

    monkeypatch.setattr(answering, "Sampler", make)
    trainer = trainer_of(tmp_path, **mesh_settings(name, mesh))
    batches = batches_of(trainer)
    assert trainer.mesh.size == mesh.data * mesh.fsdp and trainer.batches.rows_per_step % trainer.mesh.size == 0
    divisions = {sampler._division and sampler._division.devices for sampler in samplers}
    assert divisions == {trainer.mesh.size} and dtypes == {"float8_e4m3fn" if name == "fp8" else "float32"}
    np.testing.assert_array_equal(batches[0].tokens, wanted[0].tokens)
    np.testing.assert_allclose(*(batch[0].extra[SAMPLED_LOGPS] for batch in (batches, wanted)), atol=1e-5)
    for metric in ("loss", "grad_norm", "reward"):
        found, expected = (of_metric(run, metric) for run in (trainer, one))
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5, err_msg=metric)


@pytest.mark.full
@pytest.mark.parametrize("mesh", [MeshConfig(1, 2), MeshConfig(2, 1)])
def test_a_run_over_devices_that_ends_in_a_roll_out_goes_on_to_the_same_bits(mesh, tmp_path, monkeypatch):
    more = dict(num_iterations=2, steps_per_generation=2, temperature=1.3, beta=0.05)
    checkpoint = CheckpointConfig(every_steps=1, every_minutes=None)
    shared = dict(steps=6, objective=more, checkpoint=checkpoint, memory=MemoryConfig(plan="keep"))
    runs = {}
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
        runs[name] = trainer_of(tmp_path / name, mesh=mesh, **shared)
    trained = runs["whole"].train()

    class Killed(Sampler):
        rounds = 0

        def step(self):
            self.rounds += bool(runs["cut"].history)
            if self.rounds == 2:
                raise KeyboardInterrupt
            return super().step()

    with monkeypatch.context() as patch:
        patch.setattr(answering, "Sampler", Killed)
        with pytest.raises(KeyboardInterrupt):
            runs["cut"].train()
    assert len(runs["cut"].history) == 4
    again = trainer_of(tmp_path / "cut", mesh=mesh, **shared)
    for a, b in zip(jax.tree.leaves(nnx.state(again.train())), jax.tree.leaves(nnx.state(trained)), strict=True):
        np.testing.assert_array_equal(a, b)
    assert of_metric(again, "loss") == of_metric(runs["whole"], "loss")[4:]


@pytest.mark.full
def test_slots_are_planned_from_what_the_step_leaves(tmp_path):
    """In a run of rewards, and in an evaluation that generates."""
    for name in ("free", "held"):
        (tmp_path / name).mkdir()
    held_out = tmp_path / "held.jsonl"
    held_out.write_text("\n".join(json.dumps({"prompt": "one", "answer": "two"}) for _ in range(32)))
    changes = dict(
        steps=1,
        data=DataConfig(train="rows that the test made", eval=str(held_out), length=32),
        evaluation=EvaluationConfig(generate=("exact_match",), max_new_tokens=8),
    )
    free = trainer_of(tmp_path / "free", **changes)
    assert free.slots == {} and free.batches.answering.sampling.slots == 64
    cost, device, model = free.planner.cost, free.planner.device, free.model.prepared
    fixed = cost.fixed_bytes(1) + prefill_bytes(cost, device)
    room = (fixed + 1.5 * slots_for(model, 1e12, 32, 8).bytes / 0.9) / 0.98  # a tenth of what is free is spared
    held = trainer_of(tmp_path / "held", memory=MemoryConfig(budget_gb=room / 2**30), **changes)
    assert {name: plan.slots for name, plan in held.slots.items()} == {"answers": 8, "generate": 8}
    assert held.batches.answering.sampling.slots == 8 and held.answers is not None and held.answers.most_slots == 8
    of_plan = (cost, held.planner.forecast, device, *phase_sections(held.config))
    phases = phases_of(model, held.model.trainable, *of_plan, slots=held.slots)
    need = {phase.name: phase.device_bytes for phase in phases}
    assert need["answers"] == pytest.approx(fixed + held.slots["answers"].bytes) and need["generate"] <= need["answers"]
    lines = phase_lines(phases, room, None, slots=held.slots)
    assert "answers 0.00" in lines[0] and "  sampling in phase answers: 8 slots of" in lines[-2]
    decoding = dataclasses.replace(held.slots["answers"], converted_bytes=1e6, converted_layers=1)
    phases = phases_of(model, held.model.trainable, *of_plan, slots={"answers": decoding})
    more = next(phase.device_bytes for phase in phases if phase.name == "answers") - need["answers"]
    assert more == pytest.approx(1e6), "decoded weights are in the phase's memory"
    held.train()
    with pytest.raises(ValueError, match="1 slots of .* are left beside the model"):
        trainer_of(tmp_path / "held", memory=MemoryConfig(budget_gb=fixed / 2**30), **changes)


@pytest.mark.full
def test_answers_are_sampled_with_as_many_converted_layers_as_the_plan_says(monkeypatch):
    """A later generation, or a process that continues the run, may find other memory free, and must draw the same."""
    monkeypatch.setattr("jaxtune.models.generation.sampler.room_bytes", lambda share: 1e12)
    source = source_of(CASES["dapo"])
    sampling, model = source.answering.sampling, adapted_model(quantize(tiny_model(), "nf4"), r=4)
    prompts = [(3, 4)] * 20
    assert sampling.sampler(model, prompts).plan.converted_layers == 2 and sampling.most_converted is None
    assert slots_for(model, 1e12, 32, 18).converted_layers == 2
    assert not slots_for(model, 1e12, 32, 18, converts=False).converted_layers
    assert [slots_for(model, 1e12, 32, 16, exact=exact).converted_layers for exact in (True, False)] == [2, 0]
    for decodes in (1, 0):
        source.limit_slots(dataclasses.replace(slots_for(model, 1e12, 32, 18), converted_layers=decodes))
        plan = sampling.sampler(model, prompts).plan
        assert (plan.slots, plan.converted_layers) == (18, decodes)


def test_a_plan_of_slots_counts_prefixes_and_streamed_weights(tmp_path):
    """As samplers do: copies of weights get what prefixes leave, and of weights that stream there are none."""
    planner = trainer_of(tmp_path, memory=MemoryConfig(budget_gb=1)).planner
    base, rows = adapted_model(quantize(tiny_model(), "nf4"), r=4), SampledRows(32, 18, 64)
    fixed = planner.cost.fixed_bytes(1) + prefill_bytes(planner.cost, planner.device)

    def planned(room: float, rows: SampledRows, model: Decoder = base) -> SlotPlan:
        return slots_between(planner.cost, planner.plan.at(), planner.device, fixed + room, model, rows)

    room = next(size for size in range(10**5, 10**9, 10**5) if planned(size, rows).converted_layers == 2)
    turns = planned(room, dataclasses.replace(rows, prefixes=True))
    assert turns.converted_layers < 2 and turns.prefix_bytes == int(0.1 * room) and turns.slots == 18
    assert planned(2 * room, dataclasses.replace(rows, prefixes=True)).converted_layers == 2
    graph, state = nnx.split(base)
    streamed = nnx.merge(graph, Streamed.declared(base, state, 1))
    assert not planned(1e9, rows, streamed).converted_layers and planned(1e9, rows).converted_layers == 2


@pytest.mark.full
def test_rewards_that_are_all_equal_teach_nothing_and_are_told(tmp_path, capsys):
    file = tmp_path / "equal.py"
    file.write_text("def equal(completions, **columns):\n    return [1.0] * len(completions)\n")
    trainer = trainer_of(tmp_path, steps=2, objective=dict(reward_funcs=(f"{file}:equal",)))
    trainer.train()
    shown = capsys.readouterr()
    assert "all rewards of a group are equal in 100% of groups" in shown.out + shown.err
    assert of_metric(trainer, "frac_reward_zero_std") == [1.0, 1.0]


def test_a_reward_that_fails_ends_the_run_with_the_answer(tmp_path):
    file = tmp_path / "bad.py"
    file.write_text("def bad(completions, **columns):\n    return [int('x')]\n")
    trainer = trainer_of(tmp_path, steps=2, objective=dict(reward_funcs=(f"{file}:bad",)))
    with pytest.raises(ValueError, match="reward function bad failed.*ValueError.*\n  prompt: "):
        trainer.train()


@pytest.mark.parametrize(
    "changes, told",
    [
        (dict(objective=dict(reward_funcs=())), "objective.reward_funcs"),
        (dict(objective=dict(loss_type="ipo")), "objective.loss_type"),
        (dict(data=DataConfig(train="x", length=32, eval_rows=2)), "eval_rows"),
        (dict(data=DataConfig(train="x", length=32, eval="rows.jsonl")), "data.eval"),
        (dict(data=DataConfig(train="x", length=10)), "data.length"),
    ],
)
def test_what_does_not_go_together_is_named(tmp_path, changes, told):
    with pytest.raises(ValueError, match=told):
        trainer_of(tmp_path, **changes)


def test_a_recipe_names_rewards_in_a_list(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model: {path: m}\ndata: {train: rows.jsonl}\noutput: out\n"
        "objective: {name: grpo, reward_funcs: [exact_match, 'own.py:good'], reward_weights: [1.0, 0.5], beta: 0.1}\n"
    )
    objective = load_config(str(recipe), ["objective.loss_type=sapo"]).objective
    assert objective.reward_funcs == ("exact_match", "own.py:good") and objective.reward_weights == (1.0, 0.5)
    made = objective_of(objective)
    assert isinstance(made, GRPO) and made.losses == PolicyLoss(loss_type="sapo", beta=0.1)
    with pytest.raises(ConfigError, match="objective.reward_funcs.*dpo has no such option"):
        load_config(str(recipe), ["objective.name=dpo"])


def test_prompts_come_from_rows_of_every_form(tmp_path):
    rows = [
        {"prompt": "ask", "level": 3},
        {"prompt": [{"role": "user", "content": "hi"}], "answer": "there"},
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "good"}]},
        {"question": "2 + 2?", "answer": "4"},
    ]
    tokenizer = make_tokenizer()
    found = read_prompts(rows, tokenizer, DataConfig(train="x"), 100)
    assert [prompt.turns for prompt in found] == [
        "ask",
        [{"role": "user", "content": "hi"}],
        [{"role": "user", "content": "hi"}],
        [{"role": "user", "content": "2 + 2?"}],
    ]
    assert [prompt.columns.get("answer") for prompt in found] == [None, "there", "good", "4"]
    assert found[0].columns == {"level": 3} and found[1].ids == found[2].ids
    hi, good = [{"role": "user", "content": "hi"}], [{"role": "assistant", "content": "good"}]
    more = [{"role": "assistant", "content": "call"}, {"role": "user", "content": "go on"}, *good]
    for completion in ("good", good, more):  # TRL's forms; any other is a column for reward functions
        [prompt] = read_prompts([{"prompt": hi, "completion": completion}], tokenizer, DataConfig(train="x"), 100)
        assert (prompt.turns, prompt.columns["answer"], prompt.ids) == (hi, "good", found[1].ids)
    for completion in (None, 4, ["a", "b"], []):
        [prompt] = read_prompts([{"prompt": hi, "completion": completion}], tokenizer, DataConfig(train="x"), 100)
        assert prompt.turns == hi and prompt.columns == {"completion": completion} and prompt.ids == found[1].ids
    text = tokenizer.decode(found[1].ids)
    assert "hi" in text and text.rstrip().endswith("assistant")
    [templated] = read_prompts([{"prompt": "hi"}], tokenizer, DataConfig(train="x", template="chatml"), 100)
    assert templated.turns == "hi" and templated.ids == found[1].ids
    with pytest.raises(ConfigError, match=r"rows:1: its prompt has .* tokens"):
        read_prompts([{"prompt": "very long " * 50}], tokenizer, DataConfig(train="x"), 20)
    with pytest.raises(ConfigError, match=r"rows:1: not valid Unicode"):
        read_prompts([{"prompt": "half \ud83d"}], tokenizer, DataConfig(train="x"), 20)
    skipping = DataConfig(train="x", on_bad_row="skip")
    bad = [{"prompt": "very long " * 50}, {"prompt": "half \ud83d"}]
    assert len(read_prompts([*bad, *rows], tokenizer, skipping, 20)) >= 3
    with pytest.raises(ConfigError, match="no prompt"):
        read_prompts([{"text": "no question"}], tokenizer, skipping, 20)
    (tmp_path / "texts.jsonl").write_text('{"text": "no question"}\n')
    with pytest.raises(ConfigError, match=r"data.train: .*texts.jsonl has no prompt that could be used; the first: "):
        read_prompts(str(tmp_path / "texts.jsonl"), tokenizer, skipping, 20)
