"""Generation with the cache against repeated full forwards without one."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import NEW_TOKENS, PROMPT_TOKENS
from tiny import CONFIGS, golden_tokens
from tiny_models import adapted_model, golden_model, tiny_model

from jaxtune import from_pretrained, generate, merge_adapter
from jaxtune.models.config import LayerSpec, RopeConfig, Source
from jaxtune.models.generate import _limited, _program

GOLDENS = Path(__file__).resolve().parent.parent / "goldens"
PROMPTS = [[3, 9, 27], list(range(1, 20)), [44], [7, 7, 7, 8, 30, 2, 1]]

# With rows of mixed lengths; the other features of the families are in the goldens.
FEATURES = {
    "window": dict(layers=(LayerSpec(window=4), LayerSpec()), head_dim=16),
    "gemma2": dict(
        layers=(LayerSpec(window=5), LayerSpec()), attention_soft_cap=2.0, final_soft_cap=3.0, embedding_scale=4.0,
        norm_offset=1.0, post_norm=True, tie_embeddings=True, activation="gelu_tanh",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_equals_transformers(name):
    prompts = golden_tokens()[:, :PROMPT_TOKENS].tolist()
    expected = np.load(GOLDENS / f"{name}.npz")["greedy"].tolist()
    assert generate(golden_model(name), prompts, NEW_TOKENS, eos_token_ids=[]) == expected


def greedy_without_cache(model, prompts, count):
    """Whole rows through the model again for each token; one shape, so one compile."""
    length = max(map(len, prompts)) + count
    rows = [list(prompt) for prompt in prompts]
    forward = jax.jit(lambda tokens, ids: model(tokens, ids))
    for _ in range(count):
        tokens = np.zeros((len(rows), length), np.int32)
        for row, ids in zip(tokens, rows, strict=True):
            row[: len(ids)] = ids
        used = np.arange(length) < np.array([[len(ids)] for ids in rows])
        logits = forward(tokens, used.astype(np.int32))
        for index, ids in enumerate(rows):
            ids.append(int(logits[index, len(ids) - 1].argmax()))
    return [ids[len(prompt) :] for ids, prompt in zip(rows, prompts, strict=True)]


@pytest.mark.parametrize("name", FEATURES)
def test_greedy_equals_greedy_without_cache(name):
    model = tiny_model(initializer_range=0.5, **FEATURES[name])
    expected = greedy_without_cache(model, PROMPTS, 12)
    assert generate(model, PROMPTS, max_new_tokens=12) == expected
    assert len({tuple(row) for row in expected}) == len(PROMPTS)  # the prompts matter


def test_a_real_model_tells_a_story(test_data):
    model, tokenizer = from_pretrained(test_data / "models" / "stories260K", dtype="float32")
    prompts = [tokenizer(text)["input_ids"] for text in ("Once upon a time, there was a", "Tom")]
    told = generate(model, prompts, max_new_tokens=40)
    assert told == greedy_without_cache(model, prompts, 40)
    assert "little girl named Lily" in tokenizer.decode(prompts[0] + told[0])
    adapted = adapted_model(model, r=4)
    different = generate(adapted, prompts, max_new_tokens=40)
    assert different != told
    assert different == greedy_without_cache(adapted, prompts, 40)


def longrope_model():
    rope = RopeConfig(
        kind="longrope", original_max_position_embeddings=24, short_factor=(1.0, 1.1, 1.2, 1.3),
        long_factor=(1.0, 4.0, 9.0, 16.0),
    )  # fmt: skip
    return tiny_model(initializer_range=0.5, rotary=(rope,))


@pytest.mark.parametrize("length", [10, 20, 24, 25, 40])
def test_longrope_switches_with_the_total_length(length):
    model = longrope_model()
    prompts = [[(7 * i + row) % 48 for i in range(length)] for row in range(2)]
    assert generate(model, prompts, max_new_tokens=10) == greedy_without_cache(model, prompts, 10)


def test_a_longrope_row_switches_by_itself():
    """Rows that pass the original context at different steps, or never, or were past it from the start."""
    model = longrope_model()
    prompts = [[(7 * i + row) % 48 for i in range(length)] for row, length in enumerate((8, 20, 23, 30))]
    alone = [greedy_without_cache(model, [prompt], 6)[0] for prompt in prompts]
    assert generate(model, prompts, max_new_tokens=6) == alone


def test_a_row_does_not_depend_on_the_others():
    model = tiny_model(initializer_range=0.5)
    together = generate(model, PROMPTS, max_new_tokens=8)
    assert [generate(model, [prompt], max_new_tokens=8)[0] for prompt in PROMPTS] == together


def test_adapters_generate_without_merging():
    model = adapted_model(tiny_model(initializer_range=0.5), r=4, lora_dropout=0.5)
    answers = generate(model, PROMPTS, max_new_tokens=8)
    assert answers == generate(merge_adapter(model), PROMPTS, max_new_tokens=8)
    assert answers == greedy_without_cache(model, PROMPTS, 8)
    assert answers != generate(tiny_model(initializer_range=0.5), PROMPTS, max_new_tokens=8)


def test_rows_end_with_an_end_token():
    model = tiny_model(initializer_range=0.5)
    free = generate(model, PROMPTS, max_new_tokens=12)
    end = free[1][4]

    def cut(row, ends):
        at = next((i for i, token in enumerate(row) if token in ends), len(row))
        return row[: at + 1]

    assert generate(model, PROMPTS, max_new_tokens=12, eos_token_ids=end) == [cut(row, [end]) for row in free]
    ends = [end, free[0][2]]
    expected = [cut(row, ends) for row in free]
    assert generate(model, PROMPTS, max_new_tokens=12, eos_token_ids=ends) == expected
    assert len({len(row) for row in expected}) > 1
    model.source = Source("somewhere", config=json.dumps({"eos_token_id": 1}))
    model.source = Source("somewhere", model.source.config, generation_config=json.dumps({"eos_token_id": ends}))
    assert generate(model, PROMPTS, max_new_tokens=12) == expected
    assert generate(model, PROMPTS, max_new_tokens=12, eos_token_ids=[]) == free
    model.source = Source("somewhere", config=json.dumps({"eos_token_id": end}), generation_config="{}")
    assert generate(model, PROMPTS, max_new_tokens=12) == [cut(row, [end]) for row in free]


def test_sampling_follows_the_softmax_and_the_seed():
    model = tiny_model()
    prompt = [5, 6, 7]
    answers = generate(model, [prompt] * 64, max_new_tokens=16, temperature=0.7, seed=1)
    assert answers == generate(model, [prompt] * 64, max_new_tokens=16, temperature=0.7, seed=1)
    assert answers[:3] == generate(model, [prompt] * 3, max_new_tokens=16, temperature=0.7, seed=1)
    assert answers != generate(model, [prompt] * 64, max_new_tokens=16, temperature=0.7, seed=2)
    firsts = np.concatenate(
        [[row[0] for row in generate(model, [prompt] * 64, 1, temperature=0.7, seed=seed)] for seed in range(30)]
    )
    probabilities = np.asarray(jax.nn.softmax(model(jnp.array([prompt]))[0, -1] / 0.7))
    expected = probabilities * len(firsts)
    chi_square = ((np.bincount(firsts, minlength=48) - expected) ** 2 / expected).sum()
    assert chi_square < 47 + 4 * (2 * 47) ** 0.5  # 47 degrees of freedom, four standard deviations


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        (dict(top_k=2), [0, 3]),
        (dict(top_p=0.7), [0, 3]),  # 0.5 alone is less than 0.7; with 0.25 it is not
        (dict(top_p=0.5), [3]),
        (dict(min_p=0.3), [0, 3]),
        (dict(top_k=3, top_p=0.99, min_p=0.21), [0, 1, 3]),  # 0.125 is a quarter of 0.5
        (dict(top_k=1, temperature=9.0), [3]),
        (dict(top_p=1e-6), [3]),
    ],
)
def test_sampling_takes_only_what_the_limits_leave(limits, kept):
    logits = jnp.log(jnp.array([[0.25, 0.125, 0.0625, 0.5, 0.0625]]))
    settings = dict(top_k=5, top_p=1.0, min_p=0.0) | {k: v for k, v in limits.items() if k != "temperature"}
    left = _limited(logits, **settings)
    assert np.flatnonzero(np.isfinite(left[0])).tolist() == kept
    np.testing.assert_array_equal(left[0][np.array(kept)], logits[0][np.array(kept)])


def test_limits_of_sampling_reach_the_program():
    model, prompt = tiny_model(), [5, 6, 7]
    greedy = generate(model, [prompt], max_new_tokens=8)
    assert generate(model, [prompt] * 3, max_new_tokens=8, temperature=3.0, top_k=1) == greedy * 3
    drawn = {row[0] for row in generate(model, [prompt] * 64, 1, temperature=3.0, top_k=2)}
    assert drawn == set(np.argsort(model(jnp.array([prompt]))[0, -1])[-2:].tolist())


def test_one_compile_for_each_bucket_of_shapes():
    model = tiny_model(vocab_size=52)  # nobody else has compiled for it
    before = _program._cache_size()
    for prompts, count in (
        ([[1]] * 3, 1), ([[2, 3]] * 4, 16), ([[1] * 16, [2], [3, 4]], 7), ([[5] * 9] * 4, 10),
    ):  # fmt: skip
        generate(model, prompts, max_new_tokens=count)
    assert _program._cache_size() - before == 1
    generate(model, [[1]] * 5, max_new_tokens=1)
    generate(model, [[1] * 17] * 4, max_new_tokens=1)
    generate(model, [[1]] * 4, max_new_tokens=17)
    assert _program._cache_size() - before == 4
    generate(model, [[1]] * 4, max_new_tokens=2, temperature=0.5)
    generate(model, [[1]] * 4, max_new_tokens=2, temperature=0.9, seed=4)
    assert _program._cache_size() - before == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(prompts=[]), "prompts is empty"),
        (dict(prompts=[[1], []]), "prompt 1 is empty"),
        (dict(prompts=[[1, 48]]), "prompt 0 holds token id 48, outside the vocabulary of 48"),
        (dict(prompts=[[1, -2]]), "prompt 0 holds token id -2"),
        (dict(prompts=["text"]), "prompt 0 is not a list of token ids"),
        (dict(prompts=[[0.5]]), "prompt 0 is not a list of token ids"),
        (dict(prompts=[[1] * 100], max_new_tokens=29), "need 129 positions; the model has 128"),
        (dict(prompts=[[1]], max_new_tokens=0), "max_new_tokens = 0"),
        (dict(prompts=[[1]], temperature=-1.0), "temperature = -1"),
        (dict(prompts=[[1]], top_p=0.9), "have no effect with temperature = 0"),
        (dict(prompts=[[1]], temperature=1.0, top_p=0.0), "top_p = 0.0: must be above 0"),
        (dict(prompts=[[1]], temperature=1.0, top_k=-1), "top_k = -1: must be a whole number"),
        (dict(prompts=[[1]], temperature=1.0, min_p=2.0), "min_p = 2.0: must be from 0 to 1"),
    ],
)
def test_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        generate(tiny_model(), **arguments)


def test_the_last_position_can_be_filled():
    model = tiny_model(initializer_range=0.5)
    prompt = [list(range(40)) + list(range(40)) + list(range(40))]
    assert generate(model, prompt, max_new_tokens=8) == greedy_without_cache(model, prompt, 8)
