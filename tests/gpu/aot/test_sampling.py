"""The programs of the sampling engine, compiled for a GPU that is not there: caches are updated where they lie."""

from __future__ import annotations

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from benchmarks.shapes import SHAPES
from jaxtune.models.decoder import Decoder
from jaxtune.models.files.quant import compute_in_fp8, quantize
from jaxtune.models.generation import slots as device
from jaxtune.models.generation.converted import Converted
from jaxtune.models.generation.division import Division
from jaxtune.models.generation.sampling import Kind
from jaxtune.models.generation.structure import rounded_indices, structure_of, with_cache
from jaxtune.models.linear import GatedLora
from jaxtune.models.lora import freeze, get_peft_model, linears
from jaxtune.models.placement import partition
from jaxtune.models.registry import config_from_hf
from tests.gpu.aot.target import H200

SLOTS, CAPACITY, STEPS = 64, 768, 8
_TYPES = {"bfloat16": "bf16", "float32": "f32", "bool": "pred", "int32": "s32", "float8_e4m3fn": "f8e4m3fn"}


def with_adapters_of_rows(model: Decoder, rank: int = 64) -> Decoder:
    for _, linear in linears(model):
        out_size, in_size = linear.sizes
        sides = jnp.zeros((rank, in_size), model.dtype), jnp.zeros((out_size, rank), model.dtype)
        linear.lora = GatedLora(*sides, jnp.zeros(rank, jnp.int32), jnp.zeros(rank))
    return model


def structure_and_shapes(
    name: str,
    layers: int,
    adapter: bool | str,
    load_in: str | None,
    decodes: int = 0,
    cache: str | None = None,
    **changes,
):
    hf = SHAPES[name] | {"num_hidden_layers": layers} | changes
    if "layer_types" in hf:
        hf |= {"layer_types": hf["layer_types"][:layers]}

    def make():
        model = Decoder(config_from_hf(hf), jax.random.key(0), "bfloat16")
        model = quantize(model, load_in.removesuffix(" products")) if load_in else model
        model = compute_in_fp8(model) if load_in == "fp8 products" else model
        if adapter == "of rows":
            return with_adapters_of_rows(freeze(model))
        experts = ["experts.gate_up_proj", "experts.down_proj"] if model.config.moe else None
        return get_peft_model(model, r=16, target_parameters=experts) if adapter else model

    model = with_cache(nnx.eval_shape(make), cache)
    graph, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten(state)
    structure = structure_of(graph, treedef, model.config)
    for place in rounded_indices(structure, tuple(leaf.shape for leaf in leaves)):
        leaves[place] = leaves[place].update(dtype=jnp.bfloat16)
    if decodes:
        found = []

        def of(arrays):
            new, arrays = Converted(decodes).of(structure, arrays)
            found.append(new)
            return arrays

        leaves = jax.eval_shape(of, leaves)
        structure = found[0]
    return structure, tuple(leaves)


def lowered(
    name: str,
    layers: int,
    adapter: bool | str = False,
    load_in: str | None = None,
    decodes: int = 0,
    slots: int = SLOTS,
    exact: bool = False,
    **changes,
):
    """(the states' shapes, {program: it, lowered}) of a published shape with fewer layers and changed sizes, the first
    `decodes` layers of which are decoded."""
    structure, shapes = structure_and_shapes(name, layers, adapter, load_in, decodes, **changes)
    where = H200.sharding()

    def placed(tree):
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where), tree)

    def ints(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=where)

    with H200.lowering():
        states = placed(device.states_shape(structure, shapes, slots, CAPACITY))
        staged = placed(device.states_shape(structure, shapes, 1, 256))
        live = device.Live(ints(slots), ints(slots), placed(jax.ShapeDtypeStruct((slots,), bool)))
        rows = placed(device.empty_rows(slots, 4, structure.config.vocab_size))
        rows = rows._replace(adapter=ints(slots) if adapter == "of rows" else None)
        chunk = ints(1, 128), *[ints(1)] * 3, *([ints(1)] if adapter == "of rows" else [])
        programs, leaves = device.programs_of(False, slots, exact), list(placed(shapes))
        changed = np.zeros(slots, bool)
        kind = Kind(True, False, False)
        prompts = {
            "prefill": lambda: programs.prefill.lower(structure, 256, leaves, ints(4, 256), ints(4), ints(4)),
            "pack": lambda: programs.pack.lower(structure, 256, leaves, ints(1, 1024), ints(4), ints(4), ints(4)),
        }
        return states, {name: lower() for name, lower in prompts.items() if exact} | {
            "decode": programs.decode.lower(structure, kind, STEPS, leaves, states, live, None, changed, live, rows),
            "insert": programs.insert.lower(states, staged, ints(1), ints(1)),
            "extend": programs.extend.lower(structure, leaves, staged, *chunk),
        }


