"""Computes the tensors of a changed model (merged, decoded, encoded) one at a time, so that it is never in memory as a
whole.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from jaxtune.models.decoder import Decoder
from jaxtune.models.files import quant
from jaxtune.models.lora import copy_structure, matrices, name_matches
from jaxtune.models.placement.streams import on_device
from jaxtune.models.registry import tensor_names
from jaxtune.pallas.formats import FORMATS, Stored, dense


def tensors_of(model: Decoder) -> dict[str, nnx.Variable]:
    """{Hugging Face name: variable} of a model in the order of files. No head if it is the embedding; values may be
    shapes. Raises ValueError for adapters, or a model prepared for QAT.
    """
    flat = list(nnx.to_flat_state(nnx.state(model)))
    if any("lora" in map(str, path) for path, _ in flat):
        raise ValueError(
            "this model has adapters: merge them first (merge_adapter), or write them alone (save_adapter)"
        )
    if quant.qat_spec(model) is not None:
        raise ValueError("this model is prepared for QAT: make its weights the rounded ones first (convert_qat)")

    def order(item):
        path = item[0]
        module = ("embedding", "per_layer", "layers", "norm", "head", "vision").index(path[0])
        return module, path[1] if path[0] == "layers" else 0

    name_of = tensor_names(model)
    return {name_of(path): variable for path, variable in sorted(flat, key=order)}


@dataclasses.dataclass(frozen=True)
class Weights:
    """A model of which some tensors are computed only when they are needed. Its methods return new Weights and compute
    nothing.
    """

    # the changed model's structure, configs, shapes and unchanged tensors; a tensor that `makers` changes has a
    # jax.ShapeDtypeStruct in place of each array in it
    model: Decoder
    # {Hugging Face name: function that computes the tensor}; a caller that keeps none of the results has one in memory
    makers: Mapping[str, Callable[[], Any]] = types.MappingProxyType({})

    def maker(self, name: str, variable: nnx.Variable) -> Callable[[], Any]:
        """The function that returns a tensor's value, on the device if the variable streams. name, variable: an item of
        tensors_of(self.model).
        """
        return self.makers.get(name) or (lambda: on_device(variable.get_value()))

    def changed(self, changes: Mapping[str, Callable[[Any], Any]]) -> Weights:
        """Replaces matrices. changes: {name, as in lora.matrices: old weight -> new}; traced now for shapes, called
        when needed; unknown names are ignored. Raises ValueError for a model with adapters or prepared for QAT.
        """
        model, makers = copy_structure(self.model), dict(self.makers)
        names = {id(variable): name for name, variable in tensors_of(model).items()}
        for name, matrix in matrices(model):
            if name in changes:
                tensor = names[id(matrix.weight)]
                makers[tensor] = functools.partial(_then, self.maker(tensor, matrix.weight), changes[name])
                matrix.weight = matrix.weight.replace(jax.eval_shape(changes[name], matrix.stored_weight))
        return Weights(model, makers)

    def dequantized(self, modules: Sequence[str] | None = None) -> Weights:
        """Decodes quantised weights to model.dtype. modules: names, or their last parts; None: all. Raises ValueError
        for a model with adapters or prepared for QAT.
        """

        def is_selected(name: str) -> bool:
            return modules is None or any(name_matches(name, pattern) for pattern in modules)

        decode = functools.partial(dense, dtype=self.model.dtype)
        quantised_names = [name for name, matrix in matrices(self.model) if isinstance(matrix.stored_weight, Stored)]
        return self.changed({name: decode for name in quantised_names if is_selected(name)})

    def quantized(self, load_in: str) -> Weights:
        """Quantises linears and experts to `load_in`, but not routers and rows that are not whole blocks; `qat` becomes
        None. A model stored in that format stays as it is. Raises ValueError for a model with adapters or prepared for
        QAT.
        """
        if quant.stored_in(self.model) == load_in:
            return self
        plain = self.dequantized()
        encode, skipped = functools.partial(quant.encode, load_in=load_in), not_whole(plain, load_in)
        names = [name for name, matrix in matrices(plain.model) if matrix.quantizable and name not in skipped]
        result = plain.changed(dict.fromkeys(names, encode))
        result.model.qat = None  # its weights are no longer rounded to that grid
        return result


def not_whole(weights: Weights, format: str) -> list[str]:
    """Linears and experts whose rows are not whole blocks of `format`, a key of FORMATS; no routers."""
    block = FORMATS[format].kinds[0].row_block
    return [name for name, matrix in matrices(weights.model) if matrix.quantizable and matrix.sizes[-1] % block]


def _then(make: Callable[[], Any], change: Callable[[Any], Any]) -> Any:
    return change(make())
