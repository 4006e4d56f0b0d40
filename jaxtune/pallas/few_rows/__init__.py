"""Operations of a decoding step, each one kernel where XLA makes several: products of few rows, norms, new tokens."""

from jaxtune.pallas.few_rows.api import added_norm, gated_product, placed, products

__all__ = ["added_norm", "gated_product", "placed", "products"]
