"""The kernels of quant_matmul and 8-bit Adam lower, pass ptxas without spilling, and stand where they should."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from jaxtune.pallas import dispatch
from jaxtune.pallas.adam8 import api as adam8
from jaxtune.pallas.formats import FP8, MXFP4, NF4
from jaxtune.pallas.formats.fp8 import ROW, TILE
from jaxtune.pallas.formats.int8 import Int8
from jaxtune.pallas.formats.nvfp4 import NVFP4
from jaxtune.pallas.quant_matmul import LoraWeights, fp8_product, line_matmul, mosaic, quant_matmul
from jaxtune.train.engine.xla_options import compiler_options
from jaxtune.train.optimizer.adam8 import scale_by_adam_8bit
from tests.gpu.aot.target import H200

E4M3 = jnp.float8_e4m3fn
KERNEL = 'custom_call_target="mosaic_gpu_v2"'


def compiled(function, *arguments, compiler_options=None, **options):
    where = H200.sharding()
    arguments = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where), arguments)
    with H200.lowering():
        return jax.jit(function, **options).lower(*arguments).compile(compiler_options=compiler_options)


def packed(rows, columns, double_quant=True):
    array = jax.ShapeDtypeStruct((rows, columns), jnp.bfloat16)
    return jax.eval_shape(lambda a: NF4.encode(a, double_quant), array)


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.fixture
def ptxas(monkeypatch, capfd):
    """Bytes of registers that the assembler spilled, in each function compiled since; report.registers: a thread's."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")

    def report():
        captured = capfd.readouterr()
        text = captured.out + captured.err
        assert text.count("Compiling entry function") == 1
        report.registers = int(re.findall(r"Used (\d+) registers", text)[0])
        return [int(number) for number in re.findall(r"(\d+) bytes spill", text)]

    return report


@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_dequantising(dtype, double_quant, ptxas):
    program = compiled(lambda w: mosaic.dequantize(w, dtype), packed(1024, 4096, double_quant))
    assert program.as_text().count(KERNEL) == 1
    assert program.memory_analysis().temp_size_in_bytes == 0  # nothing beside the codes and the result
    assert not any(ptxas())


def test_dequantising_mxfp4(ptxas):
    weight = MXFP4(array(3, 1024, 2048, dtype=jnp.uint8), array(3, 1024, 128, dtype=jnp.uint8))
    program = compiled(lambda w: mosaic.dequantize(w, jnp.bfloat16), weight)
    assert program.as_text().count(KERNEL) == 1
    assert program.memory_analysis().temp_size_in_bytes == 0
    assert not any(ptxas())


@pytest.mark.parametrize("divides", [True, False])
def test_dequantising_nvfp4(divides, ptxas):
    codes, scales = array(1024, 2048, dtype=jnp.uint8), array(1024, 256, dtype=jnp.float8_e4m3fn)
    weight = NVFP4(codes, scales, array(1, 1, dtype=jnp.float32), divides=divides)
    program = compiled(lambda w: mosaic.dequantize(w, jnp.bfloat16), weight)
    assert program.as_text().count(KERNEL) == 1
    assert program.memory_analysis().temp_size_in_bytes == 0
    assert " fusion(" not in program.as_text()  # no other kernel computes a table of scales
    assert not any(ptxas())


def test_int8_needs_no_memory_beside_the_weight():
    """It has no kernel: XLA decodes in one pass, and encodes with numbers for rows alone."""
    weight = Int8(array(1024, 4096, dtype=jnp.int8), array(1024, dtype=jnp.float32), "bfloat16")
    assert compiled(lambda w: w.decode(jnp.bfloat16), weight).memory_analysis().temp_size_in_bytes == 0
    encoding = compiled(Int8.encode, array(1024, 4096, dtype=jnp.bfloat16)).memory_analysis()
    assert encoding.temp_size_in_bytes <= 4 * 4 * 1024


@pytest.mark.parametrize(
    ("tokens", "columns"),
    [(1, 1024), (1, 4096), (1, 14_336), (1, 28_672), (1, 4608), (16, 4096)],  # by rows, but for the last two
)
@pytest.mark.parametrize("double_quant", [True, False])
def test_small_product(tokens, columns, double_quant, ptxas):
    program = compiled(mosaic.small_matmul, array(tokens, columns), packed(1024, columns, double_quant))
    assert program.as_text().count(KERNEL) == 1
    assert program.memory_analysis().temp_size_in_bytes == 0
    assert not any(ptxas())


