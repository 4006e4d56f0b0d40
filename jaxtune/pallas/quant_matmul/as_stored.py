"""Which modules multiply by weights as they are stored, without decoding them (PRODUCTS), by the value of the option
model.compute that asks for it, such as "fp8". `product_of` returns the module for a weight.

Such a module has nine functions, which `reference.py`, `gated_matmul.py` and `normed_matmul.py` call for weights whose
format names it (Stored.compute), if the caller sets `fp8`:
- kind(weight): a hashable value. Weights of one call with the same kind share one rounded x in the forward, and one
  product of their gradients in the backward.
- operand(x, kind, implementation): x [tokens, in] rounded for a product with weights of that kind, as the module's
  forward takes it (`coded`).
- gated_operand(gate, up, a, activation, kind, implementation): (the same of activation(gate) * up, that times a^T), for
  gated_matmul.
- normed_refusal(x, rank, kind): the reason why `normed_operand` cannot compute a call, or None.
- normed_operand(x, weight, rounding, a, kind): (`operand` of the RMS norm of x, that norm times a^T), for
  normed_matmul.
- forward(coded, weight, more, dtype, implementation): x W^T in `dtype`. `more` is None, or an adapter's two operands (u
  [tokens, r], b [out, r]), whose product u b^T is added.
- gated_gradients(gate, up, dgated, dinner, activation, adapters, kind, implementation): (a pair of the gradients of
  gate and up; that of an adapter's A; None, or in place of the gradients what `backward` and the adapters of gate and
  up take of them), for gated_mlp.
- rounded_gradients(douts, inner, bs, kind, implementation): None, or what `backward` and the adapters take of the
  gradients of outputs: (all of them rounded, side by side; their products with the B's; the transposed gradients times
  the low-rank inputs).
- backward(douts, weights, more, dtype, implementation, coded): the sum of dy W over weights of one kind, in `dtype`;
  `douts` has dy [tokens, out_i] for each of them, and `coded` is None, or all of them rounded, and then `douts` is not
  read. `more` is None, or the adapters' (u [tokens, r], a [in, r]), whose product u a^T is added.
"""

from __future__ import annotations

from types import ModuleType

import jax

from jaxtune.pallas.formats import Stored
from jaxtune.pallas.quant_matmul import fp8_product

# {value of model.compute: the module with the nine functions}
PRODUCTS: dict[str, ModuleType] = {"fp8": fp8_product}


def product_of(weight: jax.Array | Stored) -> ModuleType | None:
    """The module that multiplies by this weight as it is stored, without decoding it: its functions are described at
    the top of this file. None for an array, and for a quantised weight whose format has no such module. quant_matmul
    uses the module only if its caller sets `fp8`."""
    return None if not isinstance(weight, Stored) or weight.compute is None else PRODUCTS[weight.compute]
