"""The sampling engine: a row in slots that fill and empty has the tokens that it has alone."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import jax
import numpy as np
import picture_rows
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import CONFIGS
from tiny_models import adapted_model, golden_model, tiny_model

from jaxtune import Decoder, Sampler, generate
from jaxtune.models.components import stored_as
from jaxtune.models.config import LayerSpec, RopeConfig
from jaxtune.models.files.quant import quantize
from jaxtune.models.generation import plain_layer
from jaxtune.models.generation import sampler as sampler_module
from jaxtune.models.generation.converted import Convertible, picture_bytes
from jaxtune.models.generation.generate import training_logprobs
from jaxtune.models.generation.prefills import Prefills
from jaxtune.models.generation.slot_plan import SlotPlan, plan_slots, prefilled_at_once, room_bytes, slots_for
from jaxtune.models.generation.structure import flattened
from jaxtune.models.linear import frozen
from jaxtune.models.lora import experts as experts_of
from jaxtune.models.lora import freeze
from jaxtune.models.lora import linears as linears_of
from jaxtune.models.registry import config_from_hf, tower_config
from jaxtune.pallas.formats import MXFP4, Stored


def prompts_of(vocab: int, lengths=(3, 19, 1, 7, 30, 2, 12)) -> list[list[int]]:
    return [[(7 * row + 5 * place + 3) % vocab for place in range(length)] for row, length in enumerate(lengths)]


# Of rows that decode together, each draws in its own way. The one that needs most is first: its program serves all.
SETTINGS = (
    dict(temperature=1.2, top_p=0.9, repetition_penalty=1.3, seed=3),
    dict(),
    dict(temperature=0.8, seed=11),
    dict(temperature=1.0, top_k=5, min_p=0.01, seed=4),
    dict(repetition_penalty=1.7),
)


def finished(sampler: Sampler) -> dict[int, tuple[list[int], list[float], str]]:
    """{request: (ids, log-probabilities, finish_reason)} of all that was submitted."""
    found: dict[int, tuple[list[int], list[float], str]] = {}
    while sampler.pending:
        for piece in sampler.step():
            ids, logprobs, reason = found.get(piece.request, ([], [], ""))
            assert not reason, "a piece after the last one"
            found[piece.request] = ids + piece.ids, logprobs + piece.logprobs, piece.finish_reason or ""
    return found


def mixed(sampler: Sampler, prompts, new: int) -> list[tuple[list[int], list[float], str]]:
    numbers = [
        sampler.submit(prompt, new + index % 3, eos_token_ids=(), **SETTINGS[index % len(SETTINGS)])
        for index, prompt in enumerate(prompts)
    ]
    found = finished(sampler)
    return [found[number] for number in numbers]


def one_by_one(sampler: Sampler, prompts, new: int):
    """Each row when no other request is there."""
    found = []
    for index, prompt in enumerate(prompts):
        number = sampler.submit(prompt, new + index % 3, eos_token_ids=(), **SETTINGS[index % len(SETTINGS)])
        found.append(finished(sampler)[number])
    return found


def assert_same(found, expected, atol=1e-4):
    assert [row[0] for row in found] == [row[0] for row in expected]
    for (ids, logprobs, reason), (_, others, other_reason) in zip(found, expected, strict=True):
        assert len(ids) == len(logprobs) and reason == other_reason
        np.testing.assert_allclose(logprobs, others, atol=atol)


@pytest.mark.full
@pytest.mark.parametrize("name", CONFIGS)
def test_rows_in_slots_are_rows_alone(name):
    """Of every family: more prompts than slots, of unequal lengths, each drawn in its own way; and the same in one
    slot, whose prompts are prefilled by pieces of 8 tokens."""
    model = golden_model(name)
    prompts = prompts_of(model.config.vocab_size)
    sampler = Sampler(model, slots=3, length=64)
    together = mixed(sampler, prompts, 9)
    assert_same(together, one_by_one(sampler, prompts, 9))
    assert {len(ids) for ids, *_ in together} == {9, 10, 11}
    assert_same(mixed(Sampler(model, slots=1, length=64, prefill_tokens=8), prompts[:5], 9), together[:5])


@pytest.fixture(scope="module")
def model() -> Decoder:
    return tiny_model(initializer_range=0.5)


@pytest.mark.parametrize("count", [1, 7, 300])
def test_any_number_of_prompts_over_eight_slots(model, count):
    prompts = prompts_of(48, [1 + (7 * row) % 23 for row in range(count)])
    limits = [1 + (5 * row) % 19 for row in range(count)]
    sampler = Sampler(model, slots=8, length=64)
    rows = list(sampler.run(prompts, limits, temperature=1.0, seed=5, eos_token_ids=[7]))
    assert [row.index for row in rows] == list(range(count))
    as_they_end = list(sampler.run(prompts, limits, temperature=1.0, seed=5, eos_token_ids=[7], in_order=False))
    assert sorted(as_they_end, key=lambda row: row.index) == rows
    assert count < 8 or as_they_end != rows
    for row, limit in zip(rows, limits, strict=True):
        assert row.ids and 7 not in row.ids[:-1]
        assert row.finish_reason == ("stop" if row.ids[-1] == 7 else "length")
        assert len(row.ids) == limit or row.finish_reason == "stop"
    for row in rows[:: max(1, count // 5)]:
        draws = dict(max_new_tokens=limits[row.index], temperature=1.0, eos_token_ids=[7])
        number = sampler.submit(prompts[row.index], seed=5, index=row.index, **draws)
        assert finished(sampler)[number][0] == row.ids


def test_a_seed_of_its_own_draws_as_generate_does_alone(model):
    prompts = prompts_of(48)
    settings = dict(max_new_tokens=8, temperature=1.0, top_p=0.9)
    rows = Sampler(model, slots=3, length=64).run(prompts, seed=range(7), **settings)
    alone = [generate(model, [prompt], seed=[own], **settings)[0] for own, prompt in enumerate(prompts)]
    assert [row.ids for row in rows] == alone


class _Letters:
    """A tokenizer whose token i is the letter i."""

    def decode(self, tokens, **options):
        return "".join(chr(ord("A") + int(token)) for token in tokens)


def test_stop_strings_end_rows_wherever_a_round_ends(model):
    prompts = prompts_of(48)
    sampler = Sampler(model, slots=2, length=64)
    free = [row.ids for row in sampler.run(prompts, 24)]
    texts = [_Letters().decode(ids) for ids in free]
    stops = [texts[1][3:5], texts[4][6:9], texts[3][17:20]]
    cut = [min([text.find(s) + len(s) for s in stops if s in text] or [len(text)]) for text in texts]
    rows = list(sampler.run(prompts, 24, stop_strings=stops, tokenizer=_Letters()))
    assert [row.ids for row in rows] == [ids[:n] for ids, n in zip(free, cut, strict=True)]
    ended = [any(row.ids and _Letters().decode(row.ids).endswith(s) for s in stops) for row in rows]
    assert [row.finish_reason == "stop" for row in rows] == ended and sum(ended) >= 3


def test_equal_prompts_are_prefilled_once(model):
    sampler = Sampler(model, slots=8, length=64)
    calls = []
    prefill = sampler._prefills._programs.prefill
    sampler._prefills._programs = sampler._prefills._programs._replace(
        prefill=lambda *arguments: calls.append(arguments[3].shape) or prefill(*arguments)
    )
    one, two = prompts_of(48, (13, 20))
    rows = list(sampler.run([one] * 12 + [two] * 4, 8, temperature=1.0, seed=2))
    assert calls == [(1, 16), (1, 32)]
    assert len({tuple(row.ids) for row in rows}) == 16
    number = sampler.submit(one, 8, temperature=1.0, seed=2, index=5)
    assert finished(sampler)[number][0] == rows[5].ids


def test_short_prompts_are_prefilled_together(model):
    sampler = Sampler(model, slots=8, length=64, prefill_tokens=64)
    calls = []
    prefill = sampler._prefills._programs.prefill
    sampler._prefills._programs = sampler._prefills._programs._replace(
        prefill=lambda *arguments: calls.append(arguments[3].shape) or prefill(*arguments)
    )
    prompts = prompts_of(48, (5, 6, 7, 8, 9))
    together = [row.ids for row in sampler.run(prompts, 8)]
    assert calls == [(4, 16), (1, 16)]
    assert together == [generate(model, [prompt], 8)[0] for prompt in prompts]


PACKED = {
    "some are left over, and one is prefilled by itself": (8, (90, 128, 66, 100, 70, 71, 91, 3), [(4, 384), (3, 384)]),
    "two fill half a row": (8, (90, 80), [(2, 192)]),
    "before slots are free": (2, (100, 100, 101, 100, 3, 99, 101, 102, 80), [(3, 384), (3, 384), (2, 192)]),
}


@pytest.mark.full
@pytest.mark.parametrize("case", PACKED)
def test_prompts_of_unequal_lengths_are_packed(case, monkeypatch):
    """They give what each gives alone."""
    slots, lengths, expected = PACKED[case]
    packed = []
    pack = Prefills._pack
    monkeypatch.setattr(
        Prefills, "_pack", lambda self, *given: packed.append((len(given[1]), given[3])) or pack(self, *given)
    )
    model = tiny_model(initializer_range=0.5, max_position_embeddings=512, layers=(LayerSpec(window=50), LayerSpec()))
    prompts = prompts_of(48, lengths)
    sampler = Sampler(model, slots=slots, length=160, prefill_tokens=384)
    found = mixed(sampler, prompts, 6)
    assert packed == expected
    assert_same(found, one_by_one(Sampler(model, slots=8, length=160), prompts, 6))


@pytest.mark.full
def test_prompts_fill_a_longer_row_while_most_slots_are_free(monkeypatch):
    """If there is memory for it. Those that do not fill it are packed as while rows decode."""
    packed = []
    pack = Prefills._pack
    monkeypatch.setattr(
        Prefills, "_pack", lambda self, *given: packed.append((len(given[1]), given[3])) or pack(self, *given)
    )
    monkeypatch.setattr(sampler_module, "room_bytes", lambda share: 1e9)
    model = tiny_model(initializer_range=0.5, max_position_embeddings=512)
    prompts = prompts_of(48, (100, 101, 102) * 4)
    found = mixed(Sampler(model, slots=16, length=160, prefill_tokens=256), prompts, 6)
    assert packed == [(10, 1024), (2, 256)]
    packed.clear()
    assert_same(mixed(Sampler(model, slots=5, length=160, prefill_tokens=256), prompts, 6), found)
    assert len(packed) > 1 and {size for _, size in packed} == {256}


def test_the_most_likely_tokens_come_with_each_token(model):
    """In descending order, with log-probabilities as the chosen token has them; of rows that ask for them."""
    sampler = Sampler(model, slots=3, length=64)
    prompts = prompts_of(48)[:3]
    plain = list(sampler.run(prompts, 9, temperature=1.0))
    rows = list(sampler.run(prompts, 9, temperature=1.0, top_logprobs=20))
    assert [row.ids for row in rows] == [row.ids for row in plain]
    assert not any(row.top_logprobs for row in plain)
    for row in rows:
        assert [len(top) for top in row.top_logprobs] == [20] * len(row.ids)
        for token, logprob, top in zip(row.ids, row.logprobs, row.top_logprobs, strict=True):
            values = [value for _, value in top]
            assert values == sorted(values, reverse=True)
            assert dict(top).get(token, logprob) == pytest.approx(logprob, abs=1e-5)
    [greedy] = sampler.run(prompts[:1], 5, top_logprobs=2)
    assert [(top[0][0], len(top)) for top in greedy.top_logprobs] == [(token, 2) for token in greedy.ids]
    with pytest.raises(ValueError, match="top_logprobs = 21: must be a whole number from 0 to 20"):
        sampler.submit([1], top_logprobs=21)


@pytest.mark.full
def test_caches_grow_to_what_rows_need():
    model = tiny_model(initializer_range=0.5, max_position_embeddings=1024, layers=(LayerSpec(window=150), LayerSpec()))
    short, long = [5, 6, 7], [(3 * i) % 48 for i in range(140)]
    sampler = Sampler(model, slots=2, length=900)
    numbers = [sampler.submit(short, 30), sampler.submit(long, 230, temperature=1.0, seed=3)]
    sampler.step()
    assert sampler._caches.capacity == 384
    found = {}
    for _ in range(3):  # the caches grow under a row that decodes
        for piece in sampler.step():
            found.setdefault(piece.request, ([], [], ""))[0].extend(piece.ids)
    late = sampler.submit(short, 600, temperature=1.0, seed=9)
    for request, (ids, *_) in finished(sampler).items():
        found.setdefault(request, ([], [], ""))[0].extend(ids)
    assert sampler._caches.capacity == 768
    assert found[numbers[0]][0] == generate(model, [short], 30)[0]
    assert found[numbers[1]][0] == generate(model, [long], 230, temperature=1.0, seed=[3])[0]
    assert found[late][0] == generate(model, [short], 600, temperature=1.0, seed=[9])[0]


def longrope_model() -> Decoder:
    factors = dict(short_factor=(1.0, 1.1, 1.2, 1.3), long_factor=(1.0, 4.0, 9.0, 16.0))
    rope = RopeConfig(kind="longrope", original_max_position_embeddings=24, **factors)
    return tiny_model(initializer_range=0.5, rotary=(rope,))


@pytest.mark.parametrize("chunk", [2048, 8])
def test_a_longrope_row_is_prefilled_anew_when_it_switches(chunk):
    """Rows that pass the original context at different steps, or never, or were past it from the start; the answers
    are those of whole forwards."""
    model = longrope_model()
    prompts = prompts_of(48, (8, 20, 23, 30, 24, 10))
    forward = jax.jit(lambda tokens, ids: model(tokens, ids))
    rows = list(Sampler(model, slots=2, length=64, prefill_tokens=chunk).run(prompts, 6))
    for prompt, row in zip(prompts, rows, strict=True):
        text = list(prompt)
        for token in row.ids:
            padded, ids = np.zeros((2, 1, 40), np.int32)
            padded[0, : len(text)], ids[0, : len(text)] = text, 1
            assert token == int(forward(padded, ids)[0, len(text) - 1].argmax())
            text.append(token)


def test_a_longrope_row_that_waits_to_be_prefilled_anew_waits_once():
    """Its prefill takes several chunks while others decode, and a round that was dispatched before it paused ends."""
    prompts, new = prompts_of(48, (20, 2, 3, 10)), [30, 40, 40, 20]
    model = longrope_model()
    found = [
        [row.ids for row in Sampler(model, slots=4, length=64, prefill_tokens=chunk).run(prompts, new)]
        for chunk in (2048, 8)
    ]
    assert found[0] == found[1] and [len(ids) for ids in found[1]] == new


def test_requests_come_and_go_while_others_decode(model):
    sampler = Sampler(model, slots=2, length=64)
    one, two, three, four = prompts_of(48, (5, 9, 3, 12))
    expected = {name: generate(model, [prompt], 40)[0] for name, prompt in (("one", one), ("four", four))}
    first, second = sampler.submit(one, 40), sampler.submit(two, 40)
    third = sampler.submit(three, 40)
    pieces = sampler.step() + sampler.step()
    assert {piece.request for piece in pieces} == {first, second}
    sampler.cancel(second)  # it decodes
    sampler.cancel(third)  # it waits
    sampler.cancel(third)  # it is done
    fourth = sampler.submit(four, 40)
    found = {number: list(p.ids) for number in (first,) for p in pieces if p.request == number}
    reasons = {}
    while sampler.pending or len(reasons) < 4:
        for piece in sampler.step():
            found.setdefault(piece.request, []).extend(piece.ids)
            if piece.finish_reason:
                reasons[piece.request] = piece.finish_reason
    assert reasons == {first: "length", second: "cancelled", third: "cancelled", fourth: "length"}
    assert found[first] == expected["one"] and found[fourth] == expected["four"]
    assert sampler.step() == [] and sampler.pending == 0


def test_a_run_that_is_left_cancels_what_it_asked_for(model):
    sampler = Sampler(model, slots=2, length=64)
    prompts = prompts_of(48)
    for row in sampler.run(prompts, 20):
        assert row.index == 0
        break
    assert sampler.pending == 0
    assert [row.ids for row in sampler.run(prompts, 20)] == generate(model, prompts, 20)


def test_a_run_leaves_the_pieces_of_other_requests_to_step(model):
    """Requests that were cancelled before the run, and what is submitted as its last row comes."""
    sampler, prompts = Sampler(model, slots=2, length=64), prompts_of(48)
    expected = generate(model, prompts, 20)
    cancelled = sampler.submit(prompts[0], 20)
    sampler.cancel(cancelled)
    rows, later = sampler.run(prompts, 20), None
    for row in rows:
        assert row.ids == expected[row.index]
        if row.index == len(prompts) - 1:
            later = sampler.submit(prompts[0], 20)
            break
        with pytest.raises(ValueError, match="submit while `run` has rows to yield: take all of them first, or close"):
            sampler.submit(prompts[0], 20)
    assert list(rows) == []
    found = finished(sampler)
    assert found == {cancelled: ([], [], "cancelled"), later: (expected[0], found[later][1], "length")}


def test_other_weights_of_the_same_structure(model):
    adapted = adapted_model(tiny_model(initializer_range=0.5), r=4)
    prompts = prompts_of(48)
    sampler = Sampler(adapted, slots=3, length=64)
    before = [row.ids for row in sampler.run(prompts, 8)]
    trained = adapted_model(tiny_model(initializer_range=0.5), r=4, seed=7)
    sampler.update(trained)
    after = [row.ids for row in sampler.run(prompts, 8)]
    assert before == generate(adapted, prompts, 8) != after == generate(trained, prompts, 8)
    with pytest.raises(ValueError, match="another structure"):
        sampler.update(model)


@pytest.mark.full
@pytest.mark.usefixtures("compiled_in_full")
def test_adapters_are_rounded_once_as_products_round_them():
    tokens = np.arange(24, dtype=np.int32)[None]
    wide = stored_as(tiny_model("bfloat16"), {"*.q_proj": "fp32", "*.up_proj": "fp32"})  # which multiply in float32
    for base, settings, rounded_dtype in (
        (tiny_model("bfloat16"), {"use_rslora": True}, "bfloat16"),
        (tiny_model("bfloat16"), {"use_dora": True}, "float32"),
        (wide, {}, "float32"),
    ):
        model = adapted_model(base, r=4, target_modules=["q_proj", "up_proj"], **settings)
        structure, leaves = flattened(model)
        rounded = structure.model(leaves)
        np.testing.assert_array_equal(rounded(tokens), model(tokens))
        for dtype, own in (("float32", model), (rounded_dtype, rounded)):
            loras = [linear.lora for _, linear in linears_of(own) if linear.lora is not None]
            assert {str(side[...].dtype) for lora in loras for side in (lora.a, lora.b)} == {dtype}


def test_what_an_adapter_of_some_matrices_samples_is_what_it_trains():
    """The adapter's products are then part of some of a step's kernels."""
    model = tiny_model(initializer_range=0.5)
    model = adapted_model(model, r=4, use_rslora=True, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"])
    prompts = prompts_of(48)
    rows = list(Sampler(model, slots=4, length=64).run(prompts, 8, eos_token_ids=()))
    trained = training_logprobs(model, prompts, [row.ids for row in rows], 8)
    np.testing.assert_allclose([row.logprobs for row in rows], trained, atol=1e-4)


@pytest.mark.full
@pytest.mark.usefixtures("compiled_in_full")
def test_a_step_rounds_as_training_does():
    """Nearly all log-probabilities of sampled tokens are those of training then, although they have 16 bits."""
    model = adapted_model(tiny_model("bfloat16", initializer_range=0.2, hidden_size=64, head_dim=32), r=4)
    prompts = prompts_of(48)
    rows = list(Sampler(model, slots=4, length=64).run(prompts, 16, temperature=1.0, eos_token_ids=()))
    trained = training_logprobs(model, prompts, [row.ids for row in rows], 16)
    apart = np.abs(np.array([row.logprobs for row in rows]) - np.array(trained))
    assert (apart < 1e-5).mean() > 0.9


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.usefixtures("compiled_in_full")
def test_deterministic_rows_have_the_same_bits_in_any_batch_and_slot(dtype):
    model = tiny_model(dtype, initializer_range=0.5, hidden_size=64, head_dim=32)
    prompts = prompts_of(48, [1 + (11 * row) % 40 for row in range(13)])
    sampler = Sampler(model, slots=8, length=64, deterministic=True)
    settings = dict(temperature=0.9, eos_token_ids=())
    together = list(sampler.run(prompts, 12, seed=range(13), **settings))
    turned = list(sampler.run(prompts[::-1], 12, seed=range(13)[::-1], **settings))[::-1]
    alone = [next(sampler.run([prompt], 12, seed=[own], **settings)) for own, prompt in enumerate(prompts)]
    for rows in (turned, alone):
        assert [(row.ids, row.logprobs) for row in rows] == [(row.ids, row.logprobs) for row in together]


def quantised_model(name: str) -> Decoder:
    if name == "llama":
        return quantize(tiny_model(initializer_range=0.5, hidden_size=64, head_dim=32), "nf4")
    return quantize(golden_model(name), {"qwen3_moe": "nf4", "qwen2_moe": "int8"}[name])


def quantised(model: Decoder) -> list[list[bool]]:
    """For each layer, of each matrix."""
    return [[isinstance(matrix.stored_weight, Stored) for *_, matrix in layer.matrices()] for layer in model.layers]


@pytest.mark.full
@pytest.mark.parametrize("share", ["all", "half"])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "qwen2_moe"])
def test_quantised_weights_of_as_many_layers_as_fit_are_decoded_once(name, share, monkeypatch):
    """Its tokens are those of the quantised model; weights that are trained on keep what is decoded."""
    base = quantised_model(name)
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if base.config.moe else None
    models = [adapted_model(base, seed, r=4, target_parameters=names) for seed in (1, 2)]
    weights = [[matrix.stored_weight for *_, matrix in layer.matrices()] for layer in base.layers]
    convertible, count = Convertible.of(models[0], 2048), len(base.layers)
    assert convertible.layers == tuple(4 * sum(weight.size for weight in layer) for layer in weights)
    slots = slots_for(models[0], 1e12, 64, 17).bytes
    # The first layer and half of the next beside slots, and what stays free for states of prompts and other buffers.
    beside = slots + convertible.buffer_bytes + slots / 17 * 2 * 2048 / 64
    room = {"all": 1e12, "half": beside + convertible.layers[0] + 0.5 * convertible.layers[1]}[share]
    monkeypatch.setattr("jaxtune.models.generation.sampler.room_bytes", lambda share: room)
    decodes = {"all": count, "half": 1}[share]
    sampler = Sampler(models[0], slots=17, length=64)
    size = sum(convertible.layers[:decodes])
    assert (sampler.plan.converted_layers, sampler.plan.converted_bytes) == (decodes, size)
    assert f"layers converted once: {decodes}, 0.00 GB" in str(sampler.plan)
    if name == "llama":
        exact = Sampler(models[0], slots=1, length=64, exact=True)
        assert exact.plan.converted_layers == count, "no kernel multiplies by codes in one order"
    assert not Sampler(models[0], slots=17, length=64, deterministic=True).plan.converted_bytes
    assert not Sampler(models[0], slots=17, length=64, most_converted=0).plan.converted_bytes
    assert quantised(sampler.model) == [[index >= decodes] * len(layer) for index, layer in enumerate(weights)]
    prompts = prompts_of(base.config.vocab_size)
    before = [row.ids for row in sampler.run(prompts, 8)]
    decoded = {id(codes): array for codes, array in sampler._model._converted._cache.values()}
    assert len(decoded) == sum(map(len, weights[:decodes]))
    sampler.update(models[1])
    assert {id(codes): array for codes, array in sampler._model._converted._cache.values()} == decoded
    after = [row.ids for row in sampler.run(prompts, 8)]
    assert before == generate(models[0], prompts, 8) != after == generate(models[1], prompts, 8)


@pytest.mark.full
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "qwen2_moe"])
def test_few_rows_have_experts_alone_decoded_once(name):
    """Linears multiply few rows by codes; for experts no kernel does."""
    model = quantised_model(name)
    kinds = [[matrix.num_experts for *_, matrix in layer.matrices()] for layer in model.layers]
    for slots in (1, 16):
        sampler = Sampler(model, slots=slots, length=64, free_bytes=1e12)
        assert quantised(sampler.model) == [[not experts for experts in layer] for layer in kinds]
        of_experts = [matrix.stored_weight.size for _, matrix in experts_of(model)]
        assert sampler.plan.converted_bytes == 4 * sum(of_experts) == slots_for(model, 1e12, 64, slots).converted_bytes
    prompts = prompts_of(model.config.vocab_size)
    assert [row.ids for row in sampler.run(prompts, 8)] == generate(model, prompts, 8)


@pytest.mark.parametrize("slots", [1, 17])
def test_experts_in_the_order_of_their_files_stay(slots):
    """gpt-oss's MXFP4: a copy would be of the other order, and transposed in each step."""
    model = freeze(golden_model("gpt_oss"))
    for _, matrix in experts_of(model):
        weight = dataclasses.replace(MXFP4.encode(matrix.weight[...].swapaxes(1, 2)), swapped=True)
        matrix.weight = frozen(matrix.weight.replace(weight))
    assert any(map(any, quantised(model)))
    sampler = Sampler(model, slots=slots, length=64, free_bytes=1e12)
    assert quantised(sampler.model) == quantised(model) and not sampler.plan.converted_layers


