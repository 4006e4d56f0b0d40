"""KTO: its loss and gradients beside the written-out definition; rows; runs, over two devices and with experts too."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from jaxtune.models.lora import without_adapter
from jaxtune.train.config import ConfigError
from jaxtune.train.config.objective import ObjectiveConfig
from jaxtune.train.data.packing.pairs import PackedPairs, PairDataset
from jaxtune.train.data.tokens.cache import Summary
from jaxtune.train.data.tokens.documents import Document, Documents
from jaxtune.train.objectives.kto import KTO, with_mismatched_answers
from jaxtune.train.objectives.loss import Forward
from tests.train.data.conftest import make_tokenizer
from tests.train.test_preference import LENGTH, TURNS, adapted, held_out, pairs, plain_answer, trainer_of
from tests.train.tiny_runs import make_config


def single(count: int, seed: int = 0) -> PairDataset:
    """Of pairs the chosen answer, or (of every third) the rejected one."""
    documents = pairs(count, seed)
    kept = [
        documents[2 * pair + side]
        if (pair % 3 == 0) == bool(side)
        else dataclasses.replace(documents[0], tokens=np.zeros(0, np.int32), mask=np.zeros(0, bool))
        for pair in range(count)
        for side in (0, 1)
    ]
    made, labels = with_mismatched_answers(Documents.gather(kept))
    return PairDataset(made, Summary(rows=count, documents=count), LENGTH, labels=labels)


def plain_loss(objective, model, data: PairDataset):
    base, ratios, kl = without_adapter(model), [], 0.0
    for index in range(len(data.documents)):
        ours, theirs = (plain_answer(which, data.documents[index])[0] for which in (model, base))
        ratios.append(ours - theirs)
    kl = jax.lax.stop_gradient(jnp.maximum(sum(ratios[1::2]) / (len(ratios) / 2), 0.0))
    total = 0.0
    for ratio, label in zip(ratios[0::2], data.labels, strict=True):
        if label:
            total += objective.desirable_weight * (1 - 1 / (1 + jnp.exp(-objective.beta * (ratio - kl))))
        else:
            total += objective.undesirable_weight * (1 - 1 / (1 + jnp.exp(-objective.beta * (kl - ratio))))
    return total, (kl, jnp.stack(ratios[0::2]))


@pytest.mark.full
def test_loss_metrics_and_gradients_are_the_definition():
    objective, data, model = KTO(0.3, desirable_weight=1.5, undesirable_weight=0.5), single(7), adapted()
    rows = PackedPairs(data.documents, LENGTH, labels=data.labels)
    batch = rows.empty(len(rows) + 1)  # and one of padding
    for row in range(len(rows)):
        rows.fill(batch, row, row)
    graph, trainable, frozen = nnx.split(model, nnx.Param, ...)

    def ours(trainable):
        loss, count, sums = objective.loss(nnx.merge(graph, trainable, frozen), batch, Forward(chunk_tokens=7))
        return loss, (count, sums)

    (loss, (count, sums)), gradients = jax.jit(jax.value_and_grad(ours, has_aux=True))(trainable)
    (want, (kl, ratios)), slopes = jax.value_and_grad(
        lambda t: plain_loss(objective, nnx.merge(graph, t, frozen), data), has_aux=True
    )(trainable)
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(slopes), strict=True):
        assert np.abs(b).max() > 1e-4
        np.testing.assert_allclose(a, b, atol=1e-5 * max(1.0, np.abs(b).max()), err_msg=jax.tree_util.keystr(path))
    found, rewards = objective.metrics({"loss": loss, "count": count} | sums), 0.3 * np.asarray(ratios)
    labels = data.labels.astype(bool)
    means = {"rewards/chosen": rewards[labels].mean(), "rewards/rejected": rewards[~labels].mean(), "kl": kl}
    means["rewards/margins"] = means["rewards/chosen"] - means["rewards/rejected"]
    for name, value in means.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
    nothing = objective.metrics(dict.fromkeys(("loss", "count", *objective.sums), 0.0))
    assert set(nothing) == set(found) and not any(nothing.values())


def test_rows_of_every_form_and_the_answers_of_strangers():
    tokenizer, data = make_tokenizer(), dataclasses.replace(make_config("x").data, length=96)
    texts = [
        {"prompt": "Add 1: ", "completion": "It is 4.", "label": True},
        {"prompt": TURNS, "completion": [{"role": "assistant", "content": "I am a bot."}], "label": 0},
    ]
    texts.append({"messages": TURNS + texts[1]["completion"], "label": False})
    for row, template in zip(texts, (None, "chatml", "chatml"), strict=True):
        rows = [row, row | {"label": True}]
        made = KTO().prepare(
            rows, tokenizer, dataclasses.replace(data, template=template), vocab_size=400, max_rows=None
        )
        assert made.labels.tolist() == [float(row["label"]), 1.0] and len(made.documents) == 4
    a, b = (dict(prompt=p, completion=c, label=True) for p, c in (("one ", "apple"), ("two ", "pear")))
    made = KTO(precompute_ref_log_probs=True).prepare([a, b], tokenizer, data, vocab_size=400, max_rows=None)
    assert np.isnan(made.reference).all() and made.reference.shape == (4,)
    first, stranger, second, other = (made.documents[index] for index in range(4))
    answer = [tokenizer.decode(d.tokens[d.mask]) for d in (first, stranger, second, other)]
    assert answer[0] == answer[3] != answer[1] == answer[2] and "apple" in answer[0] and "pear" in answer[1]
    assert tokenizer.decode(stranger.tokens[~stranger.mask]) == tokenizer.decode(first.tokens[~first.mask])
    side = made.split(1)[0]
    assert len(side.labels) == 1 and len(side.documents) == len(side.reference) == 2


def documents_of(rows: list[tuple[int, int, int]]) -> Documents:
    """Labelled rows of (prompt's number, tokens of the prompt, tokens of the answer), all desirable."""
    made = []
    for number, (prompt, before, answer) in enumerate(rows):
        tokens = np.concatenate([np.full(before, 100 + prompt), np.full(answer, 1000 + number)]).astype(np.int32)
        made += [
            Document(tokens, np.arange(before + answer) >= before),
            Document(np.zeros(0, np.int32), np.zeros(0, bool)),
        ]
    return Documents.gather(made)


@given(st.lists(st.tuples(st.integers(0, 3), st.just(2), st.integers(1, 4)), min_size=1, max_size=14))
def test_the_mismatched_answer_is_the_nearest_of_another_prompt(rows):
    made, _ = with_mismatched_answers(documents_of(rows))
    count = len(rows)
    for row, (prompt, _, _) in enumerate(rows):
        before = [(row - back) % count for back in range(1, count + 1)]
        want = next((other for other in before if rows[other][0] != prompt), before[0])
        stranger = made[2 * row + 1]
        assert set(stranger.tokens[:2]) == {100 + prompt} and set(stranger.tokens[2:]) == {1000 + want}
        assert len(stranger.tokens) == 2 + rows[want][2]


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 30), st.integers(1, 60)), min_size=1, max_size=8),
    st.integers(4, 64),
    st.booleans(),
)
def test_a_rows_own_answer_is_never_cut_for_a_strangers(rows, length, packing):
    documents, labels = with_mismatched_answers(documents_of(rows))
    packed = PackedPairs(documents, length, labels=labels, second_yields=True, packing=packing)
    for row, (_, before, answer) in enumerate(rows):
        own, stranger = (int(count) for count in packed.kept_lengths[row])
        whole = min(before + answer, length)
        assert own == (whole if whole > before else 0)
        there = min(len(documents[2 * row + 1].tokens), length - own)
        assert stranger == (there if own and there > before else 0)
    assert packed.report.truncated == sum(before < length < before + answer for _, before, answer in rows)
    assert packed.without_second == int(((packed.kept_lengths[:, 1] == 0) & (packed.kept_lengths[:, 0] > 0)).sum())
    if any(before + answer > length for _, before, answer in rows):
        with pytest.raises(ValueError, match="longer"):
            PackedPairs(documents, length, labels=labels, second_yields=True, overflow="error")


