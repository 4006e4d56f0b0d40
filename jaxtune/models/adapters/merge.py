"""Merges an adapter into its base, one matrix at a time, and verifies that the result computes the same:
- Every merged matrix is finite, and its product with random rows equals its adapter's within a bound that every correct
  merge satisfies. Every embedding or head that was trained whole is finite.
- Every other tensor is the model's own, decoded if quantised, and rounded to the grid of QAT.
- The logits of a small random batch agree (check_logits).
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtune.models.adapters.merged_logits import FP32_ROUNDOFF, Merged, check_logits, roundoff
from jaxtune.models.decoder import Decoder
from jaxtune.models.files.quant import qat_spec, round_to_grid
from jaxtune.models.files.weights import Weights, tensors_of
from jaxtune.models.layers.expert_linear import ExpertLinear
from jaxtune.models.linear import Frozen, Linear, NeverTrained, merged_weight, trained
from jaxtune.models.lora import copy_structure, has_adapter, matrices, stop_rounding
from jaxtune.models.observed_inputs import recorded
from jaxtune.models.placement.streams import declared, is_on_host, memory_kinds, on_device, streamed_bytes
from jaxtune.models.qat.fake_quant import FakeQuant
from jaxtune.models.stack.stack_layers import UNTUNED
from jaxtune.pallas import dispatch
from jaxtune.pallas.formats import Stored, dense
from jaxtune.pallas.grouped_matmul import GroupedLora
from jaxtune.pallas.quant_matmul import LoraWeights, quant_matmul

# The most float32 arrays of a matrix's size (one expert's) that _merge_and_check, compiled for a GPU, has at the same
# time; XLA's programs for a CPU have up to 5.
_WIDE_COPIES = 2
# How long the verification of the logits waits for the first tensor to be made: its tracing holds Python's lock, for
# which the writer would wait before the disk has anything to do.
_HEAD_START_SECONDS = 1.0
_PROBES = 8  # rows with which the products of a merged matrix and of its adapter are compared
_ROUNDED_COPIES = 11  # where it also rounds to QAT's grid; the formats with scales of blocks in FP8 need most


def _merged_and_checked(weight: jax.Array, lora: LoraWeights, probe: jax.Array, dtype, fake_quant: FakeQuant | None):
    """(the merged weight [out, in] in dtype; bool[], whether it is finite; float32[], the largest error / the error
    allowed).

    Compares products with `probe`, float32[rows, in]. Rounding each weight changes output o by at most u sum_i |w_oi
    x_i|, with its unit roundoff u; fp32 sums of n terms change it by at most n u32 times the sum of their magnitudes.
    """
    wide = merged_weight(weight, lora)
    if fake_quant is None:
        stored = wide.astype(dtype)
        wide = stored.astype(jnp.float32)
    else:
        stored = fake_quant.round(wide).astype(dtype)
    expected = quant_matmul(probe, [weight.astype(jnp.float32)], [lora])[0]
    actual = quant_matmul(probe, [wide])[0]

    def size(w):  # [.., in] x [out, in] of magnitudes
        return jnp.einsum("bi,oi->bo", jnp.abs(probe), jnp.abs(w), precision=jax.lax.Precision.HIGHEST)

    inner = jnp.einsum("bi,ri->br", jnp.abs(probe), jnp.abs(lora.a), precision=jax.lax.Precision.HIGHEST)
    terms = size(weight.astype(jnp.float32)) + abs(lora.scale) * jnp.einsum(
        "br,or->bo", inner, jnp.abs(lora.b), precision=jax.lax.Precision.HIGHEST
    )
    terms = terms if lora.row_scale is None else terms * jnp.abs(lora.row_scale)
    length = weight.shape[1] + lora.a.shape[0]
    # Subnormal numbers have an absolute rounding error, not a relative one.
    tiny = jnp.abs(probe).sum(-1, keepdims=True) * float(jnp.finfo(dtype).smallest_subnormal)
    allowed = roundoff(dtype) * size(wide) + 2 * length * FP32_ROUNDOFF * terms + tiny
    # Where DoRA's magnitude is zero, both products and the allowed error are zero.
    error = jnp.where(actual == expected, 0.0, jnp.abs(actual - expected) / allowed).max()
    return stored, jnp.isfinite(wide).all(), error


_merge_and_check = jax.jit(_merged_and_checked, static_argnums=(3, 4), compiler_options=UNTUNED)


@functools.partial(jax.jit, static_argnums=(3, 4), compiler_options=UNTUNED)
def _merge_experts(
    weight: jax.Array, lora: GroupedLora, probe: jax.Array, transposed: bool, fake_quant: FakeQuant | None
):
    """_merged_and_checked for all experts [E, out, in], or [E, in, out] if `transposed`, one at a time."""

    def merge_expert(expert):
        weight, a, b = expert
        weight = weight.T if transposed else weight
        lora_of = LoraWeights(a, b, None, lora.scale)
        stored, finite, error = _merged_and_checked(weight, lora_of, probe, weight.dtype, fake_quant)
        return stored.T if transposed else stored, finite, error

    stored, finite, errors = jax.lax.map(merge_expert, (weight, lora.a, lora.b))
    return stored, finite.all(), errors.max()


@dispatch.unsaid()  # it runs once, in float32, which training kernels do not support: no report of that is needed
def _merged_matrix(name: str, linear: Linear | ExpertLinear, index: int, dtype: str, base_dtype: Any) -> jax.Array:
    """The merged and verified weight of one matrix, in the stored shape. ArithmeticError if it is not finite in
    `base_dtype`, or its products differ by more than rounding.
    """
    program, arguments = _merge_of(linear, index, dtype)
    stored, finite, error = program(*arguments)
    del arguments
    finite, error = jax.device_get((finite, error))
    if not finite:
        raise ArithmeticError(f"merge_adapter: {name} is not finite in {base_dtype} after merging; nothing was merged")
    if not error <= 1.0:
        raise ArithmeticError(
            f"merge_adapter: {name} does not act like its adapter: {error:.3g} times the rounding error allowed"
        )
    return stored


def _merge_of(linear: Linear | ExpertLinear, index: int, dtype: str) -> tuple[jax.stages.Wrapped, tuple]:
    """(the program that merges a matrix, its arguments). The matrix is decoded here."""
    weight = dense(on_device(linear.stored_weight), dtype)
    probe = np.random.default_rng(index).standard_normal((_PROBES, linear.sizes[-1]), np.float32)
    assert linear.lora is not None
    if isinstance(linear, ExpertLinear):
        return _merge_experts, (weight, linear.lora.weights(), probe, linear.transposed, linear.fake_quant)
    return _merge_and_check, (weight, linear.lora.weights(weight), probe, weight.dtype, linear.fake_quant)


@contextlib.contextmanager
def _compiling_merges(model: Decoder) -> Iterator[None]:
    """Compiles, in threads, the programs that merge a model's matrices while the block runs."""
    one_at_a_time, matrix_by_program = threading.Lock(), {}
    for index, (_, linear) in enumerate(matrices(model)):
        if linear.lora is not None:
            shapes = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(nnx.state(linear)))
            matrix_by_program.setdefault((nnx.graphdef(linear), shapes), (linear, index))

    def ahead(linear: Linear | ExpertLinear, index: int) -> None:
        with one_at_a_time:
            program, arguments = _merge_of(linear, index, model.dtype)
            lowered = program.lower(*arguments)
            del arguments
        lowered.compile()

    with ThreadPoolExecutor(8, "compile") as pool:
        for matrix in () if _is_divided(model) else matrix_by_program.values():
            pool.submit(ahead, *matrix)
        yield


