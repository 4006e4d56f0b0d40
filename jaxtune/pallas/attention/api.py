"""Public functions of packed attention, and the choice of their implementation. Shapes are [B, T, heads, D],
with grouped key/value heads. All raise TypeError or ValueError for wrong arguments or an implementation that refuses.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from jaxtune.pallas import dispatch, meshes, one_order, targets
from jaxtune.pallas.arguments import FLOATS, Arguments
from jaxtune.pallas.attention import cudnn, first_use, in_tiles, mosaic, reference, triton
from jaxtune.pallas.attention.layout import PackedLayout

IMPLEMENTATIONS = {"cudnn": cudnn, "mosaic": mosaic, "triton": triton, "reference": reference, "in_tiles": in_tiles}
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
    """{name: function that returns why it refuses the call (gradients included), or None}, in the order of trial.

    "reference" refuses nothing. A function may first compare its kernel with the reference on this GPU, which takes
    seconds.

      query: only shape and dtype are read.
      layout: only max_documents, causal and whether it has runs is read; with the GPU and the query's shape they decide
        the order, what kernels can run, and Mosaic's blocks.
      kv_heads: heads of key and value.
      window: keys that a query sees, or None. soft_cap: of the scores, or None. sinks: any array, or None.
    """
    options = dict(window=window, soft_cap=soft_cap, sinks=sinks)
    layout = layout.of_window(window)
    if one_order.is_exact() and not one_order.runs_kernels():
        return {"in_tiles": lambda: in_tiles.refusal(query, layout, **options)}

    def vendor():
        return cudnn.refusal(query, layout, **options) or first_use.cudnn_refusal(query, kv_heads, layout, window)

    def kernel(name):
        def refuse():
            module = IMPLEMENTATIONS[name]
            blocks = functools.partial(mosaic.blocks_of, query, layout, window) if name == "mosaic" else dict
            if (reason := module.refusal(query, layout, **options)) is not None:
                return reason
            with one_order.exact(one_order.is_exact() and layout.max_documents != 1):  # whole rows' tiles are the same
                return first_use.refusal(name, module, query, kv_heads, soft_cap, blocks(), layout.runs is not None)

        return refuse

    table: dispatch.Table = {
        "cudnn": vendor,
        "mosaic": kernel("mosaic"),
        "triton": kernel("triton"),
        "reference": lambda: None,
    }
    if one_order.is_exact():
        return {"triton": table["triton"]}
    hopper = targets.here() is targets.HOPPER
    if layout.max_documents != 1 or (hopper and query.shape[1] <= SHORT_ROWS and query.shape[-1] in mosaic.FORWARD):
        # On packed rows our kernels are faster, as they skip blocks. On short whole rows a step is as fast with either
        # (8B on an H200: 0.999 of cuDNN's speed at 8 x 2,048, 0.994 at 4 x 4,096; alone at 8 x 2,048 with D=256, 1.30),
        # and ours sum in one order: the same bits in every run and under every plan. On longer ones that would cost
        # more: alone 0.90 at 8,192 tokens.
        return {"mosaic": table["mosaic"], **table}
    return table


def _checked(op, query, key, value, layout, scale, window, soft_cap, sinks) -> Arguments:
    """Checks a call's arrays and options, and returns the checker, which knows their sizes."""
    check = Arguments(op)
    check.array("query", query, "B T heads D", FLOATS)
    check.array("key", key, "B T kv_heads D", query.dtype)
    check.array("value", value, "B T kv_heads D", query.dtype)
    check.is_a("layout", layout, PackedLayout, "a PackedLayout: packed_layout((rows, length), segment_ids) makes one")
    check.array("layout.doc_start", layout.doc_start, "B T", jnp.int32)
    check.array("layout.doc_end", layout.doc_end, "B T", jnp.int32)
    if layout.runs is not None:
        check.array("layout.runs.start", layout.runs.start, "B T", jnp.int32)
        check.array("layout.runs.end", layout.runs.end, "B T", jnp.int32)
    _check_features(check, query, key, scale, window, soft_cap, sinks)
    if window is not None and not layout.causal:
        raise ValueError(f"{op}: window = {window}: a layout that is not causal has no window")
    return check


def _check_features(check: Arguments, query, key, scale, window, soft_cap, sinks) -> None:
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
    table = implementations(query, layout, kv_heads=key.shape[2], **options)
    return IMPLEMENTATIONS[dispatch.choose("attention", table, implementation)]


def _by_rows(function, operands: int, results: int):
    """f(*arrays, layout, sinks), which runs `function` on each device of a mesh with that device's rows.

    operands: number of leading arguments (layout included) that have rows as first axis.
    results: number of leading results with rows as first axis. Later ones (dsinks) are summed over the devices.
    """
    return meshes.on_each_device(
        lambda *arguments: function(*arguments[:-1], sinks=arguments[-1]), rows=operands, results=results
    )


