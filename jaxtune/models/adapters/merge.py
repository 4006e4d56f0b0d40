"""Merges an adapter into its base, one matrix at a time, and verifies that the result computes the same.
`merge_adapter` makes the merged model in memory, `merged_weights` computes its tensors one by one for an export, and
`merge_bytes` forecasts the memory that such an export takes, for the table of a run's phases.

A merge is verified before any of it is used:
- Every merged matrix is finite, and its product with random rows equals its adapter's within a bound that every correct
  merge satisfies (_merge_and_check). Every embedding or head that was trained beside the adapter is finite.
- Every other tensor is the model's own, decoded if it is quantised, and rounded to the grid if the model is prepared
  for QAT.
- The logits of a small random batch agree (_check_logits). They are computed with the merged model's structure, and
  each matrix is merged when it is used, so that the code between the matrices is covered without a second model in
  memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtune.models.components import set_compute
from jaxtune.models.decoder import Decoder
from jaxtune.models.fake_quant import FakeQuant
from jaxtune.models.files.quant import qat_spec, round_to_grid
from jaxtune.models.files.weights import Weights, tensors_of
from jaxtune.models.layers.expert_linear import ExpertLinear
from jaxtune.models.linear import Frozen, Linear, NeverTrained, merged_weight, row_norm, trained
from jaxtune.models.lora import copy_structure, has_adapter, matrices, stop_rounding
from jaxtune.models.observed_inputs import recorded
from jaxtune.models.placement import partition
from jaxtune.models.stack import run_stack
from jaxtune.models.stack_layers import UNTUNED
from jaxtune.pallas import dispatch
from jaxtune.pallas.formats import Stored, dense
from jaxtune.pallas.grouped_matmul import GroupedLora
from jaxtune.pallas.meshes import on_any_mesh
from jaxtune.pallas.quant_matmul import LoraWeights, quant_matmul

_FP32_ROUNDOFF = 2.0**-24
# Factor on the bound for logits, which is statistical; see _check_logits.
_LOGITS_MARGIN = 8.0
_PROBE_ROWS, _PROBE_LENGTH = 2, 16
_HEAD_ROWS = 8192  # how many rows of the head are in float32 at a time
# The most float32 arrays of a matrix's size (one expert's) that _merge_and_check, compiled for a GPU, has at the same
# time; XLA's programs for a CPU have up to 5.
_WIDE_COPIES = 2
_PROBES = 8  # rows with which the products of a merged matrix and of its adapter are compared
_ROUNDED_COPIES = 11  # where it also rounds to QAT's grid; the formats with scales of blocks in FP8 need most


def _merged_and_checked(weight: jax.Array, lora: LoraWeights, probe: jax.Array, dtype, fake_quant: FakeQuant | None):
    """Merges an adapter into a weight, and compares products with both. _merged_matrix calls it for a linear, compiled
    (_merge_and_check), and _merge_experts for each expert.

    The product of `probe` with the merged weight is compared with the adapter's own forward, in fp32. Rounding each
    weight to the storage dtype changes output o by at most u sum_i |w_oi x_i|, with its unit roundoff u. The fp32 sums
    of n terms in either computation change it by at most n u32 times the sum of the terms' magnitudes. The bound
    therefore holds for every correct merge.

    Args:
      weight: [out, in], decoded.
      lora: its adapter: A [r, in], B [out, r], the scale, and DoRA's factors of the rows [out] (None: it has no DoRA).
      probe: float32[rows, in], random.
      dtype: of the merged weight.
      fake_quant: the grid of QAT to which the merged weight is then rounded, which is no error and not part of the
        comparison; None: it is only rounded to `dtype`.
    Returns:
      (the merged weight [out, in] in dtype; bool[], whether it is finite, with fake_quant before that rounding;
        float32[], the largest error divided by the error allowed, at most 1 if the merge is right)
    """
    wide = merged_weight(weight, lora)
    if fake_quant is None:
        stored = wide.astype(dtype)
        wide = stored.astype(jnp.float32)
    else:
        stored = fake_quant.round(wide).astype(dtype)
    expected = quant_matmul(probe, [weight.astype(jnp.float32)], [lora])[0]
    got = quant_matmul(probe, [wide])[0]

    def size(w):  # [.., in] x [out, in] of magnitudes
        """The products of the magnitudes of probe [rows, in] and w [out, in], float32[rows, out]."""
        return jnp.einsum("bi,oi->bo", jnp.abs(probe), jnp.abs(w), precision=jax.lax.Precision.HIGHEST)

    inner = jnp.einsum("bi,ri->br", jnp.abs(probe), jnp.abs(lora.a), precision=jax.lax.Precision.HIGHEST)
    terms = size(weight.astype(jnp.float32)) + abs(lora.scale) * jnp.einsum(
        "br,or->bo", inner, jnp.abs(lora.b), precision=jax.lax.Precision.HIGHEST
    )
    terms = terms if lora.row_scale is None else terms * jnp.abs(lora.row_scale)
    length = weight.shape[1] + lora.a.shape[0]
    # Subnormal numbers have an absolute rounding error, not a relative one.
    tiny = jnp.abs(probe).sum(-1, keepdims=True) * float(jnp.finfo(dtype).smallest_subnormal)
    allowed = _roundoff(dtype) * size(wide) + 2 * length * _FP32_ROUNDOFF * terms + tiny
    # Where DoRA's magnitude is zero, both products and the allowed error are zero.
    error = jnp.where(got == expected, 0.0, jnp.abs(got - expected) / allowed).max()
    return stored, jnp.isfinite(wide).all(), error


_merge_and_check = jax.jit(_merged_and_checked, static_argnums=(3, 4), compiler_options=UNTUNED)


@functools.partial(jax.jit, static_argnums=(3, 4), compiler_options=UNTUNED)
def _merge_experts(
    weight: jax.Array, lora: GroupedLora, probe: jax.Array, transposed: bool, fake_quant: FakeQuant | None
):
    """Merges the adapters of an experts' matrix into the weight of each expert, and compares each expert's product of
    random rows with its adapter's, within the error that rounding explains (_merge_and_check): (merged weights, whether
    all are finite, the largest error of any expert divided by the error allowed, at most 1 if the merge is right).

    weight: [E, out, in], or [E, in, out] if `transposed`, decoded; the merged weights have its shape and dtype. lora:
    the adapters. probe: float32[rows, in], random. fake_quant: the grid to which merged weights are rounded, or None.
    """

    def one(expert):
        """_merged_and_checked for one expert: (merged weight in the layout of the stored one, finite, error). expert:
        (weight, a, b)."""
        weight, a, b = expert
        weight = weight.T if transposed else weight
        lora_of = LoraWeights(a, b, None, lora.scale)
        stored, finite, error = _merged_and_checked(weight, lora_of, probe, weight.dtype, fake_quant)
        return stored.T if transposed else stored, finite, error

    stored, finite, errors = jax.lax.map(one, (weight, lora.a, lora.b))
    return stored, finite.all(), errors.max()


def _roundoff(dtype) -> float:
    """The unit roundoff of a floating-point dtype, the largest relative error of rounding to it. The bounds on the
    error of a merge are multiples of it."""
    return float(jnp.finfo(dtype).eps) / 2


@dispatch.unsaid()  # it runs once, in float32, which training kernels do not support: no report of that is needed
def _merged_matrix(name: str, linear: Linear | ExpertLinear, index: int, dtype: str, base_dtype: Any) -> jax.Array:
    """Merges the adapter of one matrix into its weight, rounds the result to the grid of QAT, if there is one, and
    verifies it. Returns the merged weight, in the shape of the stored one: [out, in], or of all experts [E, out, in] or
    [E, in, out]. The functions in `Weights.made` call it for the matrices that have adapters (merged_weights).

    Args:
      name: the matrix's name, for errors.
      linear: the matrix, which has an adapter.
      index: the seed of the random rows with which the products are compared; each matrix has another one.
      dtype: the dtype to which a quantised weight is decoded, and then that of the result; a weight that is not
        quantised keeps its own.
      base_dtype: the dtype that the error message names, Decoder.weight_dtype. Nothing is computed with it.
    Raises:
      ArithmeticError: the merged weight is not finite, or its products differ from the adapter's by more than rounding.
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


