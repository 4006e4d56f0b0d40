"""MLIR's Python bindings, private to jaxlib, for instructions that Pallas lacks. Their import takes a quarter of a
second.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxlib.mlir import ir as ir
    from jaxlib.mlir.dialects import arith as arith
    from jaxlib.mlir.dialects import gpu as gpu
    from jaxlib.mlir.dialects import llvm as llvm
    from jaxlib.mlir.dialects import nvvm as nvvm
    from jaxlib.mlir.dialects import vector as vector
else:
    from jaxtune.system.later import Later

    ir = Later("jaxlib.mlir.ir")
    arith, gpu, llvm, nvvm, vector = (
        Later(f"jaxlib.mlir.dialects.{name}") for name in ("arith", "gpu", "llvm", "nvvm", "vector")
    )
