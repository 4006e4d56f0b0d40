"""The grouped product compiles for a H200 at published shapes, both directions, adapters in the same kernel; routing
stores nothing of the size pairs x experts."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from benchmarks.shapes import SHAPES as PUBLISHED
from jaxtune.models.decoder import Decoder
from jaxtune.models.files.quant import quantize
from jaxtune.models.lora import get_peft_model
from jaxtune.models.registry import config_from_hf
from jaxtune.models.stack.residual_plan import KEEP, RECOMPUTE, ResidualPlan
from jaxtune.pallas import dispatch
from jaxtune.pallas.formats import FP8, MXFP4, NF4
from jaxtune.pallas.formats.fp8 import ROW, TILE
from jaxtune.pallas.grouped_matmul import GroupedLora, fp8_experts, grouped_matmul, mosaic
from jaxtune.pallas.grouped_matmul.layout import groups_of
from jaxtune.pallas.routing import matmul_of_tokens, matmul_to_tokens, permute, route, unpermute
from jaxtune.train.data.batches import Batch
from jaxtune.train.engine.xla_options import compiler_options
from jaxtune.train.program.step import StepProgram
from tests.gpu.aot.target import H200

GPT_OSS, QWEN3 = PUBLISHED["gpt-oss-20b"], PUBLISHED["qwen3-30b-a3b"]
BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
SHAPES = {"gpt-oss": (32, 65_536, 2880, 5760, True), "qwen3-30b-a3b": (128, 131_072, 768, 2048, False)}


@pytest.mark.parametrize("model", SHAPES)
def test_kernels_compile_for_an_h200(model):
    experts, pairs, in_size, out_size, transposed = SHAPES[model]
    where = H200.sharding()

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    def step(x, weight, a, b, sizes, dout):
        groups = groups_of(sizes, pairs)

        def run(x, a, b):
            return grouped_matmul(x, weight, groups, GroupedLora(a, b, 2.0), transposed=transposed)

        out, pullback = jax.vjp(run, x, a, b)
        return out, *pullback(dout)

    sizes = array(experts, dtype=jnp.int32)
    rows = jax.eval_shape(lambda sizes: groups_of(sizes, pairs), sizes).rows
    weight = array(experts, in_size, out_size) if transposed else array(experts, out_size, in_size)
    lora = (array(experts, 16, in_size, dtype=jnp.float32), array(experts, out_size, 16, dtype=jnp.float32))
    with H200.lowering():
        lowered = jax.jit(step).lower(array(rows, in_size), weight, *lora, sizes, array(rows, out_size))
        assert dispatch.record["grouped_matmul"] == ("mosaic", {})
        text = lowered.compile().as_text()
    # Forward after a thin product, dx, and da; dx's thin product and db are one.
    assert text.count('custom_call_target="mosaic_gpu_v2"') == 4
    assert text.count('custom_call_target="triton_kernel_call"') == 1


@pytest.mark.parametrize(
    ("experts", "pairs", "in_size", "out_size", "transposed", "dtype"),
    [
        (60, 32_768, 2048, 2816, False, jnp.bfloat16),  # Qwen1.5-MoE-A2.7B
        (60, 32_768, 1408, 2048, False, jnp.bfloat16),
        (32, 65_536, 2880, 5760, True, jnp.bfloat16),  # gpt-oss-20b
        (128, 131_072, 768, 2048, False, jnp.float32),  # Qwen3-30B-A3B
        (8, 1024, 64, 64, False, jnp.bfloat16),
        (8, 1024, 64, 128, False, jnp.float32),
    ],
)
def test_a_gradient_of_experts_weights_is_one_kernel(
    experts, pairs, in_size, out_size, transposed, dtype, capfd, monkeypatch
):
    """Which spills nothing, and stores nothing beside its result; the product and dx are one each."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    where = H200.sharding()

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    def step(x, weight, sizes, dout):
        groups = groups_of(sizes, pairs)
        out, pullback = jax.vjp(lambda x, w: grouped_matmul(x, w, groups, transposed=transposed), x, weight)
        return out, *pullback(dout)

    sizes = array(experts, dtype=jnp.int32)
    rows = jax.eval_shape(lambda sizes: groups_of(sizes, pairs), sizes).rows
    shape = (experts, in_size, out_size) if transposed else (experts, out_size, in_size)
    with H200.lowering():
        lowered = jax.jit(step).lower(array(rows, in_size), array(*shape, dtype=dtype), sizes, array(rows, out_size))
        assert dispatch.record["grouped_matmul"] == ("mosaic", {})
        compiled = lowered.compile()
    text = compiled.as_text()
    assert text.count('custom_call_target="mosaic_gpu_v2"') == 3
    assert "while(" not in text
    cast = 2 * experts * in_size * out_size if dtype == jnp.float32 else 0  # the weight in the rows' dtype
    assert compiled.memory_analysis().temp_size_in_bytes < 1.01 * cast + 100_000
    said = capfd.readouterr()
    spilled = re.findall(r"(\d+) bytes spill", said.out + said.err)
    assert spilled and not any(map(int, spilled))