def _trained_whole(name: str, weight: jax.Array, dtype: Any) -> jax.Array:
    """The float32 weight in the dtype of the base's own. Raises ArithmeticError if it is not finite in that."""
    stored = weight.astype(dtype)
    if not jax.device_get(jnp.isfinite(stored).all()):
        raise ArithmeticError(f"merge_adapter: {name} is not finite in {dtype} after merging; nothing was merged")
    return stored


def _plain_matrix(linear: Linear | ExpertLinear, dtype: str) -> jax.Array:
    """The merged model's weight of a matrix without an adapter: decoded, and rounded to its grid of QAT."""
    weight = dense(on_device(linear.stored_weight), dtype)
    transposed = isinstance(linear, ExpertLinear) and linear.transposed
    return weight if linear.fake_quant is None else round_to_grid(weight, linear.fake_quant, transposed)


def merged_weights(model: Decoder) -> Weights:
    """The weights of the model with its adapter merged in, computed one by one: Weights.makers has the function for
    each changed tensor. Weights.model is a new model without adapters whose variables are nnx.Param (but NeverTrained);
    changed ones have only shape and dtype.

    Logits are verified here, each matrix when it is computed. If the device has room for several times as much, a
    thread verifies the logits, which takes seconds, while first tensors are written; the last tensor's function waits
    for it.

    Raises ValueError without an adapter; ArithmeticError for a failed verification, here or when a tensor is computed.
    """
    weights, check = _merge(model)
    if not _has_room(model):
        check(False)
        return weights
    thread, making = ThreadPoolExecutor(1, "logits"), threading.Event()
    checked = thread.submit(check, True, making)
    thread.shutdown(wait=False)
    pending_names = set(weights.makers)
    makers = {
        name: functools.partial(_verified_tensor, name, make, pending_names, checked, making)
        for name, make in weights.makers.items()
    }
    return Weights(weights.model, makers)


