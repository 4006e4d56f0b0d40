"""The two thin products of an adapter's backward."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from jaxtune.pallas import dispatch, meshes
from jaxtune.pallas.arguments import FLOATS, Arguments
from jaxtune.pallas.thin_pair import reference, triton

_TOKENS, _OUT = 2048, 512  # fewer tokens and smaller outputs are left to the vendor's GEMMs
_TOGETHER = 4096  # numbers of all outputs that share x up to which launches of kernels take as long as their work


@meshes.on_any_mesh
def thin_pair(
    dout: jax.Array, b: jax.Array, inner: jax.Array, *, implementation: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """(dout b [tokens, r] in dout's dtype, dout^T inner [out, r] in b's dtype), each rounded once from float32 sums.
    The kernel reads dout once for both, and its results have the same bits in each run. TypeError or ValueError for
    wrong arguments or an implementation that refuses.

      dout: [tokens, out] bfloat16, float16 or float32.
      b: float[out, r], the adapter's B, rounded to dout's dtype.
      inner: [tokens, r] in dout's dtype, the tokens times the adapter's A.
      implementation: "triton" (16 bits, a rank of at most 32), "reference", or None: "triton" if it supports the call
        and there are at least 2,048 tokens and 512 outputs.
    """
    check = Arguments("thin_pair")
    check.array("dout", dout, "tokens out", FLOATS)
    check.array("b", b, "out r", FLOATS)
    check.array("inner", inner, "tokens r", dout.dtype)
    if implementation is None and (len(dout) < _TOKENS or len(b) < _OUT):
        implementation = "reference"
    if dispatch.choose("thin_pair", implementations(dout, b), implementation) == "reference":
        return reference.thin_pair(dout, b, inner)  # XLA divides it by itself
    dinner, db = meshes.on_each_device(triton.thin_pair, rows=2, results=1)(dout, inner, b)
    return dinner, db.astype(b.dtype)


@meshes.on_any_mesh
def thin_pairs(
    douts: Sequence[jax.Array], bs: Sequence[jax.Array], inner: jax.Array
) -> tuple[jax.Array, list[jax.Array]] | None:
    """`thin_pair` of two or three outputs that share x, by one kernel: (dout_i b_i side by side [tokens, sum of r],
    dout_i^T inner_i [out_i, r] in b_i's dtype each). None where each is better alone: without a kernel, for fewer than
    2,048 tokens, and for fewer than 512 outputs in all or more than 4,096.

      douts, bs: [tokens, out_i] in one dtype, float[out_i, r_i].
      inner: [tokens, sum of r], the tokens times the adapters' A's side by side.
    """
    check = Arguments("thin_pairs")
    check.sequence("bs", bs, "one for each output", len(douts))
    for index, (dout, b) in enumerate(zip(douts, bs, strict=True)):
        check.array(f"douts[{index}]", dout, f"tokens out_{index}", FLOATS)
        check.array(f"bs[{index}]", b, f"out_{index} r_{index}", FLOATS)
    check.array("inner", inner, f"tokens {sum(b.shape[1] for b in bs)}", douts[0].dtype)
    if len(douts) == 1 or len(inner) < _TOKENS or not _OUT <= sum(map(len, bs)) <= _TOGETHER:
        return None
    reason = triton.refusal_of_several(douts, bs)
    table = {"triton": lambda: reason, "apart": lambda: None}  # each output alone says why it has no kernel
    if dispatch.choose("thin_pairs", table, "apart" if reason else None) == "apart":
        return None
    dinner, dbs = meshes.on_each_device(triton.thin_pairs, rows=2, results=1)([*douts], inner, [*bs])
    return dinner, [db.astype(b.dtype) for db, b in zip(dbs, bs, strict=True)]


def implementations(dout, b) -> dispatch.Table:
    """{name: why it refuses a call, or None}, in the order of trial. Arguments may be shapes."""
    return {"triton": lambda: triton.refusal(dout, b), "reference": lambda: None}
