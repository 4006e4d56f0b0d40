"""A sampler that compiles beside: what is prepared serves usual rows, and a missing program stops nobody else."""

from __future__ import annotations

import gc
import itertools
import threading

import jax
import numpy as np
import picture_rows
import pytest
from drawn import draws, model_of
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from tiny import CONFIGS
from tiny_models import adapted_model, tiny_config, tiny_model

import jaxtune
from jaxtune import Decoder, Sampler
from jaxtune.models.generation import prefills, ready, row_programs, slots
from jaxtune.models.generation.adapters import Adapter
from jaxtune.models.generation.generate import begin
from jaxtune.models.generation.requests import PromptPictures
from jaxtune.models.generation.sampling import Sampling
from jaxtune.models.generation.structure import flattened
from jaxtune.models.hf import Pretrained, model_from_config
from jaxtune.models.programs import kept as kept_programs
from jaxtune.system.program_cache import in_use
from tests import patience
from tests.compilations import compilations as compilations_of

VOCAB, LENGTH, CHUNK = 48, 256, 64
KINDS = (
    {},
    {"temperature": 0.9},
    {"temperature": 1.1, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 5, "top_logprobs": 3},
    {"repetition_penalty": 1.3},
    {"temperature": 1.0, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"logit_bias": {3: 2.0, 5: -4.0}, "min_new_tokens": 3},
)
UNUSUAL = {
    "ends": {"eos_token_ids": [1, 2, 3, 4, 5, 6]},
    "biases": {"eos_token_ids": (), "logit_bias": {token: 0.1 * token for token in range(20)}},
}  # for which the programs have too few columns


@pytest.fixture(scope="module")
def model() -> Decoder:
    return tiny_model(initializer_range=0.5, max_position_embeddings=LENGTH)


@pytest.fixture
def patient(monkeypatch):
    """Nothing is compiled that a larger program serves."""
    monkeypatch.setattr(ready, "LATER_SECONDS", float("inf"))


@pytest.fixture
def compilations(monkeypatch):
    """What XLA was asked for in the test's thread, and the threads of its samplers for what they compile beside."""
    others = {*threading.enumerate()} - {threading.current_thread()}

    def beside(calls):
        if threading.current_thread() not in others:
            names.extend(call.function.request(call).name for call in calls)
        return kept_programs.prepare(calls)

    with compilations_of() as names:
        monkeypatch.setattr(ready, "prepare", beside)
        yield names


def made(model: Decoder, **settings) -> Sampler:
    settings = {"slots": 4, "length": LENGTH, "prefill_tokens": CHUNK, "first_at_once": True} | settings
    return Sampler(model, **settings, compiles_beside=True)


def drawn(random: np.random.Generator, count: int) -> list[tuple[list[int], int, dict]]:
    """(prompt, new tokens, settings): prompts of one token up to some chunks."""
    rows = []
    for index in range(count):
        length = int(random.choice([1, 2, *random.integers(3, CHUNK, 2), *random.integers(CHUNK, LENGTH - 1, 1)]))
        new = int(random.integers(1, min(24, LENGTH - length) + 1))
        settings = {"seed": 7, "index": index, "eos_token_ids": [4]} | KINDS[random.integers(len(KINDS))]
        rows.append((random.integers(VOCAB, size=length).tolist(), new, settings))
    return rows


def answers(sampler: Sampler, rows) -> list[tuple[list[int], list[float]]]:
    numbers = [sampler.submit(prompt, new, **settings) for prompt, new, settings in rows]
    pieces = {number: ([], []) for number in numbers}
    while sampler.pending:
        for piece in sampler.step():
            assert piece.finish_reason != "failed", piece.error
            pieces[piece.request][0].extend(piece.ids)
            pieces[piece.request][1].extend(piece.logprobs)
    return [pieces[number] for number in numbers]


def assert_same(results, expected) -> None:
    assert [ids for ids, _ in results] == [ids for ids, _ in expected]
    for (_, logprobs), (_, others) in zip(results, expected, strict=True):
        np.testing.assert_allclose(logprobs, others, atol=1e-4)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full)])