def _merge(model: Decoder) -> tuple[Weights, Callable[..., None]]:
    """(the merged weights, not verified yet; the function that verifies their logits). ValueError: no adapter."""
    if not has_adapter(model):
        raise ValueError("merge_adapter: this model has no adapter")
    merged = copy_structure(model)
    dtype = model.weight_dtype
    makers: dict[int, Callable[[], jax.Array]] = {}  # by the identity of the merged model's variable
    views: dict[int, Merged] = {}
    changed = 0
    for index, ((name, matrix), (_, linear)) in enumerate(zip(matrices(model), matrices(merged), strict=True)):
        weight = matrix.stored_weight
        rounded = matrix.fake_quant is not None
        changed += matrix.lora is not None or isinstance(weight, Stored)
        if matrix.lora is not None:
            make = functools.partial(_merged_matrix, name, matrix, index, model.dtype, dtype)
        elif isinstance(weight, Stored) or rounded or is_on_host(weight):
            make = functools.partial(_plain_matrix, matrix, model.dtype)
        else:
            continue
        form = jax.ShapeDtypeStruct(weight.shape, model.dtype if isinstance(weight, Stored) else weight.dtype)
        linear.weight = trained(declared(linear.weight, form, False), form)
        linear.lora = nnx.data(None)
        linear.fp8 = False
        stop_rounding(linear)
        makers[id(linear.weight)], views[id(linear.weight)] = make, Merged.of(matrix, model.dtype)
    for module in (merged.embedding, merged.head):
        if module is not None and isinstance(module.weight, nnx.Param):
            name = model.config.head.name if isinstance(module, Linear) else "embed_tokens"
            weight = module.weight.get_value()
            # The dtype of what it replaces, which a precision map may have given this module.
            whole_dtype = dtype if module.original is None else module.original.get_value().dtype
            module.weight = trained(module.weight, jax.ShapeDtypeStruct(weight.shape, whole_dtype))
            makers[id(module.weight)] = functools.partial(_trained_whole, name, weight, whole_dtype)
            changed += 1
            if module.original is not None:
                del module.original
    spec = qat_spec(model)
    merged.qat = None if spec is None else recorded(model, spec)
    for _, module in nnx.iter_modules(merged):
        for key, value in list(vars(module).items()):
            if isinstance(value, Frozen):
                value = declared(value, on_device(value.get_value()), False)
                setattr(module, key, value if isinstance(value, NeverTrained) else trained(value, value.get_value()))
    merged.base_digest = merged.base_fingerprint = None  # it is another base now
    # Matched by the identity of the variable and not by a name, so that no other tensor can be written in its place.
    maker_of = {
        name: makers.pop(id(variable)) for name, variable in tensors_of(merged).items() if id(variable) in makers
    }
    if makers:
        raise ArithmeticError(f"merge_adapter: {len(makers)} tensors have no place in files; nothing was merged")
    weights = Weights(merged, maker_of)

    def check(at_once: bool, making: threading.Event | None = None) -> None:
        """Verifies the logits once `making` is set, when the first tensor is made."""
        with dispatch.unsaid(), _compiling_merges(model):
            if making is not None:
                making.wait(_HEAD_START_SECONDS)
            check_logits(model, weights, views, changed, at_once)

    return weights, check