@pytest.mark.full
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "qwen2_moe"])
def test_experts_without_a_sort_give_the_same_tokens(name, adapted, monkeypatch):
    """As few_rows' kernels compute them, in plain JAX here; also beside slots that are empty. A shared expert has
    none."""
    model, asked = golden_model(name), []
    if adapted:
        parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        model = adapted_model(freeze(model), 1, r=4, target_parameters=parameters)
    monkeypatch.setattr(plain_layer, "experts_have_kernels", lambda *call: asked.append(call) or True)
    prompts = prompts_of(model.config.vocab_size)
    found = mixed(Sampler(model, slots=9, length=64), prompts, 9)
    assert bool(asked) == (name != "qwen2_moe")
    monkeypatch.undo()
    assert_same(found, mixed(Sampler(model, slots=3, length=64), prompts, 9))


@pytest.mark.full
@pytest.mark.parametrize("settings", [{"lora_alpha": 8}, {"use_rslora": True}], ids=str)
def test_adapters_of_experts_are_cast_and_padded_once(settings, monkeypatch):
    """Where the kernel would do both in each product; the tokens do not change, nor what other layers do."""
    asked = []
    monkeypatch.setattr("jaxtune.models.generation.converted.pads_adapters", lambda *call: asked.append(call) or True)
    monkeypatch.setattr("jaxtune.models.generation.sampler.room_bytes", lambda share: 1e9)
    base = freeze(golden_model("qwen3_moe"))
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    models = [adapted_model(base, seed, r=4, target_parameters=parameters, **settings) for seed in (1, 2)]
    sampler = Sampler(models[0], slots=17, length=64)
    assert sampler.plan.converted_layers == len(base.layers)
    assert {("float32", *matrix.sizes[:0:-1]) for _, matrix in experts_of(base)} == set(asked)
    prompts = prompts_of(base.config.vocab_size)
    found = []
    for model in models:
        sampler.update(model)
        weights = sampler._model.weights
        used = weights.structure.model(weights.leaves)
        pairs = [(m.lora, own.lora) for (_, m), (_, own) in zip(experts_of(used), experts_of(model), strict=True)]
        for lora, own in pairs:
            assert (lora.rank, lora.own_ranks, own.rank, own.own_ranks, lora.scale) == (64, 4, 4, None, own.scale)
            np.testing.assert_array_equal(lora.b[...][..., :4], own.b[...])
            assert not np.any(lora.a[...][:, 4:])
        found.append([row.ids for row in sampler.run(prompts, 8, eos_token_ids=())])
        assert found[-1] == generate(model, prompts, 8, eos_token_ids=())
    assert found[0] != found[1]


