"""WIP"""

from __future__ import annotations

import jax

from jaxtune.pallas import compat
from jaxtune.pallas.few_rows import triton
from jaxtune.pallas.few_rows.api import added_norm, gated_product, products

KINDS = {"products", "gated"}
TILES = {}


def _by_kernel(x, parts, norm, weights, activation, *, eps, offset, float32):
    from jaxtune.pallas.few_rows import normed_kernels

    inner = x.shape[1]
    if activation:
        tile, width = triton.gated_tile(weights[0].shape[0], 1, ()), weights[0].shape[0]
    else:
        tile, width = triton.product_tile(x, weights, ()), sum(w.shape[0] for w in weights)
    tile = TILES.get(activation, tile)
    padding = 3 - len(weights)
    sizes = [*(w.shape[0] for w in weights), *(0,) * padding]
    added, out = compat.triton_graph_call(
        normed_kernels.normed_product_kernel,
        (x, parts, norm, *weights, *(weights[0],) * padding),
        [jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((1, width), x.dtype)],
        (width // tile.rows,),
        warps=tile.warps,
        stages=tile.stages,
        INNER=inner,
        WIDTH=1 << (inner - 1).bit_length(),
        FIRST=sizes[0],
        SECOND=sizes[1],
        THIRD=sizes[2],
        ROWS=tile.rows,
        DEPTH=tile.depth,
        TOKENS=16,
        PARTS=parts.shape[0],
        ACTIVATION=triton.ACTIVATIONS[activation] if activation else 0,
        STAGES=tile.stages,
        EPS=float(eps),
        OFFSET=float(offset),
        FLOAT32=int(float32),
    )
    return out, added


def _runs(x, kind, loras) -> bool:
    return len(x) == 1 and kind in KINDS and not loras and compat.triton_refusal() is None


def normed_products(x, parts, norm, weights, loras=(), **options):
    """(products of the normed stream [splits, N, out], the stream)."""
    if _runs(x, "products", loras):
        out, added = _by_kernel(x, parts, norm, weights, None, **options)
        return out[None], added
    added, normed = added_norm(x, parts, norm, **options)
    return products(normed, weights, loras), added


def normed_gated(x, parts, norm, gate, up, activation, loras=(), **options):
    if _runs(x, "gated", loras):
        return _by_kernel(x, parts, norm, (gate, up), activation, **options)
    added, normed = added_norm(x, parts, norm, **options)
    return gated_product(normed, gate, up, activation, loras), added