@pytest.mark.parametrize("kind", ["nf4", "mxfp4"])
@pytest.mark.parametrize("model", SHAPES)
def test_products_over_four_bits_compile_for_an_h200(model, kind):
    """Forward and dx decode while they multiply, each to one buffer; two thin products serve the adapter, of which
    Triton's kernel computes that of dx."""
    experts, pairs, in_size, out_size, transposed = SHAPES[model]
    where = H200.sharding()
    if kind == "mxfp4":
        transposed = False  # as published

    def like(tree):
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where), tree)

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    def step(x, weight, a, b, sizes, dout):
        groups = groups_of(sizes, pairs)

        def run(x):
            lora = GroupedLora(a, b, 2.0)
            return grouped_matmul(x, weight, groups, lora, transposed=transposed)

        out, pullback = jax.vjp(run, x)
        return out, *pullback(dout)

    sizes = array(experts, dtype=jnp.int32)
    rows = jax.eval_shape(lambda sizes: groups_of(sizes, pairs), sizes).rows
    shape = (experts, in_size, out_size) if transposed else (experts, out_size, in_size)
    if kind == "nf4":
        weight = like(jax.eval_shape(NF4.encode, array(*shape)))
    else:
        blocks = array(*shape[:2], shape[2] // 2, dtype=jnp.uint8)
        weight = MXFP4(blocks, array(*shape[:2], shape[2] // 32, dtype=jnp.uint8))
    lora = (array(experts, 16, in_size, dtype=jnp.float32), array(experts, out_size, 16, dtype=jnp.float32))
    with H200.lowering():
        lowered = jax.jit(step).lower(array(rows, in_size), weight, *lora, sizes, array(rows, out_size))
        compiled = lowered.compile()
    text = compiled.as_text()
    assert text.count('custom_call_target="mosaic_gpu_v2"') == 3
    assert text.count('custom_call_target="triton_kernel_call"') == 1
    decoded_bytes = 2 * experts * in_size * out_size
    assert compiled.memory_analysis().temp_size_in_bytes < 1.2 * decoded_bytes


@pytest.mark.full
@pytest.mark.parametrize(("model", "block"), [("gpt-oss", ROW), ("qwen3-30b-a3b", TILE)])
def test_products_over_fp8_compile_for_an_h200(model, block, capfd, monkeypatch):
    """From and to tokens, both directions, with an adapter in the kernel: no weight is decoded, and nothing spills."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    experts, pairs, in_size, out_size, transposed = SHAPES[model]
    where = H200.sharding()

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    def step(x, rows, weight, a, b, choice, dout):
        routing = route(choice, experts)

        def run(x, rows):
            options = dict(transposed=transposed, fp8=True)
            lora = GroupedLora(a, b, 2.0)
            return (
                matmul_of_tokens(x, weight, routing, lora, derivative_follows=True, **options),
                matmul_to_tokens(rows, weight, routing, lora, **options),
            )

        outputs, pullback = jax.vjp(run, x, rows)
        return outputs, pullback((outputs[0], dout))

    tokens = 16_384
    choice = array(tokens, pairs // tokens, dtype=jnp.int32)
    rows = jax.eval_shape(lambda choice: route(choice, experts), choice).groups.rows
    shape = (experts, in_size, out_size) if transposed else (experts, out_size, in_size)
    encoded = jax.eval_shape(lambda array: FP8.encode(array, block), array(*shape))
    weight = jax.tree.map(lambda a: array(*a.shape, dtype=a.dtype), encoded)
    lora = (array(experts, 16, in_size, dtype=jnp.float32), array(experts, out_size, 16, dtype=jnp.float32))
    sides = array(tokens, in_size), array(rows, in_size), weight, *lora, choice, array(tokens, out_size)
    with H200.lowering():
        text = jax.jit(step).lower(*sides).compile().as_text()
    assert dispatch.record["fp8_matmul of experts"] == ("mosaic", {})
    said = capfd.readouterr()
    spilled = map(int, re.findall(r"(\d+) bytes spill", said.out + said.err))
    assert max(spilled) <= (8 if block == TILE else 0)  # two registers of the kernel of blocks
    assert not re.search(rf"(bf16|f32)\[{experts},({in_size},{out_size}|{out_size},{in_size})\]", text)


@pytest.mark.full
def test_fp8_where_no_kernel_serves():
    """What the kernels are checked against rounds rows, as they do; where it runs in their place, no layer keeps what
    its forward decoded until the backward."""
    where, experts, width = H200.sharding(), 8, 1024

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    def placed(function, *arrays):
        return jax.tree.map(lambda a: array(*a.shape, dtype=a.dtype), jax.eval_shape(function, *arrays))

    weight = placed(FP8.encode, array(experts, width, width))
    groups = placed(lambda sizes: groups_of(sizes, 1024), array(experts, dtype=jnp.int32))

    def step(x, weights, groups, dout):
        def run(x):
            for each in weights:
                x = jax.nn.silu(grouped_matmul(x, each, groups, fp8=True, implementation="reference"))
            return x

        out, pull = jax.vjp(run, x)
        return out, pull(dout)

    def temporary_bytes(layers):
        options = compiler_options("gpu", deterministic=False)
        program = jax.jit(step, compiler_options=options).lower(x, [weight] * layers, groups, x).compile()
        return program.memory_analysis().temp_size_in_bytes

    x = array(groups.rows, width)
    with H200.lowering():
        wide = array(*x.shape, dtype=jnp.float32)
        checked = fp8_experts._exact.lower(wide, weight, groups, 2, None, None).compile().as_text()
        assert f"f8e4m3fn[{groups.rows},{width}]" in checked
        decoded_bytes = 2 * experts * width * width  # of a layer; its rows, which are kept, are 0.47 of it
        assert temporary_bytes(6) - temporary_bytes(2) < 4 * 0.6 * decoded_bytes


@pytest.mark.parametrize("implementation", ["reference", "mosaic"])
def test_routing_stores_nothing_of_the_size_pairs_times_experts(implementation):
    """131,072 tokens with 8 of 256 experts: a one-hot of that would be 268 million numbers."""
    choice = jax.ShapeDtypeStruct((131_072, 8), jnp.int32, sharding=H200.sharding())
    with H200.lowering():
        lowered = jax.jit(lambda choice: route(choice, 256, implementation=implementation)).lower(choice)
        compiled = lowered.compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 50_000_000
    kernels = compiled.as_text().count('custom_call_target="mosaic_gpu_v2"')
    assert kernels == {"reference": 0, "mosaic": 2}[implementation]


@pytest.mark.parametrize(("tokens", "k", "experts", "hidden"), [(16_384, 4, 32, 2880), (131_072, 8, 256, 4096)])
def test_moving_and_summing_rows_compiles_for_an_h200(tokens, k, experts, hidden):
    """Nothing is stored beside the results."""
    pairs = jax.ShapeDtypeStruct((tokens, k), jnp.int32)
    routing = jax.eval_shape(lambda choice: route(choice, experts), pairs)
    where = H200.sharding()
    routing, x, rows = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where),
        (
            routing,
            jax.ShapeDtypeStruct((tokens, hidden), jnp.bfloat16),
            jax.ShapeDtypeStruct((routing.groups.rows, hidden), jnp.bfloat16),
        ),
    )

    def run(x, rows, routing):
        there = permute(x, routing, implementation="mosaic")
        return there, unpermute(rows, routing)

    with H200.lowering():
        compiled = jax.jit(run).lower(x, rows, routing).compile()
    assert compiled.as_text().count('custom_call_target="mosaic_gpu_v2"') == 1  # sums are XLA's
    assert compiled.memory_analysis().temp_size_in_bytes < 8 * tokens * k + 100_000


@pytest.mark.parametrize("blocks", mosaic.CANDIDATES)
def test_every_candidate_of_the_tuner_compiles_where_it_divides(blocks):
    in_size, out_size = 768, 6144 // blocks.columns * blocks.columns
    where = H200.sharding()

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    def run(x, weight, sizes):
        return mosaic.product(x, weight, groups_of(sizes, 2048), 2, blocks=blocks)

    rows = jax.eval_shape(lambda sizes: groups_of(sizes, 2048), array(8, dtype=jnp.int32)).rows
    with H200.lowering():
        arrays = array(rows, in_size), array(8, out_size, in_size), array(8, dtype=jnp.int32)
        text = jax.jit(run).lower(*arrays).compile().as_text()
    assert text.count('custom_call_target="mosaic_gpu_v2"') == 1


def compiled_step(shape, layers: int, plan, rows: int, *, max_documents: int = 1, four_bit: bool = False, length=2048):
    """The program that adds one micro-batch of a LoRA step with adapters on experts, for an H200."""
    config = config_from_hf({**shape, "num_hidden_layers": layers})

    def make():
        model = Decoder(config, jax.random.key(0), "bfloat16")
        return get_peft_model(quantize(model) if four_bit else model, r=16, target_parameters=BOTH)

    graph, trainable, frozen = nnx.split(nnx.eval_shape(make), nnx.Param, ...)
    schedule = optax.constant_schedule(1e-4)
    residuals = ResidualPlan.uniform(plan, layers)
    program = StepProgram(
        graph, optax.adamw(schedule), schedule, plan=residuals, max_documents=max_documents, micro_batches=2
    )
    where = H200.sharding()

    def placed(tree):
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where), tree)

    state = jax.eval_shape(lambda t: program.init(t, 0), trainable)
    sums = jax.eval_shape(program.zero_sums, trainable)
    index = jax.ShapeDtypeStruct((), jnp.int32)
    arguments = placed((sums, state, frozen, Batch.empty(rows, length), index))
    with H200.lowering():
        return jax.jit(program.accumulate, donate_argnums=0).lower(*arguments).compile()


@pytest.mark.full
@pytest.mark.parametrize(("plan", "products"), [("keep", 4), ("recompute", 5)])
def test_a_layer_of_gpt_oss_runs_each_product_once(plan, products):
    """The train step of a layer: gate_up and down forward, their dx; and gate_up again where it is not kept. What
    the derivative of a segment computes again of its own output is dead code."""
    layers = 1
    compiled = compiled_step(GPT_OSS, layers, {"keep": KEEP, "recompute": RECOMPUTE}[plan], 8, max_documents=16)
    assert dispatch.record["grouped_matmul"] == ("mosaic", {})
    assert dispatch.record["attention"][0] == "mosaic"
    text = compiled.as_text()
    calls = text.count('custom_call_target="mosaic_gpu_v2"')
    attention = 3 if plan == "keep" else 4  # forward, dq, dk with dv
    thin = 2 if plan == "keep" else 3  # gate_up's adapter forward, again where it is not kept; and backward, of down
    sums = 3  # of the tiles of adapters' gradients, gate_up's A and down's B, and of the chunks of down's A
    assert calls == layers * (products + attention + thin + sums), "products bring tokens' rows themselves"
    pairs = re.findall(r"= \(f32\[12,69504,16\].* custom_call_target=\"triton_kernel_call\"", text)
    assert len(pairs) == layers, "the gradient of gate and up is read once for their adapter"
    # The activation's kernels compute the product with down's A, without the inner rows where it is computed again, and
    # the gradient of A.
    calls = [line.split("custom-call(")[0] for line in text.splitlines() if 'target="triton_kernel_call"' in line]
    forwards = [call for call in calls if "bf16[69504,64]" in call]
    assert ["bf16[69504,2880]" in call for call in forwards] == [True] + [False] * (plan == "recompute")
    assert sum("bf16[69504,5760]" in call for call in calls) == layers


@pytest.mark.full
def test_gradients_of_layers_do_not_wait_for_each_other():
    """Four more layers take their inputs, and not the 54 MB of each one's gradients until the end of the step."""
    two, six = (compiled_step(QWEN3, layers, RECOMPUTE, 1, length=512) for layers in (2, 6))
    more = six.memory_analysis().temp_size_in_bytes - two.memory_analysis().temp_size_in_bytes
    layer_input = 512 * 2048 * 2
    assert more < 4 * (layer_input + 4_000_000)


@pytest.mark.full
def test_expert_weights_in_four_bits_are_decoded_by_their_products():
    """No pass decodes them: gate/up forward, again and backward, down forward and backward each make their buffer."""
    text = compiled_step(QWEN3, 1, RECOMPUTE, 4, four_bit=True).as_text()
    assert dispatch.record["grouped_matmul"][0] == "mosaic_ahead"
    kernels = [line for line in text.splitlines() if "mosaic_gpu_v2" in line]
    gate_up, down = 128 * 1536 * 2048 // 8192, 128 * 768 * 2048 // 8192
    assert not any(f" bf16[{rows},8192]" in line for line in kernels for rows in (gate_up, down))
    buffers = "bf16[128,1536,2048]", "bf16[128,2048,768]"
    assert [sum(buffer in line.split("custom-call(")[0] for line in kernels) for buffer in buffers] == [3, 2]