@pytest.mark.parametrize(
    ("tokens", "tile"),
    [
        (1, line_matmul.Tile(7, 2, 4)),
        (1, line_matmul.Tile(7, 2, 2, 1, 2)),
        (16, line_matmul.Tile(7, 2, 3)),
        (4, line_matmul.Tile(2, 4, 3, 1, 2)),
        (16, line_matmul.Tile(8, 2, 2, 4)),
    ],
)
@pytest.mark.parametrize("double_quant", [True, False])
def test_small_product_by_lines(tokens, tile, double_quant, ptxas):
    weight = packed(1024, 4096, double_quant)
    program = compiled(lambda x, w: mosaic.small_matmul(x, w, tile), array(tokens, 4096), weight)
    assert program.as_text().count(KERNEL) == 1
    assert program.memory_analysis().temp_size_in_bytes == 0  # the parts of a sum are added within a cluster
    assert not any(ptxas())


def test_both_directions_decode_by_the_kernel():
    def step(x, weights, dout):
        outputs, pullback = jax.vjp(lambda x: quant_matmul(x, weights), x)
        return pullback((dout, *outputs[1:]))

    program = compiled(step, array(256, 1024), [packed(2048, 1024), packed(1024, 1024)], array(256, 2048))
    assert dispatch.record["quant_matmul"] == ("mosaic", {})
    assert program.as_text().count(KERNEL) == 3  # forward of the second (its result is the cotangent), backward of both


@pytest.mark.parametrize("block", [ROW, TILE])
@pytest.mark.parametrize(
    ("tokens", "rank", "columns"),
    [(16384, 0, 4096), (16384, 16, 1152), (16384, 48, 4096), (296, 48, 512)],  # the last is that of the first use
)
def test_product_of_codes(tokens, rank, columns, block, ptxas):
    """With and without an adapter, in tiles of 256 columns and of 128; the last tile of rows overlaps."""
    codes = (array(tokens, 4096, dtype=E4M3), array(tokens, 32 if block == TILE else 1, dtype=jnp.float32))
    weight = jax.eval_shape(lambda a: FP8.encode(a, block), array(columns, 4096))
    more = (array(tokens, rank), array(columns, rank)) if rank else None

    def product(codes, weight, more):
        return fp8_product.forward(codes, weight, more, jnp.bfloat16, "mosaic")

    assert compiled(product, codes, weight, more).as_text().count(KERNEL) == 1
    assert max(ptxas()) <= (16 if tokens < 16384 else 0)


