"""The tensors of a model or an adapter under llama.cpp's names and in its order of rows, made one at a time."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtune.models.config import DecoderConfig
from jaxtune.models.decoder import Decoder
from jaxtune.models.files.gguf_names import (
    GATE_UP,
    Architecture,
    Names,
    gate_and_up,
    heads_of,
    interleaved,
    rope_factors,
)
from jaxtune.models.files.weights import Weights, tensors_of
from jaxtune.models.lora import experts, linears, matrices
from jaxtune.models.stack.stack_layers import UNTUNED
from jaxtune.pallas.formats import Stored, dense

# Matrices that llama.cpp keeps in float32: routers, and the projection to the embeddings of each layer.
_PLAIN = (
    ".mlp.gate.weight",
    ".mlp.router.weight",
    "_expert_gate.weight",
    ".router.proj.weight",
    ".per_layer_model_projection.weight",
)
# llama.cpp computes it without the adapters of a file.
_UNADAPTED = "model.per_layer_model_projection"


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor of a GGUF file, and how it is computed."""

    name: str  # llama.cpp's name
    shape: tuple[int, ...]  # in numpy's order; the file lists the dimensions in reverse
    # computes the tensor, as an array of floats, from the value that its Source makes: a weight as an array, the Lora
    # module for a tensor of an adapter, or None for a tensor that is known already
    of: Callable[[Any], Any]
    # True: it is stored in float32 whatever the outtype, as vectors and the matrices of _PLAIN (llama.cpp requires it),
    # biases of experts, and the matrices of adapters are. False: it is stored in the type that the outtype gives it
    plain: bool
    # the name of the dtype of the numbers to which quantisation-aware training (QAT) rounded the tensor, so that a
    # quantised type stores it exactly; None: it did not
    grid: str | None = None
    weight: str = ""  # Hugging Face's name of the weight that it is, for messages; "": those of its own name
    heads: int | None = None  # how many heads there are whose rows `of` reorders on the device; None: it does not


@dataclasses.dataclass(frozen=True)
class Source:
    """Tensors computed from one value of the model, such as gate and up from a fused matrix, which is made once."""

    make: Callable[[], Any]  # returns the value; called when these tensors are written, and the value is then freed
    tensors: tuple[Tensor, ...]  # the tensors that are computed from it, in the order of the file
    stored: Stored | None = None  # the quantised weight that `make` decodes, or the same with shapes; None: none


def all_tensors(sources: Iterable[Source]) -> list[Tensor]:
    """In the order of the file."""
    return [tensor for source in sources for tensor in source.tensors]


interleaved_on_device = jax.jit(interleaved, static_argnums=1, compiler_options=UNTUNED)


def of_model(weights: Weights, arch: Architecture) -> list[Source]:
    """The Sources of a model, in the order of the file: rotary factors, weights, and a tied head where llama.cpp needs
    it apart. Raises ValueError if llama.cpp has no name for a tensor.

      weights: with an adapter merged.
    """
    model = weights.model
    config, names = model.config, Names(arch, model.config.num_layers)
    sources = [
        Source(lambda: None, (Tensor(name, factors.shape, lambda _, factors=factors: factors, True),))
        for name, factors in rope_factors(config).items()
    ]
    tower = () if model.vision is None else model.vision.config.prefixes  # llama.cpp has it in another file
    variables = {name: variable for name, variable in tensors_of(model).items() if not name.startswith(tower)}
    rounded = _rounded(model)
    for name, variable in variables.items():
        make = functools.partial(_dense, weights.maker(name, variable), model.dtype)
        shape = tuple(variable.get_value().shape)
        tensors = _tensors(name, shape, config, arch, names)
        tensors = [dataclasses.replace(tensor, grid=rounded.get(name), weight=name) for tensor in tensors]
        value = variable.get_value()
        sources.append(Source(make, tuple(tensors), value if isinstance(value, Stored) else None))
    if arch.own_output and config.tie_embeddings:
        name = "model.embed_tokens.weight"
        make = functools.partial(_dense, weights.maker(name, variables[name]), model.dtype)
        head = Tensor("output.weight", tuple(variables[name].get_value().shape), lambda embedding: embedding, False)
        sources.append(Source(make, (head,)))
    return sources


def _tensors(
    name: str, shape: tuple[int, ...], config: DecoderConfig, arch: Architecture, names: Names
) -> list[Tensor]:
    if ".experts." in name:
        return _expert_tensors(name, shape, config, arch, names)
    return [_dense_tensor(name, shape, config, arch, names)]


def of_change(name: str, change: np.ndarray, config: DecoderConfig, arch: Architecture) -> dict[str, np.ndarray]:
    """{llama.cpp's name: change [.., out, columns]} of a matrix by its name in lora.matrices."""
    is_turned = ".experts." in name and config.moe is not None and config.moe.transposed
    change = change.swapaxes(1, 2) if is_turned else change
    weight = name if ".experts." in name else f"{name}.weight"
    tensors = _tensors(weight, change.shape, config, arch, Names(arch, config.num_layers))
    return {tensor.name: np.asarray(tensor.of(jnp.asarray(change))) for tensor in tensors}