def test_decoded_weights_take_memory_that_no_slot_needs():
    def bytes_of(slots, length):
        return slots * length * 1000

    def planned(room, layers, buffers=0, **fixed):
        convertible = Convertible(layers, buffers, 128)
        plan = plan_slots(bytes_of, 1024, room, convertible=convertible, **fixed)
        assert plan.converted_bytes == sum(layers[: plan.converted_layers])
        alone = plan_slots(bytes_of, 1024, room, **fixed).slots
        assert plan.slots == (16 if any(layers) and 16 < alone < 32 else alone), "as many slots, or none that decode"
        return plan.slots, plan.length, plan.converted_layers

    four, eight, short = (20_000_000,) * 4, (10_000_000,) * 8, (15_500_000,) * 4
    # A tenth is left: 64 slots of 1,024 tokens take 66 MB, of 512 33 MB and of 256 16.4 MB.
    assert planned(200e6, four) == (64, 1024, 4)
    assert planned(180e6, four) == (64, 1024, 4), "162 MB less 80 leave 82 MB for slots"
    assert planned(140e6, short) == (64, 512, 4), "62 MB are less than half, and leave 64 MB for slots"
    assert planned(150e6, four) == (64, 1024, 3), "80 MB are more than half: 69 MB are left by the longest rows"
    assert planned(100e6, eight) == (64, 1024, 2)
    assert planned(19e6, (800_000,) * 4) == (64, 256, 0) and planned(19e6, (600_000,) * 40) == (64, 256, 1)
    fixed = dict(slots=64, length=1024)
    assert [planned(room, eight, **fixed)[2] for room in (80e6, 85e6, 151e6, 170e6)] == [0, 1, 7, 8]
    # There are fewer slots until they fit, and only what they leave is decoded; below 17 nothing is.
    assert planned(50e6, eight, length=1024) == (32, 1024, 1) and planned(30e6, eight, length=1024) == (16, 1024, 0)
    assert planned(151e6, eight, 40e6, **fixed)[2] == 4, "buffers that need more than a tenth stay free"
    assert planned(None, eight) == (64, 1024, 0), "free memory is not known"
    assert planned(200e6, (0, 0)) == (64, 1024, 0), "no weight is quantised"
    assert planned(30e6, (0, 0), length=1024) == (24, 1024, 0)


