"""Whatever is asked of a sampler, each row has the tokens that it has alone: sets that hypothesis draws."""

from __future__ import annotations

import numpy as np
import pytest
from drawn import (
    DRAWS,
    VOCAB,
    Asked,
    alone,
    asked_rows,
    check_by_forward,
    choices,
    draws,
    forget_programs,
    model_of,
    new_tokens,
    prompts,
)
from hypothesis import given
from hypothesis import strategies as st

from jaxtune import Sampler, generate
from jaxtune.models.generation.slot_plan import length_bucket


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.sampled_from([1, 16, 128]))
def test_a_prompt_fits_into_the_cache_of_its_row(tokens, more, least):
    prompt, row = length_bucket(tokens, least), length_bucket(tokens + more)
    assert tokens <= prompt <= row and least <= prompt
    assert length_bucket(prompt, least) == prompt and length_bucket(row) == row
    assert prompt < 2 * tokens or prompt == least


@pytest.mark.full
@pytest.mark.parametrize(("length", "new"), [(300, 60), (257, 127), (383, 1)])
def test_prompts_between_a_bucket_of_prompts_and_one_of_caches(length, new):
    prompt = tuple((7 * place + 3) % VOCAB for place in range(length))
    row = alone(Asked(prompt, new, {}, 0))
    check_by_forward(Asked(prompt, new, {}, 0), row)
    assert generate(model_of(), [prompt], max_new_tokens=new) == [row.ids]
    several = Sampler(model_of(), 2, length + new)  # two are packed, one is too long to be packed with them
    for row in several.run([prompt, prompt[1:], prompt[:1]], [new, new, new]):
        assert row.ids == alone(Asked(prompt[row.index :] if row.index < 2 else prompt[:1], new, {}, 0)).ids


@pytest.mark.full
@draws(3)
@given(st.data(), asked_rows())
def test_rows_of_a_sampler(data, rows):
    """Some are submitted while others decode, and some are cancelled."""
    forget_programs()
    form = data.draw(
        st.fixed_dictionaries(
            dict(
                slots=st.sampled_from([1, 3]),
                prefill_tokens=st.sampled_from([2048, 300, 64] if DRAWS else [2048, 300]),
                tokens_per_round=st.sampled_from([8, 3]),
                prefills_alone=st.booleans(),
                deterministic=st.booleans(),
            )
        )
    )
    begins = [data.draw(st.integers(0, 4)) for _ in rows]
    cancels = [data.draw(st.sampled_from([None, None, 0, 2, 5])) for _ in rows]
    tops = [data.draw(st.sampled_from([0, 0, 3])) for _ in rows]
    longest = max(len(one.prompt) + one.new for one in rows)
    sampler = Sampler(model_of(), length=longest, **form)
    numbers: dict[int, int] = {}
    ids: list[list[int]] = [[] for _ in rows]
    logprobs: list[list[float]] = [[] for _ in rows]
    reasons: list[str | None] = [None] * len(rows)
    for step in range(10_000):
        for index, one in enumerate(rows):
            if begins[index] == step:
                number = sampler.submit(one.prompt, one.new, seed=one.seed, top_logprobs=tops[index], **one.choice)
                numbers[number] = index
        for number, index in numbers.items():
            if cancels[index] is not None and begins[index] + cancels[index] == step:
                sampler.cancel(number)
        for piece in sampler.step():
            index = numbers[piece.request]
            assert reasons[index] is None, "a piece after the last one"
            ids[index] += piece.ids
            logprobs[index] += piece.logprobs
            reasons[index] = piece.finish_reason
            assert [len(top) for top in piece.top_logprobs] == [tops[index]] * len(piece.ids) or not tops[index]
        if step > max(begins) and not sampler.pending:
            break
    assert all(reasons)
    for index, one in enumerate(rows):
        row = alone(one)
        if DRAWS and index == 0:  # a pass over 3,000 tokens takes as long as all else
            check_by_forward(one, row)
        if reasons[index] == "cancelled":
            assert cancels[index] is not None and ids[index] == row.ids[: len(ids[index])]
        else:
            assert (ids[index], reasons[index]) == (row.ids, row.finish_reason)
        np.testing.assert_allclose(logprobs[index], row.logprobs[: len(logprobs[index])], atol=1e-3)


@pytest.mark.full
@draws(3)
@given(st.data(), st.lists(prompts(), min_size=1, max_size=5), choices())
def test_prompts_of_generate(data, rows, choice):
    forget_programs()
    new = data.draw(new_tokens(max(map(len, rows))))
    seeds = data.draw(st.lists(st.integers(0, 2**32), min_size=len(rows), max_size=len(rows)))
    streams, scored, same = (data.draw(st.booleans()) for _ in range(3))
    shown: list[list[int]] = [[] for _ in rows]
    found = generate(
        model_of(),
        rows,
        new,
        seed=seeds,
        streamer=(lambda row, tokens: shown[row].extend(tokens)) if streams else None,
        output_logprobs=scored,
        deterministic=same and not streams,
        **choice,
    )
    answers, logprobs = found if scored else (found, None)
    for index, (prompt, seed) in enumerate(zip(rows, seeds, strict=True)):
        row = alone(Asked(prompt, new, choice, seed))
        assert answers[index] == row.ids and shown[index] == (row.ids if streams else [])
        if logprobs is not None:
            np.testing.assert_allclose(logprobs[index], row.logprobs, atol=2e-3)