@meshes.on_any_mesh
def attention_forward(
    query, key, value, layout: PackedLayout, *, scale, window=None, soft_cap=None, sinks=None, implementation=None
):
    """Attention and its log-sum-exp, for code that saves residuals itself. Not differentiable.

    Returns (out [B, T, heads, D] in query's dtype, lse float32[B, heads, T], natural logarithm, sink included). At
    padding out is 0 and lse means nothing.

      query: [B, T, heads, D] bfloat16, float16 or float32.
      key, value: [B, T, kv_heads, D] in query's dtype, heads a multiple of kv_heads. All are finite at padding, too.
      layout: `packed_layout((B, T), segment_ids)`.
      scale: factor on query . key.
      window: a query sees itself and the window - 1 keys before it (Hugging Face's sliding_window); None: all.
      soft_cap: scores s become soft_cap * tanh(s / soft_cap), as in Gemma 2.
      sinks: float[heads], an extra logit of each head that has no value, as in gpt-oss.
      implementation: "cudnn", "mosaic" (Hopper), "triton" (compute capability 8.0 on), "reference" (jnp, everywhere),
        or None: the first of `implementations` that supports the call.
    """
    _checked("attention_forward", query, key, value, layout, scale, window, soft_cap, sinks)
    options = dict(window=window, soft_cap=soft_cap, sinks=sinks)
    module = _pick(query, key, value, layout, implementation, **options)
    function = functools.partial(module.forward, scale=scale, window=window, soft_cap=soft_cap)
    layout = layout.of_window(window)
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
    """Gradients of attention from its saved output and log-sum-exp: (dquery, dkey, dvalue, dsinks) in the operands'
    shapes and dtypes, 0 at padding. dsinks is None without sinks.

    The implementation may differ from the forward's.

      out, lse: results of attention_forward, by whatever implementation.
      dout: [B, T, heads, D], gradient of out. It must be finite at padding, too (`attention` zeroes it there).
      query, key, value: [B, T, heads or kv_heads, D], the forward's operands.
      layout, scale, window, soft_cap, sinks: those of the forward; another one gives wrong gradients, unnoticed.
      implementation: "cudnn", "mosaic", "triton", "reference", or None: the first that supports the call.
    """
    check = _checked("attention_backward", query, key, value, layout, scale, window, soft_cap, sinks)
    check.array("out", out, "B T heads D", query.dtype)
    check.array("lse", lse, "B heads T", jnp.float32)
    check.array("dout", dout, "B T heads D", query.dtype)
    options = dict(window=window, soft_cap=soft_cap, sinks=sinks)
    with one_order.exact(one_order.is_exact() and not one_order.runs_kernels()):  # a GPU's gradients are the usual ones
        module = _pick(query, key, value, layout, implementation, **options)
    function = functools.partial(module.backward, scale=scale, window=window, soft_cap=soft_cap)
    layout = layout.of_window(window)
    return _by_rows(function, 7, 3)(query, key, value, out, lse, dout, layout, sinks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _attention(query, key, value, sinks, layout, static, implementation, backward_implementation):
    """Attention with a custom derivative; static: (name, value) pairs of scale, window and soft_cap."""
    return _attention_fwd(query, key, value, sinks, layout, static, implementation, backward_implementation)[0]


def _attention_fwd(query, key, value, sinks, layout, static, implementation, backward_implementation):
    """(out, residuals). The softmax weights [T, T] are not saved; the backward computes them again."""
    out, lse = attention_forward(query, key, value, layout, sinks=sinks, implementation=implementation, **dict(static))
    return out, (query, key, value, sinks, layout, out, lse)


def _attention_bwd(static, implementation, backward_implementation, residuals, dout):
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
    """Attention over packed documents, differentiable in query, key, value and sinks: [B, T, heads, D], 0 at padding.

    It saves the operands, out and the log-sum-exp; the backward computes the softmax weights again. Arguments are those
    of attention_forward. out's gradient at padding may be anything, even NaN.

      backward_implementation: of the gradients; None: `implementation`. One that refuses raises when gradients are
        taken.
      layout: of the rows (packed_layout). scale: multiplies the logits, such as 1 / sqrt(D).
      query, key, value: [B, T, heads, D] and twice [B, T, kv_heads, D] of one float dtype.
      window: a query sees itself and the window - 1 keys before it; None: all of its document.
      soft_cap: scores s become soft_cap * tanh(s / soft_cap). sinks: float[heads], a logit per head without a value.
      implementation: "cudnn", "mosaic", "triton", "reference", or None: the first that supports the call.
    """
    _checked("attention", query, key, value, layout, scale, window, soft_cap, sinks)
    static = (("scale", scale), ("window", window), ("soft_cap", soft_cap))
    backward_implementation = backward_implementation or implementation
    return _attention(query, key, value, sinks, layout, static, implementation, backward_implementation)
