"""The scales under which quantisation-aware training (QAT) rounds activations in formats that observe them, such as
nvfp4-nvfp4: `observed_scales` measures them by forward passes, `with_input_scales` puts them into a model that is
prepared for QAT, `known_scales` reads those that a model has, and `recorded` makes the grid with them that files
record.

A linear's scale follows from the largest magnitude of its inputs over the rows that were observed, and does not change
after that: training, checkpoints and exported files have the same number. Linears that share an input, such as query,
key and value, observe the same numbers and have equal scales, as servers that multiply by all of them at once need."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtune.models.decoder import Decoder
from jaxtune.models.fake_quant import ROUNDINGS, FakeQuant
from jaxtune.models.linear import InputScale
from jaxtune.models.lora import copy_structure, linears
from jaxtune.models.placement import partition


class _Largest:
    """Collects the largest magnitudes of the inputs of linears while rows run through a model. observed_scales makes
    one and sets `real` before each row; `note` is called from the compiled program, for linears in any order."""

    def __init__(self):
        self.real = np.zeros(0, bool)  # bool[tokens], of the row that runs: False on padding
        self.found: dict[str, float] = {}  # {name of a linear: the largest magnitude so far}

    def note(self, name: str, magnitudes: jax.Array) -> None:
        """Takes one linear's inputs into account: `found` gets the largest magnitude of these and of the earlier ones,
        without padding. With its first argument bound, it is the linear's `observer`. name: the linear's. magnitudes:
        float32[1, tokens], the largest magnitude of each token of the row that runs."""
        of_tokens = np.asarray(magnitudes).reshape(self.real.shape)
        seen = of_tokens.max(where=self.real, initial=0.0)
        self.found[name] = float(np.maximum(self.found.get(name, 0.0), seen))  # not finite if any is not


def observed_scales(
    model: Decoder,
    format: str,
    tokens: np.ndarray,
    segment_ids: np.ndarray | None = None,
    positions: np.ndarray | None = None,
) -> dict[str, float]:
    """Measures the scales of activations: {name of a linear: scale} for all linears, also those that are not rounded.
    Those of nvfp4-nvfp4 are the numbers that compressed-tensors calls input_global_scale: 448 * 6 / the largest
    magnitude of the linear's inputs, rounded to the dtype in which the linear multiplies, and 1 for a linear whose
    inputs are all zero.

    The model runs forward, its linears without rounding, over one row at a time. Padding is left out. Training with
    such a format calls it before the first step, if the model has no scales yet (known_scales).

    Args:
      model: the model, with or without an adapter. It is not changed.
      format: a format of QAT that observes scales, such as "nvfp4-nvfp4".
      tokens: int32[rows, length].
      segment_ids: int32[rows, length], the document of each token in its row, 0 on padding; None: a row is one
        document.
      positions: int32[rows, length]; None: they restart with each document.
    Raises:
      ValueError: a format that observes no scales; the model's weights are divided over devices.
      FloatingPointError: an activation is not finite.
    """
    if (scale := None if format not in ROUNDINGS else ROUNDINGS[format].observed) is None:
        raise ValueError(f"observed_scales: {format!r} rounds no activations under observed scales")
    partition.require_undivided(nnx.state(model), "the range of activations")
    model, largest = copy_structure(model), _Largest()
    for name, linear in linears(model):
        linear.fake_quant = None
        linear.observer = functools.partial(largest.note, name)
    graph, state = nnx.split(model)

    @jax.jit
    def run(state, *row):
        return nnx.merge(graph, state).hidden_states(*row)

    ids = np.ones_like(tokens) if segment_ids is None else segment_ids
    for index in range(len(tokens)):
        largest.real = ids[index] > 0
        places = None if positions is None else positions[index : index + 1]
        jax.block_until_ready(run(state, tokens[index : index + 1], ids[index : index + 1], places))
        jax.effects_barrier()
    if wrong := [name for name, value in largest.found.items() if not np.isfinite(value)]:
        raise FloatingPointError(f"the inputs of {wrong[0]} are not finite: their range cannot be observed")
    dtypes = {name: linear.compute or model.dtype for name, linear in linears(model)}
    return {name: float(scale(jnp.float32(value), dtypes[name])) for name, value in largest.found.items()}


def with_input_scales(model: Decoder, scales: Mapping[str, float]) -> Decoder:
    """A new model over the same arrays whose linears round their activations under these scales. quant.rounded_by
    (prepare_qat, and the loading of adapters) calls it, and training, with scales that it has observed or that are in
    the checkpoint from which it resumes. model: prepared for QAT in a format that observes scales; it is not changed.
    scales: {name of a linear: scale}; names of linears that are not rounded have no effect.

    Raises:
      ValueError: a linear that is rounded has no scale.
    """
    model = copy_structure(model)
    for name, linear in linears(model):
        if linear.fake_quant is not None:
            if name not in scales:
                raise ValueError(
                    f"qat: {linear.fake_quant.format} rounds activations under observed scales, and {name} has none: "
                    "observe them on rows (observed_scales)"
                )
            linear.input_scale = InputScale(jnp.asarray(scales[name], jnp.float32))
    return model


def known_scales(model: Decoder) -> dict[str, float]:
    """The scales of activations that a model has already, {name of a linear: scale}: those of a model that is prepared
    for QAT, or else of the QAT that rounded its weights (model.qat); {} if it has neither. Scales of which a traced
    model has only the shapes do not count. Training observes no scales if the model has some, prepare_qat takes them by
    default, and checkpoints and files record them."""
    found = {name: linear.input_scale.get_value() for name, linear in linears(model) if linear.input_scale is not None}
    known = {name: float(scale) for name, scale in found.items() if not isinstance(scale, jax.ShapeDtypeStruct)}
    return known or dict(() if model.qat is None else model.qat.input_scales)


def recorded(model: Decoder, spec: FakeQuant) -> FakeQuant:
    """The grid that the files of adapters and converted models record of a model that is prepared for QAT with `spec`:
    a FakeQuant with the format, group size and dtype of `spec` (`spec.grid`), and with the model's scales of
    activations as `input_scales` if the format observes them. Saved adapters record it, and so do models whose adapters
    are merged or whose QAT is converted."""
    pairs = tuple(sorted(known_scales(model).items())) if spec.observes else ()
    return dataclasses.replace(spec.grid, input_scales=pairs)
