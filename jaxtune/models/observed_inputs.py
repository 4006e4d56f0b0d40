"""The scales under which QAT rounds activations in formats that observe them, such as nvfp4-nvfp4. A linear's scale
follows from its largest input over the observed rows and never changes after. Linears that share an input (query, key
and value) have equal scales, as servers that multiply by all at once need.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtune.models.decoder import Decoder
from jaxtune.models.linear import InputScale
from jaxtune.models.lora import copy_structure, linears
from jaxtune.models.placement import partition
from jaxtune.models.qat.fake_quant import ROUNDINGS, FakeQuant


class _Largest:
    """Collects the largest magnitudes of linears' inputs; `note` is called from the compiled program, in any order."""

    def __init__(self):
        self.real = np.zeros(0, bool)  # bool[tokens], of the row that runs: False on padding
        self.magnitude_by_name: dict[str, float] = {}  # {name of a linear: the largest magnitude so far}

    def note(self, name: str, magnitudes: jax.Array) -> None:
        """magnitudes: float32[1, tokens], of each token of the row that runs; padding does not count."""
        of_tokens = np.asarray(magnitudes).reshape(self.real.shape)
        largest = of_tokens.max(where=self.real, initial=0.0)
        self.magnitude_by_name[name] = float(
            np.maximum(self.magnitude_by_name.get(name, 0.0), largest)
        )  # not finite if any is not


def observed_scales(
    model: Decoder,
    format: str,
    tokens: np.ndarray,
    segment_ids: np.ndarray | None = None,
    positions: np.ndarray | None = None,
) -> dict[str, float]:
    """Measures the scales of activations, {name of a linear: scale}, for all linears: one row at a time runs forward,
    without rounding; padding does not count. For nvfp4-nvfp4 a scale is compressed-tensors' input_global_scale: 448 * 6
    / the largest magnitude in float32, and 1 if all inputs are zero.

      model: not changed.
      format: of QAT, such as "nvfp4-nvfp4".
      tokens: int32[rows, length].
      segment_ids: int32[rows, length], each token's document, 0 on padding; None: one document a row.
      positions: int32[rows, length], in the document; None: from 0 in each.

    Raises ValueError for a format that observes no scales or weights divided over devices, FloatingPointError for an
    activation that is not finite.
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
        row_positions = None if positions is None else positions[index : index + 1]
        jax.block_until_ready(run(state, tokens[index : index + 1], ids[index : index + 1], row_positions))
        jax.effects_barrier()
    if wrong := [name for name, value in largest.magnitude_by_name.items() if not np.isfinite(value)]:
        raise FloatingPointError(f"the inputs of {wrong[0]} are not finite: their range cannot be observed")
    return {name: float(scale(jnp.float32(value))) for name, value in largest.magnitude_by_name.items()}


def with_input_scales(model: Decoder, scales: Mapping[str, float]) -> Decoder:
    """A new model over the same arrays whose linears round activations under these scales, {name of a linear: scale}.
    `model` is prepared for QAT. Raises ValueError if a linear that is rounded has no scale.
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
    """The scales of activations that a model has, {name of a linear: scale}: those of its preparation for QAT, else of
    the QAT that rounded its weights; {} if it has neither, or is traced.
    """
    scale_arrays = {
        name: linear.input_scale.get_value() for name, linear in linears(model) if linear.input_scale is not None
    }
    scales = {name: float(scale) for name, scale in scale_arrays.items() if not isinstance(scale, jax.ShapeDtypeStruct)}
    return scales or dict(() if model.qat is None else model.qat.input_scales)


def recorded(model: Decoder, spec: FakeQuant) -> FakeQuant:
    """The grid that files record of a model prepared for QAT with `spec`: its format, group size, dtype and observed
    scales.
    """
    pairs = tuple(sorted(known_scales(model).items())) if spec.observes else ()
    return dataclasses.replace(spec.grid, input_scales=pairs)
