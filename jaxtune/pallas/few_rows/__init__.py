"""The operations of a decoding step, in which each sequence gets one new token, so that arrays have few rows. Each
operation is one kernel where XLA makes several: `products` and `gated_product` multiply by weights, `added_norm` adds
to the residual stream and norms it, and `placed` writes a token's keys and values into the caches."""

from jaxtune.pallas.few_rows.api import added_norm, gated_product, placed, products

__all__ = ["added_norm", "gated_product", "placed", "products"]
