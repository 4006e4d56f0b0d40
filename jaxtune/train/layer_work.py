"""One layer, as the planner (memory.py) sees it.

Its residuals and its work are read from its shapes; what its backward takes beside what is kept was fitted to programs
compiled for an H200 (benchmarks/train/predictions.py records how well that holds).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtune.models.config import DecoderConfig
from jaxtune.models.linear import Linear
from jaxtune.models.moe import ExpertLinear
from jaxtune.models.stack import LayerPlan, layer_forward, segments_of
from jaxtune.pallas.formats import FourBit
from jaxtune.pallas.gated import mosaic
from jaxtune.pallas.grouped_matmul.layout import TILE_ROWS
from jaxtune.train.plan import RESIDUALS


@dataclasses.dataclass(frozen=True)
class Work:
    """One segment's forward, for one token: FLOPs of products and of attention, bytes moved by everything else.

    weight_flops: of the weights' own gradients. Once a pass, whatever the tokens: weight_bytes read, elements decoded,
    and empty_flops, products with the rows that fill up the experts' last tiles.
    """

    flops: float = 0.0
    attention_flops: float = 0.0
    moved_bytes: float = 0.0
    weight_flops: float = 0.0
    weight_bytes: float = 0.0
    decoded: float = 0.0
    empty_flops: float = 0.0


_SEGMENT_OF = {
    "q_proj": "project", "k_proj": "project", "v_proj": "project", "qkv_proj": "project", "o_proj": "mix",
    "gate_proj": "expand", "up_proj": "expand", "gate_up_proj": "expand", "down_proj": "contract",
}  # fmt: skip
_PROBE_TOKENS = 128


def nbytes(tree) -> float:
    return float(sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree)))


def _matrices(layer) -> Iterator[tuple[str, Linear | ExpertLinear]]:
    for path, module in nnx.iter_modules(layer):
        if isinstance(module, Linear | ExpertLinear):
            yield str(path[-1]), module


def decoded_expert_bytes(layer, dtype) -> float:
    weights = [matrix.stored_weight for _, matrix in _matrices(layer) if isinstance(matrix, ExpertLinear)]
    return float(max((w.size for w in weights if isinstance(w, FourBit)), default=0) * dtype.itemsize)


def trained_matrix_bytes(layer, dtype) -> float:
    """A layer's trained matrices in a compute dtype that is not their masters'."""
    weights = [matrix.weight for _, matrix in _matrices(layer)]
    trained = [w for w in weights if isinstance(w, nnx.Param)]
    return 0.0 if dtype.itemsize >= 4 else sum(math.prod(w.shape) for w in trained) * float(dtype.itemsize)


def layer_anatomy(layer, key, shape, length: int, dtype) -> tuple[dict[str, float], dict[str, float], dict[str, Work]]:
    """(residual bytes a token, those whatever the tokens, work of each segment) of one layer; key: what makes it equal
    to another."""
    graph, spec, leaves, structure = key
    once, twice = (_probe(graph, spec, shape, dtype.name, (leaves, structure), n * _PROBE_TOKENS) for n in (1, 2))
    residuals = {name: (nbytes(twice[name]) - nbytes(once[name])) / _PROBE_TOKENS for name in once}
    padding = {name: 2 * nbytes(once[name]) - nbytes(twice[name]) for name in once}
    residuals["layer_output"] = residuals["layer_input"]
    segments = segments_of(layer)
    window = min(spec.window or length, length)
    seen_keys = window - (window - 1) * window / (2 * length)  # the mean over a whole document of `length`
    sums = {segment.name: dict.fromkeys((f.name for f in dataclasses.fields(Work)), 0.0) for segment in segments}
    for name, matrix in _matrices(layer):
        size = used = math.prod(matrix.sizes)
        weight = matrix.stored_weight
        of = sums[_SEGMENT_OF[name]]
        if isinstance(matrix, ExpertLinear):
            used = size // shape.moe.num_experts * shape.moe.experts_per_token
            of["empty_flops"] += 2.0 * size * TILE_ROWS / 2
            # To and from the rows sorted by expert.
            of["moved_bytes"] += shape.moe.experts_per_token * shape.hidden_size * dtype.itemsize
        of["flops"] += 2.0 * used
        of["weight_bytes"] += nbytes(weight)
        of["decoded"] += size if isinstance(weight, FourBit) else 0.0
        of["weight_flops"] += 2.0 * used if isinstance(matrix.weight, nnx.Param) else 0.0
    for segment in segments:
        moved = sum(residuals[name] for name in (*segment.inputs, *segment.outputs))
        if segment.name == "attend":
            sums["attend"]["attention_flops"] = 4.0 * shape.query_size * seen_keys
        else:
            sums[segment.name]["moved_bytes"] += moved
    return residuals, padding, {name: Work(**values) for name, values in sums.items()}


def abstract_leaves(tree):
    """(shapes and dtypes of the leaves, structure), hashable."""
    leaves, structure = jax.tree.flatten(tree)
    return tuple((tuple(leaf.shape), str(leaf.dtype)) for leaf in leaves), structure


@functools.lru_cache(64)
def _probe(graph, spec, shape, dtype: str, arguments, tokens: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of a layer's residuals."""
    from jaxtune.models.rope import rotary_table
    from jaxtune.pallas.attention import PackedLayout, packed_layout

    leaves, structure = arguments
    trainable, frozen = jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(*leaf) for leaf in leaves])

    def run(trainable, frozen, x):
        layout = packed_layout((1, tokens), None, 1)
        tables = tuple(
            rotary_table(rope, shape.head_dim, shape.max_position_embeddings, layout.positions())
            for rope in shape.rotary
        )
        layout = PackedLayout(layout.doc_start, layout.doc_end, tables, layout.max_documents, layout.full)
        # Not the jitted function: what it traces here must not be found again by a run on another device.
        return layer_forward.__wrapped__(  # type: ignore[attr-defined]
            graph, spec, RESIDUALS, trainable, frozen, x, layout, None
        )[1]

    return jax.eval_shape(run, trainable, frozen, jax.ShapeDtypeStruct((1, tokens, shape.hidden_size), dtype))


