"""PackedLayout: which keys each query of a batch can see, computed once per batch (`packed_layout`) and passed to every
layer.

Tokens see each other, causally, within a contiguous run of a segment id. An id that returns later in the row is a new
document, 0 is padding anywhere, and no ids at all means one document a row. The layout knows no block size and no
window: every kernel derives its visible and masked blocks from it.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxtune.pallas.arguments import INTEGERS, Arguments
from jaxtune.pallas.meshes import on_any_mesh


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedLayout:
    """The document boundaries of every token of a batch, and the model's rotary tables; packed_layout makes one for
    each batch without tables, the model adds its tables, and all layers use it: attention takes the bounds, and the
    layers rotate queries and keys by the tables. (A step of generation makes its own.) It is a JAX pytree whose
    guarantees are static: another guarantee is another program."""

    doc_start: jax.Array  # int32[B, T], index in the row of the first token of this token's document
    # int32[B, T], index after the last token of this token's document. Padding has doc_start = doc_end = its own index:
    # an empty range, so that padding sees nothing and nothing sees it.
    doc_end: jax.Array
    # for each rotary base of the model (cos, sin), float32[B, T, rotary_dim / 2] each; a base with a factor on queries
    # has it as a third array float32[B, T, 1]
    rotary: tuple[tuple[jax.Array, ...], ...] = ()
    # a static guarantee about every row, or None for none: n means at most n documents a row; 1 also means that the
    # document starts at index 0, so that padding can only follow it
    max_documents: int | None = dataclasses.field(default=None, metadata=dict(static=True))
    # a static guarantee that every row is one document without padding
    full: bool = dataclasses.field(default=False, metadata=dict(static=True))

    def positions(self) -> jax.Array:
        """int32[B, T]: index of each token within its document; 0 on padding. The rotary tables of packed rows are made
        for these, so that each document begins at position 0."""
        index = jnp.arange(self.doc_start.shape[1], dtype=jnp.int32)
        return index - self.doc_start


@on_any_mesh
def packed_layout(
    shape: tuple[int, int], segment_ids: jax.Array | None = None, max_documents: int | None = None
) -> PackedLayout:
    """Builds the layout of a batch of `shape` = (rows, length), whose rotary tables are empty (the model fills them).

    Shapes are static and nothing waits for the device, so it can be used within jit.

    Args:
      shape: (rows, length), each at least 1.
      segment_ids: int[B, T], the same number for neighbouring tokens of one document, 0 for padding; `full` stays False
        with them. None: one document a row without padding, which the layout then guarantees (full, max_documents = 1),
        whatever max_documents is.
      max_documents: the caller's guarantee that no row has more documents than this; with 1, the document of each row
        starts at index 0. None: no guarantee. It is not verified here, because that would wait for the device.
    Raises:
      TypeError, ValueError: an argument does not fit this description.
    """
    check = Arguments("packed_layout")
    check.sequence("shape", shape, "rows and length", 2)
    rows, length = shape
    check.number("rows", rows, whole=True, least=1)
    check.number("length", length, whole=True, least=1)
    check.number("max_documents", max_documents, whole=True, least=1, optional=True)
    index = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (rows, length))
    if segment_ids is None:
        zeros = jnp.zeros((rows, length), jnp.int32)
        return PackedLayout(zeros, zeros + length, max_documents=1, full=True)
    check.array("segment_ids", segment_ids, f"{rows} {length}", INTEGERS)
    changes = segment_ids[:, 1:] != segment_ids[:, :-1]
    edge = jnp.ones((rows, 1), bool)
    first = jnp.concatenate([edge, changes], axis=1)
    last = jnp.concatenate([changes, edge], axis=1)
    start = jax.lax.cummax(jnp.where(first, index, 0), axis=1)
    end = jax.lax.cummin(jnp.where(last, index + 1, length), axis=1, reverse=True)
    padding = segment_ids == 0
    return PackedLayout(jnp.where(padding, index, start), jnp.where(padding, index, end), max_documents=max_documents)