def _merge_of(linear: Linear | ExpertLinear, index: int, dtype: str) -> tuple[Any, tuple]:
    """(the program that merges a matrix, its arguments), for _merged_matrix, whose arguments these are: _merge_experts
    or _merge_and_check. The matrix is decoded here."""
    weight = dense(linear.stored_weight, dtype)
    probe = np.random.default_rng(index).standard_normal((_PROBES, linear.sizes[-1]), np.float32)
    assert linear.lora is not None
    if isinstance(linear, ExpertLinear):
        return _merge_experts, (weight, linear.lora.weights(), probe, linear.transposed, linear.fake_quant)
    return _merge_and_check, (weight, linear.lora.weights(weight), probe, weight.dtype, linear.fake_quant)


@contextlib.contextmanager
def _compiling_merges(model: Decoder) -> Iterator[None]:
    """Compiles, in threads, the programs that merge the matrices of a model, one for each shape, while the block runs;
    merged_weights verifies the logits meanwhile. One matrix at a time is decoded for it. An error is left to the merge
    itself, which then has it too. Of a model on several devices nothing is compiled here: they must get their programs
    in one order."""
    one_at_a_time, found = threading.Lock(), {}
    for index, (_, linear) in enumerate(matrices(model)):
        if linear.lora is not None:
            shapes = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(nnx.state(linear)))
            found.setdefault((nnx.graphdef(linear), shapes), (linear, index))

    def ahead(linear: Linear | ExpertLinear, index: int) -> None:
        with one_at_a_time:
            program, arguments = _merge_of(linear, index, model.dtype)
            lowered = program.lower(*arguments)
            del arguments
        lowered.compile()

    with ThreadPoolExecutor(8, "compile") as pool:
        for matrix in () if _is_divided(model) else found.values():
            pool.submit(ahead, *matrix)
        yield


