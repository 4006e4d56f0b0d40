"""A sampler over the devices of a mesh gives the rows of one device, of divided weights in its share of the memory."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from tiny_models import adapted_model, over, tiny_model

from jaxtune.models.config import LayerSpec, MoEConfig
from jaxtune.models.decoder import Decoder
from jaxtune.models.files.quant import quantize
from jaxtune.models.generation import slots as device
from jaxtune.models.generation.division import Division, Sharing
from jaxtune.models.generation.generate import generate
from jaxtune.models.generation.requests import Row
from jaxtune.models.generation.sampler import Sampler
from jaxtune.models.generation.slot_rows import SlotRows
from jaxtune.models.placement import partition
from jaxtune.train.data.batches import Batch
from jaxtune.train.objectives.policy import log_probs_of

VOCAB = 512
# Whose rows are whole blocks of a quantised format.
WIDE = dict(hidden_size=128, intermediate_size=256, initializer_range=0.2)


def model_of(dtype: str = "float32", **changes) -> Decoder:
    return tiny_model(dtype, vocab_size=VOCAB, **(dict(initializer_range=0.5) | changes))


MODELS = {
    "adapter": lambda: adapted_model(model_of(), r=4),
    "DoRA, biases": lambda: adapted_model(model_of(mlp_bias=True, qkv_bias=True), r=4, use_dora=True),
    "bf16": lambda: model_of("bfloat16"),
    "nf4": lambda: adapted_model(quantize(model_of(**WIDE), "nf4"), r=4),
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
    other = adapted_model(model_of(), seed=2, r=4)
    sampler = Sampler(divided, slots=2, length=64)
    before = list(sampler.run(prompts, 6))
    sampler.update(over(other, *sizes))
    after = list(sampler.run(prompts, 6))
    for elsewhere in (other, over(other, *reversed(sizes))):
        with pytest.raises(ValueError, match="Sampler: update: these weights are on other devices"):
            sampler.update(elsewhere)
    assert [row.ids for row in after] == generate(other, prompts, 6) != [row.ids for row in before]


def test_devices_prefill_side_by_side():
    """Each a long prompt, a pack, or a lone prompt, so that N devices take as many programs as one for an Nth."""
    model = adapted_model(model_of(max_position_embeddings=512), r=4)
    divided, calls = over(model, 2, 1), []

    def programs_of(model, devices: int, lengths, **options) -> list[str]:
        sampler = Sampler(model, slots=8 // devices, length=256, **(dict(prefill_tokens=64) | options))
        prefills = sampler._prefills
        for name in ("prefill", "pack", "extend"):
            function = getattr(prefills._programs, name)

            def counted(*arguments, name=name, function=function):
                calls.append(name)
                return function(*arguments)

            prefills._programs = prefills._programs._replace(**{name: counted})
        calls.clear()
        list(sampler.run(prompts_of(lengths), 2))
        return sorted(calls)

    for lengths, options in (
        ((150, 160, 170, 180), {}),
        ((150, 160, 170, 180), dict(prefix_bytes=1 << 22)),
        ((20, 20, 20, 20, 20, 20, 20, 20), {}),
        ((20, 20, 20, 20, 20, 20, 20, 20), dict(prefill_tokens=256)),
        ((40, 40, 40, 40), dict(prefills_alone=True)),
    ):
        half = programs_of(model, 1, lengths[: len(lengths) // 2], **options)
        assert programs_of(divided, 2, lengths, **options) == half and half


def test_beginnings_of_prompts_are_reused_on_all_devices():
    """Also by a prompt that another device prefills, and with the rows of one device."""
    model = adapted_model(model_of(max_position_embeddings=512), r=4)
    [beginning] = prompts_of((100,))
    prompts = [[*beginning, *end] for end in prompts_of((3, 9, 20, 40), seed=1)]

    def found(model, slots: int) -> list[tuple[int, list[int]]]:
        sampler = Sampler(model, slots=slots, length=256, prefill_tokens=32, prefix_bytes=1 << 22)
        rows = []
        for few in (prompts[:1], prompts[1:]):  # the first one's states are there before the others come
            requests: dict[int, list[int]] = {sampler.submit(prompt, 5): [] for prompt in few}
            while sampler.pending:
                for piece in sampler.step():
                    requests[piece.request] += piece.ids
                    if piece.finish_reason is not None:
                        rows.append((piece.request, piece.reused, requests[piece.request]))
        return [(reused, ids) for _, reused, ids in sorted(rows)]

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


@given(st.integers(1, 8), st.integers(1, 6), st.data())
def test_rows_take_slots_of_the_device_with_the_fewest(devices, slots, data):
    """No device has two rows more than another while slots are given and none is freed; then ends of any row."""
    mesh = Mesh(np.array(jax.devices()[:devices]).reshape(devices, 1), ("data", "fsdp"))
    rows = SlotRows.__new__(SlotRows)
    rows.requests, rows._division = [None] * (devices * slots), Division(mesh, ()) if devices > 1 else None
    for _ in range(data.draw(st.integers(0, 2 * devices * slots))):
        free, taken = rows.free, [slot for slot, request in enumerate(rows.requests) if request is not None]
        assert sorted(free + taken) == list(range(devices * slots))
        counts = [sum(slot // slots == index for slot in taken) for index in range(devices)]
        if taken and (not free or data.draw(st.booleans())):
            rows.requests[data.draw(st.sampled_from(taken))] = None
        else:
            assert counts[free[0] // slots] == min(counts)
            rows.requests[free[0]] = object()