def _has_room(model: Decoder) -> bool:
    """Whether the model is on one device with enough free memory to verify logits while tensors are written."""
    if _is_divided(model):  # whose first device another process may have
        return False
    leaf = next(leaf for leaf in jax.tree.leaves(nnx.state(model)) if isinstance(leaf, jax.Array))
    device = next(iter(leaf.devices()))  # the set is the sharding's own, so nothing is taken out of it
    if not (memory := device.memory_stats()):
        return False
    return memory["bytes_limit"] - memory["bytes_in_use"] > 4 * merge_bytes(model)[0]


def _is_divided(model: Decoder) -> bool:
    leaves = jax.tree.leaves(nnx.state(model))
    return any(len(leaf.sharding.device_set) > 1 for leaf in leaves if isinstance(leaf, jax.Array))


def _verified_tensor(
    name: str, make: Callable[[], jax.Array], pending_names: set[str], checked: Future[None], making: threading.Event
) -> jax.Array:
    """Computes a changed tensor; the last of `pending_names` waits for `checked`, and each raises its error."""
    making.set()
    tensor = make()
    pending_names.discard(name)
    if not pending_names or checked.done():
        checked.result()
    return tensor


def merge_adapter(model: Decoder) -> Decoder:
    """The model with its adapter merged into the weights: w + scale b a, rescaled for DoRA, computed in fp32. A new
    model that shares unchanged arrays and is a base again, without adapters, all `nnx.Param` (but NeverTrained).

    Weights have the base's stored dtype; quantised ones are decoded to the compute dtype; in a model prepared for QAT
    merged ones are rounded to its grid. The device needs room for all changed tensors; `export_model` does not.

    Raises ValueError without an adapter, ArithmeticError for a failed verification.
    """
    weights, check = _merge(model)
    check(False)  # and not in a thread, because what follows takes memory for a second model
    for name, variable in tensors_of(weights.model).items():
        if name in weights.makers:
            variable.set_value(weights.makers[name]())
    return weights.model


def merge_bytes(model: Decoder) -> tuple[int, int]:
    """(bytes on the device, bytes in host memory) that writing the merged model (merged_weights) needs beyond the
    model: those of the tensor which needs most, a copy of it if it streams, and the embedding and head that are trained
    whole. Arrays may be abstract. Without an adapter, quantised weights are decoded all the same.
    """
    device = host = 0
    for _, matrix in matrices(model):
        weight = matrix.stored_weight
        size = weight.size * (jnp.dtype(model.dtype) if isinstance(weight, Stored) else weight.dtype).itemsize
        # Experts are merged one at a time, into a tensor of all of them.
        wide = 4 * weight.size // max(matrix.num_experts, 1)
        streams = any(kind is not None for kind in memory_kinds(matrix.weight))
        if matrix.lora is not None or isinstance(weight, Stored) or matrix.fake_quant is not None:
            decoded = size if isinstance(weight, Stored) else 0
            copies = 0 if matrix.lora is None else _WIDE_COPIES
            copies = copies if matrix.fake_quant is None else _ROUNDED_COPIES
            # Of each output of a probe three numbers are in memory, and the probe itself.
            *_, outputs, inputs = matrix.sizes
            products = 0 if matrix.lora is None else 4 * _PROBES * (3 * outputs + inputs)
            arrived = int(streamed_bytes(matrix.weight)) if streams else 0
            device = max(device, size + decoded + copies * wide + products + arrived)
        elif streams:
            device = max(device, size)
        host = max(host, size)
    for holder in (model.embedding, model.head):
        if holder is not None:
            stored = model.dtype if holder.original is None else holder.original.get_value().dtype
            holder_bytes = holder.weight.get_value().size * jnp.dtype(stored).itemsize
            host = max(host, holder_bytes)
            # The check of the logits has both of them while it merges the matrices.
            device += holder_bytes if holder.original is not None else 0
    return device, host
