"""Runs the layers, and decides what happens to every residual between forward and backward.

A layer is a chain of segments between named residuals. Each residual has a fate: kept in device memory, offloaded to
pinned host memory and brought back one layer ahead of its use, or dropped and recomputed by running earlier segments
again. The backward is written by hand (a custom_vjp around the whole stack): it calls jax.vjp on a segment at its
saved inputs, where the unused product is dead code and disappears, and the attention's own backward with its saved
output and log-sum-exp.

The layers are unrolled in the one jitted step. On an H200, 8B shape, a scan costs 7 % for copying residuals into
stacked buffers, and slices of one stacked host buffer do not overlap with compute; separate buffers do.
The layer functions are module-level and jitted, so layers of one kind are traced once; XLA still compiles each.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.lax import optimization_barrier

from jaxtune.models.block import MoEBlock
from jaxtune.models.config import LayerSpec
from jaxtune.models.ferry import Ferry, copies_start_at_once, cut, join
from jaxtune.pallas.attention import PackedLayout, attention_backward, attention_forward
from jaxtune.pallas.routing import RouterSums

Fate = Literal["keep", "offload", "recompute"]


@dataclasses.dataclass(frozen=True)
class Segment:
    """A piece of a layer between named residuals; `name` is its method on Block, except for "attend"."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    differentiable: bool = True


SEGMENTS = (
    Segment("project", ("layer_input",), ("query", "key", "value")),
    Segment("attend", ("query", "key", "value"), ("attention_out", "lse")),
    Segment("mix", ("attention_out", "layer_input"), ("mid",)),
    Segment("expand", ("mid",), ("gate", "up")),
    Segment("contract", ("gate", "up", "mid"), ("layer_output",)),
)
MOE_SEGMENTS = (
    *SEGMENTS[:3],
    Segment("route", ("mid",), ("choice",), differentiable=False),
    Segment("expand", ("mid", "choice"), ("gate_up",)),
    Segment("contract", ("gate_up", "choice", "mid"), ("layer_output",)),
)


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """The fate of each residual of one layer, of those that it has.

    layer_input must be kept or offloaded: nothing can recompute it. So must choice (the experts of each token, a few
    bytes): experts that are chosen anew could differ from those that gate_up was sorted by.
    """

    layer_input: Fate = "keep"
    query: Fate = "keep"
    key: Fate = "keep"
    value: Fate = "keep"
    attention_out: Fate = "keep"
    lse: Fate = "keep"
    mid: Fate = "keep"
    gate: Fate = "keep"
    up: Fate = "keep"
    choice: Fate = "keep"
    gate_up: Fate = "keep"

    def __post_init__(self):
        for field in dataclasses.fields(self):
            fate = getattr(self, field.name)
            if fate not in ("keep", "offload", "recompute"):
                raise ValueError(f"residual {field.name}: fate {fate!r} is not one of keep, offload, recompute")
        for name in ("layer_input", "choice"):
            if getattr(self, name) == "recompute":
                raise ValueError(f"residual {name}: it can be kept or offloaded, but nothing can recompute it")

    @functools.cache  # noqa: B019 - there are few plans
    def named(self, fate: Fate) -> tuple[str, ...]:
        return tuple(f.name for f in dataclasses.fields(self) if getattr(self, f.name) == fate)


KEEP = LayerPlan()
_DROP: Fate = "recompute"
RECOMPUTE = LayerPlan(
    query=_DROP, key=_DROP, value=_DROP, attention_out=_DROP, lse=_DROP, mid=_DROP, gate=_DROP, up=_DROP, gate_up=_DROP
)


# Of a layer with experts whose router has losses of its own: what comes out leaves the stack, beside its output.
BALANCE = Segment("balance", ("mid", "choice"), ("router_sums",))
# expand and contract in one, a tile of tokens after the other: gate and up exist for a tile only, in both directions.
TILED_MLP = Segment("tiled_mlp", ("mid",), ("layer_output",))


@dataclasses.dataclass(frozen=True)
class ResidualPlan:
    """One LayerPlan a layer. Static: a program is compiled for one plan.

    tile_tokens: where set, layers that recompute both gate and up run their MLP over tiles of this many tokens of each
    row, which it must divide. Sums of the weights' gradients are then over tiles.
    """

    layers: tuple[LayerPlan, ...]
    tile_tokens: int | None = None

    @classmethod
    def uniform(cls, layer: LayerPlan, num_layers: int) -> ResidualPlan:
        return cls((layer,) * num_layers)


