"""DPO, ORPO and SimPO: their losses and gradients beside the written-out definitions, packed and not; whole runs."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxtune.models.config import MoEConfig
from jaxtune.models.files.published import PUBLISHED
from jaxtune.models.files.quant import quantize
from jaxtune.models.lora import get_peft_model, matrices, without_adapter
from jaxtune.models.registry import config_from_hf
from jaxtune.models.stack.residual_plan import KEEP, ResidualPlan
from jaxtune.train.config import (
    AdapterConfig,
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    MemoryConfig,
    OptimConfig,
    ScheduleConfig,
)
from jaxtune.train.config.objective import ObjectiveConfig
from jaxtune.train.data.packing.pairs import PAIRS, PackedPairs, PairDataset
from jaxtune.train.data.tokens.cache import Summary
from jaxtune.train.data.tokens.documents import Document, Documents
from jaxtune.train.display.precision_notes import reference_notes
from jaxtune.train.loop.saving import TrainingInterrupted
from jaxtune.train.objectives.loss import Forward
from jaxtune.train.objectives.named import objective_of
from jaxtune.train.objectives.objective import RunNeeds
from jaxtune.train.objectives.preference import DPO, METRICS, ORPO, SimPO
from jaxtune.train.planning.cost import abstract_model, step_cost
from jaxtune.train.planning.devices import find_device
from jaxtune.train.planning.forecasts import forecast
from jaxtune.train.planning.plan import StepPlan
from jaxtune.train.planning.step_spec import StepSpec
from jaxtune.train.trainer import Trainer
from tests.train.data.conftest import make_tokenizer
from tests.train.tiny_runs import VOCAB, lora_model, make_config, tiny_model

LENGTH = 24
FOLLOWER = np.random.default_rng(0).permutation(VOCAB)


def pairs(count: int, seed: int = 0, longest: int = 11) -> Documents:
    """Documents of pairs: after a prompt, the chosen answer follows a rule, the rejected one does not."""
    draw, made = np.random.default_rng(seed), []
    for _ in range(count):
        prompt = [int(token) for token in draw.integers(0, VOCAB, draw.integers(1, 4))]
        for follows in (True, False):
            tokens = list(prompt)
            for _ in range(int(draw.integers(2, longest - len(prompt)))):
                tokens.append(int(FOLLOWER[tokens[-1]]) if follows else int(draw.integers(VOCAB)))
            mask = np.arange(len(tokens)) >= len(prompt)
            made.append(Document(np.asarray(tokens, np.int32), mask))
    return Documents.gather(made)


def pair_set(documents: Documents, packing: bool = True) -> PairDataset:
    return PairDataset(documents, Summary(rows=len(documents) // 2, documents=len(documents)), LENGTH, packing)


def adapted():
    """A model whose adapter does something."""
    model, draw = lora_model(layers=2), np.random.default_rng(3)
    for _, matrix in matrices(model):
        matrix.lora.b.set_value(jnp.asarray(0.2 * draw.standard_normal(matrix.lora.b.shape), jnp.float32))
    return model


def batch_of(documents: Documents, packing: bool = True):
    rows = PackedPairs(documents, LENGTH, packing=packing)
    batch = rows.empty(len(rows))
    for row in range(len(rows)):
        rows.fill(batch, row, row)
    return jax.tree.map(jnp.asarray, batch)


# ---- the definitions, one document at a time, from whole logits


def plain_answer(model, document: Document):
    """(sum of log-probabilities, their number) of an answer."""
    tokens = jnp.asarray(document.tokens)[None]
    logps = jax.nn.log_softmax(model(tokens[:, :-1]))[0, jnp.arange(tokens.shape[1] - 1), tokens[0, 1:]]
    kept = jnp.asarray(document.mask[1:], jnp.float32)
    return (logps * kept).sum(), kept.sum()


def plain_loss(objective, model, documents: Documents):
    """Sum over the pairs, and the sums of METRICS."""
    base, total, values = without_adapter(model), 0.0, np.zeros(len(METRICS))
    likelihood, tokens = 0.0, 0  # of the chosen documents with their prompts
    for pair in range(len(documents) // 2):
        (c, c_n), (r, r_n) = (plain_answer(model, documents[2 * pair + side]) for side in (0, 1))
        (c0, _), (r0, _) = (plain_answer(base, documents[2 * pair + side]) for side in (0, 1))
        beta, smoothing = objective.beta, getattr(objective, "label_smoothing", 0.0)
        if isinstance(objective, DPO) and objective.loss_type == "ipo":
            good, bad = c - c0, r - r0
            loss = (good / c_n - bad / r_n - 1 / (2 * beta)) ** 2
        elif isinstance(objective, DPO):
            good, bad = c - c0, r - r0
            margin = beta * (good - bad)
            if objective.loss_type == "hinge":
                loss = jnp.maximum(0.0, 1.0 - margin)
            else:
                loss = -jnp.log(1 / (1 + jnp.exp(-margin))) * (1 - smoothing)
                loss -= jnp.log(1 / (1 + jnp.exp(margin))) * smoothing
        elif isinstance(objective, ORPO):
            good, bad = c / c_n, r / r_n
            odds = jnp.log(jnp.exp(good) / (1 - jnp.exp(good))) - jnp.log(jnp.exp(bad) / (1 - jnp.exp(bad)))
            loss = -beta * jnp.log(1 / (1 + jnp.exp(-odds)))
            whole = dataclasses.replace(documents[2 * pair], mask=np.ones(len(documents[2 * pair].tokens), bool))
            likelihood, tokens = likelihood + plain_answer(model, whole)[0], tokens + len(whole.tokens) - 1
        else:
            good, bad = c / c_n, r / r_n
            margin = beta * (good - bad) - objective.simpo_gamma
            loss = -jnp.log(1 / (1 + jnp.exp(-margin))) * (1 - smoothing)
            loss -= jnp.log(1 / (1 + jnp.exp(margin))) * smoothing
        total = total + loss
        rewards = [beta * good, beta * bad]
        logps = [c, r] if isinstance(objective, DPO) else [good, bad]
        numbers = [*rewards, rewards[0] > rewards[1], rewards[0] - rewards[1], *logps]
        values = values + jnp.stack([jnp.asarray(number, jnp.float32) for number in numbers])
    if isinstance(objective, ORPO):
        total = total - likelihood * (len(documents) // 2) / tokens
    return total, values


OBJECTIVES = {
    "sigmoid": DPO(beta=0.3),
    "smoothed": DPO(beta=0.3, label_smoothing=0.2),
    "ipo": DPO(0.2, "ipo"),
    "hinge": DPO(beta=0.3, loss_type="hinge"),
    "orpo": ORPO(beta=0.4),
    "simpo": SimPO(),
    "simpo, smoothed": SimPO(1.5, 0.7, 0.1),
}


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_loss_metrics_and_gradients_are_the_definitions(name, packing):
    objective, documents, model = OBJECTIVES[name], pairs(4), adapted()
    batch = batch_of(documents, packing)
    assert batch.extra[PAIRS].shape[1] == (2 if packing else 1)
    graph, trainable, frozen = nnx.split(model, nnx.Param, ...)

    def ours(trainable):
        loss, count, sums = objective.loss(nnx.merge(graph, trainable, frozen), batch, Forward(chunk_tokens=7))
        return loss, (count, jnp.stack([sums[name] for name in METRICS]))

    def plain(trainable):
        return plain_loss(objective, nnx.merge(graph, trainable, frozen), documents)

    (loss, (count, sums)), gradients = jax.jit(jax.value_and_grad(ours, has_aux=True))(trainable)
    (want, values), slopes = jax.value_and_grad(plain, has_aux=True)(trainable)
    assert count == 4
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    np.testing.assert_allclose(sums, values, rtol=1e-4, atol=1e-5)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(slopes), strict=True):
        assert np.abs(b).max() > 1e-4
        np.testing.assert_allclose(a, b, atol=1e-5 * max(1.0, np.abs(b).max()), err_msg=jax.tree_util.keystr(path))


@pytest.mark.full
@pytest.mark.parametrize("kind", ["experts", "nf4"])
def test_experts_and_four_bits_are_compared_to_the_base(kind):
    """The reference is the model without its adapters, those of experts too."""
    moe = MoEConfig(4, 2, 64, router_bias=True, expert_bias=True, transposed=True, interleaved=True, swiglu_limit=7.0)
    base = tiny_model(moe=moe, attention_sinks=True) if kind == "experts" else quantize(tiny_model(), "nf4")
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if kind == "experts" else None
    model, draw = get_peft_model(base, r=4, target_parameters=targets), np.random.default_rng(3)
    for _, matrix in matrices(model):
        if matrix.lora is not None:
            matrix.lora.b.set_value(jnp.asarray(0.2 * draw.standard_normal(matrix.lora.b.shape), jnp.float32))
    documents, objective = pairs(4), DPO(beta=0.3)
    batch, (graph, trainable, frozen) = batch_of(documents), nnx.split(model, nnx.Param, ...)

    def ours(trainable):
        loss, _, sums = objective.loss(nnx.merge(graph, trainable, frozen), batch, Forward(chunk_tokens=7))
        return loss, sums["rewards/margins"]

    def plain(trainable):
        return plain_loss(objective, nnx.merge(graph, trainable, frozen), documents)[0]

    (loss, margins), gradients = jax.jit(jax.value_and_grad(ours, has_aux=True))(trainable)
    want, slopes = jax.value_and_grad(plain)(trainable)
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    assert abs(margins) > 1e-2
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(slopes), strict=True):
        assert np.abs(b).max() > 1e-4
        np.testing.assert_allclose(a, b, atol=1e-5 * max(1.0, np.abs(b).max()), err_msg=jax.tree_util.keystr(path))


def test_metrics_are_means_and_none_of_a_step_without_pairs():
    sums = dict.fromkeys(METRICS, 6.0) | {"count": 4.0, "loss": 1.0}
    assert DPO().metrics(sums) == dict.fromkeys(METRICS, 1.5)
    assert DPO().metrics(dict.fromkeys(sums, 0.0)) == dict.fromkeys(METRICS, 0.0)


# ---- rows


def test_a_pair_is_never_divided():
    documents = pairs(30)
    rows = PackedPairs(documents, LENGTH)
    assert len(rows) < 30 and rows.report.fill > 0.6
    found = []
    for row in range(len(rows)):
        batch = rows.empty(1)
        rows.fill(batch, 0, row)
        segments, there = batch.segment_ids[0], int(batch.extra[PAIRS].sum())
        assert set(segments) - {0} == set(range(1, 2 * there + 1))
        for place in range(there):
            sides = [batch.tokens[0][segments == 2 * place + side] for side in (1, 2)]
            index = next(
                i for i in range(0, 60, 2) if all(np.array_equal(documents[i + s].tokens, sides[s]) for s in (0, 1))
            )
            found.append(index)
    assert sorted(found) == list(range(0, 60, 2))


def test_long_pairs_are_cut_and_dropped():
    def document(length, prompt):
        return Document(np.arange(length, dtype=np.int32), np.arange(length) >= prompt)

    made = [document(30, 2), document(6, 2), document(20, 2), document(20, 2), document(5, 2), document(40, 25)]
    rows = PackedPairs(Documents.gather(made), 24)
    assert rows.kept_lengths.tolist() == [[18, 6], [12, 12], [0, 0]]  # of the last, nothing of one answer is left
    assert rows.report.truncated == 3 and rows.report.dropped == 2 and rows.report.cut_tokens == 12 + 16
    assert PackedPairs(Documents.gather(made), 25).kept_lengths.tolist() == [[19, 6], [12, 12], [0, 0]]
    with pytest.raises(ValueError, match=r"longer than data\.length=24"):
        PackedPairs(Documents.gather(made), 24, overflow="error")
    with pytest.raises(ValueError, match=r"data\.overflow = 'split': a pair"):
        PackedPairs(Documents.gather(made), 24, overflow="split")


TURNS = [{"role": "user", "content": "Add 1: "}]
GOOD, BAD = ([{"role": "assistant", "content": text}] for text in ("It is 4.", "I am a bot."))
FORMS = {
    "text": {"prompt": "Add 1: ", "chosen": "It is 4.", "rejected": "I am a bot."},
    "conversation": {"prompt": TURNS, "chosen": GOOD, "rejected": BAD},
    "prompt within": {"chosen": TURNS + GOOD, "rejected": TURNS + BAD},
    "conversations": {
        "conversations": [{"from": "human", "value": "Add 1: "}],
        "chosen": {"from": "gpt", "value": "It is 4."},
        "rejected": {"from": "gpt", "value": "I am a bot."},
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_every_form(form):
    tokenizer = make_tokenizer()
    data = make_config("x").data
    data = dataclasses.replace(data, length=96, template=None if form == "text" else "chatml")
    made = DPO().prepare([FORMS[form]] * 2, tokenizer, data, vocab_size=400, max_rows=None)
    assert isinstance(made, PairDataset) and len(made.documents) == 4
    trained = [tokenizer.decode(d.tokens[d.mask]) for d in (made.documents[0], made.documents[1])]
    assert "It is 4." in trained[0] and "I am a bot." in trained[1]
    assert all(
        "Add" not in text and "Add 1" in tokenizer.decode(made.documents[i].tokens) for i, text in enumerate(trained)
    )


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, "no column rejected"),
        ({"prompt": "a", "chosen": " ", "rejected": "b"}, "empty chosen response"),
        ({"chosen": "a", "rejected": "b"}, "chosen is text, and there is no prompt"),
        ({"chosen": TURNS, "rejected": TURNS + BAD}, "chosen does not end with an answer of the assistant"),
    ],
)
def test_rows_that_are_no_preference(row, message):
    with pytest.raises(ValueError, match=message):
        DPO().prepare([row], make_tokenizer(), make_config("x").data, vocab_size=400, max_rows=None)


def test_settings_that_do_not_go_together(tmp_path):
    for wrong, message in (
        (dict(name="sft", beta=0.1), r"objective\.beta = 0\.1: sft has no such option"),
        (dict(name="orpo", loss_type="ipo"), r"objective\.loss_type = 'ipo': orpo has no such option"),
        (dict(name="dpo", loss_type="ipo", label_smoothing=0.1), r"objective\.label_smoothing = 0\.1"),
        (dict(name="orpo", precompute_ref_log_probs=True), r"objective\.precompute_ref_log_probs = True: orpo has no"),
        (dict(name="dpo", beta=-1.0), r"objective\.beta = -1\.0: must be greater than 0"),
    ):
        with pytest.raises(ValueError, match=message):
            ObjectiveConfig(**wrong)
    config = make_config(tmp_path, objective=ObjectiveConfig("dpo"))
    with pytest.raises(ValueError, match="objective = dpo: .* has no adapter"):
        Trainer(tiny_model("float32"), None, config, pair_set(pairs(4)))
    data = dataclasses.replace(make_config(tmp_path).data, train_on="all")
    with pytest.raises(ValueError, match=r"data\.train_on = 'all'"):
        DPO().prepare([FORMS["text"]], make_tokenizer(), data, vocab_size=400, max_rows=None)
    from jaxtune.train.objectives.sft import SFT

    with pytest.raises(ValueError, match="chosen and rejected are preference data: set objective=dpo, orpo or simpo"):
        SFT().prepare([FORMS["text"]], make_tokenizer(), make_config("x").data, vocab_size=400, max_rows=None)


# ---- runs


def trainer_of(output, name="dpo", model=None, rows=None, eval_rows=None, keeps_model=True, **changes):
    settings = dict(
        steps=12,
        rows_per_step=8,
        optim=OptimConfig(learning_rate=2e-2),
        schedule=ScheduleConfig(),
        evaluation=EvaluationConfig(at_start=True),
        objective=ObjectiveConfig(name),
        data=dataclasses.replace(make_config(output).data, length=LENGTH, eval="held out"),
        checkpoint=CheckpointConfig(every_steps=6, every_minutes=None, keep=3),
    )
    config = make_config(output, **(settings | changes))
    rows, eval_rows = rows or pair_set(pairs(64)), eval_rows or pair_set(pairs(24, seed=1))
    return Trainer(model or lora_model(), None, config, rows, eval_rows, keeps_model=keeps_model)


def held_out(trainer, key):
    return [line[key] for line in trainer.history if key in line]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    trainer = trainer_of(tmp_path_factory.mktemp("dpo"))
    return trainer, trainer.train()


@pytest.mark.full
def test_dpo_raises_the_margin_on_held_out_pairs(run):
    trainer, _ = run
    before, after = held_out(trainer, "eval_rewards/margins")
    assert before == 0.0 and after > 0.05  # the adapter begins with nothing
    assert held_out(trainer, "eval_rewards/accuracies")[-1] > 0.6
    first, last = held_out(trainer, "eval_loss")
    assert first == pytest.approx(np.log(2), rel=1e-6) and last < first
    line = trainer.history[1]
    assert line["pairs"] > 8 and all(name in line for name in METRICS) and "targets" not in line


@pytest.mark.full
def test_a_dpo_run_goes_on_bit_for_bit(run, tmp_path):
    trainer, trained = run
    shutil.copytree(trainer.output, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000012")
    resumed = trainer_of(tmp_path / "run").train()
    same_bits(trained, resumed)


def interrupted(output, **settings):
    """A run that SIGTERM ends in the middle, and which then goes on."""
    trainer = trainer_of(output, **settings)
    load_step = trainer.engine.load_step

    def stopping(step):
        if step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return load_step(step)

    trainer.engine.load_step = stopping
    with pytest.raises(TrainingInterrupted, match="SIGTERM after step [56]"):
        trainer.train()
    return trainer_of(output, **settings).train()


def same_bits(one, other):
    for a, b in zip(*(jax.tree.leaves(nnx.state(model, nnx.Param)) for model in (one, other)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.full
def test_a_signal_in_the_middle_changes_no_bit(run, tmp_path):
    same_bits(run[1], interrupted(tmp_path))


@pytest.mark.parametrize("precomputed", [False, True])
def test_a_run_whose_weights_stream_is_the_same_run(precomputed, tmp_path):
    """Its reference, in each loss or before the first step, and its evaluations have them from the host, too."""

    def trained(plan: str):
        settings = dict(
            steps=2,
            memory=MemoryConfig(plan=plan),
            objective=ObjectiveConfig("dpo", precompute_ref_log_probs=precomputed),
        )
        trainer = trainer_of(tmp_path / plan, model=lora_model(layers=2), keeps_model=False, **settings)
        return trainer.train(), held_out(trainer, "eval_loss"), trainer.planner.plan.level("streamed")

    (model, losses, level), (want, want_losses, _) = trained("recompute; streamed=2"), trained("recompute")
    assert level == 2 and losses == want_losses and len(losses) == 2
    same_bits(model, want)


@pytest.mark.parametrize("name", ["orpo", "simpo"])
def test_a_run_prefers_what_is_chosen(name, tmp_path):
    trainer = trainer_of(tmp_path, name)
    trainer.train()
    before, after = held_out(trainer, "eval_rewards/margins")
    assert after > before


@pytest.mark.full
def test_pairs_that_are_all_beyond_the_margin_do_not_end_a_run(tmp_path):
    trainer = trainer_of(
        tmp_path, rows=pair_set(pairs(8)), objective=ObjectiveConfig("dpo", loss_type="hinge", beta=2.0)
    )
    trainer.train()
    assert trainer.steps_done == 12
    assert any(line["loss"] == 0 and line["grad_norm"] == 0 for line in trainer.history if "grad_norm" in line)


def test_the_reference_of_an_adapter_that_was_trained_before_is_said(tmp_path):
    objective = objective_of(ObjectiveConfig("dpo"))
    [note] = reference_notes(objective, "taught")
    assert note.startswith("dpo: the reference is the model without its adapter, and not the model with")
    assert reference_notes(objective, None) == []
    assert reference_notes(objective_of(ObjectiveConfig("orpo")), "taught") == []


@pytest.mark.full
def test_micro_batches_give_the_same_run(run, tmp_path):
    other = trainer_of(tmp_path, micro_batches=4)
    other.train()
    for key in ("loss", "rewards/margins", "logps/chosen"):
        np.testing.assert_allclose(held_out(run[0], key), held_out(other, key), rtol=1e-3, atol=1e-4, err_msg=key)


@pytest.mark.full
def test_a_precomputed_reference_gives_the_same_run(run, tmp_path):
    """Held-out pairs too, in rows of another shape; once for all runs over these rows and weights."""
    model = lora_model()
    model.base_digest = "weights"
    settings = dict(
        objective=ObjectiveConfig("dpo", precompute_ref_log_probs=True),
        data=dataclasses.replace(run[0].config.data, cache_dir=str(tmp_path / "cache")),
    )
    trainer = trainer_of(tmp_path / "one", model=model, **settings)
    trained = trainer.train()
    assert trainer.planner.cost.reference_runs == 0
    files = sorted((tmp_path / "cache").glob("reference_*.npy"))
    assert len(files) == 2  # of training and of evaluation
    for key in ("loss", "rewards/margins", "logps/chosen", "eval_loss", "eval_rewards/margins"):
        np.testing.assert_allclose(held_out(run[0], key), held_out(trainer, key), rtol=1e-4, atol=1e-5, err_msg=key)

    # Another run reads them, or computes anew what was damaged; a signal in the middle changes no bit.
    whole = files[0].read_bytes()
    files[0].write_bytes(whole[:-4])
    same_bits(trained, interrupted(tmp_path / "two", model=model, **settings))
    assert files[0].read_bytes() == whole


@pytest.mark.full
def test_a_reference_that_cannot_be_kept_is_used_all_the_same(run, tmp_path, capsys):
    """A cache may be there to be read only."""
    model = lora_model()
    model.base_digest = "weights"
    (tmp_path / "cache").write_text("no folder")
    settings = dict(
        objective=ObjectiveConfig("dpo", precompute_ref_log_probs=True),
        data=dataclasses.replace(run[0].config.data, cache_dir=str(tmp_path / "cache")),
    )
    found = trainer_of(tmp_path / "one", model=model, **settings).evaluate()
    assert found["eval_loss"] == pytest.approx(np.log(2), rel=1e-6)  # of adapters that do nothing yet
    assert f"data.cache_dir={tmp_path / 'cache'} cannot be written" in capsys.readouterr().out


def test_a_split_keeps_each_pair_with_its_reference():
    documents = pairs(20)
    rows = dataclasses.replace(pair_set(documents), reference=np.arange(40, dtype=np.float32))
    for side in rows.split(6):
        for index in range(len(side.documents)):
            tokens = documents[int(side.reference[index])].tokens
            np.testing.assert_array_equal(side.documents[index].tokens, tokens)


@pytest.mark.full
def test_the_reference_is_planned_for(run, tmp_path):
    assert run[0].planner.cost.reference_runs == 1
    config = make_config(
        tmp_path, adapter=AdapterConfig(), data=DataConfig(train="pairs", length=2048), precision="bf16"
    )
    spec = StepSpec.of(config)
    model = abstract_model(config_from_hf(PUBLISHED["meta-llama/Llama-3.1-8B"]), spec.model)
    device, seconds = find_device("H200"), []
    for reference_runs in (0, 1):
        parts = step_cost(model, dataclasses.replace(spec, needs=RunNeeds(reference_runs=reference_runs)))
        seconds.append(forecast(parts, StepPlan(ResidualPlan.uniform(KEEP, 32), 1, 1024), device).step_seconds)
    assert 1.3 < seconds[1] / seconds[0] < 1.6  # a forward pass more than one, and a backward of two


@pytest.mark.full
@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_people_s_preferences_raise_the_margin_on_held_out_rows(name, test_data, tmp_path):
    tokenizer, config = make_tokenizer(), make_config(tmp_path)
    data = DataConfig(
        train=str(test_data / f"datasets/preference/{name}_en_demo.jsonl"),
        max_rows=120,
        eval_rows=30,
        length=256,
        template="chatml",
        cache_dir=str(tmp_path / "cache"),
    )
    model = get_peft_model(tiny_model("float32", vocab_size=len(tokenizer), max_position_embeddings=256), r=4)
    config = dataclasses.replace(
        config,
        steps=16,
        rows_per_step=8,
        data=data,
        optim=OptimConfig(learning_rate=5e-3),
        objective=ObjectiveConfig(name, precompute_ref_log_probs=True),
        evaluation=EvaluationConfig(at_start=True),
    )
    trainer = Trainer(model, tokenizer, config)
    trainer.train()
    before, after = held_out(trainer, "eval_rewards/margins")
    assert before == 0.0 and after > 0.01
