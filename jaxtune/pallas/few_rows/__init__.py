"""The operations of a decoding step, in which each sequence gets one new token, so that arrays have few rows. On a GPU
that its kernels support, an operation runs as one or two kernels where XLA makes more. On other devices it is plain
JAX.

- `products` and `gated_product` multiply by weights.
- `experts_gated` and `experts_down` multiply by the weights of a mixture of experts. `experts_have_kernels` says
  whether they have kernels for a call.
- `added_norm` adds to the residual stream and norms the sum.
- `placed` norms and rotates a token's queries and keys, and writes its keys and values into the caches.
- `attended` does what `placed` does and computes the token's attention, for short caches.
- `chosen_token` chooses the next token from the logits, and `looked_up` draws a token from probabilities.

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
