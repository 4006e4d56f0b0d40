"""Sums in one order, whatever else a program computes ([exact](README.md)): plain JAX on a CPU, kernels on a GPU."""

from jaxtune.pallas.one_order import functions, triton
from jaxtune.pallas.one_order.sums import (
    adapted,
    contracted,
    exact,
    exactly_if,
    exp,
    is_exact,
    log,
    log_probabilities,
    of_order,
    product,
    runs_kernels,
    sigmoid,
    softmax,
    tanh,
    tempered,
    total,
)

__all__ = [
    "adapted",
    "contracted",
    "exact",
    "exactly_if",
    "exp",
    "functions",
    "is_exact",
    "log",
    "log_probabilities",
    "of_order",
    "product",
    "runs_kernels",
    "sigmoid",
    "softmax",
    "tanh",
    "tempered",
    "total",
    "triton",
]
