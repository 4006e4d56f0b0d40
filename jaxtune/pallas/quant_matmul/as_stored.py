"""Formats that products take as they are stored, by the value of model.compute that asks for it.

A product is a module with four functions; `reference.py` calls them where a weight's `compute` names it:
- kind(weight): weights of one kind share the other operand, and one product of their gradients.
- operand(x, kind, implementation): x [tokens, in] as the product of such weights takes it.
- forward(coded, weight, more, dtype, implementation): x W^T, and the product of `more`'s two operands.
- backward(douts, weights, more, dtype, implementation): the sum of dy W over weights of one kind, and `more`'s product.
"""

from __future__ import annotations

from types import ModuleType

import jax

from jaxtune.pallas.formats import Stored
from jaxtune.pallas.quant_matmul import fp8_product

# {value of model.compute: the module with the four functions}
PRODUCTS: dict[str, ModuleType] = {"fp8": fp8_product}


def product_of(weight: jax.Array | Stored) -> ModuleType | None:
    """The module of PRODUCTS that multiplies by this weight as it is stored, without decoding it; None for an array,
    and for a format that products decode. Whether it is used at all is the caller's choice (fp8 of quant_matmul)."""
    return None if not isinstance(weight, Stored) or weight.compute is None else PRODUCTS[weight.compute]
