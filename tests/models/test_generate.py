"""Generation with the cache against repeated full forwards without one; of every family, test_families.py has
transformers' own."""

from __future__ import annotations

import functools
import json
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_models import adapted_model, tiny_model

from jaxtune import from_pretrained, generate, merge_adapter
from jaxtune.models.config import PRE_AND_POST_NORM, LayerSpec, RopeConfig, Source
from jaxtune.models.generation import slots
from jaxtune.models.generation.generate import _token_logprobs
from jaxtune.models.generation.sampling import Sampling, filtered

PROMPTS = [[3, 9, 27], list(range(1, 20)), [44], [7, 7, 7, 8, 30, 2, 1]]

# With rows of mixed lengths; the other features of the families are in the goldens.
FEATURES = {
    "window": dict(layers=(LayerSpec(window=4), LayerSpec()), head_dim=16),
    "gemma2": dict(
        layers=(LayerSpec(window=5), LayerSpec()),
        attention_soft_cap=2.0,
        final_soft_cap=3.0,
        embedding_scale=4.0,
        norm_offset=1.0,
        stages=PRE_AND_POST_NORM,
        tie_embeddings=True,
        activation="gelu_tanh",
    ),
}


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


@pytest.mark.full
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
        kind="longrope",
        original_max_position_embeddings=24,
        short_factor=(1.0, 1.1, 1.2, 1.3),
        long_factor=(1.0, 4.0, 9.0, 16.0),
    )
    return tiny_model(initializer_range=0.5, rotary=(rope,))


@pytest.mark.full
@pytest.mark.parametrize("length", [10, 20, 24, 25, 40])
def test_longrope_switches_with_the_total_length(length):
    model = longrope_model()
    prompts = [[(7 * i + row) % 48 for i in range(length)] for row in range(2)]
    assert generate(model, prompts, max_new_tokens=10) == greedy_without_cache(model, prompts, 10)


@pytest.mark.full
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


@pytest.mark.full
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
        (dict(top_p=1e-6), [3]),
    ],
)
def test_sampling_takes_only_what_the_limits_leave(limits, kept):
    logits = jnp.log(jnp.array([[0.25, 0.125, 0.0625, 0.5, 0.0625]]))
    left = filtered(logits, Sampling(temperature=1.0, **limits).numbers(5))
    assert np.flatnonzero(np.isfinite(left[0])).tolist() == kept
    np.testing.assert_array_equal(left[0][np.array(kept)], logits[0][np.array(kept)])


@pytest.mark.full
def test_limits_of_sampling_reach_the_program():
    model, prompt = tiny_model(), [5, 6, 7]
    greedy = generate(model, [prompt], max_new_tokens=8)
    assert generate(model, [prompt] * 3, max_new_tokens=8, temperature=3.0, top_k=1) == greedy * 3
    drawn = {row[0] for row in generate(model, [prompt] * 64, 1, temperature=3.0, top_k=2)}
    assert drawn == set(np.argsort(model(jnp.array([prompt]))[0, -1])[-2:].tolist())


@pytest.mark.full
def test_one_compile_for_each_bucket_of_shapes(monkeypatch):
    model = tiny_model(vocab_size=52, max_position_embeddings=1024)
    traces = Counter()

    def counting(function):
        @functools.wraps(function)
        def counted(*args, **kwargs):
            traces[function] += 1
            return function(*args, **kwargs)

        return counted

    # Programs of this test's own, so that no other test's traces count, with functions that count how often jit traces.
    prefill, decode = slots.prefill, slots.decode
    with monkeypatch.context() as patch:
        patch.setattr(slots, "prefill", counting(prefill))
        patch.setattr(slots, "decode", counting(decode))
        compiled = slots.programs.__wrapped__(same_choices=False, many_rows=False)
    monkeypatch.setattr(slots, "programs", lambda *_: compiled)

    def counts():
        return traces[prefill], traces[decode]

    for prompts, count in (([[1, 2]] * 3, 2), ([[2, 3]] * 4, 16), ([[1] * 16, [2], [3, 4]], 7), ([[5] * 9] * 4, 10)):
        generate(model, prompts, max_new_tokens=count)
    assert counts() == (1, 1)
    generate(model, [[1, 2]] * 5, max_new_tokens=2)  # eight slots
    generate(model, [[1] * 18] * 4, max_new_tokens=2)  # longer prompts
    assert counts() == (2, 2)
    generate(model, [[1, 2]] * 4, max_new_tokens=200)  # longer rows
    generate(model, [[1, 2]] * 4, max_new_tokens=4, streamer=lambda row, new: None)
    assert counts() == (2, 4)
    generate(model, [[1, 2]] * 4, max_new_tokens=2, temperature=0.5)
    generate(model, [[1, 2]] * 4, max_new_tokens=2, temperature=0.9, seed=4)
    assert counts() == (2, 5)
    generate(model, [[1, 2]] * 4, max_new_tokens=2, temperature=0.9, top_p=0.5, min_p=0.1)
    generate(model, [[1, 2]] * 4, max_new_tokens=2, temperature=0.3, top_k=7)
    assert counts() == (2, 6)


