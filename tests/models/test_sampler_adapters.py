"""One sampler for a base and many adapters: a row has the tokens that it has alone, by the model with its adapter."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sampler import finished
from tiny import CONFIGS
from tiny_models import adapted_model, golden_model, tiny_model

from jaxtune import Sampler, load_adapter, save_adapter
from jaxtune.models.adapters.adapter_files import adapter_on_host
from jaxtune.models.files.quant import quantize
from jaxtune.models.generation.adapters import Adapter, AdapterBank, read_adapter
from jaxtune.models.generation.slot_plan import room_bytes
from jaxtune.models.lora import freeze, linears

# Of unequal ranks and targets; each a third or more of an answer's tokens are other than the base's.
ADAPTERS = {
    "q": dict(r=4, lora_alpha=8, target_modules=["q_proj"]),
    "all": dict(r=64, lora_alpha=24, target_modules="all-linear"),
    "mlp": dict(r=8, lora_alpha=8, target_modules=["gate_proj", "up_proj", "down_proj"]),
    "rs": dict(r=16, lora_alpha=4, use_rslora=True, target_modules=["o_proj", "v_proj"]),
    "ranks": dict(r=6, lora_alpha=9, target_modules="all-linear", rank_pattern={"down_proj": 12}),
    "alphas": dict(r=32, lora_alpha=20, target_modules=["k_proj", "up_proj"], alpha_pattern={"k_proj": 50}),
    "layer": dict(r=5, lora_alpha=10, target_modules=r".*layers\.1\..*"),
    "down": dict(r=9, lora_alpha=18, target_modules=["down_proj"]),
}
NAMES = [None, *ADAPTERS]


@functools.cache
def base(dtype: str = "float32"):
    return freeze(tiny_model(dtype))


@functools.cache
def adapted(name: str | None, dtype: str = "float32"):
    """The base with an ordinary adapter."""
    if name is None:
        return base(dtype)
    return adapted_model(base(dtype), seed=1 + NAMES.index(name), **ADAPTERS[name])


def adapters_of(names=ADAPTERS, dtype: str = "float32") -> dict[str, Adapter]:
    return {name: Adapter.of(adapted(name, dtype)) for name in names}


@functools.cache
def together() -> Sampler:
    return Sampler(base(), 6, 64, adapters=adapters_of())


@functools.cache
def alone(name: str | None) -> Sampler:
    return Sampler(adapted(name), 1, 64)


def answers(sampler: Sampler, rows) -> list[tuple[list[int], list[float], str]]:
    """rows: (prompt, new tokens, adapter)."""
    numbers = [sampler.submit(prompt, new, eos_token_ids=(), adapter=name) for prompt, new, name in rows]
    ended = finished(sampler)
    return [ended[number] for number in numbers]


def assert_as_alone(found, rows, sampler_of=alone, atol=2e-5):
    for (ids, logprobs, reason), (prompt, new, name) in zip(found, rows, strict=True):
        [(own, own_logprobs, own_reason)] = answers(sampler_of(name), [(prompt, new, None)])
        assert (ids, reason) == (own, own_reason), name
        np.testing.assert_allclose(logprobs, own_logprobs, atol=atol)


PROMPTS = st.lists(st.integers(0, 47), min_size=1, max_size=40)
ROWS = st.lists(st.tuples(PROMPTS, st.integers(1, 12), st.sampled_from(NAMES)), min_size=1, max_size=14)


@settings(max_examples=12, deadline=None)
@given(ROWS)
def test_rows_of_all_adapters_are_rows_alone(rows):
    assert_as_alone(answers(together(), rows), rows)
