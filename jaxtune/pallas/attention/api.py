"""Packed causal attention: the public functions, and the choice of their implementation. `attention` is differentiable;
`attention_forward` and `attention_backward` compute its result and its gradients for code that saves residuals itself;
`implementations` says which implementations serve a call. Shapes are [B, T, heads, D] with grouped key/value heads.
Packed rows have several documents, and a token sees only its own."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxtune.pallas import dispatch, meshes
from jaxtune.pallas.arguments import FLOATS, Arguments
from jaxtune.pallas.attention import cudnn, first_use, mosaic, reference, triton
from jaxtune.pallas.attention.layout import PackedLayout

IMPLEMENTATIONS = {"cudnn": cudnn, "mosaic": mosaic, "triton": triton, "reference": reference}
SHORT_ROWS = 4096


def implementations(
    query,
    layout: PackedLayout,
    *,
    kv_heads: int,
    window=None,
    soft_cap=None,
    sinks=None,
) -> dispatch.Table:
    """Returns the implementations of a call in the order in which they are tried: {name: a function that returns the
    reason why it refuses the call, gradients included, or None}. dispatch.choose takes the first that does not refuse,
    and `jaxtune info --kernels` prints the reasons. The names are "cudnn", "mosaic", "triton" and "reference" (plain
    jnp, which refuses nothing), in this order; "mosaic" comes first unless the layout guarantees one document a row,
    and on a Hopper GPU also for such rows of up to 4,096 tokens if the head dim is 64, 128, 256 or 512. The functions
    may compare a kernel with the reference on this GPU first (first_use.py), which takes seconds.

    Args:
      query: [B, T, heads, D]; only shape and dtype are used.
      layout: the bounds of the documents; only its static guarantee max_documents is used: it decides the order of the
        names, what cuDNN and Triton can run, and which blocks the Mosaic kernels use.
      kv_heads: number of key and value heads, which decides the case on which a kernel is compared with the reference.
      window: a query sees itself and the window - 1 keys before it; None: all keys before it.
      soft_cap: scores s become cap * tanh(s / cap); None: no cap.
      sinks: float[heads], an extra logit for each head that has no value; None: none.
    """
    options = dict(window=window, soft_cap=soft_cap, sinks=sinks)

    def vendor():
        return cudnn.refusal(query, layout, **options) or first_use.cudnn_refusal(query, kv_heads, layout, window)

    def kernel(name):
        def refuse():
            module = IMPLEMENTATIONS[name]
            blocks = functools.partial(mosaic.blocks_of, query, layout, window) if name == "mosaic" else dict
            return module.refusal(query, layout, **options) or first_use.refusal(
                name, module, query, kv_heads, soft_cap, blocks()
            )

        return refuse

    table: dispatch.Table = {
        "cudnn": vendor,
        "mosaic": kernel("mosaic"),
        "triton": kernel("triton"),
        "reference": lambda: None,
    }
    hopper = dispatch.compute_capability() == (9, 0)
    if layout.max_documents != 1 or (hopper and query.shape[1] <= SHORT_ROWS and query.shape[-1] in mosaic.FORWARD):
        # On packed rows our kernels are faster, as they skip blocks. On short whole rows a step is as fast with either
        # (8B on an H200: 0.999 of cuDNN's speed at 8 x 2,048, 0.994 at 4 x 4,096; alone at 8 x 2,048 with D=256, 1.30),
        # and ours sum in one order: the same bits in every run and under every plan. On longer ones that would cost
        # more: alone 0.90 at 8,192 tokens.
        return {"mosaic": table["mosaic"], **table}
    return table


def _checked(op, query, key, value, layout, scale, window, soft_cap, sinks) -> Arguments:
    """For the public functions here: checks the arrays and options of a call, and returns the checker, with which the
    caller can check further arrays against the same sizes.

    Args:
      op: the name of the public function that was called, with which messages begin.
      query, key, value: [B, T, heads, D] and twice [B, T, kv_heads, D], all of one dtype, which is bfloat16, float16 or
        float32, heads a multiple of kv_heads.
      layout: a PackedLayout for B rows of T tokens.
      scale: a number.
      window: None, or a whole number from 1 on.
      soft_cap: None, or a number above 0.
      sinks: None, or float[heads].
    Raises:
      TypeError, ValueError: an argument is not so.
    """
    check = Arguments(op)
    check.array("query", query, "B T heads D", FLOATS)
    check.array("key", key, "B T kv_heads D", query.dtype)
    check.array("value", value, "B T kv_heads D", query.dtype)
    check.is_a("layout", layout, PackedLayout, "a PackedLayout: packed_layout((rows, length), segment_ids) makes one")
    check.array("layout.doc_start", layout.doc_start, "B T", jnp.int32)
    check.array("layout.doc_end", layout.doc_end, "B T", jnp.int32)
    _check_features(check, query, key, scale, window, soft_cap, sinks)
    return check


def _check_features(check: Arguments, query, key, scale, window, soft_cap, sinks) -> None:
    """The part of `_checked`, its only caller, after the arrays: checks the ratio of heads and the options. scale
    must be a number, window None or a whole number from 1 on, soft_cap None or above 0, and sinks None or float[heads].
    query [B, T, heads, D] and key [B, T, kv_heads, D] are checked already, except their numbers of heads; check is the
    checker that knows their sizes and the name of the call.

    Raises:
      TypeError, ValueError: heads are no multiple of key/value heads, or an option is not as described above.
    """
    if query.shape[2] % key.shape[2]:
        raise ValueError(
            f"{check.op}: {query.shape[2]} query heads are not a multiple of {key.shape[2]} key/value heads"
        )
    check.number("scale", scale)
    check.number("window", window, whole=True, least=1, optional=True)
    check.number("soft_cap", soft_cap, above=0, optional=True)
    if sinks is not None:
        check.array("sinks", sinks, "heads", FLOATS)


def _pick(query, key, value, layout, implementation, **options):
    """Chooses the implementation of a call and returns its module, which has the functions `forward` and `backward`:
    the one named `implementation`, or for None the first of `implementations` that supports the call. It raises
    ValueError if the named one does not, or is unknown.

    query, key, value: of the call; only shapes and dtypes are used. layout: the documents of the call, of which only
    the static guarantees are used. options: window, soft_cap and sinks, each None if the call has none.
    """
    table = implementations(query, layout, kv_heads=key.shape[2], **options)
    return IMPLEMENTATIONS[dispatch.choose("attention", table, implementation)]


def _by_rows(function, operands: int, results: int):
    """Returns a function f(*arrays, layout, sinks) that calls `function` on each device of a mesh with the device's own
    rows of the batch, because the kernels are programs for one device. Without a mesh of several devices, or within a
    shard_map over it, `function` gets the arrays as they are.

    Args:
      function: an implementation's forward or backward. It takes the same arguments, with `sinks` as a keyword.
      operands: how many of f's first arguments, the layout included, have the batch's rows as their leading axis, and
        are divided along the mesh's axis "data" (if there is none, or it does not divide the number of rows, each
        device computes all rows). The arguments after them, sinks, are whole on every device.
      results: how many of the first results have rows as their leading axis. Further ones (dsinks) are summed over the
        devices among which rows are divided.
    """
    return meshes.on_each_device(lambda *given: function(*given[:-1], sinks=given[-1]), rows=operands, results=results)


@meshes.on_any_mesh
def attention_forward(
    query, key, value, layout: PackedLayout, *, scale, window=None, soft_cap=None, sinks=None, implementation=None
):
    """Computes attention and its log-sum-exp, for code that saves residuals itself and later calls attention_backward,
    such as the layers of a model. Kernels have no derivative here; `attention` is differentiable.

    Args:
      query: [B, T, heads, D] bfloat16, float16 or float32.
      key, value: [B, T, kv_heads, D] in query's dtype, heads a multiple of kv_heads. All three must be finite at
        padding, too.
      layout: document bounds, `packed_layout((B, T), segment_ids)`; a query sees the keys of its document up to itself.
      scale: factor on query . key.
      window: a query sees itself and the window - 1 keys before it (Hugging Face's sliding_window); None: all keys
        before it.
      soft_cap: scores s become soft_cap * tanh(s / soft_cap), as in Gemma 2; None: no cap.
      sinks: float[heads], an extra logit for each head that has no value, as in gpt-oss; None: none.
      implementation: "cudnn", "mosaic" (kernels for Hopper GPUs), "triton" (kernels for NVIDIA GPUs from compute
        capability 8.0 on), "reference" (plain jnp, everywhere), or None for the first that supports the call, in the
        order of `implementations`.
    Returns:
      (out [B, T, heads, D] in query's dtype, lse float32[B, heads, T], the natural logarithm of the sum of exponentials
        of a query's scores, its head's sink included). Padding gives out = 0; its lse means nothing, and depends on the
        implementation.
    Raises:
      TypeError, ValueError: an argument is not as described here, or the named implementation does not support the
        call.
    """
    _checked("attention_forward", query, key, value, layout, scale, window, soft_cap, sinks)
    options = dict(window=window, soft_cap=soft_cap, sinks=sinks)
    chosen = _pick(query, key, value, layout, implementation, **options)
    function = functools.partial(chosen.forward, scale=scale, window=window, soft_cap=soft_cap)
    return _by_rows(function, 4, 2)(query, key, value, layout, sinks)


@meshes.on_any_mesh
def attention_backward(
    query,
    key,
    value,
    out,
    lse,
    dout,
    layout: PackedLayout,
    *,
    scale,
    window=None,
    soft_cap=None,
    sinks=None,
    implementation=None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Computes the gradients of attention from its saved output and log-sum-exp, for code that saves residuals itself,
    such as the layers of a model.

    Args:
      query: [B, T, heads, D] bfloat16, float16 or float32.
      key, value: [B, T, kv_heads, D] in query's dtype, finite at padding, too.
      out, lse: the results of attention_forward, by whatever implementation.
      dout: [B, T, heads, D], the gradient of out, which must be finite at padding too (`attention` sets it to zero
        there).
      layout: the document bounds, as in the forward.
      scale: factor on query . key.
      window: a query sees itself and the window - 1 keys before it; None: all keys before it.
      soft_cap: scores s become soft_cap * tanh(s / soft_cap); None: no cap.
      sinks: float[heads], an extra logit for each head that has no value; None: none.
      implementation: "cudnn", "mosaic" (kernels for Hopper GPUs), "triton" (kernels for NVIDIA GPUs from compute
        capability 8.0 on), "reference" (plain jnp, everywhere), or None for the first that supports the call, in the
        order of `implementations`; it need not be that of the forward.
    Returns:
      (dquery, dkey, dvalue, dsinks): shapes and dtypes of the operands; dsinks is None without sinks. Padding gives 0.
    Raises:
      TypeError, ValueError: an argument is not as described here, or the named implementation does not support the
        call.
    """
    check = _checked("attention_backward", query, key, value, layout, scale, window, soft_cap, sinks)
    check.array("out", out, "B T heads D", query.dtype)
    check.array("lse", lse, "B heads T", jnp.float32)
    check.array("dout", dout, "B T heads D", query.dtype)
    options = dict(window=window, soft_cap=soft_cap, sinks=sinks)
    chosen = _pick(query, key, value, layout, implementation, **options)
    function = functools.partial(chosen.backward, scale=scale, window=window, soft_cap=soft_cap)
    return _by_rows(function, 7, 3)(query, key, value, out, lse, dout, layout, sinks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _attention(query, key, value, sinks, layout, static, implementation, backward_implementation):
    """Returns packed causal attention, [B, T, heads, D] in query's dtype and 0 at padding, with a custom derivative,
    whose backward may run another implementation than the forward. `attention` calls it with checked arguments.

    Args:
      query, key, value: [B, T, heads, D] and twice [B, T, kv_heads, D].
      sinks: float[heads], an extra logit for each head that has no value; None: none.
      layout: the bounds of the documents.
      static: the keyword arguments scale, window and soft_cap as a tuple of pairs (name, value), because a static
        argument must be hashable.
      implementation, backward_implementation: the names of those that compute the forward and the gradients; None: the
        first that supports the call.
    """
    return _attention_fwd(query, key, value, sinks, layout, static, implementation, backward_implementation)[0]


def _attention_fwd(query, key, value, sinks, layout, static, implementation, backward_implementation):
    """The forward rule of `_attention` for jax.custom_vjp, with the same arguments: returns (out [B, T, heads, D],
    residuals). `_attention` itself calls it too, for out alone, where no gradient is taken. backward_implementation is
    not used: it is here because JAX passes all arguments to both rules. The residuals are (query, key, value, sinks,
    layout, out, lse), lse being the log-sum-exp float32[B, heads, T]; the softmax weights [T, T] are not saved but
    computed again in the backward."""
    out, lse = attention_forward(query, key, value, layout, sinks=sinks, implementation=implementation, **dict(static))
    return out, (query, key, value, sinks, layout, out, lse)


def _attention_bwd(static, implementation, backward_implementation, residuals, dout):
    """The backward rule of `_attention` for jax.custom_vjp: returns (gradients of query, key and value, of sinks or
    None without them, None for the layout), in the operands' shapes and dtypes. It first sets dout to zero at padding,
    where it may be anything, even NaN, unless the layout guarantees that there is no padding (`full`).

    Args:
      static, implementation, backward_implementation: the static arguments of the call; `implementation` is not used.
      residuals: what _attention_fwd saved.
      dout: the gradient of out, [B, T, heads, D].
    """
    query, key, value, sinks, layout, out, lse = residuals
    if not layout.full:  # padding may have any gradient, even NaN
        dout = jnp.where((jnp.arange(dout.shape[1]) < layout.doc_end)[:, :, None, None], dout, 0)
    options = dict(static, sinks=sinks, implementation=backward_implementation)
    return (*attention_backward(query, key, value, out, lse, dout, layout, **options), None)


_attention.defvjp(_attention_fwd, _attention_bwd)


@meshes.on_any_mesh
def attention(
    query,
    key,
    value,
    layout: PackedLayout,
    *,
    scale,
    window=None,
    soft_cap=None,
    sinks=None,
    implementation=None,
    backward_implementation=None,
):
    """Causal attention over packed documents, differentiable with respect to query, key, value and sinks. The backward
    computes the softmax weights again, from the operands, out and the log-sum-exp, which are saved. The layers of a
    model save these themselves, and call attention_forward and attention_backward in its place; in jaxtune only the
    check of the machine (commands/machine_checks.py) calls this function.

    Args:
      query: [B, T, heads, D] bfloat16, float16 or float32.
      key, value: [B, T, kv_heads, D] in query's dtype, heads a multiple of kv_heads; finite at padding, too.
      layout: document bounds, `packed_layout((B, T), segment_ids)`; causal within a document.
      scale: factor on query . key.
      window: a query sees itself and the window - 1 keys before it; None: all keys before it.
      soft_cap: scores s become cap * tanh(s / cap); None: no cap.
      sinks: float[heads], an extra logit for each head that has no value; None: none.
      implementation: "cudnn", "mosaic" (kernels for Hopper GPUs), "triton" (kernels for NVIDIA GPUs from compute
        capability 8.0 on), "reference" (plain jnp, everywhere), or None for the first that supports the call, in the
        order of `implementations`.
      backward_implementation: the implementation of the gradients; None: `implementation`.
    Returns:
      out [B, T, heads, D] in query's dtype. Padding gives 0 and gets no gradient, whatever out's gradient is there.
    Raises:
      TypeError, ValueError: an argument is not as described here, or a named implementation does not support the call
        (that of the gradients: when they are taken).
    """
    _checked("attention", query, key, value, layout, scale, window, soft_cap, sinks)
    static = (("scale", scale), ("window", window), ("soft_cap", soft_cap))
    backward_implementation = backward_implementation or implementation
    return _attention(query, key, value, sinks, layout, static, implementation, backward_implementation)