def copies(text: str, states) -> list[str]:
    """The instructions of a compiled program that copy, convert or transpose an array of a state's shape."""
    found = []
    for shape in {(_TYPES[str(a.dtype)], a.shape) for a in jax.tree.leaves(states)}:
        array = re.escape(f"{shape[0]}[{','.join(map(str, shape[1]))}]")
        found += re.findall(rf"^.*= {array}\S* (?:copy|transpose|copy-start)\(.*$", text, re.MULTILINE)
    return found


CASES = {
    "8B": ("llama-3.1-8b", 2, False, None),
    "8B, adapter": ("llama-3.1-8b", 2, True, None),
    "8B, adapters of rows": ("llama-3.1-8b", 2, "of rows", None),
    "8B NF4, adapters of rows": ("llama-3.1-8b", 2, "of rows", "nf4"),
    "8B NF4, adapter": ("llama-3.1-8b", 2, True, "nf4"),
    "8B NF4, adapter, one layer decoded": ("llama-3.1-8b", 2, True, "nf4", 1),
    "gpt-oss": ("gpt-oss-20b", 2, False, None),
    "experts": ("qwen3-30b-a3b", 2, False, None),
}


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_no_program_copies_a_cache(case):
    states, programs = lowered(*CASES[case])
    for name in ("decode", "insert"):
        program = programs[name].compile()
        assert not copies(program.as_text(), states), name
        memory = program.memory_analysis()
        states_bytes = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(states))
        assert memory.alias_size_in_bytes >= states_bytes, name


def over_two(data: int, fsdp: int, load_in: str | None, slots: int, cache: str | None = None):
    """(the states' shapes, the compiled decode, pack and prefill) of three layers of 8B with an adapter on a mesh of
    two devices, of `slots` slots each."""
    structure, shapes = structure_and_shapes("llama-3.1-8b", 3, True, load_in, cache=cache)
    mesh = H200.mesh(data, fsdp)
    by_rows = NamedSharding(mesh, partition.ROWS)
    places = jax.tree.leaves(partition.shardings(jax.tree.unflatten(structure.treedef, list(shapes)), mesh))
    leaves = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s) for a, s in zip(shapes, places, strict=True)]
    division = Division.of(leaves)
    assert division is not None and division.weights_are_whole == (fsdp == 1)

    def placed(tree):
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=by_rows), tree)

    def ints(*shape):
        return placed(jax.ShapeDtypeStruct(shape, jnp.int32))

    count = 2 * slots
    with H200.lowering(), partition.compiling(mesh):
        states = placed(device.states_shape(structure, shapes, count, CAPACITY))
        flags = placed(jax.ShapeDtypeStruct((count,), bool))
        live = device.Live(ints(count), ints(count), flags)
        rows = placed(device.empty_rows(count, 4, structure.config.vocab_size))
        programs, kind = division.programs(False, slots), Kind(True, False, False)
        lowered = (
            programs.decode.lower(structure, kind, STEPS, leaves, states, live, None, flags, live, rows),
            programs.pack.lower(structure, 256, leaves, ints(2, 2048), *[ints(32)] * 3),
            programs.prefill.lower(structure, 256, leaves, ints(16, 256), ints(16), ints(16)),
        )
        return states, *(program.compile() for program in lowered)