def gated_in_place(shape: DecoderConfig, dtype, length: int) -> bool:
    """On a Hopper GPU, the gradients of gate and up and the activation take the place of what they are made of."""
    return shape.moe is None and mosaic.unsupported(dtype, length * shape.intermediate_size, shape.activation) is None


def backward_bytes(
    plan: LayerPlan,
    size: Mapping[str, float],
    tiles: int,
    in_place: bool,
    expert_rows: float,
    expert_bytes: float,
    gathered: bool,
    arrived: float,
    arrived_last: float,
) -> float:
    """Bytes of what a layer recomputes and makes, and of what was offloaded.

    Args:
      size: {residual: bytes}, of gate and up those of a tile. tiles: that the MLP runs over.
      in_place: as gated_in_place says. expert_rows, expert_bytes: as in memory.Anatomy.
      gathered: whether experts' products bring tokens' rows themselves.
      arrived, arrived_last: bytes that have come from the host at the MLP's backward, and at the attention's.
    """
    dropped = {name: size[name] for name in plan.named("recompute")}
    if in_place:
        around = (1.6 if tiles == 1 else 2.0) * size["layer_input"]
        at_the_mlp = _at_the_mlp(dropped, size) + around + arrived
        return max(at_the_mlp, _at_the_attention(dropped, size, tiles) + arrived_last)
    # At the MLP's backward: the activation, its gradient, and those of gate and up; half-ready gradients around it.
    work = 2 * (size["gate"] + size["up"]) + 0.6 * size["layer_input"] + 0.7 * size["query"]
    # Of experts likewise; or gradients of gate_up and of rows, which are as many as sorted rows. Where products do not
    # bring rows themselves, sorted rows too; or, beside a decoded weight, if gate_up runs again, its rows and those of
    # a gradient; if not, gradients of gate_up and of rows.
    gate_up, sorted_rows = size["gate_up"], expert_rows * size["gate_up"]
    if gathered:
        work += max(2 * gate_up, gate_up + 1.3 * sorted_rows)
    else:
        rows = 2.05 * sorted_rows if "gate_up" in dropped else gate_up + sorted_rows
        work += max(2 * gate_up + 1.25 * sorted_rows, rows + 1.1 * expert_bytes)
    if tiles > 1:
        work += 0.2 * size["layer_input"]
    return work + sum(dropped.values()) + arrived_last


def _at_the_mlp(dropped: Mapping[str, float], size: Mapping[str, float]) -> float:
    """Gate, up and the activation's gradient, which are replaced."""
    work = sum(dropped.values()) + (size["gate"] + size["up"]) / 2
    if "attention_out" not in dropped and "lse" not in dropped:  # then query, key and value are not made before
        work -= sum(dropped.get(name, 0.0) for name in ("query", "key", "value"))
    return work


def _at_the_attention(dropped: Mapping[str, float], size: Mapping[str, float], tiles: int) -> float:
    """Later, with nothing left of the MLP: the attention's gradients."""
    work = sum(dropped.values()) - dropped.get("gate", 0.0) - dropped.get("up", 0.0)
    work += 2 * size["query"] + size["key"] + size["value"] + 2.2 * size["layer_input"]
    if tiles == 1:
        return work
    # cuDNN's work space, which counts where nothing is larger: gradients of query in float32, and of key and value for
    # each of its heads. By one step of 350,208 tokens on an H200, 3.5 to 3.9 times the query.
    return work - dropped.get("mid", 0.0) - size["layer_input"] + 4 * size["query"]
