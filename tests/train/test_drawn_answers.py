"""Whatever prompts a run of rewards has, each answer is that of its prompt alone, on one device or two."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from drawn import VOCAB, Asked, alone, choices, draws, model_of, new_tokens, prompts
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from jaxtune.train.objectives.sampling import Settings
from jaxtune.train.sampled.answering import OneTurn, Prompt, Sampling


@functools.cache
def model_on(devices: int):
    if devices == 1:
        return model_of()
    graph, state = nnx.split(model_of())
    mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
    return nnx.merge(graph, jax.device_put(state, jax.NamedSharding(mesh, jax.P())))


@pytest.mark.full
@draws(3)
@given(st.data(), st.lists(prompts(), min_size=1, max_size=4), choices(ends=False))
def test_answers_of_a_run(data, given_prompts, choice):
    choice |= dict(temperature=choice["temperature"] or 1.0)
    new = data.draw(new_tokens(max(map(len, given_prompts))))
    ends = tuple(data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=3, unique=True)))
    group, devices = data.draw(st.integers(1, 2)), data.draw(st.sampled_from([1, 1, 2]))
    settings = Settings(max_completion_length=new, slots=data.draw(st.sampled_from([1, 3])), **choice)
    asked = [Prompt("", ids, {}) for ids in given_prompts for _ in range(group)]
    seeds = data.draw(st.lists(st.integers(0, 2**31), min_size=len(asked), max_size=len(asked)))
    found, _ = OneTurn(Sampling(settings, ends, str))(model_on(devices), asked, seeds)
    for one, prompt, seed in zip(found, asked, seeds, strict=True):
        own = dict(choice, eos_token_ids=ends, scaled_logprobs=True)
        row = alone(Asked(prompt.ids, new, own, seed))
        assert (one.ids, one.finish_reason) == (row.ids, row.finish_reason)
        np.testing.assert_allclose(one.logps, row.logprobs, atol=1e-3)
