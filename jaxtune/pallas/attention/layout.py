"""Which keys each query of a batch can see, computed once per batch and passed to every layer.

Tokens see each other, causally or both ways, within a contiguous run of a segment id. An id that returns later in the
row is a new document, 0 is padding anywhere, and no ids mean one document a row. The layout knows no block size and no
window.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxtune.pallas.arguments import INTEGERS, Arguments
from jaxtune.pallas.meshes import on_any_mesh


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Runs:
    """Runs of neighbouring tokens of a document that see each other both ways, such as those of a picture. A token
    outside of them is a run of its own; padding has start = end = its own index. Neither bound falls along a row.
    """

    start: jax.Array  # int32[B, T], index in the row of the first token of this token's run: the first that sees it
    end: jax.Array  # int32[B, T], index after the last token of this token's run: after the last that it sees
    # whether only attention with a window has them; other attention is causal
    windows_only: bool = dataclasses.field(default=False, metadata=dict(static=True))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedLayout:
    """The document bounds of every token of a batch, and the model's rotary tables, which the model adds. A pytree
    whose guarantees are static: another guarantee is another program.
    """

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
    # whether a token sees the tokens of its document up to itself; False: all of them, as the patches of a picture do
    causal: bool = dataclasses.field(default=True, metadata=dict(static=True))
    runs: Runs | None = (
        None  # tokens that see later ones, too; a window cuts the backward look alone. None: there are none
    )

    def positions(self) -> jax.Array:
        """int32[B, T]: index of each token within its document; 0 at padding."""
        index = jnp.arange(self.doc_start.shape[1], dtype=jnp.int32)
        return index - self.doc_start

    def counts(self) -> jax.Array:
        """int32[B]: tokens of each row that are not padding."""
        return (self.doc_end > self.doc_start).sum(1, dtype=jnp.int32)

    def of_window(self, window: int | None) -> PackedLayout:
        """Without runs that attention of this window does not have."""
        drops = self.runs is not None and self.runs.windows_only and window is None
        return dataclasses.replace(self, runs=None) if drops else self

    def with_runs(self, inside: jax.Array, windows_only: bool = False) -> PackedLayout:
        """With a run of each sequence of neighbouring tokens of a document that are inside, bool[B, T]."""
        rows, length = inside.shape
        index = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), inside.shape)
        goes_on = inside[:, 1:] & inside[:, :-1] & (self.doc_start[:, 1:] == self.doc_start[:, :-1])
        edge = jnp.ones((rows, 1), bool)
        first, last = jnp.concatenate([edge, ~goes_on], 1), jnp.concatenate([~goes_on, edge], 1)
        start = jax.lax.cummax(jnp.where(first, index, 0), axis=1)
        end = jax.lax.cummin(jnp.where(last, index + 1, length), axis=1, reverse=True)
        return dataclasses.replace(self, runs=Runs(start, jnp.minimum(end, self.doc_end), windows_only))


@on_any_mesh
def packed_layout(
    shape: tuple[int, int],
    segment_ids: jax.Array | None = None,
    max_documents: int | None = None,
    causal: bool = True,
) -> PackedLayout:
    """The layout of a batch of `shape` = (rows, length), without rotary tables. It never waits for the device.

    segment_ids: int[B, T], equal for neighbouring tokens of a document, 0 at padding. None: one document a row
      without padding, which the layout then guarantees (full, max_documents = 1).
    max_documents: the caller's guarantee, not verified, that no row has more; 1 also means that each row's document
      starts at index 0.
    causal: False: a token sees all of its document.
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
        return PackedLayout(zeros, zeros + length, max_documents=1, full=True, causal=causal)
    check.array("segment_ids", segment_ids, f"{rows} {length}", INTEGERS)
    changes = segment_ids[:, 1:] != segment_ids[:, :-1]
    edge = jnp.ones((rows, 1), bool)
    first = jnp.concatenate([edge, changes], axis=1)
    last = jnp.concatenate([changes, edge], axis=1)
    start = jax.lax.cummax(jnp.where(first, index, 0), axis=1)
    end = jax.lax.cummin(jnp.where(last, index + 1, length), axis=1, reverse=True)
    padding = segment_ids == 0
    bounds = jnp.where(padding, index, start), jnp.where(padding, index, end)
    return PackedLayout(*bounds, max_documents=max_documents, causal=causal)
