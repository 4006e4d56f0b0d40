"""Computes the tensors of a changed model one at a time, so that the changed model is never in memory as a whole:
`Weights`, which merging, saving and exporting use. `tensors_of` names the tensors of a model in the order of files, and
`not_whole` the matrices that a format cannot store.

Changes are merging adapters, decoding and encoding weights.
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
from jaxtune.models.families.common import tensor_name
from jaxtune.models.files import quant
from jaxtune.models.lora import copy_structure, matrices, name_matches
from jaxtune.models.registry import family
from jaxtune.pallas.formats import FORMATS, Stored, dense


def tensors_of(model: Decoder) -> dict[str, nnx.Variable]:
    """{Hugging Face name: variable} of a model without adapters, in the order in which files have them: embedding,
    per-layer embeddings if there are any, layers, norm, head. Saving, exporting and merging go through a model by it.
    There is no head if it is the embedding. The variables are the model's own, and their values may be arrays,
    quantised weights or only shapes.

    Raises:
      ValueError: a model with adapters, or one that is prepared for QAT.
    """
    norms = family(model.config.family).norms
    flat = list(nnx.to_flat_state(nnx.state(model)))
    if any("lora" in map(str, path) for path, _ in flat):
        raise ValueError(
            "this model has adapters: merge them first (merge_adapter), or write them alone (save_adapter)"
        )
    if quant.qat_spec(model) is not None:
        raise ValueError("this model is prepared for QAT: make its weights the rounded ones first (convert_qat)")

    def order(item):
        """The sort key of a (path, variable) pair: the place of its module in files, then the layer's index."""
        path = item[0]
        return ("embedding", "per_layer", "layers", "norm", "head").index(path[0]), path[1] if path[
            0
        ] == "layers" else 0

    layers, head = model.config.layers, model.config.head.name
    return {tensor_name(path, norms, layers, head): variable for path, variable in sorted(flat, key=order)}


@dataclasses.dataclass(frozen=True)
class Weights:
    """A model of which some tensors are computed only when they are needed, as when it is saved merged, so that only
    one of these is in memory at a time. `changed`, `dequantized` and `quantized` return new Weights with further such
    changes, and compute nothing. `maker` gives the function that computes a tensor, which the files' writer calls."""

    # the changed model's structure, configs, shapes and unchanged tensors; a tensor that `made` changes has a
    # jax.ShapeDtypeStruct in place of each array in it
    model: Decoder
    # {Hugging Face name: function that computes the tensor}; a caller that keeps none of the results has one in memory
    made: Mapping[str, Callable[[], Any]] = types.MappingProxyType({})

    def maker(self, name: str, variable: nnx.Variable) -> Callable[[], Any]:
        """The function, without arguments, that returns the value of a tensor: the one in `made`, or, for an unchanged
        tensor, one that returns the value of `variable`.

        name, variable: the Hugging Face name of the tensor and its variable, an item of tensors_of(self.model)."""
        return self.made.get(name, variable.get_value)

    def changed(self, changes: Mapping[str, Callable[[Any], Any]]) -> Weights:
        """Returns these weights with some matrices replaced, which nothing computes yet. `dequantized`, `quantized` and
        exports to quantised formats call it; merging does not, but makes a Weights with functions in `made`.

        Args:
          changes: {name of a matrix, as lora.matrices gives it: a function that takes the old weight, with the changes
            so far, and returns the new one}. The function is called when the matrix is needed; until then it is only
            traced (jax.eval_shape) for its result's shape. Names that the model does not have are ignored.

        Raises:
          ValueError: the model has adapters, or is prepared for QAT (tensors_of).
        """
        model, made = copy_structure(self.model), dict(self.made)
        names = {id(variable): name for name, variable in tensors_of(model).items()}
        for name, matrix in matrices(model):
            if name in changes:
                tensor = names[id(matrix.weight)]
                made[tensor] = functools.partial(_then, self.maker(tensor, matrix.weight), changes[name])
                matrix.weight = matrix.weight.replace(jax.eval_shape(changes[name], matrix.stored_weight))
        return Weights(model, made)

    def dequantized(self, modules: Sequence[str] | None = None) -> Weights:
        """These weights with quantised ones decoded to model.dtype, each when it is needed. Exports in 16 bits write
        them, and exports to other formats encode them anew.

        modules: names, or last parts of names, of the linears and experts that are decoded; a name that matches none
        has no effect. None: all are decoded. Raises ValueError as `changed` does.
        """

        def chosen(name: str) -> bool:
            """Whether the matrix of this name is to be decoded."""
            return modules is None or any(name_matches(name, each) for each in modules)

        decode = functools.partial(dense, dtype=self.model.dtype)
        found = [name for name, matrix in matrices(self.model) if isinstance(matrix.stored_weight, Stored)]
        return self.changed({name: decode for name in found if chosen(name)})

    def quantized(self, load_in: str) -> Weights:
        """These weights with all linears and experts in the layers quantised to the format `load_in` (such as "nf4"),
        each when it is needed; quantised ones are decoded first. Routers are not quantised, nor are matrices whose rows
        are not whole blocks of the format (not_whole). The new model's `qat` is None, because its weights are no longer
        on a grid of QAT. If the model is stored in that format already (quant.stored_in), the result is this object
        itself, in which linears in 16 bits or in another format stay so. Raises ValueError as `changed` does."""
        if quant.stored_in(self.model) == load_in:
            return self
        plain = self.dequantized()
        encode, left = functools.partial(quant.encode, load_in=load_in), not_whole(plain, load_in)
        chosen = [name for name, matrix in matrices(plain.model) if matrix.quantizable and name not in left]
        found = plain.changed(dict.fromkeys(chosen, encode))
        found.model.qat = None  # its weights are no longer rounded to that grid
        return found


def not_whole(weights: Weights, format: str) -> list[str]:
    """The names of the linears and experts that a format of quantised weights (a key of FORMATS) cannot store because
    their rows are not whole blocks of it, in the model's order; routers are not among them. Exports store the matrices
    that it names in the model's dtype."""
    block = FORMATS[format].kinds[0].row_block
    return [name for name, matrix in matrices(weights.model) if matrix.quantizable and matrix.sizes[-1] % block]


def _then(make: Callable[[], Any], change: Callable[[Any], Any]) -> Any:
    """The changed tensor, change(make()): `make` computes the tensor before the change. `Weights.changed` binds both
    arguments by functools.partial, and gets a function that computes the tensor when it is needed."""
    return change(make())