def test_a_head_that_is_copied_stays_free_of_decoded_weights():
    model = tiny_model("bfloat16", hidden_size=64)
    needed = Convertible.of(model, 128).buffer_bytes
    (model.embedding if model.head is None else model.head).compute = "float32"
    head = model.head_variable[...]
    assert Convertible.of(model, 128).buffer_bytes == needed + 4 * head.size


def test_several_samplers_share_the_memory_left(monkeypatch):
    device = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 100, "bytes_in_use": 20})
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert [room_bytes(), room_bytes(0.25)] == [80, 20]


def test_prompts_are_prefilled_at_once_if_memory_is_left():
    plan = SlotPlan(slots=4, length=1000, bytes=4_000_000, converted_bytes=1_000_000)
    # 1,000 bytes a token: the states of 4 x 500 tokens take twice as much, and their activations as well.
    found = [prefilled_at_once(plan, room, 500) for room in (None, 12_999_999, 13_000_000)]
    assert found == [500, 500, 2000]


@given(
    st.integers(1, 5000), st.none() | st.integers(1, 64), st.none() | st.integers(1, 4096), st.integers(10**5, 10**9)
)
def test_a_prefill_of_pictures_fits_beside_the_slots(size, slots, length, room):
    def plan(size: int) -> SlotPlan | None:
        try:
            return plan_slots(
                lambda slots, tokens: slots * tokens * 1000,
                4096,
                room,
                slots,
                length,
                convertible=Convertible((10**6,) * 4, 0, 128),
                prefix_bytes=10**6,
                picture_bytes_of=lambda tokens: size * tokens,
            )
        except ValueError:
            return None

    text, pictures = plan(0), plan(size)
    if slots and length:
        assert pictures == text, "there is nothing to plan"
    elif pictures is None or text is None:
        assert pictures is None
    else:
        assert pictures.picture_bytes == size * pictures.length
        used = pictures.bytes + pictures.converted_bytes + pictures.prefix_bytes + pictures.picture_bytes
        assert used <= 0.9 * room
        assert pictures.slots <= text.slots and "a prefill of pictures" in str(pictures)