@dataclasses.dataclass(frozen=True)
class _Static:
    """What a program of the stack is specialised on."""

    graphs: tuple[nnx.GraphDef, ...]
    specs: tuple[LayerSpec, ...]
    plans: tuple[LayerPlan, ...]
    tile_tokens: int | None
    balance: bool


def segments_of(block, tiled: bool = False, balance: bool = False) -> tuple[Segment, ...]:
    if isinstance(block, MoEBlock):
        return (*MOE_SEGMENTS[:4], BALANCE, *MOE_SEGMENTS[4:]) if balance else MOE_SEGMENTS
    return (*SEGMENTS[:3], TILED_MLP) if tiled else SEGMENTS


def _over_tiles(step, carry, array: jax.Array, beside: tuple[jax.Array, ...], tile: int):
    """(the last carry, array with every tile replaced), in place: step(carry, tile of array, tiles of `beside`) gives
    (carry, what replaces the tile). Tiles are of the second axis.

    Not a scan, which stacks what comes out beside what goes in: XLA keeps both until the backward.
    """

    def one(index, state):
        carry, array = state
        pieces = [jax.lax.dynamic_slice_in_dim(a, index * tile, tile, axis=1) for a in (array, *beside)]
        carry, piece = step(carry, *pieces)
        return carry, jax.lax.dynamic_update_slice_in_dim(array, piece, index * tile, axis=1)

    return jax.lax.fori_loop(0, array.shape[1] // tile, one, (carry, array))


def _mlp(block, mid: jax.Array) -> jax.Array:
    with jax.named_scope("expand"):
        gate, up = block.expand(mid)
    with jax.named_scope("contract"):
        return block.contract(gate, up, mid)


def _tiled_mlp_backward(graph, trainable, frozen, mid, doutput, tile: int):
    """(gradient of the trainable tensors, gradient of mid)"""

    def one(total, doutput, mid):
        _, pullback = jax.vjp(lambda t, mid: _mlp(nnx.merge(graph, t, frozen), mid), trainable, mid)
        dtrainable, dmid = pullback(doutput)
        return jax.tree.map(jnp.add, total, dtrainable), dmid

    return _over_tiles(one, jax.tree.map(jnp.zeros_like, trainable), doutput, (mid,), tile)


def _run(segment: Segment, block, spec, layout: PackedLayout, keys, values, tile: int | None = None):
    """Outputs of one segment, as a tuple. `keys` are one dropout key a segment, or None."""
    if segment is TILED_MLP:
        assert tile is not None
        return _over_tiles(lambda _, mid: (None, _mlp(block, mid)), None, values[0], (), tile)[1:]
    with jax.named_scope(segment.name):
        if segment.name == "attend":
            query, key, value = values
            return attention_forward(query, key, value, layout, **block.attention.options(spec.window))
        if segment.name == "route":
            real = None if layout.full else jnp.arange(layout.doc_end.shape[1]) < layout.doc_end
            return (block.route(*values, real),)
        if segment is BALANCE:
            return (block.balance(*values),)
        key = None if keys is None else keys[segments_of(block).index(segment)]
        if segment.name == "project":
            rotary = None if spec.rotary is None else layout.rotary[spec.rotary]
            return block.project(*values, rotary, key)
        out = getattr(block, segment.name)(*values, key=key)
        return out if isinstance(out, tuple) else (out,)


def _work(segment: Segment, block, x, backward: bool = False) -> float:
    """How long a segment takes for x [B, T, hidden], in multiplications of large products."""
    config, length = block.attention.config, x.shape[1]
    tokens = x.shape[0] * length
    if segment.name == "attend":  # its own are slower, by this factor on an H200
        return 1.15 * (1 + 1150 / length) * tokens * config.query_size * length * (2.9 if backward else 1.0)
    hidden, inner = config.hidden_size, config.intermediate_size
    if config.moe is not None:
        inner = config.moe.expert_size * config.moe.experts_per_token
    query, kv = config.query_size, config.kv_size
    widths = {"project": query + 2 * kv, "mix": query, "route": 1, "balance": 1, "expand": 2 * inner, "contract": inner}
    widths["tiled_mlp"] = (6 if backward else 3) * inner
    return float(tokens * hidden * widths[segment.name])


def _segment_keys(key, segments):
    return None if key is None else jax.random.split(key, len(segments))


@functools.partial(jax.jit, static_argnums=(0, 1, 2), static_argnames="tile")
def layer_forward(
    graph, spec: LayerSpec, wanted: tuple[str, ...], trainable, frozen, layer_input, layout, key, leaving=(), tile=None
):
    """(layer_output, {name: residual} for the wanted names, `leaving` on the host) of one layer; tile: tokens of each
    row that its MLP runs over at a time. `wanted` may have router_sums, which is no residual."""
    with jax.named_scope("layer"), copies_start_at_once():
        block = nnx.merge(graph, trainable, frozen)
        segments = segments_of(block, tile is not None, balance="router_sums" in wanted)
        keys = _segment_keys(key, segments_of(block))
        env: dict[str, Any] = {"layer_input": layer_input}
        ferry = Ferry(leaving, [_work(segment, block, layer_input) for segment in segments], jax.memory.Space.Host)
        for stage, segment in enumerate(segments):
            inputs = ferry.depart(stage, [env[name] for name in segment.inputs])
            outputs = ferry.arrive(stage, _run(segment, block, spec, layout, keys, inputs, tile))
            env.update(zip(segment.outputs, outputs, strict=True))
        return env["layer_output"], {name: env[name] for name in wanted if name in env}, ferry.landed


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames="tile")
def layer_backward(
    graph, spec: LayerSpec, trainable, frozen, saved, doutput, layout, key, coming=(), tile=None, dsums=None
):
    """(gradient of the trainable tensors, gradient of layer_input, `coming` on the device) of one layer, from its
    saved residuals; dsums: gradient of its router_sums, where the forward had them."""
    env = dict(saved)
    block = nnx.merge(graph, trainable, frozen)
    segments = segments_of(block, tile is not None, balance=dsums is not None)
    keys = _segment_keys(key, segments_of(block))
    again = [s for s in segments[:-1] if s is not BALANCE and any(name not in env for name in s.outputs)]
    back = [s for s in reversed(segments) if s.differentiable]
    work = [_work(segment, block, doutput) for segment in again]
    work += [_work(segment, block, doutput, backward=True) for segment in back]
    ferry = Ferry(coming, work, jax.memory.Space.Device, last_is_thin=True)

    def pullback_of(segment, inputs):
        """(outputs, their derivative)"""

        def run(trainable, *values):
            return tuple(_run(segment, nnx.merge(graph, trainable, frozen), spec, layout, keys, values))

        return jax.vjp(run, trainable, *inputs)

    # A layer with experts keeps what the derivative needs of a segment that runs again anyway, such as thin products,
    # and sorted rows where products do not bring tokens' themselves: to make them twice takes longer than all that
    # other layers would make twice, and they are there for this layer only.
    pullbacks = {}
    with jax.named_scope("layer"), copies_start_at_once():
        with jax.named_scope("recompute"):
            for stage, segment in enumerate(again):
                inputs = ferry.depart(stage, [env[name] for name in segment.inputs])
                if isinstance(block, MoEBlock) and segment in back and segment.name != "attend":
                    outputs, pullbacks[segment] = pullback_of(segment, inputs)
                else:
                    outputs = _run(segment, block, spec, layout, keys, inputs)
                outputs = ferry.arrive(stage, outputs)
                env = {**dict(zip(segment.outputs, outputs, strict=True)), **env}
        with jax.named_scope("backward"):
            grads = {"layer_output": doutput, "router_sums": dsums}
            total = None

            def accumulate(name, value):
                grads[name] = grads[name] + value if name in grads else value

            for stage, segment in enumerate(back, len(again)):
                doutputs = tuple(grads[name] for name in segment.outputs if name in grads)
                # What the derivative computes again of a segment waits for its gradient, and takes no memory before.
                # Not so what segments of a layer with experts share: the sort by `choice`, a few bytes, and the norm of
                # `mid`, a tenth of the gradient of experts' rows beside it.
                shared = ("choice", "mid") if isinstance(block, MoEBlock) else ()
                held = {name: env[name] for name in segment.inputs if name not in shared}
                if isinstance(block, MoEBlock):
                    held, doutputs = optimization_barrier((held, doutputs))
                else:
                    # Nor does it run before the weights' gradients so far are there: XLA puts the adapters' off to the
                    # layer's end, and keeps the wide operands of these thin products. With experts that costs memory.
                    held, doutputs, total = optimization_barrier((held, doutputs, total))
                inputs = ferry.depart(stage, [held.get(name, env[name]) for name in segment.inputs])
                if segment.name == "attend":
                    with jax.named_scope(segment.name):
                        query, key_, value = inputs
                        out, lse = env["attention_out"], env["lse"]
                        options = block.attention.options(spec.window)
                        *dinputs, dsinks = attention_backward(
                            query, key_, value, out, lse, doutputs[0], layout, **options
                        )
                    if isinstance(block.attention.sinks, nnx.Param):
                        _, pullback = jax.vjp(lambda t: nnx.merge(graph, t, frozen).attention.sinks[...], trainable)
                        total = jax.tree.map(jnp.add, total, *pullback(dsinks))
                elif tile is not None and segment is TILED_MLP:
                    total, *dinputs = _tiled_mlp_backward(graph, trainable, frozen, inputs[0], doutputs[0], tile)
                else:
                    pullback = pullbacks.get(segment) or pullback_of(segment, inputs)[1]
                    dtrainable, *dinputs = pullback(doutputs)
                    total = dtrainable if total is None else jax.tree.map(jnp.add, total, dtrainable)
                derivatives = {
                    name: value
                    for name, value in zip(segment.inputs, dinputs, strict=True)
                    if value.dtype != jax.dtypes.float0
                }
                for name, value in ferry.arrive(stage, derivatives).items():
                    accumulate(name, value)
        return total, grads["layer_input"], ferry.landed