def test_drawn_rows_compile_nothing_once_prepared(model, patient, compilations, monkeypatch, seed):
    """Also when the caches grow, and rows of every kind come and go."""
    monkeypatch.setattr(row_programs, "_USUAL_LENGTH", 128)
    slots.programs.cache_clear()  # of other tests
    with made(model) as sampler:
        programs = sampler.prepare()
        assert programs.loaded + programs.compiled > 10 and sampler._caches.capacity == 128
        rows = [row for row in drawn(np.random.default_rng(seed), 24) if len(row[0]) + row[1] <= 128]
        rows += drawn(np.random.default_rng(seed + 10), 24)
        compilations.clear()
        results = answers(sampler, rows)
        assert compilations == [] and sampler._caches.capacity == 256
    with Sampler(model, slots=4, length=LENGTH, prefill_tokens=CHUNK) as plain:
        assert_same(results, answers(plain, rows))


@pytest.mark.parametrize("unusual", UNUSUAL)
def test_a_missing_program_keeps_only_its_row_waiting(model, patient, monkeypatch, compilations, unusual):
    compiles, goes_on = threading.Event(), threading.Event()
    with made(model) as sampler:
        sampler.prepare()

        def slow(calls):
            compiles.set()
            assert goes_on.wait(patience.SECONDS)
            return kept_programs.prepare(calls)

        monkeypatch.setattr(ready, "prepare", slow)
        rows = drawn(np.random.default_rng(3), 12)
        waits = sampler.submit([5, 6, 7], 9, **UNUSUAL[unusual])
        assert [len(ids) > 0 for ids, _ in rest(sampler, rows, until=compiles)] == [True] * len(rows)
        assert sampler.pending == sampler.waiting == 1
        goes_on.set()
        ids = []
        while sampler.pending:
            for piece in sampler.step():
                assert piece.request == waits
                ids += piece.ids
        compilations.clear()
        answers(sampler, rows)  # no kind of rows needs a program for as many columns
        assert compilations == []
    with Sampler(model, slots=4, length=LENGTH) as plain:
        assert ids == answers(plain, [([5, 6, 7], 9, UNUSUAL[unusual])])[0][0]


def rest(sampler: Sampler, rows, until: threading.Event) -> list[tuple[list[int], list[float]]]:
    """The answers to rows beside one that waits."""
    numbers = [sampler.submit(prompt, new, **settings) for prompt, new, settings in rows]
    pieces = {number: ([], []) for number in numbers}
    while sampler.pending > 1 or not until.is_set():
        for piece in sampler.step():
            pieces[piece.request][0].extend(piece.ids)
    return [pieces[number] for number in numbers]


def test_a_program_that_cannot_be_compiled_ends_its_row_alone(model, patient, monkeypatch):
    def fails(_):
        raise RuntimeError("RESOURCE_EXHAUSTED: of the test")

    with made(model) as sampler:
        sampler.prepare()
        monkeypatch.setattr(ready, "prepare", fails)
        for _ in range(2):
            number, other = sampler.submit([5, 6, 7], 9, **UNUSUAL["ends"]), sampler.submit([5], 4, eos_token_ids=())
            ends = {}
            while sampler.pending:
                ends |= {piece.request: piece for piece in sampler.step() if piece.finish_reason}
            assert ends[number].finish_reason == "failed" and "RESOURCE_EXHAUSTED" in ends[number].error
            assert ends[other].finish_reason == "length"
        assert sampler.can_score(20) is False
        with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
            while not sampler.can_score(20):
                sampler._ready.wait(0.05)


class Anything:
    """A constraint that allows every token."""

    def mask(self):
        return None

    def accept(self, tokens):
        return False


@pytest.mark.parametrize("unusual", UNUSUAL)
def test_programs_of_fewer_columns_serve_no_rows_after_those_with_many(model, patient, unusual):
    """The arrays are wider from then on, with masks, too."""
    constrained = {"constraint": Anything(), "eos_token_ids": ()}
    settings = [constrained, UNUSUAL[unusual], constrained | {"temperature": 0.7}]
    rows = [([5, 6, 7], 6, setting) for setting in settings]
    with made(model) as sampler, Sampler(model, slots=4, length=LENGTH, prefill_tokens=CHUNK) as plain:
        sampler.prepare()
        for row in [*rows, *rows]:
            assert_same(answers(sampler, [row]), answers(plain, [row]))


def test_an_error_of_preparing_is_raised(model, monkeypatch):
    def fails(*_):
        raise RuntimeError("of the test")

    slots.programs.cache_clear()
    monkeypatch.setattr(kept_programs, "_built", fails)
    with made(model) as sampler:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="of the test"):
                sampler.prepare()
    slots.programs.cache_clear()