def test_the_lengths_of_the_finding():
    documents, labels = with_mismatched_answers(documents_of([(0, 100, 600), (1, 100, 1400)]))
    packed = PackedPairs(documents, 1024, labels=labels, second_yields=True)
    assert packed.kept_lengths.tolist() == [[700, 324], [1024, 0]]
    data = PairDataset(documents, Summary(rows=2, documents=2), 1024, labels=labels, second_yields=True)
    assert any("1 rows estimate no divergence" in line for line in data.warnings())
    alike = PairDataset(documents, Summary(rows=2, documents=2), 1024, labels=labels)
    assert any("4 answers are cut, because the pair is longer than data.length = 1,024" in w for w in alike.warnings())


@pytest.mark.full
def test_a_row_without_a_mismatched_answer_has_no_part_in_the_divergence():
    objective, model = KTO(0.3), adapted()
    documents, labels = with_mismatched_answers(documents_of([(0, 2, 3), (1, 2, 14)]))
    documents = dataclasses.replace(documents, tokens=documents.tokens % 48)
    rows = PackedPairs(documents, 16, labels=labels, second_yields=True, packing=False)
    assert rows.kept_lengths.tolist() == [[5, 11], [16, 0]]
    kls = []
    for filled in (1, 2):
        batch = rows.empty(2)
        for row in range(filled):
            rows.fill(batch, row, row)
        loss, count, sums = objective.loss(model, batch, Forward(chunk_tokens=7))
        assert count == filled and np.isfinite(loss)
        kls.append(float(sums["kl"] / count))
    assert kls[0] == pytest.approx(kls[1], rel=1e-5) and kls[0] > 0


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "completion": "b"}, "no column label"),
        ({"prompt": "a", "completion": "b", "label": "good"}, "label = 'good': must be true"),
        ({"prompt": "a", "completion": " ", "label": True}, "empty completion response"),
    ],
)
def test_rows_that_have_no_label(row, message):
    with pytest.raises(ValueError, match=message):
        KTO().prepare([row], make_tokenizer(), make_config("x").data, vocab_size=400, max_rows=None)


def test_rows_of_pairs_are_refused():
    data = dataclasses.replace(make_config("x").data, format="preference")
    with pytest.raises(ConfigError, match=r"data\.format = 'preference': kto takes labelled rows"):
        KTO().prepare([{}], make_tokenizer(), data, vocab_size=400, max_rows=None)


def test_a_run_learns_what_is_desirable(tmp_path):
    objective = ObjectiveConfig("kto", beta=0.3, undesirable_weight=1.5)
    trainer = trainer_of(tmp_path, rows=single(64), eval_rows=single(24, seed=1), objective=objective)
    trainer.train()
    before, after = held_out(trainer, "eval_rewards/margins")
    assert before == 0.0 and after > 0.05
    assert trainer.history[1]["examples"] > 8 and "kl" in trainer.history[1]