def _layer_key(keys, index):
    return None if keys is None else keys[index]


def _tile(static: _Static, index: int) -> int | None:
    plan = static.plans[index]
    return static.tile_tokens if plan.gate == plan.up == "recompute" else None


_SUMS = ("router_sums",)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _stack(static: _Static, trainables, frozens, x, layout, keys, begun):
    """(layer_output of the last layer, router_sums of all layers or None); begun: see run_stack, a state a layer."""
    sums = []
    for index, (graph, spec) in enumerate(zip(static.graphs, static.specs, strict=True)):
        wanted = _SUMS if static.balance else ()
        layer = (graph, spec, wanted, trainables[index], frozens[index], x, layout, _layer_key(keys, index))
        x, found, _ = layer_forward(*layer, tile=_tile(static, index))
        sums.extend(found.values())
    return x, _total(sums)


def _total(sums: list[RouterSums]) -> RouterSums | None:
    return functools.reduce(operator.add, sums) if sums else None


def _stack_fwd(static: _Static, trainables, frozens, x, layout, keys, begun):
    kept, hosted, sums = [], [], []
    names, leaving = (), ()  # of the layer before: they go to the host while this layer computes
    last = len(static.plans) - 1
    for index, (graph, spec, plan) in enumerate(zip(static.graphs, static.specs, static.plans, strict=True)):
        wanted = plan.named("keep") + plan.named("offload") + (_SUMS if static.balance else ())
        layer = (graph, spec, wanted, trainables[index], frozens[index], x, layout, _layer_key(keys, index), leaving)
        x, residuals, landed = layer_forward(*layer, tile=_tile(static, index))
        if static.balance:
            sums.append(residuals.pop("router_sums"))
        if index:
            hosted.append(dict(zip(names, landed, strict=True)))
        # The backward begins with the last layer: its residuals would come back at once.
        names = tuple(name for name in plan.named("offload") if name in residuals) if index < last else ()
        block = nnx.merge(graph, trainables[index], frozens[index])
        stages = [_work(segment, block, x) for segment in segments_of(block)]
        leaving = cut([residuals[name] for name in names], stages)
        kept.append({name: value for name, value in residuals.items() if name not in names})
    return (x, _total(sums)), (trainables, frozens, kept, [*hosted, {}], layout, keys, begun)


