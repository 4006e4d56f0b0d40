"""The operations of a decoding step, in which each sequence gets one new token, so that arrays have few rows. On GPUs
that a kernel supports, each operation is one kernel where XLA makes several; elsewhere it is plain JAX. `products` and
`gated_product` multiply by weights, `experts_gated` and `experts_down` by those of a mixture of experts
(`experts_have_kernels` says whether these two have kernels for a call), `added_norm` adds to the residual stream and
norms it, `placed` norms and rotates a token's queries and keys, and writes its keys and values into the caches, and
`attended` computes the token's attention too, where caches are short. `chosen_token` chooses the next token by the
logits, and `looked_up` draws it.
MOST_ROWS is the largest number of rows that the kernels of products take. models/generation/plain_layer.py calls the
operations, and slots.py beside it sets a compiler option if a batch has more rows than MOST_ROWS."""

from jaxtune.pallas.few_rows.api import added_norm, gated_product, placed, products
from jaxtune.pallas.few_rows.attended import attended
from jaxtune.pallas.few_rows.drawing import chosen_token, looked_up
from jaxtune.pallas.few_rows.experts import experts_down, experts_gated, experts_have_kernels
from jaxtune.pallas.few_rows.triton import MOST_ROWS

__all__ = [
    "MOST_ROWS",
    "added_norm",
    "attended",
    "chosen_token",
    "experts_down",
    "experts_gated",
    "experts_have_kernels",
    "gated_product",
    "looked_up",
    "placed",
    "products",
]
