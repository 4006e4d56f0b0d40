"""States of prompts' beginnings: a row has the bits that it has without them."""

from __future__ import annotations

import functools
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from drawn import draws
from drawn import model_of as drawn_model
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_models import golden_model, tiny_model
from toy_mixer import Decay

from jaxtune import Decoder, Sampler, generate
from jaxtune.models.config import LayerSpec, Part, Stage, in_sequence
from jaxtune.models.generation import prefixes
from jaxtune.models.generation.converted import Convertible
from jaxtune.models.generation.prefills import Prefills
from jaxtune.models.generation.prefixes import Added, Prefixes, block_keys, worthwhile_bytes
from jaxtune.models.generation.requests import Row
from jaxtune.models.generation.slot_plan import SlotPlan, plan_slots, prefilled_at_once

PIECE, LENGTH = 8, 64
# Dense, with a window, with longrope, with sinks and experts, with layers that share keys, hybrids, and another mixer.
FAMILIES = ("llama", "mistral", "phi3", "gpt_oss", "gemma4_shared", "qwen3_next", "qwen3_5", "lfm2", "decay")


@functools.cache
def model_of(name: str) -> Decoder:
    if name != "decay":
        return golden_model(name)
    beside = Stage((Part("mixer"), Part("decay", Decay(12), norm="mixer")))
    layers = (
        LayerSpec(stages=(beside, Stage((Part("mlp"),)))),
        LayerSpec(stages=in_sequence(Part("mixer", Decay(12)))),
        LayerSpec(window=5),
    )
    return tiny_model(initializer_range=0.5, layers=layers, max_position_embeddings=LENGTH)


def sampler_of(name: str, prefix_bytes: int | None) -> Sampler:
    options = dict(deterministic=True, prefill_tokens=PIECE, tokens_per_round=3, prefix_bytes=prefix_bytes)
    return Sampler(model_of(name), 2, LENGTH, **options)


def rows_of(sampler: Sampler, asked: list[tuple[list[int], int]], begins: list[int]) -> list[tuple[Row, int]]:
    """(row, reused tokens of its prompt) of each (prompt, new tokens). begins: before which step each is submitted."""
    numbers: dict[int, int] = {}
    rows = [(Row(index, [], [], "length"), 0) for index in range(len(asked))]
    for step in itertools.count():
        for index, (prompt, new) in enumerate(asked):
            if begins[index] == step:
                numbers[sampler.submit(prompt, new, 1.0, seed=index, eos_token_ids=())] = index
        if step >= max(begins) and not sampler.pending:
            return rows
        for piece in sampler.step():
            row, reused = rows[numbers[piece.request]]
            row.ids.extend(piece.ids)
            row.logprobs.extend(piece.logprobs)
            rows[row.index] = row, reused + piece.reused
    raise AssertionError


def check(found: list[tuple[Row, int]], expected: list[tuple[Row, int]]) -> None:
    for (row, _), (other, nothing) in zip(found, expected, strict=True):
        assert (row.ids, row.logprobs) == (other.ids, other.logprobs) and nothing == 0


@functools.cache
def block_bytes(name: str) -> int:
    sampler = sampler_of(name, 10**9)
    rows_of(sampler, [(list(range(1, 2 * PIECE + 2)), 1)], [0])
    store = sampler._prefills._prefixes
    assert store is not None
    return store._bytes // 2


@st.composite
def prompts(draw) -> list[list[int]]:
    """Of up to 60 tokens, each after the beginning of an earlier one, or on its own."""
    rows: list[list[int]] = []
    for _ in range(draw(st.integers(1, 6))):
        before = draw(st.sampled_from(rows)) if rows and draw(st.integers(0, 4)) else []
        before = before[: draw(st.integers(0, len(before)))]
        size = draw(st.integers(0 if before else 1, 60 - len(before)))
        rng = np.random.default_rng(draw(st.integers(0, 5)))
        rows.append([*before, *rng.integers(3, 48, size).tolist()])
    return rows