def test_a_stretched_rotary_base_gives_the_positions_that_training_takes():
    yarn = RopeConfig(kind="yarn", factor=4.0, original_max_position_embeddings=128)
    model = tiny_model(rotary=(yarn,))
    assert (model.config.max_position_embeddings, model.config.context_length) == (128, 512)
    assert len(generate(model, [[1] * 200], 2, eos_token_ids=[])[0]) == 2
    with pytest.raises(ValueError, match="need 513 positions; the model has 512"):
        generate(model, [[1] * 500], 13)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(prompts=[]), "prompts is empty"),
        (dict(prompts=[[1], []]), "prompt 1 is empty"),
        (dict(prompts=[[1, 48]]), "prompt 0 contains token id 48, outside the vocabulary of 48"),
        (dict(prompts=[[1, -2]]), "prompt 0 contains token id -2"),
        (dict(prompts=["text"]), "prompt 0 is not a list of token ids"),
        (dict(prompts=[[0.5]]), "prompt 0 is not a list of token ids"),
        (dict(prompts=[[1] * 100], max_new_tokens=29), "need 129 positions; the model has 128"),
        (dict(prompts=[[1]], max_new_tokens=0), "max_new_tokens = 0"),
        (dict(prompts=[[1]], temperature=-1.0), "temperature = -1"),
        (dict(prompts=[[1]], top_p=0.9), "have no effect with temperature = 0"),
        (dict(prompts=[[1]], temperature=1.0, top_p=0.0), "top_p = 0.0: must be above 0"),
        (dict(prompts=[[1]], temperature=1.0, top_k=-1), "top_k = -1: must be a whole number"),
        (dict(prompts=[[1]], temperature=1.0, min_p=2.0), "min_p = 2.0: must be from 0 to 1"),
        (dict(prompts=[[1]], repetition_penalty=0.0), "repetition_penalty = 0.0: must be positive"),
        (dict(prompts=[[1]], stop_strings="x"), "give the tokenizer that turns tokens into text"),
        (dict(prompts=[[1], [2]], seed=[1]), "must be an integer, or 2 of them, one a prompt"),
    ],
)
def test_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        generate(tiny_model(), **arguments)


def test_the_last_position_can_be_filled():
    model = tiny_model(initializer_range=0.5)
    prompt = [list(range(40)) + list(range(40)) + list(range(40))]
    assert generate(model, prompt, max_new_tokens=8) == greedy_without_cache(model, prompt, 8)


# ---- sampling


def by_definition(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, penalty=1.0, seen=()):
    """The distribution of the next token, float64[V], written down with sorted lists."""
    scores = [float(x) for x in logits]
    for token in set(seen):
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    scores = [x / temperature for x in scores]
    left = set(range(len(scores)))

    def probability(token):
        return np.exp(scores[token]) / sum(np.exp(scores[i]) for i in left)

    if top_k:
        least = sorted(scores, reverse=True)[min(top_k, len(scores)) - 1]
        left = {i for i in left if scores[i] >= least}
    ranked, sofar, nucleus = sorted(left, key=lambda i: -scores[i]), 0.0, set()
    for token in ranked:
        if not nucleus or sofar < top_p:
            nucleus.add(token)
        sofar += probability(token)
    left = nucleus
    most = max(probability(i) for i in left)
    left = {i for i in left if probability(i) >= min_p * most}
    return np.array([probability(i) if i in left else 0.0 for i in range(len(scores))])


@pytest.mark.parametrize(
    "settings",
    [
        dict(temperature=0.7),
        dict(top_k=5),
        dict(top_k=400),
        dict(top_p=0.6),
        dict(top_p=1e-6),
        dict(min_p=0.2),
        dict(min_p=1.0),
        dict(temperature=1.5, top_k=20, top_p=0.8, min_p=0.1),
        dict(top_k=3, top_p=0.5),
    ],
    ids=str,
)
def test_filters_are_their_definitions(settings):
    logits = 2.0 * np.random.default_rng(0).standard_normal((8, 50)).astype(np.float32)
    logits[0, 7] = logits[0, 9] = np.sort(logits[0])[-5]  # equals at the border of top_k
    sampling = Sampling(**{"temperature": 1.0} | settings)
    numbers = sampling.numbers(50)
    assert sampling.kind.filters == (set(settings) != {"temperature"})
    found = jax.nn.softmax(filtered(jnp.asarray(logits) / numbers.temperature, numbers), axis=-1)
    expected = np.stack([by_definition(row, **settings) for row in logits])
    np.testing.assert_array_equal(np.asarray(found) > 0, expected > 0)
    np.testing.assert_allclose(found, expected, rtol=2e-5)


