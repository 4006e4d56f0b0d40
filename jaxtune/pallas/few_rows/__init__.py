"""Operations of a decoding step, in which each sequence gets one new token, so that arrays have few rows. On a GPU that
the kernels support, an operation is one or two kernels where XLA makes more; elsewhere it is plain JAX.
"""

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
