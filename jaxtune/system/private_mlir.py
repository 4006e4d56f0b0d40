"""MLIR's Python bindings, which are jaxlib's private part; see `private_jax`.

Kernels use them for instructions that Pallas has no operation for, such as a byte permutation or an approximate
division. They are a module of their own because importing them takes a quarter of a second, and only kernels need them.
"""

from jaxlib.mlir import ir as ir
from jaxlib.mlir.dialects import arith as arith
from jaxlib.mlir.dialects import gpu as gpu
from jaxlib.mlir.dialects import llvm as llvm
from jaxlib.mlir.dialects import nvvm as nvvm
from jaxlib.mlir.dialects import vector as vector
