"""The parameters of a CompatModel by their names in transformers and PEFT, for scripts that count or compare them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import jax
import numpy as np
from flax import nnx

from jaxtune.compat.texts import NumpyTensor
from jaxtune.models.adapters.adapter_files import ExpertTensor, adapter_tensors
from jaxtune.models.decoder import Decoder
from jaxtune.models.files.weights import tensors_of
from jaxtune.models.lora import has_adapter, matrices, without_adapter
from jaxtune.pallas.formats import Stored, dense

_OF_PEFT = "base_model.model."


class Parameter:
    """A weight as it was when it was asked for, with the attributes of torch's parameters that scripts read. Its
    numbers come to the host where they are asked for: by clone, detach, cpu, numpy, float, or NumPy's functions.
    """

    def __init__(self, value: jax.Array | Stored, requires_grad: bool, dtype: str):
        self._value, self.requires_grad = value, requires_grad
        self.shape = tuple(value.shape)
        self.dtype = np.dtype(dtype if isinstance(value, Stored) else value.dtype)
        self.ndim = len(self.shape)

    def numel(self) -> int:
        return math.prod(self.shape)

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        del copy
        value = dense(self._value, self.dtype) if isinstance(self._value, Stored) else self._value
        return np.array(jax.device_get(value), dtype)

    def clone(self, *_: object) -> NumpyTensor:
        return np.asarray(self).view(NumpyTensor)

    detach = cpu = numpy = float = clone


def named_parameters(module: Decoder) -> Iterator[tuple[str, Parameter]]:
    """(name, Parameter) in the order of files: transformers' names, or PEFT's if the module has an adapter."""
    if not has_adapter(module):
        for name, variable in tensors_of(module).items():
            yield name, _parameter(module, variable)
        return
    adapted = {name for name, matrix in matrices(module) if matrix.lora is not None}
    tensors = adapter_tensors(module)
    for name, variable in tensors_of(without_adapter(module)).items():
        layer, _, kind = name.rpartition(".")
        inner = ".base_layer" if layer in adapted else ".original_module" if _OF_PEFT + name in tensors else ""
        yield f"{_OF_PEFT}{layer}{inner}.{kind}", _parameter(module, variable)
    for name, variable in tensors.items():
        layer, found, kind = name.partition(".lora_")
        if found:
            matrix, _, end = kind.partition(".")
            yield f"{layer}.lora_{matrix}.default{'.' * bool(end)}{end}", _parameter(module, variable)
        else:  # a head or embedding that is trained whole
            layer, _, kind = name.rpartition(".")
            yield f"{layer}.modules_to_save.default.{kind}", _parameter(module, variable)


def _parameter(module: Decoder, variable: nnx.Variable | ExpertTensor) -> Parameter:
    trains = isinstance(getattr(variable, "variable", variable), nnx.Param)
    return Parameter(variable.get_value(), trains, module.dtype)