def test_what_a_larger_program_serves_is_compiled_later(model, monkeypatch):
    monkeypatch.setattr(ready, "LATER_SECONDS", 0.0)
    rows = [([3] * 20, 4, {"top_logprobs": 2})] * 2
    with made(model) as sampler:
        sampler.prepare()
        kind = slots.Kind(False, False, False, ranks=True)
        exact = ready.Prefill(1, 32, 32), sampler._row_programs.decode(kind, 8, False)
        choose = sampler._ready.choose
        assert choose(exact, ()) == 1
        first = answers(sampler, rows)
        while choose(exact, ()) != 0:
            sampler._ready.wait(0.1)
        assert sampler._ready.decode(exact[1], 8) == exact[1]
        assert_same(answers(sampler, rows), first)


def test_an_update_keeps_ready_what_other_arrays_have(model):
    """Weights of another dtype have programs of their own."""
    with made(model) as sampler:
        sampler.prepare()
        ready_sizes = set(sampler._ready._queue.ready)
        sampler.update(model)
        assert sampler._ready._queue.ready == ready_sizes
        graph, state = nnx.split(model)
        sampler.update(nnx.merge(graph, jax.tree.map(lambda leaf: leaf.astype("bfloat16"), state)))
        dtypes = {leaf.dtype.name for leaf in sampler._model.weights.leaves}
        assert dtypes == {"bfloat16"}, "in use before its programs are ready"
        assert ready.Mark() in sampler._ready._queue.ready
        assert not any(isinstance(size, ready.Decode | ready.Prefill) for size in sampler._ready._queue.ready)


def test_deterministic_rows_run_in_programs_of_their_own_length(model, patient):
    rows = [([3] * length, 5, {}) for length in (3, 20, 40)]
    with made(model, deterministic=True) as sampler:
        sampler.prepare()
        results = answers(sampler, rows)
        assert {ready.Prefill(1, width, width) for width in (16, 32, 64)} <= sampler._ready._queue.ready
    with Sampler(model, slots=4, length=LENGTH, prefill_tokens=CHUNK, deterministic=True) as plain:
        assert results == answers(plain, rows)


def test_the_thread_ends_with_its_sampler(model, monkeypatch):
    before = {*threading.enumerate()}

    def threads() -> list[threading.Thread]:
        new = {*threading.enumerate()} - before
        return [thread for thread in new if thread.name == "compiles beside"]

    monkeypatch.setattr(ready, "prepare", lambda calls: None)
    closed = made(model)
    assert not closed.can_score(9)
    assert threads()
    closed.close()
    assert not threads()
    freed = made(model)
    freed.can_score(9)
    assert threads()
    del freed, closed
    gc.collect()
    assert not threads()


def test_a_program_that_takes_long_keeps_no_other_waiting(model, monkeypatch):
    goes_on = threading.Event()

    def slow(calls):
        shapes = {leaf.shape for call in calls for leaf in jax.tree.leaves(call.arguments)}
        assert (1, 256) not in shapes or goes_on.wait(patience.SECONDS)

    monkeypatch.setattr(ready, "prepare", slow)
    with made(model) as sampler:
        assert not sampler.can_score(200) and not sampler.can_score(9)
        while not sampler.can_score(9):
            sampler._ready.wait(1)
        assert not sampler.can_score(200)
        goes_on.set()
        while not sampler.can_score(200):
            sampler._ready.wait(1)


def test_a_second_start_compiles_nothing(model, monkeypatch, tmp_path):
    monkeypatch.setattr(kept_programs, "cache_of_programs", in_use)
    monkeypatch.setattr(kept_programs, "_FORMAT", str(tmp_path))
    counts = []
    for _ in range(2):
        slots.programs.cache_clear()  # as in another process
        with made(model) as sampler:
            counts.append(sampler.prepare())
    slots.programs.cache_clear()
    assert counts[0].compiled == counts[1].loaded > 10 and counts[0].loaded == counts[1].compiled == 0


