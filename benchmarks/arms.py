"""Train steps without one of the things that make jaxtune's fast: what an ablation compares."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import optimization_barrier

from jaxtune.models import stack
from jaxtune.models.decoder import Decoder
from jaxtune.models.rope import rotary_table
from jaxtune.pallas.attention import PackedLayout


class SerialTransfers:
    """A TransferSchedule that is waited for: what leaves is gone before the layer's first stage begins; what comes,
    which is the next layer's, is fetched when its last stage has ended, so that it takes no more memory than under it.
    Compiled for an H200, nothing but adapters' thin products runs beside a copy.
    """

    def __init__(self, arrays, stages, space, last_is_thin=False):
        del last_is_thin
        self._arrays, self._structure = jax.tree.flatten(arrays)
        self._space = space
        self._last = len(stages) - 1

    def _copy(self, values):
        if self._arrays:
            arrays, values = optimization_barrier((self._arrays, values))
            self._arrays, values = optimization_barrier((jax.device_put(arrays, self._space), values))
        return values

    def start(self, stage, values):
        return self._copy(values) if stage == 0 and self._space == jax.memory.Space.Host else values

    def finish(self, stage, values):
        return self._copy(values) if stage == self._last and self._space == jax.memory.Space.Device else values

    @property
    def arrays(self):
        return jax.tree.unflatten(self._structure, self._arrays)


def _host_bounds(segment_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """doc_start, doc_end int32[rows, length], as the host finds them."""
    starts, ends = np.empty_like(segment_ids), np.empty_like(segment_ids)
    for row, ids in enumerate(np.asarray(segment_ids)):
        edges = np.flatnonzero(np.concatenate([[True], ids[1:] != ids[:-1], [True]]))
        runs = np.diff(edges)
        starts[row], ends[row] = np.repeat(edges[:-1], runs), np.repeat(edges[1:], runs)
    index = np.arange(segment_ids.shape[1], dtype=np.int32)
    real = segment_ids != 0
    return np.where(real, starts, index).astype(np.int32), np.where(real, ends, index).astype(np.int32)


def _from_host(x, segment_ids):
    x, segment_ids = optimization_barrier((x, segment_ids))
    shape = jax.ShapeDtypeStruct(segment_ids.shape, jnp.int32)
    bounds = jax.pure_callback(_host_bounds, (shape, shape), segment_ids)
    x, bounds = optimization_barrier((x, bounds))  # the layer does not begin before the answer is there
    return x, PackedLayout(*bounds)


@contextlib.contextmanager
def layouts_from_host() -> Iterator[None]:
    """While tracing: every layer of the forward asks the host for the layout of packed rows.

    The segment ids travel to the layers as one more pair behind the rotary tables of the batch's layout.
    """
    once, forward, backward = Decoder.layout, stack.layer_forward, stack.layer_backward
    config = None

    def with_ids(self, shape, segment_ids=None, positions=None, max_documents=None):
        nonlocal config
        config = self.config
        layout = once(self, shape, segment_ids, positions, max_documents)
        return PackedLayout(layout.doc_start, layout.doc_end, (*layout.rotary, (segment_ids, segment_ids)))

    def build_and_run(graph, spec, wanted, trainable, frozen, x, layout, *rest, **options):
        x, own = _from_host(x, layout.rotary[-1][0])
        tables = tuple(
            rotary_table(rope, config.head_dim, config.max_position_embeddings, own.positions())
            for rope in config.rotary
        )
        own = PackedLayout(own.doc_start, own.doc_end, tables)
        return forward(graph, spec, wanted, trainable, frozen, x, own, *rest, **options)

    def run_back(graph, spec, trainable, frozen, saved, doutput, layout, *rest, **options):
        saved_layout = PackedLayout(layout.doc_start, layout.doc_end, layout.rotary[:-1])
        return backward(graph, spec, trainable, frozen, saved, doutput, saved_layout, *rest, **options)

    with (
        mock.patch.object(Decoder, "layout", with_ids),
        mock.patch.object(stack, "layer_forward", build_and_run),
        mock.patch.object(stack, "layer_backward", run_back),
    ):
        yield


ARMS = {
    "overlap": lambda: mock.patch.object(stack, "TransferSchedule", SerialTransfers),  # of transfers with compute
    "layout": layouts_from_host,  # of packed rows, made once a batch
}


@contextlib.contextmanager
def without(names: Collection[str]) -> Iterator[None]:
    """While tracing: a model that does not have these of ARMS. The plan and the results are the same."""
    if not names:
        yield
        return
    jax.clear_caches()  # layer functions are traced once a process
    with contextlib.ExitStack() as patches:
        for name in names:
            patches.enter_context(ARMS[name]())
        yield
    jax.clear_caches()
