"""Measures which block sizes of the Hopper kernels are fastest on this GPU for a case, and stores them
(pallas/tuning.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxtune.pallas import tuning
from jaxtune.pallas.attention import first_use, mosaic
from jaxtune.pallas.attention.layout import packed_layout
from jaxtune.pallas.attention.shapes import Case

KERNELS = ("forward", "dquery", "dkey", "dvalue")


def candidates(kernel: str, dim: int) -> list[dict[str, Any]]:
    """Fields of the Blocks to try, mosaic.HEURISTIC's first. Some exceed shared memory; the tuner skips them.

    dim: head dim of the kernels (mosaic.kernel_dim) for which `kernel` exists.
    """
    first = mosaic.HEURISTIC[kernel][dim]
    if dim == mosaic.HALVED:  # nothing else fits shared memory, and these kernels take no turns
        return [first.as_dict()]
    forms: list[dict[str, Any]] = [dict(turns=turns, lean=lean) for lean in (False, True) for turns in (True, False)]
    stages = (2, 3, 4)
    if dim > mosaic.NARROW:
        stages, forms = (1, 2), [dict(form, buffers=1) for form in forms]
        if kernel == "dquery":
            forms += [dict(form, value_stages=1) for form in forms]
        if kernel == "dkey":  # its warpgroups hand work to each other and do not take turns
            forms = [form for form in forms if not form["turns"]]
    block_choices = [
        mosaic.Blocks(64, *sizes, **form) for form in forms for sizes in itertools.product((64, 128), stages)
    ]
    block_choices = [b for b in block_choices if b != first and (b.value_stages is None or b.value_stages < b.stages)]
    return [blocks.as_dict() for blocks in [first, *block_choices]]


def tune(
    case: Case,
    kernels: Sequence[str] = KERNELS,
    dtype=jnp.bfloat16,
    say: Callable[[str], None] = lambda text: None,
    path: Path | None = None,
) -> dict[str, dict[str, Any]]:
    """Times the kernels' blocks on one case and stores the fastest for calls like it. Hopper only.

    Returns {kernel: entry of tuning.measure}. RuntimeError if no candidate runs, or the heuristic's blocks differ from
    the reference; OSError if `path` cannot be written.

      kernels: "dkey" also makes dv, except for head dims above 256; kernels that the head dim lacks are left out.
      dtype: bfloat16 or float16.
      say: gets two texts for each candidate: its blocks before it runs, so that one that hangs is known, then its time.
      path: the JSON file for results; None: the user's cache.
    """
    dim = mosaic.kernel_dim(case.dim)
    kernels = [kernel for kernel in kernels if dim in mosaic.HEURISTIC[kernel]]
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [
        (case.rows, case.length, count, case.dim) for count in (case.heads, case.kv_heads, case.kv_heads, case.heads)
    ]
    query, key, value, dout = (jax.random.normal(k, shape).astype(dtype) for k, shape in zip(keys, shapes, strict=True))
    segments = case.segments()
    segment_arrays = () if segments is None else (jnp.asarray(segments),)
    options = dict(scale=case.dim**-0.5, window=case.window, soft_cap=case.soft_cap)
    blocks = {f"attention {kernel}": candidates(kernel, dim)[0] for kernel in kernels}
    problem = first_use.refusal("mosaic", mosaic, query, case.kv_heads, case.soft_cap, blocks)
    if problem is not None:
        raise RuntimeError(f"attention, {blocks}: {problem}")

    def layout(segment_arrays):
        return packed_layout((case.rows, case.length), *segment_arrays)

    def forward(query, key, value, layout_arguments):
        return mosaic.forward(query, key, value, layout(layout_arguments), **options)

    def backward(output_slice: slice, query, key, value, out, lse, dout, segment_arrays):
        return mosaic.backward(query, key, value, out, lse, dout, layout(segment_arrays), **options)[output_slice]

    def prepare(function, *arguments):
        # A new function for each trace, because jit's cache does not know the blocks.
        compiled = jax.jit(lambda *arguments: function(*arguments)).lower(*arguments).compile()
        return lambda: compiled(*arguments)

    inputs = (query, key, value, segment_arrays)
    work: dict[str, Callable[[], Callable[[], Any]]] = {"forward": lambda: prepare(forward, *inputs)}
    if set(kernels) - {"forward"}:
        saved = (query, key, value, *prepare(forward, *inputs)(), dout, segment_arrays)
        work["dquery"] = lambda: prepare(lambda *a: backward(slice(0, 1), *a), *saved)
        # dv is the same kernel's, or for heads of 512 another one's.
        key_outputs = slice(1, 2 if dim == mosaic.HALVED else 3)
        work["dkey"] = lambda: prepare(lambda *a: backward(key_outputs, *a), *saved)
        work["dvalue"] = lambda: prepare(lambda *a: backward(slice(2, 3), *a), *saved)
    return {kernel: _measured(kernel, case, dtype, work[kernel], say, path) for kernel in kernels}


def _measured(kernel: str, case: Case, dtype, prepare, say, path) -> dict[str, Any]:
    """Times one kernel with its candidates and stores the entry, unless its result is 2 % off the heuristic's.

    prepare: compiles the kernel with the blocks under test, and returns a function that runs it once.
    """
    dim = mosaic.kernel_dim(case.dim)
    return tuning.measure(
        f"attention {kernel}",
        mosaic.bucket(dim, case.documents is None, case.window),
        dtype,
        candidates(kernel, dim),
        prepare,
        wrong=tuning.as_the_first(),
        say=say,
        path=path,
    )
