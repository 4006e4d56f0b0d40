"""MLIR's Python bindings, which jaxlib has for its own use: the other half of what `private_jax` describes.

Kernels write single instructions with them that Pallas has no operation for, such as a permutation of bytes or an
approximate division. They stand apart because they take a quarter of a second to import, and only kernels need them.
"""

from jaxlib.mlir import ir as ir
from jaxlib.mlir.dialects import arith as arith
from jaxlib.mlir.dialects import gpu as gpu
from jaxlib.mlir.dialects import llvm as llvm
from jaxlib.mlir.dialects import nvvm as nvvm
from jaxlib.mlir.dialects import vector as vector