def exchanged_sizes(program) -> list[int]:
    """Elements of each array that a compiled program exchanges."""
    found = re.findall(
        r"^.* = (.*) (?:all-gather|all-to-all|all-reduce|collective-permute)(?:-start)?\(",
        program.as_text(),
        re.MULTILINE,
    )
    shapes = re.findall(r"\[([\d,]*)\]", " ".join(found))
    return [int(np.prod([int(size) for size in shape.split(",") if size])) for shape in shapes]


def body_of_loop(text: str) -> str:
    """What a compiled program's only loop runs, with all that it calls."""
    (name,) = re.findall(r" while\(.*body=%?([\w.\-]+)", text)
    functions = dict(re.findall(r"^(?:ENTRY )?%?([\w.\-]+) \(.*?\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL))
    texts, names = [], [name]
    for name in names:
        texts.append(functions[name])
        names += [called for called in re.findall(r"calls=%?([\w.\-]+)", texts[-1]) if called not in names]
    return "\n".join(texts)


@pytest.mark.full
@pytest.mark.parametrize(("load_in", "cache"), [(None, None), ("nf4", None), (None, "fp8")])
def test_a_step_over_two_devices_exchanges_no_weights(load_in, cache):
    """Only rows and products, five times a layer, in caches that lie where they are; a prefill has two layers whole.
    Adapters are cut once for all steps; columns and heads are read in shards, but for products of codes.
    """
    slots = 32
    states, decode, pack, prefill = over_two(1, 2, load_in, slots, cache)
    assert {str(a.dtype) for a in jax.tree.leaves(states)} == {"float8_e4m3fn" if cache else "bfloat16"}
    body = body_of_loop(decode.as_text())
    moved = re.findall(r"= bf16\[[\d,]+\]\S* (transpose|concatenate)\(", body)
    assert not (moved and load_in is None)
    cut = re.findall(r"^.*dynamic-slice.*$", body, re.MULTILINE)
    assert not [line for line in cut if re.search(r"= \w+\[\d+,16\]", line)]
    sizes = exchanged_sizes(decode)
    assert len(sizes) >= 5 * 3 and max(sizes) <= 2 * slots * SHAPES["llama-3.1-8b"]["vocab_size"]
    memory, layer = decode.memory_analysis(), 2 * 218e6 if load_in is None else 0.6 * 218e6
    states_bytes = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(states)) / 2
    assert memory.alias_size_in_bytes >= states_bytes and memory.temp_size_in_bytes < 0.2e9
    for program in (pack, prefill):
        assert program.memory_analysis().temp_size_in_bytes < 2 * layer + 0.4e9


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_two_devices_exchange_the_inserted_row_alone(sizes, dtype):
    """Of 32 that wait for slots, into caches that lie where they are."""
    structure, shapes = structure_and_shapes("llama-3.1-8b", 3, True, None)
    mesh = H200.mesh(*sizes)
    division = Division(mesh, ())

    def states_of(rows: int, capacity: int):
        states = device.states_shape(structure, shapes, rows, capacity)
        where = NamedSharding(mesh, partition.ROWS)
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, dtype, sharding=where), states)

    pair = jax.ShapeDtypeStruct((1,), jnp.int32, sharding=NamedSharding(mesh, partition.WHOLE))
    states, staged = states_of(2 * SLOTS, CAPACITY), states_of(32, 256)
    with H200.lowering(), partition.compiling(mesh):
        program = division.programs(False, SLOTS).insert.lower(states, staged, pair, pair).compile()
    rows = [a.size // len(a) for a in jax.tree.leaves(staged)]
    assert set(exchanged_sizes(program)) == set(rows)
    memory, of_one = program.memory_analysis(), states_of(SLOTS, CAPACITY)
    state_bytes = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(of_one))
    assert memory.alias_size_in_bytes >= state_bytes and not copies(program.as_text(), of_one)
    assert memory.temp_size_in_bytes <= 8 * max(rows)