@pytest.mark.parametrize("adapted", [False, True])
@draws(3)
@given(
    length=st.sampled_from([1, 2, 16, 17, 100, 511, 513, 514]) | st.integers(1, 600),
    new=st.integers(1, 30),
    settings=st.sampled_from(
        [{}, {"temperature": 0.9}, {"temperature": 1.1, "top_p": 0.9}, {"repetition_penalty": 1.3}]
    ),
)
def test_what_is_begun_by_shapes_is_all_that_a_lone_answer_needs(monkeypatch, adapted, length, new, settings):
    model = model_of()
    model = adapted_model(model, r=4) if adapted else model
    graph, state = nnx.split(model)
    shapes = nnx.merge(graph, jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), state))
    with monkeypatch.context() as patch:
        patch.setattr(kept_programs, "cache_of_programs", in_use)
        patch.setattr(ready, "begin", kept_programs.prepare)  # and wait for it
        slots.programs.cache_clear()
        functions = [f for f in slots.programs_of(False, 1) if isinstance(f, kept_programs.Function)]
        begin(shapes, [3] * length, new, Sampling(**settings))
        begun = [set(function._programs) for function in functions]
        assert sum(map(len, begun)) >= 2
        jaxtune.generate(model, [[3] * length], new, **settings)
        assert [set(function._programs) for function in functions] == begun
    slots.programs.cache_clear()


# ---- with pictures


@pytest.fixture(scope="module")
def seeing() -> Decoder:
    return model_from_config(picture_rows.QWEN3_VL, jax.random.key(0), "float32", pictures=True)


def with_picture(random: np.random.Generator, grid: tuple[int, int]) -> tuple[list[int], int, dict]:
    """A row with a picture of so many patches."""
    pieces = picture_rows.document(random, 2, grid, 3)
    tokens, _, positions, pictures = picture_rows.packed([[pieces]], *picture_rows.size(pieces))
    return tokens[0].tolist(), 4, {"pictures": PromptPictures(pictures, positions[0]), "eos_token_ids": ()}


@pytest.mark.parametrize("name", ["few", None])
def test_a_first_picture_stops_nobody(seeing, patient, monkeypatch, compilations, name):
    """Its program is compiled beside; smaller ones run in it, larger ones have their own."""
    compiles, goes_on = threading.Event(), threading.Event()
    texts = [([5, 6, 7], 9, {"eos_token_ids": ()}), ([8] * 20, 4, {"temperature": 0.9})]
    random = np.random.default_rng(1)
    large, *smaller = (with_picture(random, grid) for grid in ((12, 12), (4, 6), (8, 8), (6, 4)))
    adapters = {} if name is None else {name: Adapter.of(adapted_model(seeing, r=4))}
    with made(seeing, length=128, adapters=adapters) as sampler:
        sampler.prepare()

        def slow(calls):
            compiles.set()
            assert goes_on.wait(patience.SECONDS)
            return kept_programs.prepare(calls)

        monkeypatch.setattr(ready, "prepare", slow)
        number = sampler.submit(*large[:2], **large[2], adapter=name)
        compilations.clear()
        assert [len(ids) > 0 for ids, _ in rest(sampler, texts, until=compiles)] == [True, True]
        assert sampler.pending == sampler.waiting == 1 and compilations == []
        goes_on.set()
        first = []
        while sampler.pending:
            for piece in sampler.step():
                assert piece.request == number
                first += piece.ids
        compilations.clear()
        results = answers(sampler, [*smaller, *texts])
        assert compilations == [] and len([s for s in sampler._ready._queue.ready if isinstance(s, ready.Look)]) == 1
    with Sampler(seeing, slots=4, length=128, prefill_tokens=CHUNK, adapters=adapters) as plain:
        expected = answers(plain, [(*large[:2], large[2] | {"adapter": name}), *smaller, *texts])
        assert first == expected[0][0]
        assert_same(results, expected[1:])


LOOKS = st.builds(ready.Look, st.integers(1, 9), st.integers(1, 9))


@given(st.sets(LOOKS), LOOKS)
def test_drawn_pictures_run_in_the_smallest_program_that_is_ready(model, looks, size):
    with made(model) as sampler:
        sampler._ready._queue.ready |= {*looks, ready.Mark()}
        served = sampler._ready.looks(size)
    assert {*served} == {look for look in looks if look.width >= size.width and look.patches >= size.patches}
    assert served == sorted(served, key=lambda look: (look.patches, look.width))


# ---- before the arrays are there


