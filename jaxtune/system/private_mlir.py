"""MLIR's Python bindings, private to jaxlib, for instructions that Pallas lacks. The import takes a quarter of a
second.
"""

from jaxlib.mlir import ir as ir
from jaxlib.mlir.dialects import arith as arith
from jaxlib.mlir.dialects import gpu as gpu
from jaxlib.mlir.dialects import llvm as llvm
from jaxlib.mlir.dialects import nvvm as nvvm
from jaxlib.mlir.dialects import vector as vector