@pytest.mark.full
def test_a_step_over_two_devices_with_whole_weights_is_one_device_s():
    """They exchange what the rows made alone, and have the kernels and the memory of a device that is alone."""
    states, decode, pack, prefill = over_two(2, 1, None, SLOTS)
    _, programs = lowered("llama-3.1-8b", 3, True)
    alone = programs["decode"].compile()

    def kernels(program) -> collections.Counter[str]:
        return collections.Counter(re.findall(r' custom-call\(.*custom_call_target="([^"]+)"', program.as_text()))

    assert kernels(decode) == kernels(alone) and kernels(alone)
    assert 0 < sum(exchanged_sizes(decode)) <= 3 * 2 * SLOTS * STEPS * 2
    assert exchanged_sizes(pack) == exchanged_sizes(prefill) == []
    memory, of_one = decode.memory_analysis(), alone.memory_analysis()
    states_bytes = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(states)) / 2
    of_device = jax.tree.map(lambda a: jax.ShapeDtypeStruct((len(a) // 2, *a.shape[1:]), a.dtype), states)
    assert memory.alias_size_in_bytes >= states_bytes and not copies(decode.as_text(), of_device)
    assert memory.temp_size_in_bytes < of_one.temp_size_in_bytes + 1e6


@pytest.mark.full
def test_a_head_is_filled_up_once_for_all_tokens():
    """XLA would copy it for each token of several rows: within the loop, as the product's operand."""
    vocab = 32_003
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": vocab, "num_attention_heads": 4}
    _, programs = lowered("llama-3.2-1b", 1, **sizes, num_key_value_heads=2, head_dim=64)
    text = programs["decode"].compile(compiler_options={"xla_gpu_enable_triton_gemm": False}).as_text()
    pads = [line for line in text.splitlines() if f"bf16[{vocab + 5},256]" in line and " pad(" in line]
    assert len(pads) == 1 and "while" not in pads[0]


@pytest.mark.parametrize(("slots", "most"), [(1, 7), (64, 5), (256, 5)])
def test_a_step_has_few_kernels_beside_its_layers(slots, most):
    """Random numbers and what does not change are computed before the first step, and no step copies anything. Of many
    rows XLA multiplies, but adds up no partial sums in kernels of its own."""
    _, programs = lowered("llama-3.1-8b", 2, slots=slots)
    text = programs["decode"].compile().as_text()
    assert text.count('name = "activated_kernel"') == (2 if slots > 128 else 0)
    assert len(re.findall(r"^.* fusion\(.* kind=k(?:Loop|Input).*while/body", text, re.MULTILINE)) <= most
    assert not re.findall(r"(?:fusion|copy)-start\(", text)


@pytest.mark.full
def test_a_decoded_layer_has_the_kernels_of_plain_weights():
    """Beside a layer that is not decoded."""
    counts = []
    for decodes in (0, 1, 2):
        _, programs = lowered("llama-3.1-8b", 2, True, "nf4", decodes)
        counts.append(programs["decode"].compile().as_text().count('name = "product_kernel"'))
    assert counts == [0, 4, 8]


@pytest.mark.full
def test_a_step_of_experts_sorts_no_tokens():
    """Two kernels multiply by them; chunks of prompts are sorted."""
    _, programs = lowered(*CASES["experts"])
    decode, extend = (programs[name].compile().as_text() for name in ("decode", "extend"))
    assert [decode.count(f'name = "{name}"') for name in ("expert_kernel", "product_kernel")] == [4, 4]
    assert "expert_slots" in extend and "expert_slots" not in decode


def test_prompts_are_multiplied_as_in_training():
    """By the vendor's library, which adds the residual stream too; no weights are put side by side. Of the last layer
    only keys and values are computed."""
    _, programs = lowered("llama-3.1-8b", 2)
    text = programs["extend"].compile().as_text()
    found = re.findall(r"= \(bf16\[128,(\d+)\].* custom-call\(([^)]*)\), custom_call_target=\"__cublas", text)
    operands = [(int(width), given.count("%")) for width, given in found]
    assert sorted(operands) == [(1024, 2)] * 4 + [(4096, 2), *[(4096, 3)] * 2, *[(14336, 2)] * 2]


@pytest.mark.full
def test_an_adapter_adds_no_kernel_to_a_step():
    """Its products are part of the kernels that multiply by the weights."""
    kernels = []
    for adapter in (False, True):
        _, programs = lowered("llama-3.1-8b", 1, adapter)
        text = programs["decode"].compile().as_text()
        kernels.append(collections.Counter(re.findall(r" (fusion|custom-call|copy|convert|reduce|slice)\(", text)))
        assert text.count('name = "product_kernel"') == 4
    assert kernels[0] == kernels[1]


@pytest.mark.full
def test_adapters_of_rows_add_no_kernel_to_a_step():
    """Which columns rows take is computed before the first step."""
    fusions = []
    for adapter in (True, "of rows"):
        _, programs = lowered("llama-3.1-8b", 2, adapter)
        text = programs["decode"].compile().as_text()
        assert text.count('name = "product_kernel"') == 8
        fusions.append(len(re.findall(r"^.* (?:fusion|copy|convert|slice)\(.*while/body", text, re.MULTILINE)))
    assert fusions[0] == fusions[1] > 0


@pytest.mark.parametrize(("slots", "calls"), [(1, 4), (16, 4), (17, 0)])
def test_few_rows_multiply_codes(slots, calls):
    """Products that share x are one kernel, and no step decodes a weight; more rows multiply decoded weights."""
    layers = 2
    _, programs = lowered("llama-3.1-8b", layers, load_in="fp8", slots=slots)
    text = programs["decode"].compile().as_text()
    assert text.count('"coded_kernel"') == calls * layers
    assert ("dequantise" in text) == (not calls)


@pytest.mark.full
@pytest.mark.parametrize("adapter", [True, "of rows"])
@pytest.mark.parametrize(("load_in", "slots"), [("int8", 1), ("nvfp4", 16), ("fp8 products", 64)])
def test_adapters_are_four_kernels_of_a_layer_in_few_bits(load_in, slots, adapter):
    """x A^T of what is multiplied together; the rest is in the kernels of the products, and XLA has none in a layer."""
    counts = []
    for given in (False, adapter):
        _, programs = lowered("llama-3.1-8b", 2, given, load_in, slots=slots)
        text = programs["decode"].compile().as_text()
        counts.append(len(re.findall(r"^.* (?:fusion|custom-call)\(.*while/body", text, re.MULTILINE)))
        assert text.count('name = "thin_kernel"') == (8 if given else 0)
    assert counts[1] <= counts[0] + 8


@pytest.mark.parametrize("slots", [1, 64, 256])
def test_few_rows_multiply_in_fp8(slots):
    """Four products a layer read codes, and what the stream's norm does not round, a kernel does; XLA has the head."""
    layers = 2
    _, programs = lowered("llama-3.1-8b", layers, load_in="fp8 products", slots=slots)
    text = programs["decode"].compile().as_text()
    assert text.count('name = "few_product_kernel"') == 4 * layers
    assert text.count('name = "rounded_rows_kernel"') == 2 * layers + 1
    assert "f8e4m3fn" not in "".join(re.findall(r"^.* (?:convert|copy|pad|fusion)\(.*$", text, re.MULTILINE))


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt-oss-20b", "qwen3-30b-a3b"])
def test_a_step_reads_of_long_caches_what_rows_have(name):
    """So a server has one length of caches."""
    structure, shapes = structure_and_shapes(name, 2, False, None)
    with H200.lowering():
        assert device.reads_lengths(structure, shapes, SLOTS, 8192)
    assert not device.reads_lengths(structure, shapes, SLOTS, 8192)


@pytest.mark.full
@pytest.mark.parametrize("load_in", ["fp8", "int8", "nvfp4"])
def test_a_step_over_codes_has_the_kernels_of_plain_weights(load_in):
    """Query, key and value are one product, and gate and up one with their activation."""
    kernels = []
    for given, name in ((None, "product_kernel"), (load_in, "coded_kernel")):
        _, programs = lowered("llama-3.1-8b", 1, load_in=given, slots=1)
        text = programs["decode"].compile().as_text()
        kernels.append(collections.Counter(re.findall(r" (fusion|custom-call|copy|convert|reduce|slice)\(", text)))
        assert text.count(f'name = "{name}"') == 4
    assert kernels[0] == kernels[1]
