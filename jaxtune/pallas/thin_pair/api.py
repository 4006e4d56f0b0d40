"""The two thin products of an adapter's backward."""

from __future__ import annotations

import jax

from jaxtune.pallas import dispatch, meshes
from jaxtune.pallas.arguments import FLOATS, Arguments
from jaxtune.pallas.thin_pair import reference, triton

_TOKENS, _OUT = 2048, 512  # fewer tokens and smaller outputs are left to the vendor's GEMMs


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


def implementations(dout, b) -> dispatch.Table:
    """{name: why it refuses a call, or None}, in the order of trial. Arguments may be shapes."""
    return {"triton": lambda: triton.refusal(dout, b), "reference": lambda: None}
