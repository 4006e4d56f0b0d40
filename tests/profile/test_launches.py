"""Kernels without an instruction's name, as in CUDA graphs, find theirs."""

from __future__ import annotations

import itertools
import random
import re

import jax
import jax.numpy as jnp
import pytest
from jaxlib import _hlo

from jaxtune.profile.hlo import Module, flops, moved_bytes
from jaxtune.profile.launches import Launch, join
from jaxtune.profile.messages import HloProto
from jaxtune.profile.weights import linear_of


def module_of(function, *arguments) -> Module:
    """Of arguments that are shapes of float32, or trees of ShapeDtypeStruct."""
    made = [jax.ShapeDtypeStruct(a, "float32") if isinstance(a, tuple) else a for a in arguments]
    compiled = jax.jit(function).lower(*made).compile()
    return parsed(compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto())


def parsed(proto: bytes) -> Module:
    made = HloProto()
    made.hlo_module.ParseFromString(proto)
    return Module(made)


def layers(x, *weights):
    for index, weight in enumerate(weights):
        with jax.named_scope(f"layer{index}"):
            x = jnp.tanh(jax.lax.optimization_barrier(x)) @ weight
    return x


@pytest.fixture(scope="module")
def module():
    return module_of(layers, (64, 32), *[(32, 32)] * 5)


def launches_of(module: Module, executions: int) -> tuple[list[Launch], list[str]]:
    """As a graph shows them: products under a library's name, fusions under the first one that is alike."""
    names: dict[int, str] = {}
    launches, expected = [], []
    for _ in range(executions):
        for instruction in module.launches():
            if instruction.opcode == "fusion":
                computation = module.computation(instruction.called[0])
                name = names.setdefault(computation.fingerprint, re.sub(r"\W", "_", instruction.name))
            elif flops(instruction):
                name = "nvjet_sm90_tst_128x256"
            else:
                name = re.sub(r"\W", "_", instruction.name)
            launches.append(Launch(name, "command_buffer_1", False))
            expected.append(instruction.name)
    return launches, expected


def test_the_program_has_alike_fusions_under_one_fingerprint(module):
    fusions = [i for i in module.launches() if i.opcode == "fusion"]
    prints = {module.computation(i.called[0]).fingerprint for i in fusions}
    assert len(fusions) >= 5 > len(prints)