def _is_divided(model: Decoder) -> bool:
    """Whether arrays of a model are on several devices."""
    leaves = jax.tree.leaves(nnx.state(model))
    return any(len(leaf.sharding.device_set) > 1 for leaf in leaves if isinstance(leaf, jax.Array))


def _trained_whole(name: str, weight: jax.Array, dtype: Any) -> jax.Array:
    """The weight of an embedding or head that was trained whole beside the adapter (`weight`, float32), cast to
    `dtype`, the dtype of the base's own weight, which it replaces in the merged model. name: for errors.

    Raises:
      ArithmeticError: it is not finite in that dtype.
    """
    stored = weight.astype(dtype)
    if not jax.device_get(jnp.isfinite(stored).all()):
        raise ArithmeticError(f"merge_adapter: {name} is not finite in {dtype} after merging; nothing was merged")
    return stored


def _plain_matrix(linear: Linear | ExpertLinear, dtype: str) -> jax.Array:
    """The weight of a matrix without an adapter (`linear`), as the merged model has it: decoded to `dtype` if it is
    quantised, and rounded to its grid in a model that is prepared for QAT. It has the shape of the stored weight.
    merged_weights calls it for matrices that are quantised or rounded."""
    weight = dense(linear.stored_weight, dtype)
    transposed = isinstance(linear, ExpertLinear) and linear.transposed
    return weight if linear.fake_quant is None else round_to_grid(weight, linear.fake_quant, transposed)


