"""Measures which block sizes are fastest for the Hopper kernels of attention on this machine's GPU, for given shapes,
and stores them (pallas/tuning.py): `tune`, for the command `jaxtune tune`; `candidates` lists the sizes that it tries.
From then on attention of such shapes uses those in the user's cache."""

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
    """Returns the blocks to try for a kernel and a head dim, a list of dictionaries (the fields of Blocks that are not
    the defaults), those of mosaic.HEURISTIC first; for heads of 512 there are only those. Some exceed the shared
    memory; the tuner skips them.

    Args:
      kernel: one of KERNELS: "forward", "dquery", "dkey" or "dvalue".
      dim: a head dim of the kernels (mosaic.kernel_dim) for which this kernel exists.
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
    found = [mosaic.Blocks(64, *sizes, **form) for form in forms for sizes in itertools.product((64, 128), stages)]
    found = [b for b in found if b != first and (b.value_stages is None or b.value_stages < b.stages)]
    return [blocks.as_dict() for blocks in [first, *found]]


def tune(
    case: Case,
    kernels: Sequence[str] = KERNELS,
    dtype=jnp.bfloat16,
    say: Callable[[str], None] = lambda text: None,
    path: Path | None = None,
) -> dict[str, dict[str, Any]]:
    """Times the blocks of the kernels on one case and stores the fastest for calls like it (tuning.py). It needs a
    Hopper GPU, for which `jaxtune tune` checks first.

    Args:
      case: shapes, documents, window, soft cap; whether it has sinks is not used.
      kernels: some of "forward", "dquery", "dkey" (which also makes dv, except for head dims above 256) and "dvalue";
        those that the head dim does not have are left out.
      dtype: of the operands, bfloat16 or float16.
      say: gets text for the user, in two pieces for each candidate: its blocks before it runs, so that one that hangs
        is known, then its time or the problem, and a line break.
      path: the JSON file to which results are added; None: the user's cache.
    Returns:
      {kernel: the entry that tuning.measure returned: the fastest blocks, their time, and what was tried}.
    Raises:
      RuntimeError: the heuristic's blocks differ from the reference on a small case on this GPU (first_use.refusal), or
        no candidate runs.
      OSError: the given file `path` cannot be written. If the user's cache cannot be written, this is only logged.
    """
    dim = mosaic.kernel_dim(case.dim)
    kernels = [kernel for kernel in kernels if dim in mosaic.HEURISTIC[kernel]]
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = [
        (case.rows, case.length, count, case.dim) for count in (case.heads, case.kv_heads, case.kv_heads, case.heads)
    ]
    query, key, value, dout = (jax.random.normal(k, shape).astype(dtype) for k, shape in zip(keys, shapes, strict=True))
    segments = case.segments()
    given = () if segments is None else (jnp.asarray(segments),)
    options = dict(scale=case.dim**-0.5, window=case.window, soft_cap=case.soft_cap)
    blocks = {f"attention {kernel}": candidates(kernel, dim)[0] for kernel in kernels}
    problem = first_use.refusal("mosaic", mosaic, query, case.kv_heads, case.soft_cap, blocks)
    if problem is not None:
        raise RuntimeError(f"attention, {blocks}: {problem}")

    def layout(given):
        return packed_layout((case.rows, case.length), *given)

    def forward(query, key, value, given):
        return mosaic.forward(query, key, value, layout(given), **options)

    def backward(kept: slice, query, key, value, out, lse, dout, given):
        return mosaic.backward(query, key, value, out, lse, dout, layout(given), **options)[kept]

    def prepare(function, *arguments):
        # A new function for each trace, because jit's cache does not know the blocks.
        compiled = jax.jit(lambda *arguments: function(*arguments)).lower(*arguments).compile()
        return lambda: compiled(*arguments)

    inputs = (query, key, value, given)
    work: dict[str, Callable[[], Callable[[], Any]]] = {"forward": lambda: prepare(forward, *inputs)}
    if set(kernels) - {"forward"}:
        saved = (query, key, value, *prepare(forward, *inputs)(), dout, given)
        work["dquery"] = lambda: prepare(lambda *a: backward(slice(0, 1), *a), *saved)
        # dv is the same kernel's, or for heads of 512 another one's.
        both = slice(1, 2 if dim == mosaic.HALVED else 3)
        work["dkey"] = lambda: prepare(lambda *a: backward(both, *a), *saved)
        work["dvalue"] = lambda: prepare(lambda *a: backward(slice(2, 3), *a), *saved)
    return {kernel: _measured(kernel, case, dtype, work[kernel], say, path) for kernel in kernels}


def _measured(kernel: str, case: Case, dtype, prepare, say, path) -> dict[str, Any]:
    """For `tune`: times one kernel with each of its candidate blocks, and returns the entry that tuning.measure made,
    and stored for the class of calls of `case` (mosaic.bucket): the fastest blocks, their time, and what was tried. A
    candidate whose result differs from that of the first one, the heuristic's, by more than 2 % is not chosen.

    Args:
      kernel: one of KERNELS.
      case: only its head dim, its window, and whether each row is one document are used, which name the class.
      dtype: of the operands.
      prepare: a function without arguments that compiles the kernel with the blocks under test (threads call it within
        tuning.forced) and returns a function that runs it once.
      say: gets text for the user, two pieces that make a line for each candidate.
      path: the file that stores the entry; None: the user's cache.
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
