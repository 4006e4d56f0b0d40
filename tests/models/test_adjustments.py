"""Biases, penalties of presence and frequency, the least number of tokens: by their definitions, beside others."""

from __future__ import annotations

import numpy as np
import pytest
from drawn import VOCAB, Letters, draws, model_of
from hypothesis import given
from hypothesis import strategies as st

from jaxtune import Sampler
from jaxtune.models.generation.limits import MOST_BIASES

END = 7


@pytest.fixture(scope="module")
def sampler():
    with Sampler(model_of(), 3, 64) as sampler:
        yield sampler


def logits_after(tokens: list[int]) -> np.ndarray:
    """By a forward pass, in one shape."""
    import jax.numpy as jnp

    padded = np.zeros((1, 64), np.int32)
    padded[0, : len(tokens)] = tokens
    model = model_of()
    hidden = model.hidden_states(jnp.asarray(padded), jnp.asarray(np.arange(64)[None] < len(tokens), jnp.int32))
    return np.asarray(model.logits(hidden)[0, len(tokens) - 1, :VOCAB], np.float64)


def by_definition(prompt: list[int], count: int, choice: dict) -> tuple[list[int], float]:
    """(greedy tokens, the smallest lead of a chosen token over the next)."""
    made: list[int] = []
    lead = np.inf
    while len(made) < count and (not made or made[-1] != END):
        logits = logits_after([*prompt, *made])
        for token, bias in (choice.get("logit_bias") or {}).items():
            logits[token] += bias
        if len(made) < choice.get("min_new_tokens", 0):
            logits[END] = -np.inf
        for token in {*prompt, *made}:
            penalty = choice.get("repetition_penalty", 1.0)
            logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
        for token in set(made):
            logits[token] -= choice.get("frequency_penalty", 0.0) * made.count(token)
            logits[token] -= choice.get("presence_penalty", 0.0)
        *_, second, first = np.sort(logits)
        lead = min(lead, first - second)
        made.append(int(logits.argmax()))
    return made, lead


@st.composite
def choices(draw) -> dict:
    tokens = st.integers(0, VOCAB - 1)
    found = {
        "presence_penalty": draw(st.sampled_from([0.0, 1.5, -0.7])),
        "frequency_penalty": draw(st.sampled_from([0.0, 0.9, -0.4])),
        "repetition_penalty": draw(st.sampled_from([1.0, 1.3])),
        "logit_bias": draw(st.dictionaries(tokens, st.sampled_from([-100.0, -2.0, 1.5, 3.0]), max_size=11)),
        "min_new_tokens": draw(st.integers(0, 6)),
    }
    return found if draw(st.booleans()) else {}


@draws(12)
@given(rows=st.lists(st.tuples(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9), choices()), max_size=6))
def test_greedy_rows_beside_each_other(sampler, rows):
    numbers = [sampler.submit(prompt, 10, eos_token_ids=[END], **choice) for prompt, choice in rows]
    made: dict[int, list[int]] = {number: [] for number in numbers}
    while sampler.pending:
        for piece in sampler.step():
            made[piece.request] += piece.ids
    for number, (prompt, choice) in zip(numbers, rows, strict=True):
        expected, lead = by_definition(prompt, 10, choice)
        if lead > 1e-3:
            assert made[number] == expected, choice


def test_stop_strings_wait_for_the_least_number(sampler):
    [row] = sampler.run([[1, 2, 3]], 20, eos_token_ids=[])
    text = Letters().decode(row.ids)
    [later] = sampler.run(
        [[1, 2, 3]], 20, eos_token_ids=[], stop_strings=[*text], tokenizer=Letters(), min_new_tokens=9
    )
    assert later.ids == row.ids[:10] and later.finish_reason == "stop"


def test_a_kind_that_no_row_needs_is_left(sampler):
    def kind() -> object:
        for _ in sampler.run([[1, 2]], 4):
            pass
        return sampler._row_programs.kind_of_slots()

    plain = kind()
    for _ in sampler.run([[1, 2]], 4, 1.0, top_p=0.5, frequency_penalty=1.0):
        pass
    assert kind() == plain


def test_a_first_token_comes_at_once_where_few_decode():
    with Sampler(model_of(), 8, 64) as late, Sampler(model_of(), 8, 64, first_at_once=True) as early:

        def pieces(sampler, count: int) -> dict[int, list[int]]:
            """{row: how many tokens each of its pieces has}"""
            rows: dict[int, list[int]] = {sampler.submit([1, 2, n], 11, eos_token_ids=[]): [] for n in range(count)}
            made: dict[int, list[int]] = {}
            while sampler.pending:
                for piece in sampler.step():
                    rows[piece.request].append(len(piece.ids))
                    made.setdefault(piece.request, []).extend(piece.ids)
            texts.append([*made.values()])
            return rows

        texts: list[list[list[int]]] = []
        assert {*map(tuple, pieces(late, 2).values())} == {(8, 3)}
        assert {*map(tuple, pieces(early, 2).values())} == {(1, 8, 2)}
        assert texts[0] == texts[1]
        assert {*map(tuple, pieces(early, 3).values())} == {(8, 3)}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(logit_bias={VOCAB: 1.0}), "outside the vocabulary"),
        (dict(logit_bias={-1: 1.0}), "outside the vocabulary"),
        (dict(logit_bias={1: float("nan")}), "must be a finite number"),
        (dict(presence_penalty=float("inf")), "presence_penalty = inf"),
        (dict(frequency_penalty=float("nan")), "frequency_penalty = nan"),
        (dict(min_new_tokens=3, eos_token_ids=[*range(VOCAB)] * MOST_BIASES), f"at most {MOST_BIASES}"),
    ],
)
def test_a_setting_out_of_range(sampler, wrong, message):
    with pytest.raises(ValueError, match=message):
        sampler.submit([1], 3, **wrong)
    assert not sampler.pending