def merged_weights(model: Decoder) -> Weights:
    """Returns the weights of the model with its adapter merged in, for merge_adapter, which sets them in memory, and
    for exports, which write them one by one. `Weights.made` is {Hugging Face name of a changed tensor: the function
    that computes it when it is called}. Quantised weights are decoded, weights are rounded to the grid of QAT, if there
    is one, and a trained embedding or head replaces the base's. `Weights.model` is a new model without adapters, whose
    variables are all nnx.Param, except those that no training changes (NeverTrained), and which shares unchanged arrays
    with `model`; changed variables have only a shape and dtype, until a caller sets them.

    The logits are verified here, each matrix when it is computed, so that whoever writes the tensors writes a verified
    merge or gets an error. The device has, beside the model, one merged matrix and what its computation and
    verification take; while the logits are verified, also an embedding and a head that were trained whole.

    Raises:
      ValueError: the model has no adapter.
      ArithmeticError: a verification failed: here, that of the logits; or, when a tensor is computed, its own. Also if
        a changed tensor has no name in files.
    """
    if not has_adapter(model):
        raise ValueError("merge_adapter: this model has no adapter")
    merged = copy_structure(model)
    dtype = model.weight_dtype
    makers: dict[int, Callable[[], jax.Array]] = {}  # by the identity of the merged model's variable
    views: dict[int, _Merged] = {}
    changed = 0
    for index, ((name, own), (_, linear)) in enumerate(zip(matrices(model), matrices(merged), strict=True)):
        given = own.stored_weight
        rounded = own.fake_quant is not None
        changed += own.lora is not None or isinstance(given, Stored)
        if own.lora is not None:
            make = functools.partial(_merged_matrix, name, own, index, model.dtype, dtype)
        elif isinstance(given, Stored) or rounded:
            make = functools.partial(_plain_matrix, own, model.dtype)
        else:
            continue
        form = jax.ShapeDtypeStruct(given.shape, model.dtype if isinstance(given, Stored) else given.dtype)
        linear.weight = trained(linear.weight, form)
        linear.lora = nnx.data(None)
        linear.fp8 = False
        stop_rounding(linear)
        makers[id(linear.weight)], views[id(linear.weight)] = make, _Merged.of(own, model.dtype)
    for module in (merged.embedding, merged.head):
        if module is not None and isinstance(module.weight, nnx.Param):
            name = model.config.head.name if isinstance(module, Linear) else "embed_tokens"
            given = module.weight.get_value()
            # The dtype of what it replaces, which a precision map may have given this module.
            whole = dtype if module.original is None else module.original.get_value().dtype
            module.weight = trained(module.weight, jax.ShapeDtypeStruct(given.shape, whole))
            makers[id(module.weight)] = functools.partial(_trained_whole, name, given, whole)
            changed += 1
            if module.original is not None:
                del module.original
    spec = qat_spec(model)
    merged.qat = None if spec is None else recorded(model, spec)
    for _, module in nnx.iter_modules(merged):
        for key, value in list(vars(module).items()):
            if isinstance(value, Frozen) and not isinstance(value, NeverTrained):
                setattr(module, key, trained(value, value.get_value()))
    merged.base_digest = merged.base_fingerprint = None  # it is another base now
    # Matched by the identity of the variable and not by a name, so that no other tensor can be written in its place.
    made = {name: makers.pop(id(variable)) for name, variable in tensors_of(merged).items() if id(variable) in makers}
    if makers:
        raise ArithmeticError(f"merge_adapter: {len(makers)} tensors have no place in files; nothing was merged")
    weights = Weights(merged, made)
    with dispatch.unsaid(), _compiling_merges(model):
        _check_logits(model, weights, views, changed)
    return weights


def merge_adapter(model: Decoder) -> Decoder:
    """The model with its adapter merged into the weights: w + scale b a, rescaled for DoRA, computed in fp32.

    Merged weights have the dtype in which the base is stored; modules_to_save replace the base's modules, each in the
    dtype of the weight that it replaces. The result is a base again: it has no adapters, every tensor is an
    `nnx.Param`, except those that no training changes (NeverTrained), and tied heads are tied. It needs memory on the
    device for all changed tensors, decoded; `export_model` and the end of a run write a merged folder without that.

    If the base is quantised, all its quantised weights are decoded to the compute dtype, and the adapter is merged into
    these, over which it was trained. In a model that is prepared for QAT the merged weights are rounded to its grid, as
    in its forward; see convert_qat.

    Before it returns, the function verifies that every merged weight is finite and multiplies as its adapter does (see
    _merge_and_check), and that the logits of a small random batch agree (see _check_logits).

    Returns:
      a new model that shares unchanged arrays with `model`.
    Raises:
      ValueError: the model has no adapter.
      ArithmeticError: a verification failed; nothing is returned.
    """
    weights = merged_weights(model)
    for name, variable in tensors_of(weights.model).items():
        if name in weights.made:
            variable.set_value(weights.made[name]())
    return weights.model


