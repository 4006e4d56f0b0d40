"""The train step of an 8B-shape LoRA compiled for an H200 without one: memory, libraries, fusion. Four layers of it."""

from __future__ import annotations

import functools
import json
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from benchmarks.shapes import SHAPES
from jaxtune.models.config import DecoderConfig, LayerSpec, RopeConfig
from jaxtune.models.decoder import Decoder
from jaxtune.models.files.quant import compute_in_fp8, quantize
from jaxtune.models.lora import get_peft_model
from jaxtune.models.placement.streams import memory_kinds
from jaxtune.models.registry import config_from_hf
from jaxtune.models.stack.residual_plan import KEEP, RECOMPUTE, LayerPlan, ResidualPlan
from jaxtune.pallas import dispatch
from jaxtune.train.config import AdapterConfig, DataConfig, ModelConfig, TrainConfig
from jaxtune.train.data.batches import Batch
from jaxtune.train.engine.xla_options import compiler_options
from jaxtune.train.planning.cost import abstract_model
from jaxtune.train.planning.movables.streamed import Streamed
from jaxtune.train.planning.step_spec import StepSpec
from jaxtune.train.program.step import StepProgram
from tests.gpu.aot.compiled_step import placed_frozen
from tests.gpu.aot.target import H200

ROWS, LENGTH = 8, 2048
TOKENS = ROWS * LENGTH
HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 4096, 14336, 32, 8, 128, 128_256
PLANS = {"keep": KEEP, "recompute": RECOMPUTE, "offload": LayerPlan(gate="offload", up="offload")}

# Bytes of what one layer keeps for the backward: bf16, and an fp32 log-sum-exp for each head.
INPUT = TOKENS * HIDDEN * 2
WIDE = TOKENS * INNER * 2
RESIDUALS = TOKENS * (3 * HIDDEN + (HEADS + 2 * KV_HEADS) * HEAD_DIM + 2 * INNER) * 2 + TOKENS * HEADS * 4
# Logits of a chunk in fp32, and their gradient in bf16 (linear_cross_entropy's default keeps 2^27 logits).
LOGITS = 2**27 * (4 + 2)


