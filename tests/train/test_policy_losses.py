"""Advantages, ratios and losses of GRPO and RLOO by hand; tests/parity/test_policy_losses.py has TRL's own numbers."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from jaxtune.models.placement import partition
from jaxtune.train.config import ConfigError, DataConfig, ModelConfig, ObjectiveConfig, TrainConfig
from jaxtune.train.objectives.grpo import (
    Answers,
    PolicyLoss,
    group_advantages,
    grpo_loss,
    grpo_sums,
    importance_ratio,
    means_of,
    metric_names,
    rloo_advantages,
    rloo_loss,
)
from jaxtune.train.objectives.named import objective_of

NAN = np.nan


def test_advantages_are_deviations_from_the_groups_mean():
    rewards = np.array([[1.0], [3.0], [5.0], [5.0]])
    deviation = np.sqrt(2.0) + 1e-4  # of 1 and 3, divided by n - 1
    np.testing.assert_allclose(group_advantages(rewards, 2), [-1 / deviation, 1 / deviation, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(group_advantages(rewards, 2, scale_rewards="none"), [-1, 1, 0, 0])
    batch = np.std([1, 3, 5, 5], ddof=1) + 1e-4
    np.testing.assert_allclose(group_advantages(rewards, 2, scale_rewards="batch"), np.array([-1, 1, 0, 0]) / batch)


def test_functions_are_weighed_and_none_counts_nowhere():
    rewards = np.array([[1.0, 10.0], [NAN, 20.0], [NAN, NAN], [2.0, NAN]])
    # Sums: 1 + 5, 10, nothing, 2: the mean of the three is 6.
    found = group_advantages(rewards, 4, weights=np.array([1.0, 0.5]), scale_rewards="none")
    np.testing.assert_allclose(found, [0, 4, 0, -4])
    assert (group_advantages(np.full((4, 2), NAN), 4) == 0).all()
    one = np.array([[NAN], [7.0], [NAN], [NAN]])  # a single reward has no deviation
    assert (group_advantages(one, 4) == 0).all() and (rloo_advantages(one, 4) == 0).all()


def test_functions_can_be_scaled_one_by_one():
    rewards = np.array([[1.0, 100.0], [3.0, 100.0], [1.0, 300.0], [3.0, 500.0]])
    root = np.sqrt(2.0)
    first = np.array([-1, 1, -1, 1]) / (root + 1e-4)
    second = np.array([0, 0, -100, 100]) / (np.std([300, 500], ddof=1) + 1e-4)
    total = first + second
    want = (total - total.mean()) / (total.std(ddof=1) + 1e-4)
    np.testing.assert_allclose(group_advantages(rewards, 2, aggregation="normalize_then_sum"), want, rtol=1e-5)


def test_rloo_leaves_one_out():
    rewards = np.array([[1.0], [2.0], [6.0]])
    np.testing.assert_allclose(rloo_advantages(rewards, 3), [1 - 4, 2 - 3.5, 6 - 1.5])
    kl = np.array([1.0, 0.0, 2.0])
    np.testing.assert_allclose(
        rloo_advantages(rewards, 3, kl=kl, beta=0.5), rloo_advantages(rewards - kl[:, None] / 2, 3)
    )
    unscored = np.array([[1.0], [NAN], [5.0]])
    np.testing.assert_allclose(rloo_advantages(unscored, 3), [-4, 0, 4])
    assert (rloo_advantages(np.array([[1.0], [2.0]]), 1) == 0).all()


@pytest.mark.parametrize("function", [group_advantages, rloo_advantages])
def test_what_is_no_group_is_refused(function):
    with pytest.raises(ValueError, match="num_generations = 3"):
        function(np.ones((4, 1)), 3)
    with pytest.raises(ValueError, match=r"\[answers, functions\]"):
        function(np.ones(4), 2)


def test_ratios_of_a_sampler():
    trainer, sampler = jnp.log(jnp.array([[0.5, 0.4, 0.9]])), jnp.log(jnp.array([[0.25, 0.5, 0.1]]))
    mask = jnp.array([[1.0, 1.0, 0.0]])
    np.testing.assert_allclose(importance_ratio(trainer, sampler, mask, mode="sequence_truncate"), [[1.6]], rtol=1e-6)
    np.testing.assert_allclose(importance_ratio(trainer, sampler, mask, clip_max=1.5), [[0.0]])
    by_token = importance_ratio(trainer, sampler, mask, mode="token_truncate", clip_max=1.5, clip_min=0.9)
    np.testing.assert_allclose(by_token, [[1.5, 0.9, 1.0]], rtol=1e-6)
    masked = importance_ratio(trainer, sampler, mask, mode="token_mask", clip_max=1.5, clip_min=0.7)
    np.testing.assert_allclose(masked, [[0.0, 0.8, 1.0]], rtol=1e-6)
    unknown = importance_ratio(trainer, jnp.full((1, 3), jnp.nan), mask, mode="token_truncate")
    np.testing.assert_allclose(unknown, jnp.ones((1, 3)))
    with pytest.raises(ValueError, match="importance_sampling_mode"):
        importance_ratio(trainer, sampler, mask, mode="token")  # pyright: ignore[reportArgumentType]


def some_answers(seed: int = 0, count: int = 4, tokens: int = 5) -> Answers:
    draw = np.random.default_rng(seed)

    def logps():
        return jnp.asarray(-draw.exponential(1.0, (count, tokens)), jnp.float32)

    lengths = draw.integers(1, tokens + 1, count)
    mask = jnp.asarray(np.arange(tokens) < lengths[:, None], jnp.float32)
    return Answers(
        logps(),
        mask,
        jnp.asarray(draw.standard_normal(count), jnp.float32),
        -logps(),
        old_logps=logps(),
        ref_logps=logps(),
    )


def test_on_policy_the_gradient_is_the_advantage():
    """The first step after sampling: the ratio is 1, and its gradient that of the log-probabilities."""
    answers = dataclasses.replace(some_answers(), old_logps=None)
    tokens = answers.mask.sum()

    def loss(logps):
        return grpo_loss(dataclasses.replace(answers, logps=logps))[0]

    want = -answers.advantages[:, None] * answers.mask / tokens
    np.testing.assert_allclose(jax.grad(loss)(answers.logps), want, rtol=1e-6)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_batches_add_up(kind, level):
    """Micro-batches' sums give the loss and the metrics of all answers, whatever rows hold no answer."""
    options = PolicyLoss(loss_type=kind, importance_sampling_level=level, beta=0.1)
    answers = some_answers(count=6)
    loss, metrics = grpo_loss(answers, options)
    assert set(metrics) == set(metric_names(options)) - {"tokens", "ratios"}

    def part(rows: list[int]) -> Answers:
        cut = jax.tree.map(lambda a: a[jnp.array([*rows, 0])], dataclasses.asdict(answers))
        present = jnp.array([1.0] * len(rows) + [0.0])
        return Answers(**cut | {"mask": cut["mask"] * present[:, None], "present": present})

    parts = [grpo_sums(part(rows), options) for rows in ([0, 1], [2, 3, 4], [5])]
    total, count, sums = jax.tree.map(lambda *each: sum(each), *parts)
    np.testing.assert_allclose(total / count, loss, rtol=1e-5)
    for name, value in means_of(sums).items():
        np.testing.assert_allclose(value, metrics[name], rtol=1e-5, err_msg=name)


