"""Every public op says, while it is traced, which argument is not what it must be, and what it must be."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jaxtune.pallas import adam8
from jaxtune.pallas.attention import PackedLayout, attention, attention_backward, attention_forward, packed_layout
from jaxtune.pallas.decode.attention import (
    cache_capacity,
    cache_of,
    chunk_attention,
    chunk_written,
    decode_attention,
    written,
)
from jaxtune.pallas.decode.few_rows import placed
from jaxtune.pallas.delta_rule import (
    delta_rule_chunk,
    delta_rule_state,
    delta_rule_step,
    gated_delta_rule,
    short_convolution,
    short_convolution_parts,
    short_convolution_step,
)
from jaxtune.pallas.formats import MXFP4, NF4, blockwise8
from jaxtune.pallas.gated import (
    RowGate,
    gated_backward,
    gated_rows_backward,
    gated_thin,
    gated_thin_backward,
    thin_of_gated,
)
from jaxtune.pallas.grouped_matmul import GroupedLora, grouped_bias, grouped_matmul
from jaxtune.pallas.grouped_matmul.layout import groups_of
from jaxtune.pallas.linear_cross_entropy import linear_cross_entropy
from jaxtune.pallas.normed_heads import normed_heads
from jaxtune.pallas.normed_stream import normed_stream
from jaxtune.pallas.quant_matmul import LoraWeights, gated_matmul, normed_matmul, quant_matmul
from jaxtune.pallas.routing import (
    choose_experts,
    expert_weights,
    matmul_of_tokens,
    matmul_to_tokens,
    permute,
    route,
    router_sums,
    row_weights,
    token_bias,
    unpermute,
)
from jaxtune.pallas.thin_pair import thin_pair


def zeros(*shape, dtype=jnp.float32):
    return jnp.zeros(shape, dtype)


def ints(*shape):
    return zeros(*shape, dtype=jnp.int32)


ROUTING = jax.jit(lambda: route(ints(4, 2), 3, 8))()
GROUPS = jax.jit(lambda: groups_of(jnp.asarray([3, 5], jnp.int32), 8, 8))()
ROWS = GROUPS.rows
CODES, ABSMAX = zeros(2, 256, dtype=jnp.uint8), zeros(2)
WEIGHT = jax.jit(NF4.encode)(zeros(6, 64))
HEADS = dict(query=zeros(2, 8, 4, 16), key=zeros(2, 8, 2, 16), value=zeros(2, 8, 2, 16))
ATTENTION = dict(HEADS, layout=packed_layout((2, 8)), scale=0.3)
CACHES = dict(keys=zeros(2, 2, 9, 16), values=zeros(2, 2, 9, 16))
DECODE = dict(query=zeros(2, 4, 16), **CACHES, lengths=ints(2), scale=0.3)
CHUNK = dict(query=zeros(2, 8, 4, 16), new_keys=zeros(2, 8, 2, 16), new_values=zeros(2, 8, 2, 16))
SAVED = dict(out=zeros(2, 8, 4, 16), lse=zeros(2, 4, 8), dout=zeros(2, 8, 4, 16))
MOMENTS = dict(m=CODES, m_absmax=ABSMAX, v=CODES, v_absmax=ABSMAX, correction1=1.0, correction2=1.0, scale=1.0)
ADAM = dict(gradient=zeros(2, 200), **MOMENTS, finite=True, betas=(0.9, 0.99), eps=1e-8)
RATES = dict(decay=zeros(2, 8, 4), beta=zeros(2, 8, 4))
WRITES = dict(key=zeros(2, 8, 2, 16), value=zeros(2, 8, 4, 6), **RATES)
ONE_TOKEN = {name: array[:, :1] for name, array in WRITES.items()}
SHORT = packed_layout((2, 6))
IDS = ints(2, 8)

# Each op, arguments that it takes, and what is wrong: (argument, its value, the error, words of its sentence).
OPS = {
    attention: (
        ATTENTION,
        ("query", [1.0], TypeError, "query is a list .*; it must be an array of bfloat16, float16 or float32"),
        ("query", ints(2, 8, 4, 16), TypeError, r"query is int32\[2, 8, 4, 16\]; its dtype must be bfloat16"),
        ("query", zeros(8, 4, 16), ValueError, r"query is float32\[8, 4, 16\]; its shape must be \[B, T, heads, D\]"),
        ("key", zeros(2, 7, 2, 16), ValueError, r"key .*must be \[B, T, kv_heads, D\] with .*T = 8 \(as query has\)"),
        ("key", zeros(2, 8, 3, 16), ValueError, "value .* with .*kv_heads = 3 .as key has"),
        ("value", zeros(2, 8, 2, 8), ValueError, r"value is float32\[2, 8, 2, 8\]"),
        ("value", zeros(2, 8, 2, 16, dtype=jnp.bfloat16), TypeError, "value is bfloat16.*; its dtype must be float32"),
        ("layout", SHORT, ValueError, r"layout.doc_start is int32\[2, 6\]; .* must be \[B, T\] with .*T = 8"),
        ("layout", IDS, TypeError, r"layout is an array int32\[2, 8\]; it must be a PackedLayout: packed_layout\("),
        ("layout", None, TypeError, "layout is None; it must be a PackedLayout"),
        ("layout", PackedLayout(IDS, zeros(2, 8)), TypeError, "layout.doc_end is float32"),
        ("scale", "big", TypeError, r"scale is a str \(big\); it must be a number"),
        ("scale", float("nan"), ValueError, "scale = nan: must be finite"),
        ("window", 0, ValueError, "window = 0: must be at least 1"),
        ("window", 2.5, TypeError, "window is a float .*whole number or None"),
        ("soft_cap", -1.0, ValueError, "soft_cap = -1.0: must be above 0"),
        ("sinks", zeros(3), ValueError, r"sinks is float32\[3\]; its shape must be \[heads\] with heads = 4"),
    ),
    attention_forward: (
        ATTENTION,
        ("layout", SHORT, ValueError, r"layout.doc_start is int32\[2, 6\]"),
        ("layout", IDS, TypeError, "it must be a PackedLayout"),
        ("key", zeros(2, 8, 4), ValueError, "key is float32"),
    ),
    attention_backward: (
        dict(ATTENTION, **SAVED),
        ("layout", SHORT, ValueError, r"layout.doc_start is int32\[2, 6\]"),
        ("lse", zeros(2, 8, 4), ValueError, r"lse is float32\[2, 8, 4\]; its shape must be \[B, heads, T\]"),
        ("dout", zeros(2, 8, 4, 8), ValueError, "dout is float32"),
        ("out", zeros(2, 8, 4, 16, dtype=jnp.float16), TypeError, "out is float16.*must be float32"),
    ),
    decode_attention: (
        DECODE,
        ("keys", zeros(3, 2, 9, 16), ValueError, "keys is .* with B = 2"),
        ("query", zeros(2, 3, 16), ValueError, "3 query heads are not a multiple of 2 key/value heads"),
        ("values", zeros(2, 2, 8, 16), ValueError, "values is .* with B = 2.* capacity = 9"),
        ("values", zeros(2, 2, 9, 16, dtype=jnp.float8_e4m3fn), TypeError, "values is float8_e4m3fn.*must be float32"),
        ("lengths", ints(2, 1), ValueError, r"lengths is int32\[2, 1\]; its shape must be \[B\]"),
        ("lengths", zeros(2), TypeError, "lengths is float32.*; its dtype must be an integer dtype"),
        ("window", 0, ValueError, "window = 0: must be at least 1"),
        ("soft_cap", -1.0, ValueError, "soft_cap = -1.0: must be above 0"),
        ("sinks", zeros(3), ValueError, r"sinks is float32\[3\]; its shape must be \[heads\] with heads = 4"),
    ),
    placed: (
        dict(partial_sums=zeros(1, 2, 128), **CACHES, positions=ints(2), table=(zeros(2, 8), zeros(2, 8))),
        ("values", zeros(2, 2, 8, 16), ValueError, "values is .*capacity = 9"),
        ("table", (zeros(2, 4),) * 2, ValueError, r"table\[0\] is float32\[2, 4\]; .* \[N, D/2\] with N = 2.*D/2 = 8"),
        ("table", (zeros(2, 8), zeros(2, 16)), ValueError, r"table\[1\] is float32\[2, 16\]"),
    ),
    cache_capacity: (dict(tokens=9, window=4), ("window", 1.5, TypeError, "window is a float")),
    cache_of: (
        dict(tokens=zeros(2, 9, 2, 16), lengths=ints(2), capacity=16),
        ("lengths", ints(3), ValueError, r"lengths is int32\[3\]"),
        ("capacity", 0, ValueError, "capacity = 0: must be at least 1"),
    ),
    written: (
        dict(cache=zeros(2, 2, 9, 16), new=zeros(2, 2, 16), positions=ints(2)),
        ("new", zeros(2, 3, 16), ValueError, "new is .* with B = 2"),
        ("new", zeros(2, 2, 16, dtype=jnp.float16), TypeError, "new is float16.*must be float32"),
        ("positions", ints(3), ValueError, r"positions is int32\[3\]"),
    ),
    chunk_attention: (
        dict(CHUNK, **CACHES, before=ints(2), scale=0.3),
        ("new_keys", zeros(2, 7, 2, 16), ValueError, "new_keys is .* with .*N = 8"),
        ("keys", zeros(2, 3, 9, 16), ValueError, "keys is .* with .*kv_heads = 2"),
        ("values", zeros(2, 2, 8, 16), ValueError, "values is .*capacity = 9"),
        ("before", zeros(2), TypeError, "before is float32.*; its dtype must be an integer dtype"),
    ),
    chunk_written: (
        dict(cache=zeros(2, 2, 9, 16), new=zeros(2, 8, 2, 16), before=ints(2)),
        ("new", zeros(2, 8, 3, 16), ValueError, "new is .* with .*kv_heads = 2"),
        ("before", ints(3), ValueError, r"before is int32\[3\]"),
    ),
    packed_layout: (
        dict(shape=(2, 8), segment_ids=IDS),
        ("shape", (2,), ValueError, "shape has 1 entries; it must have 2"),
        ("shape", (2, 0), ValueError, "length = 0: must be at least 1"),
        ("segment_ids", ints(2, 5), ValueError, r"segment_ids is int32\[2, 5\]; its shape must be \[2, 8\]"),
        ("segment_ids", zeros(2, 8), TypeError, "segment_ids is float32"),
        ("max_documents", 0, ValueError, "max_documents = 0: must be at least 1"),
    ),
    quant_matmul: (
        dict(x=zeros(2, 64), weights=[WEIGHT, zeros(3, 64)]),
        ("x", ints(2, 64), TypeError, "x is int32"),
        ("x", zeros(2, 5), ValueError, r"weights\[0\] is NF4\[6, 64\]; its shape must be \[out_0, in\] with in = 5"),
        ("weights", zeros(3, 64), TypeError, r"weights is an array float32\[3, 64\]; it must be a list or tuple"),
        ("weights", [], ValueError, "weights has 0 entries"),
        ("weights", [zeros(64)], ValueError, r"weights\[0\] is float32\[64\]; its shape must be \[out_0, in\]"),
        ("weights", ["nf4"], TypeError, r"weights\[0\] is a str .*or Stored"),
        (
            "weights",
            [dataclasses.replace(WEIGHT, shape=(7, 64))],
            ValueError,
            r"weights\[0\] is damaged: codes is uint8\[192\]; shape \(7, 64\) asks for uint8\[224\]",
        ),
        ("loras", [None], ValueError, "loras has 1 entries; it must have 2"),
        ("loras", [None, (zeros(4, 64), zeros(3, 4))], TypeError, r"loras\[1\] is a tuple"),
        ("loras", [None, LoraWeights(zeros(4, 64), zeros(4, 3))], ValueError, r"loras\[1\].b is .*with out_1 = 3"),
        ("biases", [zeros(5), None], ValueError, r"biases\[0\] is float32\[5\]; .*\[out_0\] with out_0 = 6"),
        ("dropout_rate", 1.0, ValueError, "dropout_rate = 1.0: must be at least 0 and below 1"),
        ("dropout_key", 3, TypeError, "dropout_key is a int"),
        ("implementation", "fast", ValueError, "no implementation 'fast'"),
    ),
    gated_matmul: (
        dict(
            gate=zeros(2, 64),
            up=zeros(2, 64),
            weight=WEIGHT,
            lora=LoraWeights(zeros(4, 64), zeros(6, 4)),
            activation="silu",
        ),
        ("gate", ints(2, 64), TypeError, "gate is int32"),
        ("up", zeros(2, 63), ValueError, r"up is float32\[2, 63\]; its shape must be \[2, 64\]"),
        ("weight", zeros(6, 63), ValueError, r"weight is float32\[6, 63\].*in = 64"),
        ("lora", None, TypeError, "lora is None"),
        ("lora", LoraWeights(zeros(4, 64), zeros(6, 3)), ValueError, r"lora.b is .*r = 4"),
        ("lora", LoraWeights(zeros(4, 64), zeros(6, 4), zeros(6)), ValueError, "lora.row_scale must be None.*DoRA"),
        ("bias", zeros(5), ValueError, r"bias is float32\[5\].*out = 6"),
        ("activation", "swish", ValueError, "activation = 'swish': must be .*silu"),
        ("fp8", 1, TypeError, "fp8 is a int"),
    ),
    normed_matmul: (
        dict(
            x=zeros(2, 64),
            norm_weight=zeros(64),
            weights=[WEIGHT, WEIGHT],
            loras=[None, LoraWeights(zeros(4, 64), zeros(6, 4))],
            biases=[None, None],
        ),
        ("x", ints(2, 64), TypeError, "x is int32"),
        ("norm_weight", zeros(63), ValueError, r"norm_weight is float32\[63\].*in = 64"),
        ("weights", WEIGHT, TypeError, "weights is a NF4"),
        ("weights", [WEIGHT, zeros(6, 63)], ValueError, r"weights\[1\] is float32\[6, 63\].*in = 64"),
        ("loras", [None], ValueError, "loras has 1 entries; it must have 2"),
        ("loras", [None, (zeros(4, 64), zeros(6, 4))], TypeError, r"loras\[1\] is a tuple"),
        ("loras", [LoraWeights(zeros(4, 64), zeros(6, 3)), None], ValueError, r"loras\[0\].b is .*r_0 = 4"),
        ("loras", [LoraWeights(zeros(4, 64), zeros(6, 4), zeros(6)), None], ValueError, r"loras\[0\].row_scale must"),
        ("biases", [zeros(5), None], ValueError, r"biases\[0\] is float32\[5\].*out_0 = 6"),
        ("fp8", 1, TypeError, "fp8 is a int"),
    ),
    grouped_matmul: (
        dict(x=zeros(ROWS, 64), weight=zeros(2, 32, 64), groups=GROUPS),
        ("x", zeros(ROWS - 1, 64), ValueError, rf"x is .*\[rows, in\] with rows = {ROWS} \(of the groups' tiles\)"),
        ("x", zeros(ROWS, 32), ValueError, "weight is .* with .*in = 32"),
        ("weight", zeros(3, 32, 64), ValueError, r"weight is float32\[3, 32, 64\].*E = 2 \(as groups.sizes has\)"),
        ("weight", zeros(32, 64), ValueError, r"weight .*must be \[E, out, in\]"),
        ("groups", jnp.asarray([3, 5]), TypeError, "groups is an array int32.*; it must be a Groups"),
        ("lora", (1, 2), TypeError, "lora is a tuple"),
        ("lora", GroupedLora(zeros(2, 4, 64), zeros(2, 4, 32)), ValueError, "lora.b is"),
    ),
    grouped_bias: (
        dict(rows=zeros(ROWS, 8), bias=zeros(2, 8), groups=GROUPS),
        ("rows", zeros(3, 8), ValueError, "rows is"),
        ("bias", zeros(8), ValueError, r"bias .*must be \[E, out\]"),
    ),
    choose_experts: (
        dict(logits=zeros(4, 6), k=2),
        ("k", 7, ValueError, "k = 7: must be at least 1 and below 7"),
        ("logits", zeros(6), ValueError, "logits is"),
        ("real", ints(4), TypeError, r"real is int32\[4\]; its dtype must be bool"),
    ),
    expert_weights: (
        dict(logits=zeros(4, 6), choice=ints(4, 2), renormalize=True),
        ("choice", ints(3, 2), ValueError, r"choice .*T = 4"),
        ("choice", zeros(4, 2), TypeError, "choice is float32"),
    ),
    route: (
        dict(choice=ints(4, 2), num_experts=3),
        ("choice", ints(8), ValueError, r"choice is int32\[8\]; its shape must be \[T, k\]"),
        ("choice", zeros(4, 2), TypeError, "choice is float32"),
        ("num_experts", 0, ValueError, "num_experts = 0"),
        ("tile_rows", 0, ValueError, "tile_rows = 0"),
    ),
    permute: (
        dict(x=zeros(4, 8), routing=ROUTING),
        ("x", zeros(3, 8), ValueError, r"x is float32\[3, 8\]; its shape must be \[T, H\] with T = 4"),
        ("routing", GROUPS, TypeError, "routing is a Groups"),
    ),
    unpermute: (
        dict(rows=zeros(ROUTING.groups.rows, 8), routing=ROUTING),
        ("rows", zeros(5, 8), ValueError, r"rows is float32\[5, 8\].*of the routing's tiles"),
    ),
    matmul_of_tokens: (
        dict(x=zeros(4, 64), weight=zeros(3, 32, 64), routing=ROUTING),
        ("x", zeros(3, 64), ValueError, r"x is float32\[3, 64\].*with T = 4"),
        ("weight", zeros(2, 32, 64), ValueError, "weight is .*E = 3"),
        ("routing", None, TypeError, "routing is None"),
        ("bias", zeros(3, 31), ValueError, "bias is .* with .*out = 32"),
    ),
    matmul_to_tokens: (
        dict(rows=zeros(ROUTING.groups.rows, 64), weight=zeros(3, 32, 64), routing=ROUTING),
        ("rows", zeros(3, 64), ValueError, r"rows is float32\[3, 64\]"),
        ("weight", zeros(3, 32, 32), ValueError, "weight is .*in = 64"),
    ),
    row_weights: (dict(weights=zeros(4, 2), routing=ROUTING), ("weights", zeros(4, 3), ValueError, "weights .*k = 2")),
    token_bias: (
        dict(out=zeros(4, 8), weights=zeros(4, 2), bias=zeros(3, 8), choice=ints(4, 2)),
        ("bias", zeros(3, 7), ValueError, r"bias .*n = 8"),
        ("choice", ints(4, 3), ValueError, "choice .*k = 2"),
    ),
    router_sums: (dict(logits=zeros(4, 6), choice=ints(4, 2)), ("choice", ints(3, 2), ValueError, "choice .*T = 4")),
    linear_cross_entropy: (
        dict(hidden=zeros(2, 8, 16), head=zeros(32, 16), targets=ints(2, 8), weights=zeros(2, 8)),
        ("hidden", zeros(8, 16), ValueError, "hidden is"),
        ("head", zeros(16, 32), ValueError, r"head is float32\[16, 32\]; its shape must be \[V, D\] with D = 16"),
        ("targets", zeros(2, 8), TypeError, "targets is float32"),
        ("targets", ints(2, 7), ValueError, "targets .*T = 8"),
        ("weights", zeros(8), ValueError, "weights is"),
        ("soft_cap", 0.0, ValueError, "soft_cap = 0.0: must be above 0"),
        ("label_smoothing", 1.0, ValueError, "label_smoothing = 1.0: must be at least 0 and below 1"),
        ("label_smoothing", -0.1, ValueError, "label_smoothing = -0.1"),
        ("z_loss", -1.0, ValueError, "z_loss = -1.0: must be at least 0"),
        ("chunk_tokens", 0, ValueError, "chunk_tokens = 0: must be at least 1"),
    ),
    gated_backward: (
        dict(gate=zeros(3, 8), up=zeros(3, 8), dgated=zeros(3, 8), activation="silu"),
        ("up", zeros(3, 7), ValueError, r"up is float32\[3, 7\]; its shape must be \[3, 8\]"),
        ("dgated", zeros(3, 8, dtype=jnp.bfloat16), TypeError, "dgated is bfloat16.*must be float32"),
        ("activation", "swish", ValueError, "activation = 'swish': must be .*silu"),
    ),
    gated_thin: (
        dict(gate=zeros(3, 8), up=zeros(3, 8), a=zeros(2, 8), activation="silu"),
        ("gate", zeros(8), ValueError, r"gate is float32\[8\]; its shape must be \[tokens, I\]"),
        ("up", zeros(3, 7), ValueError, r"up is float32\[3, 7\].*I = 8"),
        ("a", zeros(2, 7), ValueError, r"a is float32\[2, 7\].*I = 8"),
        ("activation", "swish", ValueError, "activation = 'swish': must be .*silu"),
        ("implementation", "fast", ValueError, "no implementation 'fast'"),
    ),
    thin_of_gated: (
        dict(gate=zeros(3, 8), up=zeros(3, 8), a=zeros(2, 8), activation="silu"),
        ("up", zeros(3, 8, dtype=jnp.bfloat16), TypeError, "up is bfloat16.*must be float32"),
        ("a", ints(2, 8), TypeError, "a is int32"),
    ),
    gated_thin_backward: (
        dict(gate=zeros(3, 8), up=zeros(3, 8), dgated=zeros(3, 8), dinner=zeros(3, 2), activation="silu"),
        ("dgated", zeros(2, 8), ValueError, r"dgated is float32\[2, 8\].*tokens = 3"),
        ("dinner", zeros(2, 2), ValueError, r"dinner is float32\[2, 2\].*tokens = 3"),
        ("dinner", zeros(3, 2, dtype=jnp.bfloat16), TypeError, "dinner is bfloat16.*must be float32"),
        ("implementation", "fast", ValueError, "no implementation 'fast'"),
    ),
    gated_rows_backward: (
        dict(gate_up=zeros(3, 8), weights=zeros(3), dgated=zeros(3, 4), gate=RowGate("silu")),
        ("gate_up", zeros(3, 4), ValueError, r"gate_up is float32\[3, 4\]; its shape must be \[3, 8\]"),
        ("gate_up", zeros(3, 8, dtype=jnp.bfloat16), TypeError, "gate_up is bfloat16.*must be float32"),
        ("weights", zeros(4), ValueError, "weights is .*rows = 3"),
        ("gate", "silu", TypeError, r"gate is a str \(silu\); it must be a RowGate"),
        ("gate", RowGate("swish"), ValueError, "gate.activation = 'swish': must be .*silu"),
        ("implementation", "fast", ValueError, "no implementation 'fast'"),
    ),
    gated_delta_rule: (
        dict(query=zeros(2, 8, 2, 16), **WRITES, layout=packed_layout((2, 8))),
        ("query", zeros(2, 8, 4, 16), ValueError, r"query is .*with .*key_heads = 2 \(as key has\)"),
        ("value", zeros(2, 8, 3, 6), ValueError, r"decay is float32\[2, 8, 4\]; .* with .*heads = 3"),
        ("key", zeros(2, 8, 3, 16), ValueError, "4 value heads are not a multiple of 3 key heads"),
        ("decay", zeros(2, 8, 4, dtype=jnp.bfloat16), TypeError, "decay is bfloat16.*; its dtype must be float32"),
        ("beta", zeros(2, 8), ValueError, "beta is"),
        ("layout", SHORT, ValueError, r"layout.doc_start is int32\[2, 6\]"),
        ("layout", None, TypeError, "layout is None; it must be a PackedLayout"),
        ("implementation", "fast", ValueError, "no implementation 'fast'"),
    ),
    delta_rule_state: (
        dict(**WRITES, lengths=ints(2)),
        ("lengths", zeros(2), TypeError, "lengths is float32"),
        ("lengths", ints(3), ValueError, r"lengths is int32\[3\]; its shape must be \[B\] with B = 2"),
    ),
    delta_rule_chunk: (
        dict(query=zeros(2, 8, 2, 16), **WRITES, state=zeros(2, 4, 16, 6)),
        ("key", zeros(2, 7, 2, 16), ValueError, "T = 7"),
        ("state", zeros(2, 4, 6, 16), ValueError, "state is .*K = 16"),
    ),
    delta_rule_step: (
        dict(query=zeros(2, 1, 2, 16), **ONE_TOKEN, state=zeros(2, 4, 16, 6)),
        ("key", zeros(2, 8, 2, 16), ValueError, r"key is .* with T = 1"),
        ("state", zeros(2, 4, 6, 16), ValueError, "state is .*K = 16"),
    ),
    short_convolution: (
        dict(x=zeros(2, 8, 6), weight=zeros(6, 4), layout=packed_layout((2, 8))),
        ("weight", zeros(4, 6), ValueError, "weight is .* with C = 6"),
        ("layout", IDS, TypeError, "it must be a PackedLayout"),
    ),
    short_convolution_parts: (
        dict(x=zeros(2, 8, 24), weight=zeros(24, 4), layout=packed_layout((2, 8)), part_sizes=(8, 8, 8)),
        ("part_sizes", (8, 8), ValueError, r"part_sizes = \(8, 8\) must add up to C = 24"),
        ("weight", zeros(8, 4), ValueError, "weight .*C = 24"),
    ),
    short_convolution_step: (
        dict(x=zeros(2, 1, 6), weight=zeros(6, 4), window=zeros(2, 3, 6)),
        ("window", zeros(2, 4, 6), ValueError, r"window is .*\[B, 3, C\]"),
    ),
    normed_heads: (
        dict(x=zeros(2, 8, 3, 16), weight=zeros(16), table=(zeros(2, 8, 8), zeros(2, 8, 8))),
        ("weight", zeros(8), ValueError, r"weight is float32\[8\].*D = 16"),
        ("table", (zeros(2, 8, 8), zeros(2, 8, 4)), ValueError, r"table\[1\] is .*rotary_dim/2 = 8"),
        ("table", (zeros(2, 7, 8), zeros(2, 7, 8)), ValueError, r"table\[0\] is .*T = 8"),
        ("table", (zeros(2, 8, 9), zeros(2, 8, 9)), ValueError, "table rotates 18 numbers of heads of 16"),
    ),
    thin_pair: (
        dict(dout=zeros(6, 24), b=zeros(24, 4), inner=zeros(6, 4)),
        ("dout", ints(6, 24), TypeError, "dout is int32"),
        ("b", zeros(23, 4), ValueError, r"b is float32\[23, 4\].*out = 24"),
        ("inner", zeros(6, 5), ValueError, r"inner is float32\[6, 5\].*r = 4"),
        ("inner", zeros(6, 4, dtype=jnp.bfloat16), TypeError, "inner is bfloat16.*; its dtype must be float32"),
    ),
    normed_stream: (
        dict(x=zeros(2, 8, 16), weight=zeros(16)),
        ("x", ints(2, 8, 16), TypeError, "x is int32"),
        ("weight", zeros(8), ValueError, r"weight is float32\[8\].*size = 16"),
    ),
    NF4.encode: (
        dict(array=zeros(3, 8)),
        ("array", ints(3, 8), TypeError, "array is int32"),
        ("array", [1.0], TypeError, "array is a list"),
        ("array", zeros(0, 8), ValueError, r"array has the shape \(0, 8\)"),
        ("double_quant", "yes", TypeError, "double_quant is a str"),
    ),
    NF4.decode: (
        dict(self=WEIGHT),
        ("dtype", jnp.int8, TypeError, "dtype is int8; it must be a float dtype"),
        ("self", dataclasses.replace(WEIGHT, absmax=zeros(6)), ValueError, r"absmax is .*asks for uint8\[6\]"),
        ("self", dataclasses.replace(WEIGHT, offset=None), ValueError, "some are there and some are None"),
    ),
    MXFP4.from_blocks: (
        dict(blocks=zeros(4, 3, 16, dtype=jnp.uint8), scales=zeros(4, 3, dtype=jnp.uint8)),
        ("blocks", zeros(4, 2, 16, dtype=jnp.uint8), ValueError, r"blocks is uint8\[4, 2, 16\]; .* \[4, 3, 16\]"),
        ("scales", zeros(4, 3), TypeError, "scales is float32"),
    ),
    MXFP4.decode: (
        dict(self=MXFP4(zeros(4, 32, dtype=jnp.uint8), zeros(4, 2, dtype=jnp.uint8))),
        ("self", MXFP4(CODES, zeros(4, 2, dtype=jnp.uint8)), ValueError, r"codes are \[2, 256\]; scales \[4, 2\] ask"),
        ("dtype", jnp.int32, TypeError, "dtype is int32"),
    ),
    blockwise8.encode: (dict(values=zeros(300), signed=True), ("values", ints(300), TypeError, "values is int32")),
    blockwise8.decode: (
        dict(codes=CODES, absmax=ABSMAX, signed=True),
        ("codes", zeros(2, 128, dtype=jnp.uint8), ValueError, r"codes .*\[blocks, 256\]"),
        ("absmax", zeros(3), ValueError, "absmax .*blocks = 2"),
    ),
    adam8.plain_update: (
        ADAM,
        ("gradient", zeros(600), ValueError, "m is uint8.*blocks = 3 .256 elements of the gradient in each"),
        ("v", zeros(2, 256), TypeError, "v is float32"),
        ("v_absmax", zeros(3), ValueError, "v_absmax is"),
        ("betas", (0.9, 1.0), ValueError, "betas = 1.0: must be at least 0 and below 1"),
        ("betas", 0.9, TypeError, "betas is a float"),
    ),
    adam8.adam_update: (ADAM, ("m", CODES[:1], ValueError, r"m is uint8\[1, 256\]")),
}
CASES = [(op, OPS[op][0], *case) for op in OPS for case in OPS[op][1:]]


def traced(op, arguments):
    """Traces op(**arguments), arrays of which are arguments of the program."""
    fixed = {name: value for name, value in arguments.items() if not all(map(_is_array, jax.tree.leaves(value)))}
    return jax.eval_shape(lambda given: op(**fixed, **given), {k: v for k, v in arguments.items() if k not in fixed})


def _is_array(leaf):
    return isinstance(leaf, jax.Array)


def _id(value):
    return getattr(value, "__qualname__", "") if not isinstance(value, str) else value


# Without adam_update, which is a kernel and needs its GPU or the interpreter.
@pytest.mark.parametrize("op", [op for op in OPS if op is not adam8.adam_update], ids=lambda op: op.__qualname__)
def test_what_an_op_takes(op):
    assert jax.tree.leaves(traced(op, OPS[op][0])), "it is accepted, and has a result"


@pytest.mark.parametrize(("op", "good", "name", "value", "error", "words"), CASES, ids=_id)
def test_what_an_op_refuses(op, good, name, value, error, words):
    with pytest.raises(error, match=words) as refused:
        traced(op, {**good, name: value})
    named = op.__qualname__ if "." in op.__qualname__ else op.__name__
    assert named.split(".")[-1] in str(refused.value), "the sentence names the op"


# Of an array [6, 64] in any float dtype.
MIXED = {
    "loss": lambda x: linear_cross_entropy(x[None], x, ints(1, 6), zeros(1, 6), label_smoothing=0.1)[0],
    "linears": lambda x: quant_matmul(x, [x, NF4.encode(x)], [LoraWeights(x[:4], x[:, :4], zeros(6)), None])[0],
    "dropout": lambda x: quant_matmul(
        x, [x], [LoraWeights(x[:4], x[:, :4])], dropout_rate=0.5, dropout_key=jax.random.key(0)
    )[0],
    "bias": lambda x: grouped_bias(jnp.ones((ROWS, 64), x.dtype), x[:2], GROUPS),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", MIXED)
def test_no_dtype_is_promoted_unasked(op, dtype):
    """By JAX's strict rule, which is set for a whole process; in gradients neither."""
    with jax.numpy_dtype_promotion("strict"):
        gradient = jax.grad(lambda x: MIXED[op](x).astype(jnp.float32).sum())
        assert jax.eval_shape(gradient, zeros(6, 64, dtype=dtype)).dtype == dtype