@pytest.mark.full
def test_the_repetition_penalty_is_of_what_the_row_has():
    model = tiny_model(initializer_range=0.5)
    rows = [list(prompt) for prompt in PROMPTS]
    for row in rows:
        for _ in range(6):
            logits = np.asarray(model(jnp.array([row]))[0, -1])
            row.append(int(by_definition(logits, penalty=1.8, seen=row).argmax()))
    expected = [row[len(prompt) :] for row, prompt in zip(rows, PROMPTS, strict=True)]
    assert generate(model, PROMPTS, max_new_tokens=6, repetition_penalty=1.8) == expected
    assert generate(model, PROMPTS, max_new_tokens=6) != expected


def test_a_row_with_a_seed_of_its_own_draws_the_same_in_any_batch():
    model = tiny_model(initializer_range=0.5)
    settings = dict(max_new_tokens=8, temperature=1.0, top_p=0.9)
    alone = [generate(model, [prompt], seed=seed, **settings)[0] for prompt, seed in zip(PROMPTS, (3, 5, 5, 8))]
    assert generate(model, PROMPTS, seed=[3, 5, 5, 8], **settings) == alone
    assert generate(model, PROMPTS[1:3], seed=[5, 5], **settings) == alone[1:3]


@pytest.mark.full
def test_log_probabilities_are_the_forwards():
    model = tiny_model(initializer_range=0.5)
    settings = dict(max_new_tokens=8, temperature=1.3, top_k=9, repetition_penalty=1.2)
    answers, logprobs = generate(model, PROMPTS, output_logprobs=True, **settings)
    assert answers == generate(model, PROMPTS, **settings)
    for prompt, answer, found in zip(PROMPTS, answers, logprobs, strict=True):
        forward = jax.nn.log_softmax(model(jnp.array([prompt + answer]))[0])
        expected = forward[len(prompt) - 1 : -1][np.arange(len(answer)), np.array(answer)]
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_log_probabilities_have_the_same_bits_in_every_process(tmp_path):
    """XLA is told not to time algorithms on a GPU, as for the other programs of a deterministic sampler."""
    graph, state = nnx.split(tiny_model())
    program = _token_logprobs.lower(graph, False, state, np.zeros((1, 32), np.int32), np.ones(1, np.int32))
    program.compile(compiler_options={"xla_dump_to": str(tmp_path)})
    (options,) = tmp_path.glob("*.debug_options")
    said = options.read_text().splitlines()
    assert {"xla_gpu_autotune_level: 0", "xla_gpu_deterministic_ops: true"} <= set(said)


@pytest.mark.full
def test_log_probabilities_beside_a_head_that_is_filled_up():
    """Of a vocabulary that is no multiple of 8 in 16 bits, in the loop over several rows: what is filled up is no
    token."""
    model = tiny_model("bfloat16", vocab_size=45, tie_embeddings=True)
    settings = dict(max_new_tokens=8, output_logprobs=True)
    answers, logprobs = generate(model, PROMPTS, **settings)
    again, forward = generate(model, PROMPTS, deterministic=True, **settings)
    assert answers == again
    np.testing.assert_allclose(logprobs, forward, atol=0.02)


class _Letters:
    """A tokenizer whose token i is the letter i."""

    def decode(self, tokens, **options):
        return "".join(chr(ord("A") + int(token)) for token in tokens)


def test_stop_strings_end_a_row_where_they_are_complete():
    model = tiny_model(initializer_range=0.5)
    free = generate(model, PROMPTS, max_new_tokens=24)
    texts = [_Letters().decode(row) for row in free]
    stops = [texts[1][3:5], texts[3][17:20]]  # over a look's border, too
    cut = [min([text.find(s) + len(s) for s in stops if s in text] or [len(text)]) for text in texts]
    expected = [row[:n] for row, n in zip(free, cut, strict=True)]
    settings = dict(max_new_tokens=24, stop_strings=stops, tokenizer=_Letters())
    assert generate(model, PROMPTS, **settings) == expected
    streamed = [[] for _ in PROMPTS]
    assert generate(model, PROMPTS, streamer=lambda row, new: streamed[row].extend(new), **settings) == expected
    assert streamed == expected and len({len(row) for row in expected}) > 1


def test_streaming_gives_tokens_as_they_come():
    model = tiny_model(initializer_range=0.5)
    pieces = []
    [answer] = generate(model, PROMPTS[:1], max_new_tokens=6, streamer=lambda row, new: pieces.append((row, new)))
    assert pieces == [(0, [token]) for token in answer]
