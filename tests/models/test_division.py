"""A sampler over the devices of a mesh gives the rows of one device, of divided weights in its share of the memory."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from flax import nnx
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from tiny_models import adapted_model, over, tiny_model

from jaxtune.models.config import LayerSpec, MoEConfig
from jaxtune.models.decoder import Decoder
from jaxtune.models.files.quant import quantize
from jaxtune.models.generation import converted
from jaxtune.models.generation import slots as device
from jaxtune.models.generation.division import Division, Sharing
from jaxtune.models.generation.generate import generate
from jaxtune.models.generation.requests import Row
from jaxtune.models.generation.sampler import Sampler
from jaxtune.models.generation.slot_plan import next_power
from jaxtune.models.generation.slot_rows import SlotRows
from jaxtune.models.placement import partition
from jaxtune.train.data.batches import Batch
from jaxtune.train.objectives.policy import log_probs_of

VOCAB = 512
FORMS = converted._decoded, converted._filled
# Whose rows are whole blocks of a quantised format.
WIDE = dict(hidden_size=128, intermediate_size=256, initializer_range=0.2)

HEADS = dict(num_heads=4, num_kv_heads=2)  # whole ones on each of two devices


def model_of(dtype: str = "float32", **changes) -> Decoder:
    return tiny_model(dtype, vocab_size=VOCAB, **(dict(initializer_range=0.5) | changes))


MODELS = {
    "adapter": lambda: adapted_model(model_of(**HEADS), r=4),
    "DoRA, biases": lambda: adapted_model(model_of(mlp_bias=True, qkv_bias=True, **HEADS), r=4, use_dora=True),
    "bf16": lambda: model_of("bfloat16"),
    "nf4": lambda: adapted_model(quantize(model_of(**WIDE, **HEADS), "nf4"), r=4),
    "fp8": lambda: quantize(model_of(**WIDE), "fp8"),
    "experts": lambda: model_of(moe=MoEConfig(4, 2, 32)),
    "one matrix for gate and up": lambda: model_of(fused_gate_up=True),
    "tied": lambda: model_of(tie_embeddings=True),
    # whose layers are not plain, so that a step gathers them
    "a step of layers": lambda: model_of(layers=(LayerSpec(), LayerSpec(window=8)), residual_scale=0.5),
}


@functools.cache
def made(name: str) -> Decoder:
    return MODELS[name]()


def rows_of(sampler: Sampler, prompts, new, **changes) -> list[Row]:
    with sampler:
        return list(sampler.run(prompts, new, 1.0, list(range(len(prompts))), **changes))


def prompts_of(lengths, seed: int = 0) -> list[list[int]]:
    draw = np.random.default_rng(seed)
    return [draw.integers(3, VOCAB, length).tolist() for length in lengths]


def assert_alike(found: list[Row], wanted: list[Row]) -> None:
    assert [row.ids for row in found] == [row.ids for row in wanted]
    assert [row.finish_reason for row in found] == [row.finish_reason for row in wanted]
    for row, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(row.logprobs, other.logprobs, atol=5e-5)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("adapter", (2, 4)),
        ("adapter", (2, 1)),
        ("nf4", (1, 2)),
        ("experts", (1, 4)),
        ("a step of layers", (1, 2)),
        *(
            pytest.param(name, sizes, marks=pytest.mark.full)
            for name, sizes in (
                ("DoRA, biases", (1, 4)),
                ("DoRA, biases", (1, 2)),
                ("bf16", (2, 2)),
                ("fp8", (2, 2)),
                ("nf4", (2, 1)),
                ("experts", (4, 1)),
                ("a step of layers", (8, 1)),
                ("one matrix for gate and up", (1, 2)),
                ("tied", (2, 2)),
                ("a step of layers", (2, 2)),
            )
        ),
    ],
)
def test_devices_of_a_mesh_give_the_rows_of_one(name, sizes):
    """Also of equal prompts, a prompt of one token, and one in several pieces."""
    model = made(name)
    prompts = prompts_of((5, 9, 1, 40, 7))
    prompts += [prompts[1]] * 4
    divided = over(model, *sizes)
    sampler = Sampler(divided, slots=1, length=128, prefill_tokens=16)
    assert sampler.plan.slots == 1 and len(sampler._rows.requests) == np.prod(sizes)
    assert (Sharing.of(model), Sharing.of(divided)) == (Sharing(1, True), Sharing(int(np.prod(sizes)), sizes[1] == 1))
    found = rows_of(sampler, prompts, 9)
    assert_alike(found, rows_of(Sampler(model, slots=4, length=128, prefill_tokens=16), prompts, 9))


@settings(max_examples=4, deadline=None)
@given(st.data())
def test_drawn_slots_prompts_and_groups(data):
    """That the devices cannot share equally, with answers of other lengths, and some with penalties and filters."""
    sizes = data.draw(st.sampled_from([(1, 2), (2, 2), (1, 4), (2, 1), (3, 1), (4, 1)]))
    lengths = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=7))
    group, slots = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    prompts = [prompt for prompt in prompts_of(lengths) for _ in range(group)]
    new = [1 + (7 * index) % 11 for index in range(len(prompts))]
    changes = data.draw(st.sampled_from([{}, dict(repetition_penalty=1.2, top_p=0.9), dict(top_logprobs=2)]))
    settings = dict(length=64, prefill_tokens=data.draw(st.sampled_from([16, 32, 256])))
    settings |= data.draw(st.sampled_from([{}, dict(prefills_alone=True), dict(deterministic=True)]))
    settings |= dict(prefix_bytes=data.draw(st.sampled_from([None, 0, 1 << 20])))
    settings |= dict(exact=sizes[1] == 1 and data.draw(st.booleans()))
    found = rows_of(Sampler(over(made("adapter"), *sizes), slots=slots, **settings), prompts, new, **changes)
    # Of other slots a filter's sums round otherwise, also with `exact`, on one device too.
    wanted = rows_of(
        Sampler(made("adapter"), slots=slots if settings["exact"] else 4, **settings), prompts, new, **changes
    )
    assert_alike(found, wanted)
    for row, other in zip(found, wanted, strict=True):
        assert [[token for token, _ in top] for top in row.top_logprobs] == [
            [token for token, _ in top] for top in other.top_logprobs
        ]


def test_a_device_holds_its_share_and_two_layers():
    """By the compiled programs: a decoding step gathers nothing, a prefill two of the eight layers at a time."""
    wide = dict(hidden_size=256, intermediate_size=1024, num_heads=4, num_kv_heads=2, head_dim=64)
    model = over(tiny_model(vocab_size=4096, layers=(LayerSpec(),) * 8, **wide), 1, 4)
    sampler = Sampler(model, slots=2, length=128)
    rows_of_prompt = list(sampler.run([[1, 2, 3]], 2))
    assert len(rows_of_prompt[0].ids) == 2
    division, programs, kind = sampler._division, sampler._prefills._programs, sampler._row_programs._kinds[-1]
    assert division is not None

    def own_bytes(tree) -> int:
        return sum(array.addressable_shards[0].data.nbytes for array in jax.tree.leaves(tree))

    layer = max(sum(array.nbytes for array in jax.tree.leaves(nnx.state(each))) for each in model.layers)
    weights, states, ones = sampler._model.weights, sampler._caches.states, np.ones(4, np.int32)
    structure, leaves = weights.structure, weights.leaves
    of_slots = states, sampler._rows.live, None, *sampler._rows._unchanged, sampler._rows.sent(kind, False)
    room = device.states_shape(structure, weights.shapes, 1, 128)
    tokens = np.zeros((4, 16), np.int32)
    with partition.compiling(division.mesh):
        lowered = (
            programs.decode.lower(structure, kind, 8, leaves, *of_slots),
            programs.prefill.lower(structure, 16, leaves, tokens, ones, ones),
            programs.extend.lower(structure, leaves, room, tokens[:1], *[ones[:1]] * 3),
        )
        decode, prefill, extend = (each.compile().memory_analysis() for each in lowered)
    share = own_bytes(leaves)
    assert share < 0.26 * sum(array.nbytes for array in leaves)
    assert decode.argument_size_in_bytes < share + own_bytes(states) + 4096 and decode.temp_size_in_bytes < layer / 8
    for program in (prefill, extend):
        assert program.argument_size_in_bytes < share + own_bytes(states)
        assert program.temp_size_in_bytes < 2.7 * layer  # what they compute, too


def test_generate_runs_over_divided_weights_and_what_cannot_is_refused():
    divided, prompts = over(made("adapter"), 1, 2), prompts_of((3, 8, 2))
    assert generate(divided, prompts, 5) == generate(made("adapter"), prompts, 5)
    sampler = Sampler(divided, slots=1, length=64)
    division = Division.of(sampler._model.weights.leaves)
    assert division is not None and division.devices == 2
    for call in (
        sampler.prepare,
        lambda: sampler.score([1, 2, 3]),
        lambda: sampler.load_adapter("other", "folder"),
    ):
        with pytest.raises(ValueError, match="the model is on 2 devices"):
            call()
    with pytest.raises(ValueError, match="Sampler: exact: 2 devices divide the model's weights"):
        Sampler(divided, slots=1, length=64, exact=True)
    with pytest.raises(ValueError, match="Sampler: compiles_beside: the model is on 2 devices"):
        Sampler(divided, slots=1, length=64, compiles_beside=True)
    with pytest.raises(ValueError, match="Sampler: adapters: the model is on 2 devices"):
        Sampler(over(model_of(), 1, 2), slots=1, length=64, adapter_ranks=8)
    with pytest.raises(ValueError, match="generate: deterministic log-probabilities: the model's weights are divided"):
        generate(divided, prompts, 5, deterministic=True, output_logprobs=True)


@pytest.mark.parametrize("sizes", [(1, 2), (2, 2)])
def test_log_probabilities_of_rows_are_those_of_one_device(sizes):
    """As a run reads them between steps."""
    tokens = np.random.default_rng(0).integers(3, VOCAB, (6, 32)).astype(np.int32)
    ones, places = np.ones(tokens.shape, np.int32), np.broadcast_to(np.arange(32, dtype=np.int32), tokens.shape)
    batch = Batch(tokens, np.roll(tokens, -1, axis=1), ones.astype(np.float32), ones, places)
    expected = log_probs_of(0.7, made("adapter"), batch)
    np.testing.assert_allclose(log_probs_of(0.7, over(made("adapter"), *sizes), batch), expected, atol=5e-5)


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1)])
def test_weights_of_an_update_are_used(sizes):
    divided, prompts = over(made("adapter"), *sizes), prompts_of((3, 8, 2))
    other = adapted_model(model_of(**HEADS), seed=2, r=4)
    sampler = Sampler(divided, slots=2, length=64)
    before = list(sampler.run(prompts, 6))
    sampler.update(over(other, *sizes))
    after = list(sampler.run(prompts, 6))
    for elsewhere in (other, over(other, *reversed(sizes))):
        with pytest.raises(ValueError, match="Sampler: update: these weights are on other devices"):
            sampler.update(elsewhere)
    assert [row.ids for row in after] == generate(other, prompts, 6) != [row.ids for row in before]


@functools.cache
def long_model() -> Decoder:
    return adapted_model(model_of(max_position_embeddings=1024), r=4)


def counted_rows(model: Decoder, prompts, new: int = 2, **options) -> tuple[list[Row], list[str]]:
    """(rows, names of the programs that prefilled)"""
    calls, sampler = [], Sampler(model, **(dict(prefill_tokens=64) | options))
    prefills = sampler._prefills
    for name in ("prefill", "pack", "extend"):
        function = getattr(prefills._programs, name)

        def counted(*arguments, name=name, function=function):
            calls.append(name)
            return function(*arguments)

        prefills._programs = prefills._programs._replace(**{name: counted})
    return rows_of(sampler, prompts, new), sorted(calls)


def test_devices_prefill_side_by_side():
    """Each a long prompt, a pack, or a lone prompt, so that N devices take as many programs as one for an Nth."""
    model = long_model()
    divided = over(model, 2, 1)
    for lengths, options in (
        ((150, 160, 170, 180), {}),
        ((150, 160, 170, 180), dict(prefix_bytes=1 << 22)),
        ((20, 20, 20, 20, 20, 20, 20, 20), {}),
        ((20, 20, 20, 20, 20, 20, 20, 20), dict(prefill_tokens=256)),
        ((40, 40, 40, 40), dict(prefills_alone=True)),
    ):
        prompts = prompts_of(lengths)
        _, half = counted_rows(model, prompts[: len(prompts) // 2], slots=8, length=256, **options)
        _, calls = counted_rows(divided, prompts, slots=4, length=256, **options)
        assert calls == half and half


@settings(max_examples=5, deadline=None)
@given(
    st.sampled_from([(2, 1), (4, 1), (1, 2), (3, 1)]),
    st.lists(st.integers(66, 500), min_size=2, max_size=6),
    st.sampled_from([{}, dict(prefix_bytes=1 << 22), dict(prefills_alone=True), dict(exact=True)]),
)
@example((4, 1), [70, 330, 400, 500], {})
def test_long_prompts_of_any_lengths_are_prefilled_side_by_side(sizes, lengths, options):
    """In as many programs as the longest of each device's turn takes alone."""
    model, devices, prompts = long_model(), int(np.prod(sizes)), prompts_of(lengths)
    options = options if sizes[1] == 1 else {name: value for name, value in options.items() if name != "exact"}
    found, calls = counted_rows(over(model, *sizes), prompts, slots=3, length=512, **options)
    expected, _ = counted_rows(model, prompts, slots=3, length=512, **options)
    assert_alike(found, expected)
    turns = [lengths[first : first + devices] for first in range(0, len(lengths), devices)]
    assert len(calls) <= sum(-(-(max(turn) - 1) // 64) for turn in turns)


def test_pieces_of_prompts_that_are_prefilled_alone_have_their_widths():
    """On which their bits may depend: of pieces of 640 tokens the last is padded to 512 at least."""
    model = adapted_model(model_of(max_position_embeddings=2048), r=4)
    sampler = Sampler(over(model, 2, 1), slots=2, length=1536, prefill_tokens=640, prefills_alone=True)
    calls, extend = [], sampler._prefills._programs.extend

    def counted(structure, leaves, states, tokens, starts, counts, *others):
        calls.append((tokens.shape[1], [count for count in counts.tolist() if count]))
        return extend(structure, leaves, states, tokens, starts, counts, *others)

    sampler._prefills._programs = sampler._prefills._programs._replace(extend=counted)
    lengths = 701, 1301, 1201, 1001
    assert len(rows_of(sampler, prompts_of(lengths), 2)) == 4
    assert sorted(calls) == [(512, [20]), (512, [60, 360]), (640, [560]), (640, [640])]


def reused_and_ids(sampler: Sampler, waves, new_tokens: int) -> list[tuple[int, list[int]]]:
    """Of each prompt, of which a wave is submitted when the one before has ended."""
    rows = []
    for prompts in waves:
        requests: dict[int, list[int]] = {sampler.submit(prompt, new_tokens): [] for prompt in prompts}
        while sampler.pending:
            for piece in sampler.step():
                requests[piece.request] += piece.ids
                if piece.finish_reason is not None:
                    rows.append((piece.request, piece.reused, requests[piece.request]))
    return [(reused, ids) for _, reused, ids in sorted(rows)]


@settings(max_examples=4, deadline=None)
@given(st.sampled_from([(2, 1), (4, 1), (2, 2)]), st.data())
def test_beginnings_of_any_length_are_reused_beside_prompts_without(sizes, data):
    """With the rows of one device, and what each prompt reuses."""
    lengths = data.draw(st.lists(st.integers(40, 200), min_size=1, max_size=3))
    firsts = prompts_of(lengths)
    cuts = data.draw(st.lists(st.tuples(st.sampled_from(firsts), st.integers(0, 200)), min_size=2, max_size=4))
    ends = prompts_of([40 + 31 * index for index in range(len(cuts))], seed=1)
    nexts = [[*first[:cut], *end] for (first, cut), end in zip(cuts, ends, strict=True)]
    options = dict(length=512, prefill_tokens=32, prefix_bytes=1 << 22)

    def found(model: Decoder, slots: int) -> list[tuple[int, list[int]]]:
        sampler = Sampler(model, slots=slots, **options)
        return reused_and_ids(sampler, (firsts, nexts), 4)

    several, alone = found(over(long_model(), *sizes), 2), found(long_model(), 4)
    assert [ids for _, ids in several] == [ids for _, ids in alone]

    def shared(prompt: list[int], others: list[list[int]]) -> int:
        """Tokens of whole blocks that it begins with as one of the others."""
        pairs = ([a == b for a, b in zip(prompt[:-1], other[:-1], strict=False)] for other in others)
        return max(([*pair, False].index(False) // 32 * 32 for pair in pairs), default=0)

    for index, prompt in enumerate(nexts):
        reused, _ = several[len(firsts) + index]
        assert shared(prompt, firsts) <= reused <= shared(prompt, firsts + nexts[:index] + nexts[index + 1 :])


def test_blocks_of_all_devices_are_stored_together(monkeypatch):
    """Once a piece; and of equal blocks one is stored."""
    calls, rows_of_all = [], Division.rows_of

    def counted(division, function, arrays, starts):
        calls.append(starts.tolist())
        rows = rows_of_all(division, function, arrays, starts)
        assert all(array.shape[2] == 32 for row in rows for array in row)  # the cut alone is copied
        return rows

    monkeypatch.setattr(Division, "rows_of", counted)
    lengths = 40, 100, 70, 135
    sampler = Sampler(over(long_model(), 4, 1), slots=1, length=256, prefill_tokens=32, prefix_bytes=1 << 22)
    prompts = prompts_of(lengths)
    prompts[2] = [*prompts[1][:64], *prompts[2][64:]]
    list(sampler.run(prompts, 2))
    # A device whose prompt has no further block is asked for any.
    assert calls == [[0, 0, 0, 0], [0, 32, 32, 32], [0, 64, 0, 64], [0, 0, 0, 96]]
    store = sampler._prefills._prefixes
    assert store is not None and len(store._blocks) == 1 + 3 + 4
    assert store._bytes == sum(block.bytes for block in store._blocks.values())


@pytest.mark.parametrize("sizes", [(4, 1), (1, 4)])
def test_an_inserted_row_is_exchanged_alone(sizes):
    """By the compiled programs: their buffers do not grow with the batch of prefilled prompts."""
    sampler = Sampler(over(made("bf16"), *sizes), slots=2, length=128)
    list(sampler.run([[1, 2, 3]], 2))
    division, weights, programs = sampler._division, sampler._model.weights, sampler._prefills._programs
    assert division is not None
    states, pair = sampler._caches.states, np.zeros(1, np.int32)
    where = NamedSharding(division.mesh, partition.ROWS)

    def temporary_bytes(rows: int) -> int:
        shapes = device.states_shape(weights.structure, weights.shapes, rows * 4, 128)
        staged = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where), shapes)
        with partition.compiling(division.mesh):
            return programs.insert.lower(states, staged, pair, pair).compile().memory_analysis().temp_size_in_bytes

    row = max(a.nbytes // len(a) for a in jax.tree.leaves(states))
    assert temporary_bytes(1) == temporary_bytes(16) < 8 * row


def test_a_freed_slot_has_one_row_exchanged():
    """Of a batch of several rows."""
    sampler = Sampler(over(made("adapter"), 4, 1), slots=1, length=64)
    pairs, insert = [], sampler._admission._programs.insert

    def counted(states, staged, rows, slots):
        pairs.append((len(rows), int((slots < 4).sum())))
        return insert(states, staged, rows, slots)

    sampler._admission._programs = sampler._admission._programs._replace(insert=counted)
    prompts = prompts_of((20,) * 9)
    new = [4 + 5 * index for index in range(9)]
    with sampler:
        assert len(list(sampler.run(prompts, new))) == 9
    assert pairs[0] == (4, 4) and (1, 1) in pairs and sum(placed for _, placed in pairs) == 9
    assert all(count == next_power(placed) for count, placed in pairs)


def test_beginnings_of_prompts_are_reused_on_all_devices():
    """Also by a prompt that another device prefills, and with the rows of one device."""
    model = adapted_model(model_of(max_position_embeddings=512), r=4)
    [beginning] = prompts_of((100,))
    prompts = [[*beginning, *end] for end in prompts_of((3, 9, 20, 40), seed=1)]

    def found(model, slots: int) -> list[tuple[int, list[int]]]:
        sampler = Sampler(model, slots=slots, length=256, prefill_tokens=32, prefix_bytes=1 << 22)
        # The first one's states are there before the others come.
        return reused_and_ids(sampler, (prompts[:1], prompts[1:]), 5)

    expected = found(model, 4)
    assert [reused for reused, _ in expected] == [0, 96, 96, 96]
    for sizes in ((2, 1), (2, 2)):
        assert found(over(model, *sizes), 1) == expected


def test_whole_weights_are_converted_on_each_device():
    model, prompts = made("nf4"), prompts_of((5, 9, 3))
    options = dict(slots=17, length=128, free_bytes=1e9)
    whole, divided = (Sampler(over(model, *sizes), **options) for sizes in ((2, 1), (1, 2)))
    assert whole.plan.converted_layers == len(model.layers) and divided.plan.converted_layers == 0
    assert_alike(rows_of(whole, prompts, 4), rows_of(Sampler(model, **options), prompts, 4))
    # The names that profiles show.
    assert [converted._jitted(each, None, whole._division.mesh).__name__ for each in FORMS] == ["_decoded", "_filled"]


@given(st.integers(1, 8), st.integers(1, 6), st.data())
def test_rows_take_slots_of_the_device_with_the_fewest(devices, slots, data):
    """A slot that is given is one of a device with the fewest rows, whichever have ended; until one has, no device has
    two rows more than another.
    """
    mesh = Mesh(np.array(jax.devices()[:devices]).reshape(devices, 1), ("data", "fsdp"))
    rows = SlotRows.__new__(SlotRows)
    rows.requests, rows._division = [None] * (devices * slots), Division(mesh, ()) if devices > 1 else None
    none_ended = True
    for _ in range(data.draw(st.integers(0, 2 * devices * slots))):
        free, taken = rows.free, [slot for slot, request in enumerate(rows.requests) if request is not None]
        assert sorted(free + taken) == list(range(devices * slots))
        counts = [sum(slot // slots == index for slot in taken) for index in range(devices)]
        if taken and (not free or data.draw(st.booleans())):
            rows.requests[data.draw(st.sampled_from(taken))], none_ended = None, False
        else:
            assert counts[free[0] // slots] == min(counts)
            rows.requests[free[0]] = object()
            counts[free[0] // slots] += 1
        assert not none_ended or max(counts) - min(counts) <= 1