@pytest.mark.parametrize("hf", [picture_rows.HF, picture_rows.GEMMA4, picture_rows.UNIFIED, picture_rows.GEMMA3])
def test_the_memory_of_a_prefill_of_pictures_grows_with_its_patches(hf):
    model = Decoder(config_from_hf(hf["text_config"]), jax.random.key(0), "bfloat16", tower_config(hf))
    tower, (structure, leaves) = model.vision.config, flattened(model)
    shapes = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
    one, two = (picture_bytes(structure, shapes, tokens) for tokens in (64, 128))
    assert 1.9 * one < two <= 2 * one
    patches = 64 * tower.merge_size**2 * tower.patch_numbers
    assert one > 4 * patches + 2 * 64 * tower.out_size
    assert Sampler(model, slots=2, length=64).plan.picture_bytes == 0, "free memory is not known"
    model.vision = None
    structure, leaves = flattened(model)
    assert picture_bytes(structure, tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in leaves), 64) == 0


def test_slots_and_length_follow_from_the_memory_left():
    def bytes_of(slots, length):
        return slots * length * 1000

    plans = [plan_slots(bytes_of, 4096, room) for room in (None, 1e9, 30e6, 3e6)]
    assert [(plan.slots, plan.length) for plan in plans] == [(64, 4096), (64, 4096), (64, 256), (8, 256)]
    assert plan_slots(bytes_of, 4096, 17e6).slots == 48
    assert plan_slots(bytes_of, 4096, 30e6, slots=8).length == 2048
    assert plan_slots(bytes_of, 4096, 30e6, length=2048).slots == 12
    assert plan_slots(bytes_of, 100, None).length == 100
    with pytest.raises(ValueError, match=r"8 slots of 4096 tokens take 0.03 GB, and 0.03 GB of device memory are left"):
        plan_slots(bytes_of, 4096, 30e6, slots=8, length=4096)
    with pytest.raises(ValueError, match="length = 5000: the model has 4096 positions"):
        plan_slots(bytes_of, 4096, None, length=5000)


