"""Which modules multiply by weights as they are stored, undecoded, by the value of model.compute that asks for it.

Such a module has fp8_product's functions kind (hashable: weights of one kind share one rounded x, and one product of
their gradients), operand, gated_operand, normed_operand, normed_refusal, forward, gated_gradients, rounded_gradients
and backward, called with (kind, implementation) in place of its (blocks, implementation).
"""

from __future__ import annotations

from types import ModuleType

import jax

from jaxtune.pallas.formats import Stored
from jaxtune.pallas.quant_matmul import fp8_product

# {value of model.compute: the module with the nine functions}
PRODUCTS: dict[str, ModuleType] = {"fp8": fp8_product}


def product_of(weight: jax.Array | Stored) -> ModuleType | None:
    """The module that multiplies by this weight undecoded; None for an array, or a format without one."""
    return None if not isinstance(weight, Stored) or weight.compute is None else PRODUCTS[weight.compute]