def test_a_cut_off_answer_still_counts_as_an_answer():
    answers = some_answers()
    masked = dataclasses.replace(answers, mask=answers.mask.at[0].set(0.0))
    options = PolicyLoss(loss_type="grpo")
    _, count, _ = grpo_sums(masked, options)
    assert count == 4


def test_only_tokens_of_high_entropy_count():
    answers = dataclasses.replace(some_answers(), mask=jnp.ones((4, 5)), entropies=jnp.arange(20.0).reshape(4, 5))

    def loss(logps):
        return grpo_loss(
            dataclasses.replace(answers, logps=logps, old_logps=None), PolicyLoss(top_entropy_quantile=0.2)
        )[0]

    gradient = np.asarray(jax.grad(loss)(answers.logps)).reshape(-1)
    assert (gradient[:16] == 0).all() and (gradient[16:] != 0).all()


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([0.1, 0.25, 0.5, 0.9]), st.integers(0, 99))
def test_devices_choose_the_tokens_that_one_would(devices, share, seed):
    """Of the first device's answers, the entropies are three times those of the others."""
    answers = some_answers(seed, count=8)
    answers = dataclasses.replace(answers, entropies=answers.entropies.at[: 8 // devices].multiply(3.0))
    options = PolicyLoss(top_entropy_quantile=share)

    def gradient(logps, answers):
        def loss(logps):
            total, count, _ = grpo_sums(dataclasses.replace(answers, logps=logps), options)
            return partition.total(total) / partition.total(count)

        return jax.grad(loss)(logps)

    rows = PartitionSpec(("data", "fsdp"))
    fields = {name: getattr(answers, name) for name in ("mask", "advantages", "entropies", "old_logps")}
    divided = partition.divided(
        lambda logps, fields: gradient(logps, Answers(logps, **fields)),
        partition.make_mesh(devices, 1),
        (rows, rows),
        rows,
    )
    expected = gradient(answers.logps, Answers(answers.logps, **fields))
    np.testing.assert_allclose(jax.jit(divided)(answers.logps, fields), expected, atol=1e-6)


def test_a_run_whose_plan_would_choose_the_tokens_is_refused():
    options = dict(model=ModelConfig(path="x"), data=DataConfig("x"), output="x")
    section = ObjectiveConfig("grpo", reward_funcs=("brevity",), top_entropy_quantile=0.2)
    with pytest.raises(ConfigError, match=r"micro_batches .*top_entropy_quantile = 0.2: .*set micro_batches"):
        TrainConfig(objective=section, **options)
    config = TrainConfig(objective=section, micro_batches=1, **options)
    assert objective_of(config.objective).by_micro_batch
    assert not objective_of(dataclasses.replace(section, top_entropy_quantile=1.0)).by_micro_batch


def test_an_entropy_bonus_is_taken_from_the_loss():
    answers = some_answers()
    mean = (answers.entropies * answers.mask).sum() / answers.mask.sum()
    with_bonus, without = (grpo_loss(answers, PolicyLoss(entropy_coef=c, loss_type="grpo"))[0] for c in (0.5, 0.0))
    np.testing.assert_allclose(with_bonus, without - 0.5 * mean, rtol=1e-5)


def test_rloo_clips_the_ratio_of_an_answer():
    answers = dataclasses.replace(
        some_answers(count=2, tokens=2),
        mask=jnp.ones((2, 2)),
        logps=jnp.log(jnp.array([[0.5, 0.5], [0.5, 0.5]])),
        old_logps=jnp.log(jnp.array([[0.25, 0.5], [0.5, 0.5]])),
        advantages=jnp.array([1.0, -2.0]),
    )
    loss, metrics = rloo_loss(answers)
    np.testing.assert_allclose(loss, (-1.2 + 2.0) / 2, rtol=1e-6)  # a ratio of 2, clipped, and one of 1
    np.testing.assert_allclose(metrics["clip_ratio/high_mean"], 0.5)


def test_rloo_weighs_gradients_of_tokens_by_their_ratios():
    answers = dataclasses.replace(some_answers(), old_logps=None)
    ratio = jnp.linspace(0.0, 2.0, answers.mask.size).reshape(answers.mask.shape)

    def gradient(ratio):
        return jax.grad(lambda logps: rloo_loss(dataclasses.replace(answers, logps=logps, ratio=ratio))[0])(
            answers.logps
        )

    np.testing.assert_allclose(gradient(ratio), gradient(None) * ratio, rtol=1e-5)
    assert np.abs(gradient(None)).max() > 0
    one = jnp.full((len(ratio), 1), 0.3)
    np.testing.assert_allclose(gradient(one), gradient(jnp.broadcast_to(one, ratio.shape)), rtol=1e-5)


@pytest.mark.parametrize(
    "options, named",
    [
        (dict(loss_type="ppo"), "loss_type = 'ppo'"),
        (dict(importance_sampling_level="answer"), "importance_sampling_level"),
        (dict(top_entropy_quantile=0.0), "top_entropy_quantile"),
        (dict(epsilon=-0.1), "epsilon"),
        (dict(max_completion_length=0), "max_completion_length"),
        (dict(sapo_temperature_pos=0.0), "sapo_temperature_pos = 0.0: must be above 0"),
        (dict(sapo_temperature_neg=-1.0), "sapo_temperature_neg"),
    ],
)
def test_wrong_options_are_named(options, named):
    with pytest.raises(ValueError, match=named):
        PolicyLoss(**options)


def test_a_divergence_needs_a_reference():
    with pytest.raises(ValueError, match="ref_logps"):
        grpo_loss(dataclasses.replace(some_answers(), ref_logps=None), PolicyLoss(beta=0.1))
