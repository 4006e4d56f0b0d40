"""Full slots of Llama-3.1-8B, in one process, with other tiles of the attention, and with the few-row kernels compiled
and launched by XLA from Triton's representation, each while the kernel before it ends (programmatic dependent launch).

    python benchmarks/sampling_launch.py --output FILE.json
"""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
import time
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np

from benchmarks.random_model import random_model
from benchmarks.record import environment, write
from benchmarks.sampling import full
from benchmarks.shapes import SHAPES
from jaxtune.models.generation.slots import programs
from jaxtune.pallas import compat, dispatch, meshes
from jaxtune.pallas.decode_attention.triton import Tile


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


ATTENDED = importlib.import_module("jaxtune.pallas.few_rows.attended")
FOUR, ONE = Tile(32, 4, 3), Tile(16, 1, 3)
# (slots, tile, launched by XLA)
WAYS = (
    (64, FOUR, False),
    (64, ONE, False),
    (256, FOUR, False),
    (256, ONE, False),
    (256, ONE, True),
    (256, FOUR, True),
    (128, FOUR, False),
    (128, ONE, False),
    (64, FOUR, False),
    (64, ONE, False),
    (128, ONE, True),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True)
    options = parser.parse_args()
    options.bandwidth, options.flops = 4.8e12, 650e12
    record: dict = {"benchmark": "sampling_launch", **environment()}
    began = time.perf_counter()
    model = random_model(SHAPES["llama-3.1-8b"], jax.random.key(0), None)
    usual = compat.triton_graph_call
    for number, (slots, tile, launched) in enumerate(WAYS):
        jax.clear_caches()
        programs.cache_clear()
        compat.triton_graph_call = by_xla if launched else usual
        name = f"{number}: {slots} rows, {tile}{', launched by XLA' if launched else ''}"
        try:
            with mock.patch.object(ATTENDED, "_tile", lambda *_, tile=tile: tile):
                record[name] = full(model, slots, options)
        except Exception as error:
            record[name] = f"{type(error).__name__}: {str(error)[:300]}"
        record["seconds"] = round(time.perf_counter() - began, 1)
        print(name, record[name], record["seconds"], flush=True)
        write(options.output, record)


if __name__ == "__main__":
    main()
