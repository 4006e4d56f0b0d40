"""Compiles the programs that make and encode a GGUF file's tensors before they are needed."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import jax

from jaxtune.export import gguf_blocks, gguf_tensors
from jaxtune.export.gguf_tensors import Source, Tensor
from jaxtune.pallas.formats import Stored

_THREADS = min(8, os.cpu_count() or 1)


class Compiling:
    """Traces the programs of all tensors in one thread, in order, and compiles them in others; leaving the context
    drops what waits. Several threads would wait for Python's lock. An error is left to the call that needs the program.

      kinds: {tensor: gguf's name of its type}, of all in `sources`.
      like: dtype and sharding of most arrays; None: nothing is compiled ahead, as arrays on several devices must get
        their programs in one order.
    """

    def __init__(self, sources: Sequence[Source], kinds: Mapping[str, str], like: jax.ShapeDtypeStruct | None):
        self._compilers = ThreadPoolExecutor(_THREADS, thread_name_prefix="jaxtune-compile")
        self._tracer = ThreadPoolExecutor(1, thread_name_prefix="jaxtune-compile-trace")
        self._programs: dict[tuple, Future[object]] = {}  # by what tells programs apart; for the tracing thread
        forms: dict[tuple, Future[list[Future[object]]]] = {}  # the programs of all tensors that are alike
        self._of: dict[str, Future[list[Future[object]]]] = {}  # the same by the tensors' names
        if like is None:
            return
        for source in sources:
            for tensor in source.tensors:
                form = (tensor.shape, kinds[tensor.name], tensor.grid, tensor.heads, _described(source.stored))
                if form not in forms:
                    forms[form] = self._tracer.submit(self._traced, source, tensor, kinds[tensor.name], like)
                self._of[tensor.name] = forms[form]

    def _traced(self, source: Source, tensor: Tensor, kind: str, like: jax.ShapeDtypeStruct) -> list[Future[object]]:
        lowerings = _programs(source, tensor, kind, like)
        for key, lower in lowerings.items():
            if key not in self._programs:
                self._programs[key] = self._compilers.submit(lower().compile)
        return [self._programs[key] for key in lowerings]

    def __enter__(self) -> Compiling:
        return self

    def __exit__(self, *error) -> None:
        """Drops what waits, and does not wait for what has started."""
        self._tracer.shutdown(wait=False, cancel_futures=True)
        self._compilers.shutdown(wait=False, cancel_futures=True)

    def wait(self, name: str) -> None:
        """Waits for a tensor's programs; a call before would compile them once more."""
        traced = self._of.pop(name, None)
        if traced is not None and traced.exception() is None:
            wait(traced.result())


def _described(stored: Stored | None) -> tuple:
    """What tells the programs that decode a weight apart."""
    leaves, tree = jax.tree.flatten(stored)
    return tree, *((leaf.shape, leaf.dtype) for leaf in leaves)


def _programs(
    source: Source, tensor: Tensor, kind: str, like: jax.ShapeDtypeStruct
) -> dict[tuple, Callable[[], jax.stages.Lowered]]:
    """{what tells a program from others: a function that traces it}, in the order of their calls."""
    lowerings: dict[tuple, Callable[[], jax.stages.Lowered]] = {}
    form = jax.ShapeDtypeStruct(tensor.shape, like.dtype, sharding=like.sharding)
    if source.stored is not None:
        stored: Stored = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=like.sharding), source.stored
        )
        if (program := stored.decoding) is not None:
            lowerings["decode", *_described(stored)] = functools.partial(program.lower, stored, like.dtype.name)
    if tensor.heads is not None:
        interleaved = functools.partial(gguf_tensors.interleaved_on_device.lower, form, tensor.heads)
        lowerings["interleaved", form.shape, tensor.heads] = interleaved
    return lowerings | gguf_blocks.programs(form, kind, gguf_blocks.grid_of(tensor.grid, kind))
