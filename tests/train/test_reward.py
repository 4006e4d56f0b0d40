"""Reward models: their loss, their rows, their head in files; whole runs."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_models import adapted_model, tiny_model

import jaxtune
from jaxtune.models.adapters.merge import merge_adapter
from jaxtune.models.files.quant import quantize
from jaxtune.models.hf import from_pretrained, save_pretrained
from jaxtune.models.lora import get_peft_model
from jaxtune.models.reward import reward_model
from jaxtune.train import app
from jaxtune.train.config import AdapterConfig, DataConfig, EvaluationConfig, ModelConfig
from jaxtune.train.config.objective import ObjectiveConfig
from jaxtune.train.data.packing.pairs import PackedPairs
from jaxtune.train.objectives.loss import Forward
from jaxtune.train.objectives.reward import Reward
from tests.train.data.conftest import make_tokenizer
from tests.train.test_preference import held_out, interrupted, pairs, same_bits, trainer_of
from tests.train.tiny_runs import make_config

LENGTH = 24


def scoring(**settings):
    return get_peft_model(reward_model(tiny_model()), r=4, **settings)


@pytest.mark.full
@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
def test_loss_metrics_and_gradients_are_the_definitions(packing):
    documents, given = pairs(5), np.asarray([0.5, 0.0, -0.3, 1.0, 0.2], np.float32)
    objective, model = Reward(center_rewards_coefficient=0.1), adapted_model(reward_model(tiny_model()), r=4)
    rows = PackedPairs(documents, LENGTH, packing=packing, labels=given)
    batch = rows.empty(len(rows))
    for row in range(len(rows)):
        rows.fill(batch, row, row)
    batch = jax.tree.map(jnp.asarray, batch)
    graph, trainable, frozen = nnx.split(model, nnx.Param, ...)

    def ours(trainable):
        loss, count, sums = objective.loss(nnx.merge(graph, trainable, frozen), batch, Forward())
        return loss, (count, sums)

    def plain(trainable):
        model, total, scores = nnx.merge(graph, trainable, frozen), 0.0, []
        for pair in range(5):
            c, r = (model(jnp.asarray(documents[2 * pair + side].tokens)[None])[0, -1, 0] for side in (0, 1))
            total += jnp.log(1 + jnp.exp(-(c - r - given[pair]))) + 0.1 * (c + r) ** 2
            scores.append(jnp.stack([c, r]))
        return total, jnp.stack(scores)

    (loss, (count, sums)), gradients = jax.jit(jax.value_and_grad(ours, has_aux=True))(trainable)
    (want, scores), slopes = jax.value_and_grad(plain, has_aux=True)(trainable)
    assert count == 5
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    metrics = objective.metrics({"loss": loss, "count": count} | sums)
    wanted = dict(
        min_reward=scores.min(),
        mean_reward=scores.mean(),
        max_reward=scores.max(),
        accuracy=(scores[:, 0] > scores[:, 1]).mean(),
        margin=(scores[:, 0] - scores[:, 1]).mean(),
    )
    assert metrics.keys() == wanted.keys()
    for name, value in metrics.items():
        np.testing.assert_allclose(value, wanted[name], rtol=1e-4, atol=1e-6, err_msg=name)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(slopes), strict=True):
        assert np.abs(b).max() > 1e-5
        np.testing.assert_allclose(a, b, atol=1e-5 * max(1.0, np.abs(b).max()), err_msg=jax.tree_util.keystr(path))


def test_metrics_of_a_step_without_pairs():
    sums = dict.fromkeys(Reward.sums, 0.0) | {"count": 0.0, "loss": 0.0}
    assert Reward().metrics(sums) == dict.fromkeys(Reward.sums, 0.0)


def test_margins_are_those_of_the_rows(tmp_path):
    def row(margin):
        return {"prompt": "Add 1: ", "chosen": "It is 4.", "rejected": "I am a bot.", "margin": margin}

    def prepare(rows):
        data = dataclasses.replace(make_config("x").data, length=96)
        return Reward().prepare(rows, make_tokenizer(), data, vocab_size=400, max_rows=None)

    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps(row(margin)) for margin in (0.5, 2)), encoding="utf-8")
    for rows in ([row(0.5), row(2)], str(file)):
        np.testing.assert_array_equal(prepare(rows).labels, [0.5, 2.0])
    np.testing.assert_array_equal(prepare([str(file), str(file)]).labels, [0.5, 2.0, 0.5, 2.0])  # weighed twice
    assert prepare([row(None), row(None)]).labels is None
    # What does not fit has no end to be scored at, and is left out.
    long = row(0.0) | {"chosen": "It is 4. " * 40}
    made = prepare([row(0.5), long, row(2)])
    assert made.rows.report.dropped == 2 and made.rows.report.truncated == 0
    batch = made.batches(2, shuffle=False).batch_at(0)
    assert sorted(batch.extra["labels"][batch.extra["pairs"] > 0].tolist()) == [0.5, 2.0]
    with pytest.raises(ValueError, match="no margin, and 1 rows have one"):
        prepare([row(0.5), row(None)])
    with pytest.raises(ValueError, match="margin = 'much': must be a finite number"):
        prepare([row("much")])


@pytest.mark.full
@pytest.mark.parametrize("kind", ["plain", "nf4"])
def test_the_head_in_files(tmp_path, kind):
    """A folder as transformers' ForSequenceClassification, an adapter as PEFT's of the task SEQ_CLS."""
    base = tiny_model(tie_embeddings=True)
    save_pretrained(base, tmp_path / "base")
    base = from_pretrained(tmp_path / "base", dtype="float32", load_in="nf4" if kind == "nf4" else None)[0]
    model = adapted_model(reward_model(base, seed=3), r=4)
    tokens = jnp.arange(12).reshape(2, 6)
    assert model(tokens).shape == (2, 6, 1)
    jaxtune.save_adapter(model, tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["task_type"] == "SEQ_CLS" and config["modules_to_save"] == ["score"]
    again = jaxtune.load_adapter(base, tmp_path / "adapter")  # gets the head with its adapter
    np.testing.assert_array_equal(again(tokens), model(tokens))
    merged = merge_adapter(model)
    save_pretrained(merged, tmp_path / "merged")
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"] and config["id2label"] == {"0": "LABEL_0"}
    loaded = from_pretrained(tmp_path / "merged", dtype="float32")[0]
    assert loaded.config.head.name == "score" and reward_model(loaded) is loaded
    np.testing.assert_array_equal(loaded(tokens), merged(tokens))


@pytest.mark.full
def test_a_run_of_the_command(tmp_path):
    """From a language model's folder to an adapter and a merged reward model."""
    tokenizer, rows = make_tokenizer(), tmp_path / "rows.jsonl"
    base = tiny_model("bfloat16", vocab_size=len(tokenizer), max_position_embeddings=128)
    save_pretrained(base, tmp_path / "base", tokenizer=tokenizer)
    row = {"prompt": "Add 1: ", "chosen": "It is 4.", "rejected": "I am a bot.", "margin": 0.5}
    rows.write_text("\n".join([json.dumps(row)] * 4), encoding="utf-8")
    data = DataConfig(train=str(rows), length=96, cache_dir=str(tmp_path / "cache"))
    config = make_config(
        tmp_path / "run",
        model=ModelConfig(path=str(tmp_path / "base")),
        data=data,
        adapter=AdapterConfig(r=2),
        objective=ObjectiveConfig("reward", center_rewards_coefficient=0.01),
        steps=2,
        precision="bf16",
        evaluation=EvaluationConfig(at_end=False),
    )
    assert app.run(config) == 0
    merged = from_pretrained(tmp_path / "run" / "merged")[0]
    assert merged.config.head.name == "score" and merged.head.weight.shape == (1, 16)
    adapted = jaxtune.load_adapter(from_pretrained(tmp_path / "base")[0], tmp_path / "run" / "adapter")
    tokens = jnp.arange(8)[None]
    np.testing.assert_allclose(adapted(tokens), merged(tokens), atol=0.05)
    with pytest.raises(ValueError, match=r"evaluation\.exact_match_rows = 2: a reward model"):
        dataclasses.replace(config, evaluation=EvaluationConfig(exact_match_rows=2))