def merge_bytes(model: Decoder) -> tuple[int, int]:
    """(bytes on the device, bytes in host memory) that writing the merged model (merged_weights) needs in addition to
    the model; merge_adapter needs more. The table of a run's phases (phases_of) has them for the export at its end, and
    warns if that will not fit; no plan leaves room for it.

    Each tensor is written before the next is computed, so that each number is that of the tensor which needs most. The
    device also has the embedding and head that are trained whole, both at once while the logits are checked. For a
    model without an adapter, the bytes on the device are those of decoding its quantised weights, or 0; those in host
    memory are the largest tensor's all the same. Abstract arrays will do.
    """
    device = host = 0
    for _, matrix in matrices(model):
        weight = matrix.stored_weight
        size = weight.size * (jnp.dtype(model.dtype) if isinstance(weight, Stored) else weight.dtype).itemsize
        # Experts are merged one at a time, into a tensor of all of them.
        wide = 4 * weight.size // max(matrix.num_experts, 1)
        if matrix.lora is not None or isinstance(weight, Stored) or matrix.fake_quant is not None:
            decoded = size if isinstance(weight, Stored) else 0
            copies = 0 if matrix.lora is None else _WIDE_COPIES
            copies = copies if matrix.fake_quant is None else _ROUNDED_COPIES
            # Of each output of a probe three numbers are in memory, and the probe itself.
            *_, outputs, inputs = matrix.sizes
            products = 0 if matrix.lora is None else 4 * _PROBES * (3 * outputs + inputs)
            device = max(device, size + decoded + copies * wide + products)
        host = max(host, size)
    for holder in (model.embedding, model.head):
        if holder is not None:
            stored = model.dtype if holder.original is None else holder.original.get_value().dtype
            whole = holder.weight.get_value().size * jnp.dtype(stored).itemsize
            host = max(host, whole)
            # The check of the logits has both of them while it merges the matrices.
            device += whole if holder.original is not None else 0
    return device, host


