"""Full slots of Llama-3.1-8B with the few-row kernels compiled and launched by XLA from Triton's representation, each
while the kernel before it ends (programmatic dependent launch), or as they are.

    python benchmarks/sampling_launch.py --output FILE.json [--usual] [--slots 256 128]
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np

from benchmarks.random_model import random_model
from benchmarks.record import environment, write
from benchmarks.sampling import full
from benchmarks.shapes import SHAPES
from jaxtune.pallas import compat, dispatch, meshes


@functools.cache
def representation(kernel, types: tuple[str, ...], constants: tuple, warps: int, stages: int, capability):
    """(the kernel's name, Triton's representation as text)"""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    named = dict(constants)
    arrays = [name for name in kernel.arg_names if name not in named]
    source = ASTSource(
        kernel,
        signature=dict.fromkeys(kernel.arg_names, "constexpr") | dict(zip(arrays, types, strict=True)),
        constexprs=named,
        attrs={(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in arrays},
    )
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    with compat._compiling, triton.knobs.cache.scope():
        triton.knobs.cache.dir = triton.knobs.cache.dir or triton.knobs.cache.get_triton_dir("cache")
        built = triton.compile(source, target=target, options={"num_warps": warps, "num_stages": stages})
    return built.metadata.name, built.asm["ttir"]


def by_xla(kernel, arguments, out_types, grid, *, warps, stages, aliases=None, **constants):
    """compat.triton_graph_call."""
    types = tuple(compat._POINTERS[str(array.dtype)] for array in (*arguments, *out_types))
    capability = dispatch.compute_capability()
    name, ir = representation(kernel, types, tuple(constants.items()), warps, stages, capability)
    sizes = {f"grid_{axis}": np.int32(size) for axis, size in zip("xyz", (*grid, 1, 1), strict=False)}
    call = functools.partial(
        jax.ffi.ffi_call("__gpu$xla.gpu.triton", list(out_types), input_output_aliases=dict(aliases or {})),
        name=name,
        ir=ir,
        num_warps=np.int32(warps),
        num_stages=np.int32(stages),
        **sizes,
    )
    return list(meshes.on_each_device(call)(*arguments))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True)
    parser.add_argument("--usual", action="store_true", help="launched as they are")
    parser.add_argument("--slots", type=int, nargs="*", default=[256, 128])
    options = parser.parse_args()
    options.bandwidth, options.flops = 4.8e12, 650e12
    if not options.usual:
        compat.triton_graph_call = by_xla
    record: dict = {"benchmark": "sampling_launch", "usual": options.usual, **environment()}
    began = time.perf_counter()
    model = random_model(SHAPES["llama-3.1-8b"], jax.random.key(0), None)
    for slots in options.slots:
        record[f"full_{slots}"] = full(model, slots, options)
        record["seconds"] = round(time.perf_counter() - began, 1)
        print(slots, record[f"full_{slots}"], record["seconds"], flush=True)
        write(options.output, record)


if __name__ == "__main__":
    main()