def test_what_does_not_go_together(tmp_path):
    with pytest.raises(ValueError, match=r"objective = reward: this model has no head that scores texts"):
        trainer_of(tmp_path, "reward")
    with pytest.raises(ValueError, match="generate: this model scores texts"):
        jaxtune.generate(reward_model(tiny_model()), [[1, 2]])
    with pytest.raises(ValueError, match="reward_model: this model has adapters"):
        reward_model(get_peft_model(tiny_model(), r=4))
    with pytest.raises(ValueError, match="to = 'gguf': this model scores texts"):
        jaxtune.export_model(reward_model(tiny_model()), tmp_path / "gguf", to="gguf")
    with pytest.raises(ValueError, match=r"objective\.beta = 0\.1: reward has no such option"):
        ObjectiveConfig("reward", beta=0.1)
    save_pretrained(reward_model(tiny_model()), tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"id2label": {"0": "no", "1": "yes"}}), encoding="utf-8")
    with pytest.raises(ValueError, match="2 labels .* only those with one label"):
        from_pretrained(tmp_path / "model")


@pytest.mark.full
def test_a_run_scores_what_is_chosen_higher(tmp_path):
    """On held-out pairs; over weights in four bits; a signal in the middle changes no bit."""

    def model():
        return get_peft_model(reward_model(quantize(tiny_model(), "nf4")), r=4)

    trainer = trainer_of(tmp_path / "one", "reward", model=model())
    trained = trainer.train()
    before, after = held_out(trainer, "eval_margin")
    assert after > before + 0.1 and held_out(trainer, "eval_accuracy")[-1] > 0.6
    line = trainer.history[1]
    assert line["min_reward"] < line["mean_reward"] < line["max_reward"] and line["pairs"] > 8
    assert np.abs(np.asarray(trained.head.weight[...] - trained.head.original[...])).max() > 1e-3
    same_bits(trained, interrupted(tmp_path / "two", name="reward", model=model()))