# ---- the logits


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Merged(Stored):
    """A matrix that looks like a quantised weight and is merged with its adapter whenever it is decoded. `of` makes it
    from a linear or experts, and `_decode` merges; `problem` and `cut` are what every quantised weight must answer.

    _check_logits uses it: a model with such matrices computes what the merged model does, with one merged matrix in
    memory at a time.
    """

    base: Any  # the weight, an array or a Stored (quantised): [out, in], or of experts [E, out, in] or [E, in, out]
    a: jax.Array | None  # the adapter's A, [r, in] or of experts [E, r, in]; None: no adapter
    b: jax.Array | None  # its B, [out, r] or of experts [E, out, r]; None: no adapter
    magnitude: jax.Array | None  # DoRA's magnitude of each row, [out]; None: the adapter has none
    scale: float = dataclasses.field(metadata=dict(static=True))  # the adapter's factor on b a; 0 without an adapter
    shape: tuple[int, ...] = dataclasses.field(metadata=dict(static=True))  # of the weight
    # the dtype to which a quantised weight is decoded, and in which the merged weight is stored
    dtype_name: str = dataclasses.field(metadata=dict(static=True))
    # the grid to which the linear's weight is rounded, or None
    fake_quant: FakeQuant | None = dataclasses.field(metadata=dict(static=True))
    transposed: bool = dataclasses.field(metadata=dict(static=True))  # whether experts' weights are [in, out]

    @staticmethod
    def of(linear: Linear | ExpertLinear, dtype: str) -> _Merged:
        """The view of a linear or of experts that stands for its merged weight while the logits of a merge are verified
        (_check_logits). Decoding it merges the adapter, if there is one, and rounds to the grid of QAT, if there is
        one.

        dtype: the dtype to which a quantised weight is decoded."""
        weight, lora = linear.stored_weight, linear.lora
        magnitude = None if lora is None or lora.magnitude is None else lora.magnitude[...]
        return _Merged(
            weight,
            None if lora is None else lora.a[...],
            None if lora is None else lora.b[...],
            magnitude,
            0.0 if lora is None else lora.scale,
            tuple(weight.shape),
            dtype if isinstance(weight, Stored) else weight.dtype.name,
            linear.fake_quant,
            isinstance(linear, ExpertLinear) and linear.transposed,
        )

    def problem(self) -> str | None:
        """None. Every Stored returns here the reason why its arrays do not fit each other, or None; these always fit,
        because they come from the model."""
        return None

    def cut(self, axis: int) -> int | None:
        """None, for every axis. A Stored returns here how many consecutive indices along an axis must stay in one part
        when it is divided, or None if it cannot be; this one exists only for the check of the logits and never is."""
        return None

    @functools.partial(jax.jit, static_argnums=1)
    def _decode(self, dtype) -> jax.Array:
        """The matrix in `dtype` (None: dtype_name), with its adapter merged and rounded to the grid of QAT, if it has
        these; Stored.decode calls it when the matrix multiplies. After the rounding to the grid, and before the cast to
        `dtype`, the matrix is rounded to the dtype in which the merged weight will be stored (dtype_name), so that the
        values are those of the merged model."""
        weight = dense(self.base, self.dtype_name)
        if self.a is not None and self.b is not None:
            if weight.ndim == 3:
                adapters = (weight, self.a, self.b)
                stored = jax.lax.map(lambda expert: self._expert(*expert), adapters)
            else:
                scaled = None
                if self.magnitude is not None:
                    scaled = self.magnitude / row_norm(weight, self.a, self.b, self.scale)
                wide = merged_weight(weight, LoraWeights(self.a, self.b, scaled, self.scale))
                stored = (wide if self.fake_quant is None else self.fake_quant.round(wide)).astype(self.dtype_name)
        else:
            stored = weight if self.fake_quant is None else round_to_grid(weight, self.fake_quant, self.transposed)
        # Otherwise XLA may leave out the rounding, and the compared values would not be the stored ones.
        return jax.lax.optimization_barrier(stored).astype(dtype or self.dtype_name)

    def _expert(self, weight: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        """Merges one expert's adapter, for `_decode`, which takes one expert after another: its weight plus scale b a,
        rounded to the grid of QAT, if there is one, and then to the dtype that the merged weight is stored in.
        weight: [out, in], or [in, out] if `transposed`, which the result is too. a: [r, in]. b: [out, r]."""
        weight = weight.T if self.transposed else weight
        wide = merged_weight(weight, LoraWeights(a, b, None, self.scale))
        stored = (wide if self.fake_quant is None else self.fake_quant.round(wide)).astype(self.dtype_name)
        return stored.T if self.transposed else stored


@dispatch.unsaid()
def _check_logits(model: Decoder, merged: Weights, views: dict[int, _Merged], changed: int) -> None:
    """Compares the logits of a random batch of the model with its adapter and of the merged model, computed in fp32,
    for merged_weights. Only the rounding of weights differs: activations are not rounded, neither by QAT nor for
    products in FP8. Both models stay as they are.

    The merged model's matrices are merged when they multiply, so that the merged model is never in memory as a whole.

    Rounding weights with unit roundoff u changes a product by about u / 2 of its size, and the errors of `changed`
    products add up like a random walk. The root mean square of the difference must therefore be at most 8 u
    sqrt(changed) times that of the logits around their mean, where u includes fp32's own sums. The verification of each
    matrix is the sharp one; this one covers the code between the matrices.

    Args:
      model: the model with its adapter, whose logits are the expected ones.
      merged: the merged model with functions that compute its changed tensors.
      views: {id() of a variable of the merged model: the _Merged that computes its value when it multiplies}.
      changed: the number of matrices that are merged or decoded, and of an embedding and head that were trained whole.
    Raises:
      ArithmeticError: the logits differ by more, or are not finite. Before that every changed tensor is computed once,
        because its own verification may raise a more precise error.
    """
    walked = copy_structure(merged.model)
    pairs = _pairs(walked, merged.model)
    for name, (variable, own) in pairs.items():
        if id(own) in views:
            variable.set_value(views[id(own)])
        elif name in merged.made:  # an embedding or a head, which one forward needs twice if it is tied
            variable.set_value(merged.made[name]())
    plain = copy_structure(model)
    for _, matrix in matrices(plain):
        matrix.fp8 = False  # a merged model rounds no activations
        if matrix.fake_quant is not None:
            matrix.fake_quant = dataclasses.replace(matrix.fake_quant, inputs=False)
    # Both need programs of their own, which two threads compile at the same time. What the two models' layers have in
    # memory beside their weights is little: XLA merges one matrix of a layer at a time.
    with ThreadPoolExecutor(1 if _is_divided(model) else 2, "logits") as pool:
        expected, got = pool.map(_logits, (plain, walked))
    for variable, own in pairs.values():  # modules refer to each other: what the copy has would live until it is found
        variable.set_value(own.get_value())
    del walked
    config = model.config
    widest = max(config.hidden_size, config.intermediate_size, config.query_size)
    roundoff = _roundoff(model.weight_dtype) + _FP32_ROUNDOFF * widest**0.5
    bound = _LOGITS_MARGIN * roundoff * changed**0.5
    middle = expected.mean(-1 if config.head.is_text else None, keepdims=True)  # of scores, over all tokens
    scale = np.sqrt(np.mean(np.square(expected - middle)))
    error = float(np.sqrt(np.mean(np.square(got - expected))) / scale)
    if not error <= bound:
        for make in merged.made.values():  # the check of a matrix may give a more precise error
            make()
        raise ArithmeticError(
            f"merge_adapter: the merged model's logits differ from the adapter model's by {error:.3g} of their size; "
            f"rounding explains {bound:.3g}. Nothing was merged"
        )


def _pairs(copy: Decoder, model: Decoder) -> dict[str, tuple[nnx.Variable, nnx.Variable]]:
    """Pairs the variables of a model with those of its copy: {Hugging Face name of a tensor: (its variable in `copy`,
    its variable in `model`)}. `_check_logits` has merged matrices for the variables of `model`, and sets them in the
    copy's variables, so that the model itself stays as it is."""
    copied, originals = tensors_of(copy), tensors_of(model)
    return {name: (copied[name], originals[name]) for name in originals}


def _logits(model: Decoder) -> np.ndarray:
    """The logits of a random batch, float32[rows, tokens, vocabulary] in host memory, or the scores of a model that
    scores texts, float32[rows, tokens, scores]. _check_logits compares those of two models. The batch is the same for
    every model of this vocabulary. The logits are computed in float32, with some rows of the head at a time.

    The model's dtype is set to float32, and the dtypes that a precision map gave single modules are cleared, so the
    caller passes a copy.
    """
    model.dtype = "float32"
    set_compute(model, {})
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, (_PROBE_ROWS, _PROBE_LENGTH), np.int32)
    last = _last_layer(jnp.asarray(tokens), model)
    rows, whole = model.head_variable.shape[0], nnx.split(model)
    starts = range(0, rows, _HEAD_ROWS)
    parts = [_some_logits(*whole, last, first, min(_HEAD_ROWS, rows - first)) for first in starts]
    return np.concatenate([partition.on_host(part) for part in parts], -1)