def make_config(layers: int) -> DecoderConfig:
    rope = RopeConfig(
        5e5, "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )
    return DecoderConfig(
        family="llama",
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        layers=(LayerSpec(),) * layers,
        max_position_embeddings=131_072,
        attention_scale=HEAD_DIM**-0.5,
        rotary=(rope,),
    )


def make_full_model(layers: int):
    return nnx.eval_shape(lambda: Decoder(make_config(layers), jax.random.key(0), "bfloat16"))


def make_experts_model(layers: int):
    """gpt-oss's layers with fewer experts and a smaller vocabulary, its experts as they are published."""
    hf = SHAPES["gpt-oss-20b"] | {"num_hidden_layers": layers, "num_local_experts": 8, "vocab_size": 32_768}
    config = TrainConfig(
        model=ModelConfig(path="a shape", load_in="mxfp4"),
        data=DataConfig(train="none"),
        adapter=AdapterConfig(r=2, target_parameters=("mlp.experts.gate_up_proj", "mlp.experts.down_proj")),
        steps=1,
    )
    return abstract_model(config_from_hf(hf), StepSpec.of(config).model)


def make_model(layers: int, four_bit: bool = False):
    def make():
        model = Decoder(make_config(layers), jax.random.key(0), "bfloat16")
        return get_peft_model(quantize(model) if four_bit else model, r=16)

    return nnx.eval_shape(make)


@functools.cache
def programs(
    plan: str,
    layers: int = 4,
    max_documents: int = 1,
    four_bit: bool = False,
    length: int = LENGTH,
    streamed: int = 0,
    experts: bool = False,
):
    """(lowered accumulate, lowered update, bytes of accumulate's arguments) for one H200."""
    model = make_experts_model(layers) if experts else make_model(layers, four_bit)
    graph, trainable, frozen = nnx.split(model, nnx.Param, ...)
    schedule = optax.constant_schedule(1e-4)
    residuals = ResidualPlan.uniform(PLANS[plan], layers)
    program = StepProgram(graph, optax.adamw(schedule), schedule, plan=residuals, max_documents=max_documents)
    where = H200.sharding()
    frozen = placed_frozen(Streamed.declared(model, frozen, streamed), H200, where)

    def placed(tree):
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where), tree)

    state = placed(jax.eval_shape(lambda t: program.init(t, 0), trainable))
    sums = placed(jax.eval_shape(program.zero_sums, trainable))
    batch = placed(Batch.empty(TOKENS // length, length))
    index = placed(jax.ShapeDtypeStruct((), jnp.int32))
    arguments = (sums, state, frozen, batch, index)
    dispatch.record.pop("attention", None)
    with H200.lowering():
        accumulate = jax.jit(program.accumulate, donate_argnums=0).lower(*arguments)
        update = jax.jit(program.update, donate_argnums=(0, 1)).lower(state, sums)
    used = (sums, state.trainable, arguments[2], batch)  # what accumulate reads
    return accumulate, update, sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(used))


@functools.cache
def compiled(
    plan: str,
    layers: int = 4,
    max_documents: int = 1,
    four_bit: bool = False,
    length: int = LENGTH,
    streamed: int = 0,
    experts: bool = False,
):
    accumulate, *_ = programs(plan, layers, max_documents, four_bit, length, streamed, experts)
    return accumulate.compile(compiler_options=compiler_options("gpu", deterministic=False))


def memory(plan: str, layers: int = 4, max_documents: int = 1, four_bit: bool = False):
    return compiled(plan, layers, max_documents, four_bit).memory_analysis()


def per_layer_bytes(plan: str) -> float:
    """What two more layers add to the temporaries, each."""
    return (memory(plan, 4).temp_size_in_bytes - memory(plan, 2).temp_size_in_bytes) / 2


@pytest.mark.parametrize(
    ("max_documents", "length", "chosen"), [(1, 4096, "mosaic"), (1, 8192, "cudnn"), (16, 8192, "mosaic")]
)
def test_the_attention_that_is_chosen(max_documents, length, chosen):
    programs.cache_clear()
    programs("keep", 2, max_documents, length=length)
    assert dispatch.record["attention"] == (chosen, {})


def test_a_program_with_our_kernels_is_the_same_whatever_was_lowered_before():
    """Else XLA's compilation cache, which knows it by its text, misses (see pallas/gpu_kernel.py)."""
    texts = []
    for _ in range(2):
        programs.cache_clear()
        texts.append(programs("keep", 2, 16)[0].as_text())
    assert "mosaic_gpu" in texts[0] and texts[0] == texts[1]


def test_each_layer_calls_cudnn_forward_and_backward_once():
    text = compiled("keep", 2, length=8192).as_text()
    assert len(re.findall(r'custom_call_target="__cudnn\$fmhaSoftmax"', text)) == 2
    assert len(re.findall(r'custom_call_target="__cudnn\$fmhaSoftmaxBackward"', text)) == 2


@pytest.mark.full
def test_arguments_are_weights_adapters_sums_and_the_batch():
    expected = programs("keep")[2]
    assert abs(memory("keep").argument_size_in_bytes - expected) < 1e6
    # The sums are donated: their memory is the result's.
    assert memory("keep").alias_size_in_bytes >= 0.99 * memory("keep").output_size_in_bytes


@pytest.mark.full
def test_what_is_kept_is_what_the_plan_says():
    assert per_layer_bytes("keep") == pytest.approx(RESIDUALS, rel=0.01)
    total = memory("keep").temp_size_in_bytes
    # In the backward of the last layer: all residuals, the activation, and the gradients of it, gate and up.
    assert 4 * RESIDUALS + LOGITS < total < 4 * RESIDUALS + 4 * WIDE + 2 * INPUT


@pytest.mark.full
def test_packed_rows_take_hardly_more():
    one, many = (memory("keep", 2, documents).temp_size_in_bytes for documents in (1, 16))
    assert abs(many - one) < INPUT


@pytest.mark.full
def test_recompute_keeps_only_the_inputs_of_layers():
    total = memory("recompute").temp_size_in_bytes
    # In the backward of one layer: its residuals, the activation, and the gradients of gate, up and the activation.
    assert 4 * INPUT + RESIDUALS < total < 3 * INPUT + RESIDUALS + 4 * WIDE + 2 * INPUT
    assert memory("recompute").host_temp_size_in_bytes == 0


@pytest.mark.full
@pytest.mark.parametrize(("plan", "decoded"), [("keep", 0), ("recompute", 2 * HIDDEN * INNER)])
def test_four_bit_weights_leave_nothing_decoded(plan, decoded):
    """What is live at the step's peak is what is live over 16-bit weights: no decoded weight waits for the backward.
    Beside it are NF4's sixteen numbers and, where the peak is in an MLP's backward, the weight that is multiplied."""
    four, sixteen = memory(plan, four_bit=True), memory(plan)
    live = [found.peak_memory_in_bytes - found.argument_size_in_bytes for found in (four, sixteen)]
    assert live[0] <= live[1] + decoded + 16 * 4
    # With the gaps between buffers: at most one, of an array of the residual stream.
    assert four.temp_size_in_bytes < live[0] * (1 + 1e-4) + INPUT
    matrices = 4 * (2 * HIDDEN * (HEADS + KV_HEADS) * HEAD_DIM + 3 * HIDDEN * INNER)
    saved = matrices * (2 - (1 / 2 + 1 / 64 + 4 / 64 / 256))  # bytes: codes, absmax, nested absmax
    assert sixteen.argument_size_in_bytes - four.argument_size_in_bytes == pytest.approx(saved, rel=1e-3)


@pytest.mark.full
def test_what_is_offloaded_leaves_the_device():
    for layers in (2, 4):  # the last layer's are needed at once, and stay
        assert memory("offload", layers).host_temp_size_in_bytes == (layers - 1) * 2 * WIDE
    total = memory("offload").temp_size_in_bytes
    # In a layer's backward: its gate and up, part of the next one's, which are on their way, and four more such arrays.
    assert total < 4 * (RESIDUALS - 2 * WIDE) + 1.6 * 2 * WIDE + 4 * WIDE + 2 * INPUT


def is_product(line: str) -> bool:
    """Whether a line of a program calls a GEMM, or a kernel of ours."""
    return re.search(r'custom_call_target="(__cublas\$lt\$matmul|mosaic_gpu|triton_kernel_call)', line) is not None


def transfers(plan: str, **shape: int) -> list[tuple[str, int, int]]:
    """("to host" or "to device", products before its start, products before its end) of every asynchronous copy."""
    lines = compiled(plan, **shape).as_text().splitlines()
    entry = max(index for index, line in enumerate(lines) if line.startswith("ENTRY"))
    begun, found, count = {}, [], 0
    for line in lines[entry:]:
        name = re.match(r"\s*(?:ROOT )?%?([\w.-]+) = (.*)", line)
        if name is None:
            continue
        count += is_product(name[2])
        if " copy-start(" in name[2]:
            begun[name[1]] = count
        done = re.search(r" copy-done\((?:.* )?%?([\w.-]+)\)", name[2])
        if done:
            to_host = "S(5)" in name[2].split(" copy-done")[0]
            found.append(("to host" if to_host else "to device", begun[done[1]], count))
    return found


@pytest.mark.full
def test_transfers_run_under_the_whole_layer():
    """Not under the few products before their end only, where XLA's scheduler would put a copy's start: 0.39, 0.64."""
    lines = [line for line in compiled("offload").as_text().splitlines() if is_product(line)]
    for direction, where in (("to host", "jit(layer_forward)"), ("to device", "jit(layer_backward)")):
        covered = set()
        for way, first, last in transfers("offload"):
            if way == direction:
                covered.update(range(first, last))
        # Three layers of four send, and three receive, under the products of a layer's forward, or of its backward.
        assert len(covered) > 0.9 * 3 / 4 * sum(where in line for line in lines), direction


def test_weights_that_stream_arrive_beside_products():
    """Of layers 1 and 3 of four; those of 3 stay from forward to backward."""
    resident, streamed = compiled("recompute", four_bit=True), compiled("recompute", four_bit=True, streamed=2)
    before, after = resident.memory_analysis(), streamed.memory_analysis()
    layer = after.host_argument_size_in_bytes / 2
    assert before.argument_size_in_bytes - after.argument_size_in_bytes == pytest.approx(2 * layer, rel=1e-3)
    assert after.temp_size_in_bytes - before.temp_size_in_bytes < 2 * layer
    copies = transfers("recompute", four_bit=True, streamed=2)
    matrices, parts = 7, 2  # codes, and what scales them
    assert len(copies) == 3 * matrices * parts
    assert all(way == "to device" and last - first > 1 for way, first, last in copies)


def test_experts_in_mxfp4_that_stream_arrive_beside_products():
    """As codes and scales, twice forward and, of the layer whose weights do not stay, once backward."""
    shape, model = dict(layers=2, experts=True, streamed=2), make_experts_model(2)
    frozen = Streamed.declared(model, nnx.split(model, nnx.Param, ...)[2], 2)
    variables = jax.tree.leaves(frozen, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    hosted = [kind for variable in variables for kind in memory_kinds(variable) if kind is not None]
    copies = transfers("recompute", **shape)
    assert len(copies) == 3 * len(hosted) / 2
    assert all(way == "to device" and last - first > 1 for way, first, last in copies)
    codes = r"u8\[8,5760,1440\]\S*"
    copied = re.findall(rf"{codes}, {codes}S\(5\)\S* \S+ copy-start\(", compiled("recompute", **shape).as_text())
    assert len(copied) == 3


def products(plan: str, where: str) -> list[tuple[str, float, int]]:
    """(operation's name, beta, the last axis of the left side) of the GEMMs of cuBLASLt whose name holds `where`."""
    text, found = compiled(plan).as_text(), []
    last_axis = dict(re.findall(r"%?([\w.-]+) = bf16\[\d+,(\d+)\]", text))
    for line in text.splitlines():
        if 'custom_call_target="__cublas$lt$matmul"' not in line:
            continue
        name, left = re.search(r'op_name="([^"]*)"', line), re.search(r" custom-call\(%?([\w.-]+)", line)
        config = json.loads(line[line.index("backend_config=") + len("backend_config=") :])
        if name and left and where in name[1]:
            found.append((name[1], float(config["gemm_backend_config"]["beta"]), int(last_axis.get(left[1], 0))))
    return found


@pytest.mark.full
def test_the_adapter_s_product_is_added_in_a_gemm_s_epilogue():
    """Seven linears a layer: one of each one's two large products has beta = 1. Else a pass over memory adds them. It
    is the base product, but of key and value, which XLA merges: an adapter's would be added to numbers that are rounded
    already, and what is below half a unit of these be lost."""
    forward = products("keep", "jit(layer_forward)")
    assert sum(beta == 1.0 for _, beta, _ in forward) == 7 * 4
    assert sum(beta == 1.0 and width in (HIDDEN, INNER) for _, beta, width in forward) >= 5 * 4
    # Seven base products (XLA may join k and v) and seven with B; one with all A's for each of the four inputs.
    assert (6 + 7 + 4) * 4 <= len(forward) <= (7 + 7 + 4) * 4


@pytest.mark.full
def test_the_sum_of_input_gradients_is_in_epilogues_too():
    """dx of q, k, v: one product with A, then one a weight onto it; so for gate and up, o, down."""
    backward = [beta for name, beta, _ in products("keep", "jit(layer_backward)") if "transpose(layer)" in name]
    assert sum(beta == 1.0 for beta in backward) >= 7 * 4


def test_only_norms_adapters_and_gated_activations_are_triton_kernels():
    """No large product and no attention falls to Triton. Norms are two of each of four layers and the final one; the
    gradient of the first layer's input, which nothing reads, has no kernel. Adapters are seven of each layer, and the
    activation is computed forward and backward."""
    text = compiled("keep").as_text()
    assert "__triton_gemm" not in text
    kernels = [line for line in text.splitlines() if re.search(r'custom_call_target="[^"]*triton', line)]
    forward = [line for line in kernels if "/contract/triton" in line]
    adapters = [line for line in kernels if re.search(r"jvp\((project|mix|expand|contract)\)", line)]
    norms = [line for line in kernels if re.search(r"transpose\(jvp\(final_norm|/(mixer|mlp)_norm/", line)]
    assert len(forward) == 4 and len(norms) == 2 * 4 and len(adapters) >= 8 * 4
    assert len(forward) + len(norms) + len(adapters) == len(kernels)


@pytest.mark.full
def test_gate_and_up_in_fp8_take_half_the_bytes(monkeypatch):
    """Of two layers. Beside residuals: gate and up of the layer at work, as they were and their gradients."""

    def make(layers, four_bit):
        model = Decoder(make_config(layers), jax.random.key(0), "bfloat16")
        return get_peft_model(compute_in_fp8(quantize(model, "fp8")), r=16)

    monkeypatch.setitem(globals(), "make_model", lambda *arguments: nnx.eval_shape(lambda: make(*arguments)))
    monkeypatch.setitem(PLANS, "fp8", LayerPlan("fp8"))
    assert memory("fp8", 2).temp_size_in_bytes < 2 * (RESIDUALS - WIDE) + 3.3 * WIDE


@pytest.mark.full
def test_update_compiles_and_needs_little():
    _, update, _ = programs("keep")
    analysis = update.compile().memory_analysis()
    sums = sum(a.size * 4 for a in jax.tree.leaves(nnx.state(make_model(4), nnx.Param)))
    assert analysis.temp_size_in_bytes < 1.5 * sums
    assert analysis.alias_size_in_bytes > 3.9 * sums  # parameters, two moments, sums: all in place