@given(st.integers(1, 300), st.integers(1, 400), st.integers(1, 4096))
def test_memory_has_room_for_less_than_half_as_many_slots_more(most, fitting, length):
    room = fitting * length / 0.9
    plan = plan_slots(lambda slots, tokens: slots * tokens, 4096, room * 1.0001, length=length, most_slots=most)
    count = min(most, fitting)
    assert plan.slots <= count < 1.5 * plan.slots


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(slots=0), "slots = 0: must be a positive integer"),
        (dict(length=200), "length = 200: the model has 128 positions"),
        (dict(tokens_per_round=0), "tokens_per_round = 0"),
    ],
)
def test_errors_of_a_sampler(model, arguments, message):
    with pytest.raises(ValueError, match=message):
        Sampler(model, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(prompt=[]), "the prompt is empty"),
        (dict(prompt=[48]), "the prompt contains token id 48"),
        (dict(prompt=[1] * 50, max_new_tokens=15), "need 65 positions; a row of this sampler has 64"),
        (dict(prompt=[1] * 64), "need 65 positions"),
        (dict(prompt=[1], max_new_tokens=0), "max_new_tokens = 0"),
        (dict(prompt=[1], top_p=0.5), "have no effect with temperature = 0"),
        (dict(prompt=[1], stop_strings="x"), "give the tokenizer"),
    ],
)
def test_errors_of_a_request(model, arguments, message):
    sampler = Sampler(model, slots=2, length=64)
    with pytest.raises(ValueError, match=message):
        sampler.submit(**arguments)
    assert sampler.pending == 0


def test_errors_of_a_run(model):
    sampler = Sampler(model, slots=2, length=64)
    with pytest.raises(ValueError, match="must be an integer, or 2 of them"):
        next(sampler.run([[1], [2]], 3, seed=[1]))
    with pytest.raises(ValueError, match="2 numbers of max_new_tokens for 1 prompts"):
        next(sampler.run([[1]], [3, 4]))
    with pytest.raises(ValueError, match="prompt contains token id 99"):
        next(sampler.run([[1], [99]], 3))
    assert sampler.pending == 0
    sampler.submit([1], 3)
    with pytest.raises(ValueError, match="run while 1 requests are not done"):
        next(sampler.run([[1]], 3))