def _stack_bwd(static: _Static, residuals, gradient):
    dx, dsums = gradient  # of a sum over the layers: the same for each of them
    trainables, frozens, kept, hosted, layout, keys, begun = residuals
    gradients = [None] * len(kept)
    arrived = ()
    short = any(plan != KEEP for plan in static.plans)
    for index in range(len(kept) - 1, -1, -1):
        saved = {**kept[index]}
        saved |= {name: join(pieces) for name, pieces in zip(hosted[index], arrived, strict=True)}
        # Ties this layer's work to its gradient: else XLA shares recomputed values with the forward and keeps them. So
        # it does with trained weights in the compute dtype: 26 MB a layer of adapters on a 30B model's experts.
        saved, dx, trainable = optimization_barrier((saved, dx, trainables[index]))
        coming = tuple(hosted[index - 1].values()) if index else ()
        gradients[index], dx, arrived = layer_backward(
            static.graphs[index],
            static.specs[index],
            trainable if short else trainables[index],
            frozens[index],
            saved,
            dx,
            layout,
            _layer_key(keys, index),
            coming,
            tile=_tile(static, index),
            dsums=dsums,
        )
        if begun is not None:
            with jax.named_scope("accumulate"):
                gradients[index] = jax.tree.map(jnp.add, begun[index], gradients[index])
        if index and short:
            # Where memory is short: otherwise XLA puts off the products of adapter gradients, which nothing waits for,
            # and keeps their large operands. An 8B LoRA step of 16 layers took 21 GB for 13.
            gradients[index], dx = optimization_barrier((gradients[index], dx))
    trained = tuple(gradients)
    # Gradients that were added to what had begun are its cotangent, in its dtype; none are left for the tensors.
    return (trained, None, dx, None, None, None) if begun is None else (None, None, dx, None, None, trained)