@pytest.mark.full
@pytest.mark.parametrize("name", FAMILIES)
@draws(4)
@given(st.data(), prompts(), st.sampled_from([0, 1, 2, 5, 10**6]))
def test_rows_have_the_same_bits_with_stored_beginnings(name, data, rows, blocks):
    """Drawn prompts that share beginnings, in any order and at any time, and memory for as many blocks."""
    asked = [(prompt, data.draw(st.integers(1, LENGTH - len(prompt)).map(lambda new: min(new, 9)))) for prompt in rows]
    begins = [data.draw(st.integers(0, 9)) for _ in rows]
    size = blocks * block_bytes(name)
    with sampler_of(name, size) as sampler, sampler_of(name, 0) as without:
        found = rows_of(sampler, asked, begins)
        again = rows_of(sampler, asked, [0] * len(asked))
        expected = rows_of(without, asked, [0] * len(asked))
        store = sampler._prefills._prefixes
        assert store is None or store._bytes <= size
    check(found, expected)
    check(again, expected)
    if blocks == 10**6:
        longest = max(rows, key=len)
        [(_, reused)] = [each for each, (prompt, _) in zip(again, asked, strict=True) if prompt is longest]
        assert reused == ((len(longest) - 1) // PIECE * PIECE if len(longest) - 1 > PIECE else 0)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_second_turn_begins_after_the_first_prompt(name):
    """What is reused of it: whole blocks of the first prompt, nothing of the answer."""
    model = model_of(name)
    first = np.random.default_rng(3).integers(3, 48, 3 * PIECE + 4).tolist()
    sampler, without = sampler_of(name, 10**9), sampler_of(name, 0)
    [(answer, reused)] = rows_of(sampler, [(first, 6)], [0])
    assert reused == 0
    second = [*first, *answer.ids, *range(5, 12)]
    turns = [(second, 9), (second, 4), ([7, *second], 4), (first[: PIECE + 3], 4)]
    # Longrope's factors are those of a row's length.
    longrope = model.config.rotary[0].kind == "longrope"
    found = [rows_of(sampler, [turn], [0])[0] for turn in turns]
    check(found, [rows_of(without, [turn], [0])[0] for turn in turns])
    cut = all(mixer.has_cache for layer in model.layers for mixer in layer.mixers.values())
    begun = PIECE if cut and not longrope else 0  # states that cannot be cut are those after the first prompt
    assert [reused for _, reused in found] == [3 * PIECE, (len(second) - 1) // PIECE * PIECE, 0, begun]


def test_where_prompts_part_states_are_stored_that_cannot_be_cut():
    shared = np.random.default_rng(1).integers(3, 48, 2 * PIECE).tolist()
    asked = [([*shared, *np.random.default_rng(seed).integers(3, 48, 20).tolist()], 3) for seed in range(4)]
    sampler, without = sampler_of("qwen3_next", 10**9), sampler_of("qwen3_next", 0)
    found = [rows_of(sampler, [each], [0])[0] for each in asked]
    check(found, [rows_of(without, [each], [0])[0] for each in asked])
    assert [reused for _, reused in found] == [0, 0, 2 * PIECE, 2 * PIECE]


def test_beginnings_are_the_same_in_caches_of_any_length():
    """States that a prompt in a short cache left are those that one in a longer cache would compute, and back."""
    rng = np.random.default_rng(0)
    longest = rng.integers(0, 48, 560).tolist()
    asked = [([*longest[:shared], *rng.integers(0, 48, more).tolist()], 2) for shared, more in ((130, 0), (100, 200))]
    asked += [(longest, 2), (longest[:200], 2), ([*longest[:540], 7], 2)]
    options = dict(prefill_tokens=64, tokens_per_round=2, deterministic=True)
    sampler, without = (Sampler(drawn_model(), 1, 600, prefix_bytes=size, **options) for size in (10**9, 0))
    found = [rows_of(sampler, [each], [0])[0] for each in asked]
    check(found, [rows_of(without, [each], [0])[0] for each in asked])
    assert [reused for _, reused in found] == [0, 64, 128, 192, 512]


def test_an_update_of_the_weights_forgets():
    model, other = tiny_model(initializer_range=0.5), tiny_model(initializer_range=0.5, seed=1)
    asked = [(list(range(1, 40)), 5)]
    options = dict(deterministic=True, prefill_tokens=PIECE)
    sampler = Sampler(model, 2, LENGTH, prefix_bytes=10**9, **options)
    assert [reused for _ in range(2) for _, reused in rows_of(sampler, asked, [0])] == [0, 32]
    sampler.update(other)
    found = rows_of(sampler, asked, [0])
    assert found[0][1] == 0
    check(found, rows_of(Sampler(other, 2, LENGTH, prefix_bytes=0, **options), asked, [0]))


def test_pieces_are_no_longer_than_asked_for_and_512_at_most():
    model = tiny_model()
    pieces = [
        Sampler(model, 1, LENGTH, prefill_tokens=tokens, prefix_bytes=size)._prefills._piece
        for tokens, size in ((2048, None), (2048, 0), (2048, 9), (300, 9))
    ]
    assert pieces == [2048, 512, 512, 300]
    with pytest.raises(ValueError, match="prefix_bytes = -1: must be an integer, at least 0"):
        Sampler(model, 1, LENGTH, prefix_bytes=-1)


# ---- where they win


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(1, 9)), max_size=6))
def test_beginnings_are_stored_where_a_quarter_of_the_tokens_is_shared(forms):
    """Against a count of the blocks, where blocks are of 4 tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefixes, "BLOCK", 4)
        prompts = [[kind] * (4 * blocks) + [9] * more for kind, blocks, more in forms]
        distinct = {tuple(prompt) for prompt in prompts}
        counted = [prompt[:end] for prompt in distinct for end in range(4, len(prompt), 4)]
        shared = 4 * (len(counted) - len(set(counted)))
        wins = shared > 0 and shared >= sum(map(len, distinct)) / 4
        assert (worthwhile_bytes(prompts) is not None) == wins


def test_generate_prefills_a_shared_beginning_once(monkeypatch):
    asked, reused = [], []
    take = Prefills.take

    def counting(prefills, request):
        row = take(prefills, request)
        asked.append(len(request.tokens))
        reused.append(request.reused)
        return row

    monkeypatch.setattr(Prefills, "take", counting)
    shared = np.random.default_rng(5).integers(0, 48, 515).tolist()
    prompts = [[*shared, 1], [*shared, 2, 3], [5]]
    answers = generate(drawn_model(), prompts, 3)
    assert dict(zip(asked, reused, strict=True)) in ({516: 0, 517: 512, 1: 0}, {516: 512, 517: 0, 1: 0})
    assert [*map(len, answers)] == [3, 3, 3] and answers == generate(drawn_model(), prompts, 3, deterministic=True)
    assert reused[3:] == [0, 0, 0], "where a row's bits may not depend on other prompts"


# ---- which blocks stay

_WORDS = st.lists(st.integers(0, 1), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(_WORDS, st.booleans()), max_size=20), st.integers(0, 9), st.booleans())
def test_stored_blocks_continue_stored_blocks_within_the_memory(uses, room, hybrid):
    """Of prompts over two words of a block each; a block takes 8 bytes, and a state that cannot be cut as many."""
    size = 2
    store = Prefixes(size, 8 * room, [True, False] if hybrid else [True])
    for words, whole in uses:
        tokens = [token for word in words for token in (word, word)]
        keys = block_keys(tokens, size)
        usable, present = store.find(keys)
        assert usable <= present and (hybrid or usable == present)
        cache = jnp.zeros((1, 1, 128, 1), jnp.float32).at[0, 0, : len(tokens), 0].set(jnp.array(tokens, jnp.float32))
        for count in range(1, len(keys) + 1):
            states = [cache, jnp.full((1, 2), count, jnp.float32)] if hybrid else [cache]
            store.add({0: Added(keys[:count], whole and count == len(keys))}, states)
        usable, present = store.find(keys)
        if usable:
            zeros = [jnp.zeros_like(state) for state in states]
            restored = store.restored(keys[:usable], zeros)
            np.testing.assert_array_equal(
                restored[0][0, 0, :, 0], [*tokens[: usable * size], *[0] * (128 - usable * size)]
            )
            assert not hybrid or restored[1][0, 0] == usable
        stored_bytes = sum(block.bytes for block in store._blocks.values())
        assert store._bytes == stored_bytes <= 8 * room
    seen = {key for words, _ in uses for key in block_keys([t for word in words for t in (word, word)], size)}
    assert set(store._blocks) <= seen
    for words, _ in uses:
        keys = block_keys([token for word in words for token in (word, word)], size)
        there = [key in store._blocks for key in keys]
        assert there == sorted(there, reverse=True), "a block without those before it"


def test_the_least_recently_used_beginning_goes_first():
    store, cache = Prefixes(1, 3 * 4, [True]), [jnp.zeros((1, 1, 128, 1), jnp.float32)]
    for token in (1, 2, 3, 1, 4):
        keys = block_keys([token], 1)
        store.find(keys)
        store.add({0: Added(keys, True)}, cache)
    assert [store.find(block_keys([token], 1))[0] for token in (1, 2, 3, 4)] == [1, 0, 1, 1]
    assert store.find(block_keys([1], 1, "another condition")) == (0, 0)


# ---- memory


@given(
    st.integers(0, 10**5),
    st.none() | st.integers(1, 64),
    st.none() | st.integers(1, 1024),
    st.integers(10**4, 10**6),
    st.none() | st.lists(st.integers(0, 10**5), min_size=1, max_size=4),
    st.booleans(),
)
@example(5000, 17, 128, 10**5, [85_000], False)
def test_a_fixed_length_leaves_what_is_left_and_a_planned_one_leaves_room(asked, slots, length, room, layers, exact):
    """As much to prefixes as without copies of weights, which get what is left then."""

    def plan(size: int, layers: list[int] | None = layers) -> SlotPlan | None:
        copies = None if layers is None else Convertible(tuple(layers), 0, 128)
        try:
            sizes = dict(convertible=copies, prefix_bytes=size, exact=exact)
            return plan_slots(lambda slots, tokens: slots * tokens, 1024, room, slots, length, **sizes)
        except ValueError:
            return None

    before, after = plan(0), plan(asked)
    assert (before is None) == (after is None)
    if before is None or after is None:
        return
    assert after.bytes + after.converted_bytes + after.prefix_bytes <= 0.9 * room and after.prefix_bytes <= asked
    without = plan(asked, None)
    assert without is not None and after.prefix_bytes >= without.prefix_bytes
    assert after.slots == before.slots
    if length is not None or before.length <= 256:
        assert after.length == before.length
    elif after.length > 256:
        assert after.prefix_bytes == asked
    assert before.prefix_bytes == 0 and "beginnings" not in str(before)


def test_the_memory_of_beginnings_is_no_other_programs():
    plan = SlotPlan(4, 1000, 4_000_000, prefix_bytes=2_000_000)
    assert str(plan).endswith("0.00 GB, beginnings of prompts: 0.00 GB")
    needed = 2 * 2 * 4 * 64 * 1000 + plan.bytes
    assert prefilled_at_once(plan, needed + 1_999_999.0, 64) == 64
    assert prefilled_at_once(plan, needed + 2_000_000.0, 64) == 256