@pytest.mark.parametrize(("name", "load_in"), [*zip(CONFIGS, itertools.cycle([None, "nf4", "fp8", "int8"]))])
def test_shapes_are_those_of_the_loaded_model(name, load_in, tmp_path):
    """In the dtypes of a precision map, and with the same Structure, so that programs of the shapes are the model's."""
    jaxtune.save_pretrained(model_from_config(CONFIGS[name], jax.random.key(0), "bfloat16"), tmp_path / "base")
    words = {"norm": "fp32", "layers.0.*": "bf16"}
    try:
        pretrained = Pretrained(tmp_path / "base", "bfloat16", load_in, precision=words)
        loaded = flattened(pretrained.load())
    except ValueError as error:  # of a format that this model's rows are no whole blocks of
        pytest.skip(str(error))
    structure, shapes = flattened(pretrained.shapes())
    assert structure is loaded[0]
    assert [(leaf.shape, leaf.dtype) for leaf in shapes] == [(leaf.shape, leaf.dtype) for leaf in loaded[1]]


@pytest.mark.parametrize("load_in", [None, "nf4"])
def test_a_sampler_of_shapes_prepares_what_the_loaded_model_runs(compilations, patient, tmp_path, load_in):
    """Of converted layers, too."""
    config = tiny_config(hidden_size=64, max_position_embeddings=LENGTH)
    jaxtune.save_pretrained(Decoder(config, jax.random.key(0), "float32"), tmp_path / "base")
    slots.programs.cache_clear()
    counts, plans, settings = [], [], {"slots": 32 if load_in else 4, "prefix_bytes": 10**8}

    def prepare(shapes: Decoder, room: float | None, tokenizer: object) -> None:
        assert room is None, "a CPU tells no memory"
        with made(shapes, free_bytes=1e9, **settings) as sampler:
            counts.append(sampler.prepare())
            plans.append(sampler.plan)
            for refused in (lambda: sampler.submit([1]), lambda: sampler.score([1, 2])):
                with pytest.raises(ValueError, match="the model has shapes, no arrays: call `update` first"):
                    refused()

    model, _ = jaxtune.from_pretrained(tmp_path / "base", "float32", load_in, beside=prepare)
    with made(model, free_bytes=1e9, **settings) as sampler:
        counts.append(sampler.prepare())
        compilations.clear()
        rows = drawn(np.random.default_rng(2), 8)
        results = answers(sampler, rows)
        assert compilations == [] and sampler.plan == plans[0]
        assert (sampler.plan.converted_layers > 0) == (load_in is not None)
    assert sum(counts[0]) > 10 and sum(counts[1]) == 0
    shapes = nnx.eval_shape(lambda: model)
    with made(shapes, free_bytes=1e9, **settings) as sampler:
        sampler.update(model)
        assert_same(answers(sampler, rows), results)


def test_an_error_beside_loading_is_raised(tmp_path):
    jaxtune.save_pretrained(tiny_model(), tmp_path / "base")

    def fails(*_):
        raise RuntimeError("of the test")

    with pytest.raises(RuntimeError, match="of the test"):
        jaxtune.from_pretrained(tmp_path / "base", beside=fails)


# ---- with adapters and stored beginnings


def adapters_of(model: Decoder) -> dict[str, Adapter]:
    ranks = {"few": 4, "more": 24}
    return {name: Adapter.of(adapted_model(model, seed=rank, r=rank)) for name, rank in ranks.items()}


def with_adapters(rows, names):
    return [(prompt, new, more | {"adapter": name}) for (prompt, new, more), name in zip(rows, names, strict=True)]


def test_rows_with_adapters_and_stored_beginnings_compile_nothing_once_prepared(
    model, patient, compilations, monkeypatch
):
    """Also those whose caches are restored, and where two beginnings of equal tokens have another adapter each."""
    monkeypatch.setattr(prefills, "BLOCK", 32)
    random, adapters = np.random.default_rng(5), adapters_of(model)
    names = [None, *adapters]
    rows = [
        (prompt, new, settings | {"adapter": names[random.integers(3)]}) for prompt, new, settings in drawn(random, 20)
    ]
    shared = random.integers(VOCAB, size=100).tolist()
    turns = [([*shared, *more], 5, {"adapter": name}) for more in ([1], [2] * 40) for name in names]
    with made(model, adapters=adapters, prefix_bytes=10**8) as sampler:
        sampler.prepare()
        compilations.clear()
        results = answers(sampler, rows)
        for turn in turns:
            results += answers(sampler, [turn])
        assert compilations == []
        assert {block.adapter for block in sampler._prefills._prefixes._blocks.values()} == {0, 1, 2}
        assert sampler.can_score(20, "few") is False
        sampler.drop_adapter("few")
        assert {block.adapter for block in sampler._prefills._prefixes._blocks.values()} == {0, 2}
        store = sampler._prefills._prefixes
        assert store._bytes == sum(block.bytes for block in store._blocks.values())
    with Sampler(model, slots=4, length=LENGTH, prefill_tokens=CHUNK, adapters=adapters) as plain:
        assert_same(results, answers(plain, [*rows, *turns]))