def _rounded(model: Decoder) -> dict[str, str]:
    grid = model.qat
    if grid is None:
        return {}
    fitting = [(name, m) for name, m in matrices(model) if m.quantizable and grid.fits(m.sizes[-1])]
    return {name if matrix.num_experts else f"{name}.weight": grid.dtype for name, matrix in fitting}


def _dense(make: Callable[[], Any], dtype: str) -> jax.Array:
    return dense(make(), dtype)


def _dense_tensor(name: str, shape: tuple[int, ...], config: DecoderConfig, arch: Architecture, names: Names) -> Tensor:
    """A weight [out, in] or a vector, not of experts, as llama.cpp has it."""
    heads = heads_of(config, arch, name)
    offset = np.float32(config.norm_offset if name.endswith("norm.weight") else 0.0)

    def of(value: jax.Array) -> jax.Array:
        value = value.astype(jnp.float32) + offset if offset else value
        return value if heads is None else interleaved_on_device(value, heads)

    plain = len(shape) == 1 or name.endswith(_PLAIN)
    return Tensor(names(name), shape, of, plain, heads=heads)


def _expert_tensors(
    name: str, shape: tuple[int, ...], config: DecoderConfig, arch: Architecture, names: Names
) -> list[Tensor]:
    """A matrix [E, out, in] or bias [E, out] of all experts; gate_up_proj becomes two but for Gemma 4."""
    moe = config.moe
    assert moe is not None
    bias = name.endswith("_bias")
    module = name.removesuffix("_bias")
    turned = moe.transposed and not bias
    count, *matrix_shape = shape
    out_size, *columns = matrix_shape[::-1] if turned else matrix_shape

    def tensor(module: str, rows: slice, size: int) -> Tensor:
        def of(weight: jax.Array) -> jax.Array:
            return weight[..., rows].swapaxes(1, 2) if turned else weight[:, rows]

        return Tensor(names(module + (".bias" if bias else ".weight")), (count, size, *columns), of, bias)

    if arch.fused_experts or not module.endswith(GATE_UP):
        return [tensor(module, slice(None), out_size)]
    half = out_size // 2
    gate, up = gate_and_up(moe.interleaved, half)
    stem = module.removesuffix("gate_up_proj")
    return [tensor(f"{stem}gate_proj", gate, half), tensor(f"{stem}up_proj", up, half)]


def of_adapter(model: Decoder, arch: Architecture) -> tuple[list[Source], float]:
    """(Sources of lora_a and lora_b, alpha) of a LoRA adapter. llama.cpp scales all products B A by alpha / rank with
    one alpha, so B is multiplied by scale * rank / alpha. Raises ValueError without an adapter, or for what llama.cpp
    lacks: DoRA, a trained embedding or head, an adapted projection to per-layer embeddings.
    """
    config, names = model.config, Names(arch, model.config.num_layers)
    adapted = [(name, linear, linear.lora) for name, linear in (*linears(model), *experts(model)) if linear.lora]
    if not adapted:
        raise ValueError("gguf-adapter: this model has no adapter; export the model itself with gguf")
    for name, _, lora in adapted:
        if name == _UNADAPTED:
            raise ValueError(f"gguf-adapter: {name} is adapted, and llama.cpp ignores that adapter; export gguf")
        if lora.magnitude is not None:
            raise ValueError(f"gguf-adapter: {name} has use_dora, which llama.cpp does not support; export gguf")
    for module_name, module in (("embed_tokens", model.embedding), ("lm_head", model.head)):
        if module is not None and module.original is not None:
            raise ValueError(
                f"gguf-adapter: modules_to_save has {module_name}, which llama.cpp's adapters cannot contain"
            )
    alpha = float(adapted[0][2].scale * adapted[0][2].rank)
    sources = []
    for name, _, lora in adapted:
        factor = np.float32(lora.scale * lora.rank / alpha)
        if arch.fused_experts or not name.endswith(GATE_UP):
            sources.append(_lora_tensors(names(f"{name}.weight"), lora, factor, heads_of(config, arch, name)))
            continue
        assert config.moe is not None
        gate, up = gate_and_up(config.moe.interleaved, lora.b.shape[1] // 2)
        for projection, rows in (("gate_proj", gate), ("up_proj", up)):
            projection_name = names(f"{name.replace('gate_up_proj', projection)}.weight")
            sources.append(_lora_tensors(projection_name, lora, factor, rows=rows))
    return sources, alpha


def _lora_tensors(
    name: str, lora: Any, factor: np.float32, heads: int | None = None, rows: slice | None = None
) -> Source:
    """lora_a [.., r, in] and lora_b [.., out, r], float32."""

    def b_of(lora: Any) -> np.ndarray:
        b = np.asarray(lora.b[...], np.float32) * factor
        b = b if rows is None else b[:, rows]
        return b if heads is None else interleaved(b, heads)

    b_shape = tuple(lora.b.shape)
    if rows is not None:
        b_shape = (b_shape[0], len(range(*rows.indices(b_shape[1]))), b_shape[2])
    a = Tensor(f"{name}.lora_a", tuple(lora.a.shape), lambda lora: np.asarray(lora.a[...], np.float32), True)
    return Source(lambda: lora, (a, Tensor(f"{name}.lora_b", b_shape, b_of, True)))