@pytest.mark.parametrize("block", [ROW, TILE])
def test_transposed_codes_of_weights_that_share_x_are_read_where_they_are(block, monkeypatch, capfd):
    """The backward neither joins nor copies them: query, key and value, with an adapter in the kernel."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")

    def step(x, weights, loras, douts):
        run = functools.partial(quant_matmul, fp8=True, implementation="mosaic")
        return jax.vjp(lambda x: run(x, weights, loras), x)[1](douts)

    outs = (4096, 1024, 1024)
    weights = [jax.eval_shape(lambda a: FP8.encode(a, block).with_transposed(), array(size, 2048)) for size in outs]
    loras = [LoraWeights(array(16, 2048), array(size, 16)) for size in outs]
    text = compiled(step, array(16384, 2048), weights, loras, tuple(array(16384, size) for size in outs)).as_text()
    assert sum(KERNEL in line and "fp8_matmul" in line for line in text.splitlines()) == 1
    assert not re.search(r"f8e4m3fn\[(2048|6144),\d+\]\S* (copy|transpose|fusion|concatenate)", text)
    captured = capfd.readouterr()
    spilled = re.findall(r"(\d+) bytes spill", captured.out + captured.err)
    assert spilled and not any(map(int, spilled))


@pytest.mark.full
@pytest.mark.parametrize("block", [ROW, TILE])
def test_what_an_adapter_has_beyond_the_kernels_columns_is_added_by_one_gemm(block):
    """Query, key and value with adapters of rank 64: in the forward the kernel takes each whole, in the backward 64 of
    192 columns, and a GEMM adds the others to what the kernel wrote, where it lies."""

    def step(x, weights, loras, douts):
        outputs, pullback = jax.vjp(lambda x: quant_matmul(x, weights, loras, fp8=True, implementation="mosaic"), x)
        return outputs, pullback(douts)

    outs = (4096, 1024, 1024)
    weights = [jax.eval_shape(lambda a: FP8.encode(a, block), array(size, 2048)) for size in outs]
    loras = [LoraWeights(array(64, 2048), array(size, 64)) for size in outs]
    where = array(512, 2048), weights, loras, tuple(array(512, size) for size in outs)
    program = compiled(step, *where, compiler_options=compiler_options("gpu", deterministic=False))
    assert program.as_text().count(KERNEL) == 4
    sums = [line for line in program.as_text().splitlines() if re.search(r'cublas.*"beta":1', line)]
    assert len(sums) == 1 and "output_to_operand_aliasing" in sums[0] and "bf16[512,2048]" in sums[0]


@pytest.mark.parametrize(("implementation", "block"), [("mosaic", ROW), ("mosaic", TILE), ("reference", ROW)])
def test_products_in_fp8_take_the_codes_as_they_are(implementation, block):
    """Over e4m3, by our kernel or by cuBLASLt (XLA joins the forwards, too); no weight is decoded."""

    def step(x, weights, douts):
        run = functools.partial(quant_matmul, fp8=True, implementation=implementation)
        outputs, pullback = jax.vjp(lambda x: run(x, weights), x)
        return outputs, pullback(douts)

    weights = [jax.eval_shape(lambda a: FP8.encode(a, block), array(size, 1024)) for size in (4096, 1024)]
    options = compiler_options("gpu", deterministic=False)
    where = array(512, 1024), weights, (array(512, 4096), array(512, 1024))
    text = compiled(step, *where, compiler_options=options).as_text()
    # Two forwards, a backward for both.
    assert (text.count(KERNEL), text.count("matmul$f8")) == ((3, 0) if implementation == "mosaic" else (0, 2))
    assert not re.search(r"(bf16|f32)\[(4096|5120),1024\]|(bf16|f32)\[1024,5120\]", text)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((1024, 4096), jnp.bfloat16), ((1024, 4096), jnp.float32), ((1023, 4095), jnp.bfloat16)]
)
def test_adam_is_one_kernel_that_updates_a_donated_state_in_place(shape, dtype, ptxas):
    """Beside it: the step count and the factors, and of an odd size less than a chunk, and the direction's parts put
    together. The gradient is read as it is, and where the step is not finite, nothing is chosen afterwards."""
    adam = scale_by_adam_8bit(0.9, 0.999, 1e-8)
    gradient = array(*shape, dtype=dtype)
    numbers = array(dtype=jnp.float32), array(dtype=jnp.bool_)

    def update(gradient, state, scale, finite):
        return adam.update(gradient, state, scale=scale, finite=finite)

    program = compiled(update, gradient, jax.eval_shape(adam.init, gradient), *numbers, donate_argnums=1)
    assert dispatch.record["adamw_8bit"] == ("mosaic", {})
    assert program.as_text().count(KERNEL) == 1
    odd = gradient.size % 2048 != 0
    memory = program.memory_analysis()
    assert memory.temp_size_in_bytes < 10_000 + odd * 4 * gradient.size
    assert memory.alias_size_in_bytes > 2 * gradient.size
    assert not re.search(r"= (f32\[\d+\]|u8\[\d+,256\])\S* copy\(", program.as_text())
    assert not any(ptxas())
    registers = 128 * adam8.WARPGROUPS * -(-ptxas.registers // 8) * 8  # of a program
    assert 65536 // registers == 1  # of a multiprocessor, as its grid has


@pytest.mark.parametrize("outs", [(512, 512, 512), (4096, 1024, 1024)])  # XLA would multiply small weights in one GEMM
def test_an_adapters_part_is_added_before_the_output_is_rounded(outs):
    """The adapter's product is the addend of the weight's GEMM, not the reverse: added to an output that is already
    rounded to 16 bits, a part smaller than half a unit in its last place is lost."""
    size, tokens = outs[0], 4096
    loras = [LoraWeights(array(16, size, dtype=jnp.float32), array(out, 16, dtype=jnp.float32)) for out in outs]

    program = compiled(
        lambda x, weights, loras: quant_matmul(x, weights, loras),
        array(tokens, size),
        [array(out, size) for out in outs],
        loras,
        compiler_options=compiler_options("gpu", False),
    )

    text = program.as_text()
    shapes = dict(re.findall(r"%([\w.-]+) = \(?(\w+\[[\d,]*\])", text))
    added = [re.search(r"custom-call\(([^)]*)\)", line) for line in text.splitlines() if '"beta":1' in line]
    firsts = [shapes[call.group(1).split(",")[0].strip(" %")] for call in added if call is not None]
    assert firsts == [f"bf16[{tokens},{size}]"] * len(outs)