def test_beginnings_are_reused_in_the_prepared_programs(model, patient, compilations, monkeypatch):
    monkeypatch.setattr(prefills, "BLOCK", 32)
    random = np.random.default_rng(6)
    first = random.integers(VOCAB, size=90).tolist()
    with made(model, adapters=adapters_of(model), prefix_bytes=10**8) as sampler:
        sampler.prepare()
        compilations.clear()
        reused = []
        for prompt, name in ((first, "few"), ([*first, 1, 2], "few"), ([*first, 1, 2], None), ([*first] * 2, "few")):
            sampler.submit(prompt, 3, eos_token_ids=(), adapter=name)
            while sampler.pending:
                reused += [piece.reused for piece in sampler.step() if piece.finish_reason]
        assert reused == [0, 64, 0, 64] and compilations == []
        assert sampler._prefills._prefixes._blocks
        sampler._admission.grow(2 * LENGTH)
        assert sampler._prefills._prefixes._blocks, "longer caches do not forget beginnings"


def test_an_adapter_comes_while_others_decode(model, patient, monkeypatch, compilations):
    """Its programs are compiled beside; only its own rows wait for them."""
    compiles, goes_on = threading.Event(), threading.Event()
    adapters, rows = adapters_of(model), drawn(np.random.default_rng(3), 8)
    with made(model, prefix_bytes=10**8) as sampler:
        sampler.prepare()

        def slow(calls):
            compiles.set()
            assert goes_on.wait(patience.SECONDS)
            return kept_programs.prepare(calls)

        monkeypatch.setattr(ready, "prepare", slow)
        sampler.load_adapter("few", adapters["few"])
        compilations.clear()
        number = sampler.submit([5, 6, 7], 9, eos_token_ids=(), adapter="few")
        assert [len(ids) > 0 for ids, _ in rest(sampler, rows, until=compiles)] == [True] * len(rows)
        assert sampler.pending == sampler.waiting == 1 and not sampler.can_score(9, "few")
        assert compilations == []
        sampler.load_adapter("more", adapters["more"])  # before the one is in use
        goes_on.set()
        ids = []
        while sampler.pending:
            for piece in sampler.step():
                assert piece.request == number
                ids += piece.ids
        assert sampler._model.weights.gated and sampler._model._coming is None
        compilations.clear()
        asked = [
            (prompt, new, settings | {"adapter": name})
            for (prompt, new, settings), name in zip(rows, (None, "few", "more") * 3)
        ]
        results = answers(sampler, asked)
        assert compilations == []
        sampler.update(model)
        assert_same(answers(sampler, asked), results)
    with Sampler(model, slots=4, length=LENGTH, adapters=adapters) as plain:
        assert_same(results, answers(plain, asked))
        assert ids == answers(plain, [([5, 6, 7], 9, {"eos_token_ids": (), "adapter": "few"})])[0][0]


def test_an_adapter_whose_programs_cannot_be_compiled_ends_its_rows_alone(model, patient, monkeypatch):
    def fails(_):
        raise RuntimeError("RESOURCE_EXHAUSTED: of the test")

    adapter = adapters_of(model)["few"]
    with made(model) as sampler:
        sampler.prepare()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ready, "prepare", fails)
            sampler.load_adapter("few", adapter)
            number = sampler.submit([5, 6, 7], 9, eos_token_ids=(), adapter="few")
            other, ends = sampler.submit([5], 4, eos_token_ids=()), {}
            while sampler.pending:
                ends |= {piece.request: piece for piece in sampler.step() if piece.finish_reason}
            assert ends[number].finish_reason == "failed" and "RESOURCE_EXHAUSTED" in ends[number].error
            assert ends[other].finish_reason == "length"
            with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
                sampler.can_score(9, "few")
            sampler.drop_adapter("few")
        sampler.load_adapter("few", adapter)
        [(ids, _)] = answers(sampler, [([5, 6, 7], 9, {"eos_token_ids": (), "adapter": "few"})])
        assert len(ids) == 9
