"""Which modules multiply by weights as they are stored, undecoded, by the value of model.compute that asks for it.

Such a module has these functions; `...` stands for (kind, implementation), and `adapter` for None or an adapter's two
operands, whose product is added:
- kind(weight): hashable. Weights of one kind share one rounded x, and one product of their gradients.
- operand(x, ...): x [tokens, in] rounded, as `forward` takes it (`coded`).
- gated_operand(gate, up, a, activation, ...): (the same of activation(gate) * up, that times a^T).
- normed_operand(x, weight, rounding, a, kind): (the same of the RMS norm of x, that times a^T); normed_refusal(x, rank,
  kind): the reason why it cannot, or None.
- forward(coded, weight, adapter, dtype, implementation): x W^T.
- gated_gradients(gate, up, dgated, dinner, activation, adapters, ...): (gradients of gate and up; of A; None, or what
  `backward` and the adapters take in their place).
- rounded_gradients(douts, inner, bs, ...): None, or (gradients rounded, side by side; times the B's; transposed times
  the low-rank inputs).
- backward(douts, weights, adapter, dtype, implementation, coded): the sum of dy W over weights of one kind; `coded` is
  None, or all dy rounded, in place of `douts`.
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
