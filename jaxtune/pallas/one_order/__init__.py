"""Sums in one order, whatever else a program computes ([exact](README.md)): plain JAX on a CPU, kernels on a GPU."""

from jaxtune.pallas.one_order import triton
from jaxtune.pallas.one_order.sums import (
    adapted,
    contracted,
    exact,
    exactly_if,
    is_exact,
    log_probabilities,
    product,
    runs_kernels,
    softmax,
    tempered,
    total,
)

__all__ = [
    "adapted",
    "contracted",
    "exact",
    "exactly_if",
    "is_exact",
    "log_probabilities",
    "product",
    "runs_kernels",
    "softmax",
    "tempered",
    "total",
    "triton",
]