_stack.defvjp(_stack_fwd, _stack_bwd)


def run_stack(
    layers,
    specs: tuple[LayerSpec, ...],
    x: jax.Array,
    layout: PackedLayout,
    plan: ResidualPlan | None = None,
    dropout_key: jax.Array | None = None,
    begun=None,
) -> jax.Array:
    """Runs the layers over x [B, T, hidden]; arguments as in run_stack_and_routers."""
    return _run_stack(layers, specs, x, layout, plan, dropout_key, begun, balance=False)[0]


def run_stack_and_routers(
    layers,
    specs: tuple[LayerSpec, ...],
    x: jax.Array,
    layout: PackedLayout,
    plan: ResidualPlan | None = None,
    dropout_key: jax.Array | None = None,
    begun=None,
) -> tuple[jax.Array, RouterSums]:
    """(what the layers make of x [B, T, hidden], their routers' sums over all layers and all tokens but padding).

    Differentiable with respect to x and to the layers' `nnx.Param`s; `Frozen` tensors get no cotangent.

    Args:
      layers: Blocks. specs: one LayerSpec each.
      layout: with the rotary tables that the specs name.
      plan: fates of the residuals; everything is kept by default.
      dropout_key: draws the adapters' dropout masks; None means no dropout.
      begun: {layer's index: state like that of its `nnx.Param`s}, sums that gradients are added to, layer by layer, so
        that no layer's gradients wait for the others'. Its cotangent is then sums and gradients; the `nnx.Param`s get
        none.
    """
    if not all(isinstance(layer, MoEBlock) for layer in layers):
        raise ValueError("these layers have no router")
    x, sums = _run_stack(layers, specs, x, layout, plan, dropout_key, begun, balance=True)
    assert sums is not None
    return x, sums


def _run_stack(layers, specs, x, layout, plan, dropout_key, begun, balance: bool) -> tuple[jax.Array, Any]:
    plan = plan or ResidualPlan.uniform(KEEP, len(layers))
    if len(plan.layers) != len(layers):
        raise ValueError(f"the residual plan has {len(plan.layers)} layers, the model {len(layers)}")
    splits = [nnx.split(layer, nnx.Param, ...) for layer in layers]
    if plan.tile_tokens is not None:
        if x.shape[1] % plan.tile_tokens:
            raise ValueError(
                f"the residual plan's tile_tokens = {plan.tile_tokens} does not divide {x.shape[1]} tokens"
            )
        if dropout_key is not None:
            raise ValueError("a tiled MLP has no dropout: leave tile_tokens out of the residual plan")
    static = _Static(tuple(s[0] for s in splits), specs, plan.layers, plan.tile_tokens, balance)
    keys = None if dropout_key is None else jax.random.split(dropout_key, len(layers))
    if begun is not None:  # a layer of which nothing trains is not in it
        begun = tuple(begun.get(index, nnx.State({})) for index in range(len(layers)))
    return _stack(static, tuple(s[1] for s in splits), tuple(s[2] for s in splits), x, layout, keys, begun)