@on_any_mesh
def _last_layer(tokens: jax.Array, model: Decoder) -> jax.Array:
    """What the last layer of a model makes of tokens int32[rows, tokens], [rows, tokens, hidden]: Decoder.run without
    the final norm. What comes before the layers is one program here: as single operations it would be thirty."""
    x, layout, given = _before_layers(*nnx.split(model), tokens)
    return run_stack(model.layers, model.config.layers, x, layout, given=given)[0]


@functools.partial(jax.jit, static_argnums=0)
def _before_layers(graph: nnx.GraphDef, state: nnx.State, tokens: jax.Array):
    """The input of a model's first layer, the layout of the batch, and what layers get beside (Decoder.given)."""
    model = nnx.merge(graph, state)
    x = model.embed(tokens)
    return x, model.layout(tokens.shape), model.given(tokens, x)


@functools.partial(jax.jit, static_argnums=(0, 4), compiler_options=UNTUNED)
def _some_logits(graph: nnx.GraphDef, state: nnx.State, last: jax.Array, first: int, count: int) -> jax.Array:
    """The logits, or scores, of `count` rows of a model's head, from the row `first` on. last: what _last_layer
    returned, before the final norm."""
    model = nnx.merge(graph, state)
    return model.logits(model.norm(last), first + jnp.arange(count))
