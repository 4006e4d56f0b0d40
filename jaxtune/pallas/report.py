"""Lists which implementation runs typical calls of a training step's operations here, and why others refuse."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxtune.pallas import dispatch
from jaxtune.pallas.attention import api as attention
from jaxtune.pallas.attention.layout import packed_layout
from jaxtune.pallas.delta_rule import api as delta_rule
from jaxtune.pallas.formats import FP8, NF4
from jaxtune.pallas.gated import api as gated
from jaxtune.pallas.gated import thin
from jaxtune.pallas.grouped_matmul import api as grouped_matmul
from jaxtune.pallas.grouped_matmul.layout import groups_of
from jaxtune.pallas.linear_cross_entropy import api as linear_cross_entropy
from jaxtune.pallas.normed_heads import api as normed_heads
from jaxtune.pallas.normed_stream import api as normed_stream
from jaxtune.pallas.quant_matmul import api as quant_matmul
from jaxtune.pallas.quant_matmul import coded
from jaxtune.pallas.routing import api as routing
from jaxtune.pallas.thin_pair import api as thin_pair

_ROWS, _LENGTH, _HEADS, _KV_HEADS, _HEAD_DIM, _WIDE_HEAD_DIM, _DOCUMENTS = 8, 2048, 32, 8, 128, 256, 16
_HIDDEN, _EXPERTS, _RANK = 4096, 32, 16


@dataclasses.dataclass(frozen=True)
class KernelChoice:
    """Which implementation runs a typical call, and why others refuse it."""

    op: str  # the name of the operation, such as "attention"
    call: str  # the call in words, such as "bfloat16, silu"
    chosen: str  # the name of the implementation that runs
    # {name of an implementation: the reason why it refuses the call, or None if it could run}, of all, in the order in
    # which they are tried; the first that does not refuse is chosen
    refusals: dict[str, str | None]

    def to_text(self) -> str:
        """A line for the call, then one for each implementation: "chosen", "refuses: " and why, or "not needed"."""
        lines = [f"{self.op}: {self.call}"]
        for name, refusal in self.refusals.items():
            verdict = "chosen" if name == self.chosen else f"refuses: {refusal}" if refusal else "not needed"
            lines.append(f"  {name:<15} {verdict}")
        return "\n".join(lines)


def kernel_choices() -> list[KernelChoice]:
    """Choices for typical calls in bfloat16 on this machine's GPU (or that of targets.compile_for). Nothing is
    computed, but kernels not checked on this GPU before are compared with the reference.
    """
    query = jax.ShapeDtypeStruct((_ROWS, _LENGTH, _HEADS, _HEAD_DIM), jnp.bfloat16)
    wide = jax.ShapeDtypeStruct((_ROWS, _LENGTH, _HEADS, _WIDE_HEAD_DIM), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((_ROWS, _LENGTH), jnp.int32)
    unpacked = jax.eval_shape(lambda: packed_layout(ids.shape))
    packed = jax.eval_shape(lambda ids: packed_layout(ids.shape, ids, _DOCUMENTS), ids)
    array: Any = jax.ShapeDtypeStruct((_HIDDEN, _HIDDEN), jnp.bfloat16)
    nf4, fp8 = (jax.eval_shape(kind.encode, array) for kind in (NF4, FP8))
    experts = jax.eval_shape(NF4.encode, jax.ShapeDtypeStruct((_EXPERTS, 5760, 2880), jnp.bfloat16))
    sizes = jax.ShapeDtypeStruct((_EXPERTS,), jnp.int32)
    weight: Any = jax.ShapeDtypeStruct((_HEAD_DIM,), jnp.bfloat16)
    row = jax.ShapeDtypeStruct((_HIDDEN,), jnp.bfloat16)
    adapter = jax.ShapeDtypeStruct((_HIDDEN, _RANK), jnp.float32)
    table = [jax.ShapeDtypeStruct((_ROWS, _LENGTH, _HEAD_DIM // 2), jnp.float32)] * 2
    groups = jax.eval_shape(lambda sizes: groups_of(sizes, _ROWS * _LENGTH), sizes)
    call = f"bfloat16, head dim {_HEAD_DIM}, {_ROWS} rows of {_LENGTH:,} tokens,"
    return [
        _choice(
            "attention", f"{call} one document a row", attention.implementations(query, unpacked, kv_heads=_KV_HEADS)
        ),
        _choice(
            "attention",
            f"{call} packed, up to {_DOCUMENTS} documents a row",
            attention.implementations(query, packed, kv_heads=_KV_HEADS),
        ),
        _choice(
            "attention",
            f"bfloat16, head dim {_WIDE_HEAD_DIM}, packed, soft cap",
            attention.implementations(wide, packed, kv_heads=_KV_HEADS, soft_cap=50.0),
        ),
        _choice("quant_matmul", "bfloat16", quant_matmul.implementations([array], jnp.bfloat16)),
        _choice("quant_matmul", "bfloat16, weights in NF4", quant_matmul.implementations([nf4], jnp.bfloat16)),
        _choice(
            "quant_matmul",
            f"bfloat16, {_ROWS} tokens, weights in FP8",
            {"triton": lambda: coded.refusal([fp8], jnp.bfloat16, _ROWS), "reference": lambda: None},
        ),
        _choice("thin_pair", f"bfloat16, rank {_RANK}", thin_pair.implementations(array, adapter)),
        _choice("gated_backward", "bfloat16, silu", gated.implementations(jnp.bfloat16, array.size, "silu")),
        _choice("gated_thin", f"bfloat16, silu, rank {_RANK}", thin.implementations(array, _RANK, "silu")),
        _choice("gated_rows_backward", "bfloat16, silu", gated.row_implementations(array, gated.RowGate("silu"))),
        _choice(
            "grouped_matmul",
            f"bfloat16, {_EXPERTS} experts, 2880 x 5760",
            grouped_matmul.implementations(jnp.bfloat16, 2880, 5760, groups),
        ),
        _choice(
            "grouped_matmul",
            f"bfloat16, {_EXPERTS} experts, 2880 x 5760, weights in NF4",
            grouped_matmul.implementations(jnp.bfloat16, 2880, 5760, groups, experts),
        ),
        _choice("routing sort", f"{_EXPERTS} experts", routing.sort_implementations(_EXPERTS)),
        _choice(
            "routing spread",
            "bfloat16, 2880 numbers a row, 4 experts a token",
            routing.implementations(jnp.bfloat16, 2880, 4),
        ),
        _choice("linear_cross_entropy", "bfloat16", linear_cross_entropy.implementations()),
        _choice(
            "normed_heads",
            f"bfloat16, {_HEADS} heads of {_HEAD_DIM}",
            normed_heads.implementations(query, weight, table),
        ),
        _choice("normed_stream", f"bfloat16, rows of {_HIDDEN:,}", normed_stream.implementations(array, row)),
        _choice("gated_delta_rule", f"bfloat16, head dim {_HEAD_DIM}", delta_rule.implementations(query, query)),
    ]


def _choice(op: str, call: str, table: dispatch.Table) -> KernelChoice:
    implementation = dispatch.choose(op, table, None)
    return KernelChoice(op, call, implementation, {name: refuse() for name, refuse in table.items()})