@pytest.mark.parametrize("executions", [1, 3])
def test_each_kernel_of_each_execution_finds_its_instruction(module, executions):
    launches, expected = launches_of(module, executions)
    join(module, launches)
    assert [launch.instruction.name for launch in launches if launch.instruction] == expected
    size = len(expected) // executions
    assert [launch.execution for launch in launches] == [i // size for i in range(len(expected))]


def test_a_name_in_the_trace_finds_a_kernel_that_nothing_else_tells(module):
    launches, expected = launches_of(module, 2)
    for index in (0, 3, len(launches) - 1):
        launches[index].name, launches[index].hlo_op = "kernel_of_a_library", expected[index]
    join(module, launches)
    assert [launch.instruction.name for launch in launches if launch.instruction] == expected


def test_a_pallas_kernel_finds_its_instruction_whatever_its_name():
    """Not a product of the vendor's, though its name says matmul."""
    module = module_of(layers, (64, 32), *[(32, 32)] * 5)
    launches, expected = launches_of(module, 2)
    kernels = [i for i in module.launches() if flops(i)][1::2]
    for instruction in kernels:
        instruction.opcode, instruction.target = "custom-call", "mosaic_gpu_v2"
    names = {i.name for i in kernels}
    for launch, name in zip(launches, expected, strict=True):
        launch.name = "some_matmul_mosaic_gpu_kernel" if name in names else launch.name
    join(module, launches)
    assert [launch.instruction.name for launch in launches if launch.instruction] == expected


def test_extra_kernels_do_not_shift_the_others(module):
    launches, expected = launches_of(module, 2)
    draw = random.Random(0)
    for _ in range(6):
        launches.insert(draw.randrange(len(launches)), Launch("somebody_elses_kernel", "command_buffer_1", False))
    join(module, launches)
    mine = [launch for launch in launches if launch.name != "somebody_elses_kernel"]
    assert [launch.instruction.name for launch in mine if launch.instruction] == expected


def test_kernels_that_counting_puts_far_from_their_neighbours_find_a_free_place_between_them():
    """The trace lacks the second product and has another program's after the last, so that no count of products
    fits."""
    calls = [f"other{index}" for index in range(560)]
    calls[::140] = [f"product{index}" for index in range(4)]
    targets = [name if name[0] == "o" else "__cublas$lt$matmul" for name in calls]
    lines = [
        f'  %{name} = f32[64] custom-call(f32[64] %{before}), custom_call_target="{target}"'
        for name, before, target in zip(calls, ["x", *calls], targets)
    ]
    head = ["HloModule m, is_scheduled=true", "ENTRY main {", "  %x = f32[64] parameter(0)"]
    text = "\n".join([*head, *lines, "  ROOT %out = (f32[64]) tuple(f32[64] %other559)", "}"])
    module = parsed(_hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto())
    expected = [*calls[:140], *calls[141:490], None, *calls[490:]]
    names = ["nvjet_sm90_tst_128x256" if name is None or name[0] == "p" else name for name in expected]
    launches = [Launch(name, "command_buffer_1", False) for name in names]
    join(module, launches)
    assert [launch.instruction and launch.instruction.name for launch in launches] == expected


def test_a_program_cut_at_its_end_keeps_what_is_known(module):
    launches, expected = launches_of(module, 2)
    del launches[-3:], expected[-3:]
    join(module, launches)
    found = [launch.instruction.name if launch.instruction else None for launch in launches]
    right = sum(a == b for a, b in zip(found, expected, strict=True))
    wrong = sum(a is not None and a != b for a, b in zip(found, expected, strict=True))
    assert right >= len(expected) - 4
    assert wrong <= 2


def test_a_trace_that_begins_or_ends_within_a_program_finds_the_instructions_of_the_rest():
    """As where a capture begins while it runs; its layers are not all alike."""
    module = module_of(layers, (64, 32), (32, 48), *[(48, 48)] * 4, (48, 16))
    size = len(launches_of(module, 1)[0])
    for first, last in itertools.product(range(size), repeat=2):  # missing of the first and of the last execution
        if first + last > 2 * size - 4:
            continue  # nearly nothing of either is there
        rows = slice(first, 3 * size - last)
        launches, expected = (made[rows] for made in launches_of(module, 3))
        join(module, launches)
        assert [launch.instruction and launch.instruction.name for launch in launches] == expected, (first, last)
        assert [launch.execution for launch in launches] == [index // size for index in range(3 * size)][rows]


def test_instructions_that_a_cpu_runs_in_another_order_are_of_one_run(module):
    names = [instruction.name for instruction in module.launches()]
    launches = [Launch(name, name, False) for name in names[len(names) // 2 :] + names[: len(names) // 2]]
    join(module, launches)
    assert [launch.instruction and launch.instruction.name for launch in launches] == [one.name for one in launches]
    assert {launch.execution for launch in launches} == {0}


_COLLECTIVES = """HloModule m, is_scheduled=true

add {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT s = f32[] add(a, b)
}

scatter {
  p = f32[64] parameter(0)
  ROOT reduce-scatter = f32[32] reduce-scatter(p), replica_groups={{0,1}}, dimensions={0}, to_apply=add
}

ENTRY main {
  x = f32[64] parameter(0)
  gather = (f32[64], f32[128]) all-gather-start(x), replica_groups={{0,1}}, dimensions={0}
  gathered = f32[128] all-gather-done(gather)
  reduce = f32[64] all-reduce-start(x), replica_groups={{0,1}}, to_apply=add
  reduced = f32[64] all-reduce-done(reduce)
  scatter = ((f32[64]), f32[32]) async-start(x), calls=scatter
  scattered = f32[32] async-done(scatter), calls=scatter
  ROOT out = (f32[128], f32[64], f32[32]) tuple(gathered, reduced, scattered)
}
"""


def test_asynchronous_collectives_read_their_operand_once():
    """What begins one gives its operand beside its result."""
    module = parsed(_hlo.hlo_module_from_text(_COLLECTIVES).as_serialized_hlo_module_proto())
    moved = {i.name: moved_bytes(i) for i in module.launches()}
    assert moved == {"gather": 4 * (64 + 128), "reduce": 4 * (64 + 64), "scatter": 4 * (64 + 32)}


def test_loops_repeat_their_body():
    def loop(x, w):
        return jax.lax.fori_loop(0, 7, lambda _, x: jnp.tanh(x @ w), x)

    module = module_of(loop, (64, 32), (32, 32))
    assert sum(flops(i) for i in module.launches()) == 7 * 2 * 64 * 32 * 32


# As XLA writes a chunk's gradient into its place: the vendor's product stands inside a fusion.
IN_PLACE = """HloModule m, is_scheduled=true

%wrapped (p0: bf16[64,32], p1: bf16[32,16], p2: bf16[4,64,16], p3: s32[]) -> bf16[4,64,16] {
  %p0 = bf16[64,32]{1,0} parameter(0)
  %p1 = bf16[32,16]{1,0} parameter(1)
  %p2 = bf16[4,64,16]{2,1,0} parameter(2)
  %p3 = s32[] parameter(3)
  %zero = s32[] constant(0)
  %product = (bf16[64,16]{1,0}, s8[64]{0}) custom-call(%p0, %p1), custom_call_target="__cublas$lt$matmul",
    backend_config={"gemm_backend_config":{"dot_dimension_numbers":
      {"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  %taken = bf16[64,16]{1,0} get-tuple-element(%product), index=0
  %row = bf16[1,64,16]{2,1,0} bitcast(%taken)
  ROOT %update = bf16[4,64,16]{2,1,0} dynamic-update-slice(%p2, %row, %p3, %zero, %zero)
}

ENTRY %main (a: bf16[64,32], b: bf16[32,16], c: bf16[4,64,16], d: s32[]) -> bf16[4,64,16] {
  %a = bf16[64,32]{1,0} parameter(0)
  %b = bf16[32,16]{1,0} parameter(1)
  %c = bf16[4,64,16]{2,1,0} parameter(2)
  %d = s32[] parameter(3)
  ROOT %fusion = bf16[4,64,16]{2,1,0} fusion(%a, %b, %c, %d), kind=kCustom, calls=%wrapped
}
"""


# Beside cublasLt, XLA calls cuBLAS, oneDNN on a CPU, and cublasLt for FP8.
VENDORS = ("__cublas$lt$matmul", "__cublas$gemm", "__onednn$matmul", "__cublas$lt$matmul$f8")


@pytest.mark.parametrize("target", VENDORS)
def test_a_vendor_product_counts_without_its_workspace(target):
    text = """HloModule m, is_scheduled=true

ENTRY %main (a: bf16[64,32], b: bf16[32,16]) -> (bf16[64,16], s8[4096]) {
  %a = bf16[64,32]{1,0} parameter(0)
  %b = bf16[32,16]{1,0} parameter(1)
  ROOT %product = (bf16[64,16]{1,0}, s8[4096]{0}) custom-call(%a, %b), custom_call_target="TARGET",
    backend_config={"gemm_backend_config":{"dot_dimension_numbers":
      {"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
}
""".replace("TARGET", target)
    module = parsed(_hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto())
    (product,) = module.launches()
    assert product.is_gemm
    assert flops(product) == 2 * 64 * 32 * 16
    assert moved_bytes(product) == 2 * (64 * 32 + 32 * 16 + 64 * 16)


@pytest.mark.parametrize("target", VENDORS)
def test_a_vendor_product_inside_a_fusion_is_found(target):
    text = IN_PLACE.replace("__cublas$lt$matmul", target)
    module = parsed(_hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto())
    (fusion,) = module.launches()
    assert flops(fusion) == 2 * 64 * 32 * 16
    launches = [Launch("nvjet_sm90_tst_192x176_64x4_1x2_h_bz_coopB_NNT", "command_buffer_1", False)]
    join(module, launches)
    assert launches[0].instruction is fusion


PALLAS = """HloModule pallas, is_scheduled=true

ENTRY %main (x: bf16[40,64], w: bf16[2,32,64], q: bf16[1,40,4,16]) -> (bf16[48,32], bf16[1,40,4,16]) {
  %x = bf16[40,64]{1,0} parameter(0)
  %w = bf16[2,32,64]{2,1,0} parameter(1)
  %q = bf16[1,40,4,16]{3,2,1,0} parameter(2)
  %a = bf16[48,32]{1,0} custom-call(%x, %w), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(f)/grouped_matmul/mpmd_map"}
  %c = bf16[1,40,4,16]{3,2,1,0} custom-call(%q), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(f)/attention_forward/mpmd_map"}
  ROOT %all = (bf16[48,32]{1,0}, bf16[1,40,4,16]{3,2,1,0}) tuple(%a, %c)
}
"""  # noqa: E501


def test_pallas_products_count_their_flops():
    module = parsed(_hlo.hlo_module_from_text(PALLAS).as_serialized_hlo_module_proto())
    assert [flops(i) for i in module.launches()] == [2 * 48 * 32 * 64, 0]


def test_bytes_count_each_operand_and_result_once():
    module = module_of(lambda x, y: jnp.tanh(x) * 2 + y, (1000, 100), (1000, 100))
    (fusion,) = module.launches()
    assert moved_bytes(fusion) == 3 * 4 * 1000 * 100


def test_bytes_of_operands_that_differ_in_size():
    """Also the first, whose number protobuf leaves out."""
    module = module_of(lambda wide, row: wide * row + 1, (1000, 100), (100,))
    (fusion,) = (i for i in module.launches() if i.opcode == "fusion")
    assert moved_bytes(fusion) == 4 * (2 * 1000 * 100 + 100)


def test_bytes_of_a_slice_are_what_is_sliced():
    module = module_of(lambda x: jnp.tanh(x[10:20]), (1000, 100))
    assert sum(moved_bytes(i) for i in module.launches()) == 2 * 4 * 10 * 100


def test_a_product_is_told_by_its_weight():
    def loss(frozen, lora, x):
        with jax.named_scope("mlp"):
            hidden = jnp.tanh(x @ frozen["layers"][0]["up_proj"]["kernel"])
            thin = (x @ lora["layers"][0]["up_proj"]["a"].T) @ lora["layers"][0]["up_proj"]["b"].T
        return ((hidden + thin) ** 2).sum()

    def shape(*dims):
        return jax.ShapeDtypeStruct(dims, "float32")

    frozen = {"layers": [{"up_proj": {"kernel": shape(32, 64)}}]}
    lora = {"layers": [{"up_proj": {"a": shape(4, 32), "b": shape(64, 4)}}]}
    module = module_of(jax.grad(loss, argnums=1), frozen, lora, shape(128, 32))
    found = [(linear_of(i), flops(i)) for i in module.launches() if flops(i)]
    named = [work for name, work in found if name == "up_proj"]
    # by a weight: the large product, the adapter's two, and the gradient through b; not the two weight gradients
    assert sorted(named) == sorted([2 * 128 * 32 * 64, 2 * 128 * 32 * 4, 2 * 128 * 4 * 64, 2 * 128 * 64 * 4])
    assert {name for name, _ in found} == {"up_proj", ""}
