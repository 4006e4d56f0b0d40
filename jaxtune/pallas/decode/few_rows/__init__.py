"""Operations of a decoding step, in which each sequence gets one new token, as one or two kernels each."""

from jaxtune.pallas.decode.few_rows.api import added_norm, added_norm_coded, gated_product, placed, products
from jaxtune.pallas.decode.few_rows.attended import attended
from jaxtune.pallas.decode.few_rows.drawing import chosen_token, looked_up, masked
from jaxtune.pallas.decode.few_rows.experts import experts_down, experts_gated, experts_have_kernels
from jaxtune.pallas.decode.few_rows.shards import unsharded
from jaxtune.pallas.decode.few_rows.triton import MOST_ROWS

__all__ = [
    "MOST_ROWS",
    "added_norm",
    "added_norm_coded",
    "attended",
    "chosen_token",
    "experts_down",
    "experts_gated",
    "experts_have_kernels",
    "gated_product",
    "looked_up",
    "masked",
    "placed",
    "products",
    "unsharded",
]
