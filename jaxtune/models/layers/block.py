"""One layer of the decoder: its parts, in stages, with norms and residual additions around them.

All parts of a stage read the same value of the residual stream, through a norm or as it is, and their outputs are added
to the stream. The layer of most families has two stages of one part:

    layer_input -> [norm, mixer] + layer_input -> mid -> [norm, feed-forward] + mid -> layer_output

A layer can also have a single part, parts in parallel on one norm (Command R), or parts in parallel whose sum is normed
(Gemma 4's experts beside the dense MLP); see Part, Stage and LayerSpec in models/config.py.

A Block runs as a chain of segments (layers/segment.py): functions that read named values and compute named values, the
residuals, which a plan keeps, offloads or recomputes for the backward. A part brings its own segments. `places_of` says
how parts are connected to the residual stream, as Places and SumNorms. `_in_block` makes a part's segments those of
the block: it renames values to names that are unique in the layer, and adds norms and additions to the stream."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtune.models.config import DecoderConfig, LayerSpec
from jaxtune.models.layers.attention import Attention
from jaxtune.models.layers.experts import MoE
from jaxtune.models.layers.mlp import MLP
from jaxtune.models.layers.places import LAYER_INPUT, LAYER_OUTPUT, Place, SumNorm, places_of
from jaxtune.models.layers.segment import (
    INPUT,
    OUTPUT,
    STREAM,
    BackwardOrder,
    Context,
    Mixer,
    Residual,
    Scratch,
    Segment,
    Sizes,
    matrix_of,
)
from jaxtune.models.layers.tiles import in_tiles
from jaxtune.models.linear import NeverTrained
from jaxtune.models.norm import Normed, RMSNorm, norm_of


class PartMatrix(NamedTuple):
    """One matrix of Block.matrices, with the names by which adapters, quantisation and tensor names refer to it."""

    part: str  # the block's attribute of the part that has it, such as "mixer"
    name: str  # its dotted name within the part, such as "q_proj" or "experts.down_proj"
    matrix: Any  # Linear or ExpertLinear


class Block(nnx.Module):
    """The modules of one layer: its mixers and feed-forwards (each part is the attribute that its Part names) and the
    norms around them. `segments` is the chain that the stack runs (training, evaluation, prompts);
    `first_state` and `step` serve generation; the methods in `_bytes` are the planner's estimates of its memory.

    Apart from arrays, a block contains nothing that differs between layers of the same kind, such as an index, so that
    their programs are traced once.

    Args:
      config: of the decoder.
      spec: its kind, for stages and output_scale (whether it has layer_scalar); a Context has window and rotary base.
      key: draws the initial weights.
      dtype: of the weights.
    """

    def __init__(self, config: DecoderConfig, spec: LayerSpec, key: jax.Array, dtype):
        self.stages, self.residual_scale = spec.stages, config.residual_scale
        usual = {"mixer": Attention, "mlp": MLP if config.moe is None else MoE}
        keys = jax.random.split(key, len(spec.parts))

        def add_norm(name: str, wanted: bool) -> None:
            """Sets the attribute of this name to a norm over hidden_size, or to None if none is wanted."""
            setattr(self, name, norm_of(config, config.hidden_size, dtype) if wanted else None)

        for part, own in zip(spec.parts, keys, strict=True):
            make = usual[part.name] if part.config is None else part.config.make
            setattr(self, part.name, make(config, own, dtype))
            add_norm(f"{part.name}_norm", part.norm is True)
            add_norm(f"{part.name}_post_norm", part.post_norm)
        for stage in spec.stages:
            if stage.post_norm:
                add_norm(f"{stage.parts[0].name}_sum_norm", True)
        self.layer_scalar = NeverTrained(jnp.ones((1,), dtype)) if spec.output_scale else None

    @property
    def parts(self) -> dict[str, Any]:
        """{name: the module} of every mixer and feed-forward, in the order in which they run. A name is both the Part's
        and the block's attribute; a module is an nnx.Module."""
        return {part.name: getattr(self, part.name) for stage in self.stages for part in stage.parts}

    @property
    def mixers(self) -> dict[str, Mixer]:
        """{name: module} of the parts that are mixers, such as attention, which have `state_reads`. All others are
        feed-forwards: they have no state in generation, and declare `order` and `forward_bytes`. `first_state`,
        `order`, the estimates of bytes, the planner and prefills tell the two apart by it, but not `step`."""
        return {name: module for name, module in self.parts.items() if hasattr(module, "state_reads")}

    @property
    def takes(self) -> dict[str, tuple[int, ...]]:
        """{name: its shape for one token} of the values that the layer's parts read from outside the layer: keys and
        values of an earlier layer, or what the decoder computes for each layer; {} for most. Its callers pass them."""
        taken: dict[str, tuple[int, ...]] = {}
        for module in self.parts.values():
            taken |= getattr(module, "takes", {})
        return taken

    @property
    def gives(self) -> dict[str, str]:
        """{the block's name of a residual: the name under which later layers take it}, for the values that the layer
        shares with later ones, such as keys and values; {} for most layers. The stack and prefills pass them on."""
        return {
            self._own_segments()[part][1][own]: name
            for part, module in self.parts.items()
            for own, name in getattr(module, "gives", {}).items()
        }

    def normed(self, part: str, x: jax.Array) -> jax.Array:
        """Applies the norm before the part named `part` to x [B, T, hidden], a value of the residual stream; returns x
        unchanged if the part reads the stream without a norm. `step` and the segments of `_in_block` call it."""
        norm = places_of(self.stages)[0][part].norm
        return x if norm is None else getattr(self, norm)(x)

    def to_norm(self, part: str, x: jax.Array) -> jax.Array | Normed:
        """What `normed` returns, or a Normed, which the linears that read it may compute within their products. The
        segments of `_in_block` that declare so (Segment.norms) get it. part, x: those of `normed`."""
        name = places_of(self.stages)[0][part].norm
        norm = None if name is None else getattr(self, name)
        if isinstance(norm, RMSNorm) and (norm.float32 or norm.compute is None):
            return Normed(norm, x)
        return self.normed(part, x)

    def added(self, part: str, x: jax.Array | None, out: jax.Array) -> jax.Array:
        """Adds a part's output to x, after the part's post-norm if it has one; if x is None, the output is returned
        alone. `_on_stream` adds to the residual stream, with the layer's factors; a sum that is normed later has none.
        part: the part's name. x: the value [B, T, hidden] that the output is added to: the residual stream, or in a
        stage whose sum is normed the sum of the outputs so far; None for the first part of such a stage. out: [B, T,
        hidden]. `step` and the segments of `_in_block` call it."""
        place = places_of(self.stages)[0][part]
        out = out if place.post_norm is None else getattr(self, place.post_norm)(out)
        if x is None:
            return out
        if place.in_sum:
            return x + out
        return self._on_stream(x, out, place.makes)

    def _on_stream(self, x: jax.Array, out: jax.Array, makes: str) -> jax.Array:
        """Adds `out` times the config's residual_scale to x, a value of the residual stream; both are [B, T, hidden].

        makes: the name of the result. If it is `layer_output`, the end of the layer, the result is multiplied by
        `layer_scalar`, if the layer has one. `added` and the segment of a normed sum call it."""
        if self.residual_scale != 1.0:  # in float32, rounded once, as torch multiplies a tensor by a number
            out = (out.astype(jnp.float32) * self.residual_scale).astype(out.dtype)
        out = x + out
        if makes == LAYER_OUTPUT and self.layer_scalar is not None:
            out = out * self.layer_scalar[...].astype(out.dtype)
        return out

    # ---- the chain

    def segments(
        self, tile: int | None = None, aux: Collection[str] = (), apart: Collection[str] = ()
    ) -> tuple[Segment, ...]:
        """The chain of segments from layer_input to layer_output, in the order in which the stack runs them. Their
        `run` takes this block as its module, and their `backward` a function that builds the block.

        Args:
          tile: neighbouring tokenwise segments become one (in_tiles), which processes this many tokens of each row at
            a time; None: every segment processes whole rows.
          aux: names of the auxiliary values (such as router_sums, for a router's losses) that are wanted beside the
            layer's output; segments that compute others are left out, and other names are ignored.
          apart: names of norms, attributes of the block. The segments that read the stream through such a norm read the
            normed stream, as a value with the norm's name, which their caller computes.
        """
        chain = tuple(s for name in self.parts for s in self.part_segments(name, apart))
        chain = tuple(s for s in chain if not s.aux or s.outputs[0] in aux)
        return chain if tile is None else in_tiles(self, chain, tile)

    @property
    def aux(self) -> dict[str, Segment]:
        """{name: the segment that computes it} of all auxiliary values that the layer can return beside its output,
        such as router_sums, for a router's losses; {} for a layer without experts. Training finds losses by it."""
        return {s.outputs[0]: s for name in self.parts for s in self.part_segments(name) if s.aux}

    def part_segments(self, part: str, apart: Collection[str] = ()) -> tuple[Segment, ...]:
        """The segments of the part named `part`, also those of auxiliary values (such as router_sums, for losses), as
        segments of the block: they include the norms around the part and the addition to the residual stream, and their
        `run` takes the block. Those of the last part of a stage whose sum is normed end with that norm's segment.
        `segments` (whose argument `apart` is) and `aux` collect them, `step` runs a feed-forward's in generation, and
        the planner reads outputs."""
        (segments, names), (places, norms) = self._own_segments()[part], places_of(self.stages)
        place = places[part]
        made = tuple(new for s in segments for new in _in_block(s, part, place, names, place.norm in apart))
        return made + (() if part not in norms else (_sum_norm_segment(norms[part], made[-1].tokenwise),))

    def _own_segments(self) -> dict[str, tuple[tuple[Segment, ...], dict[str, str]]]:
        """{part's name: (its own segments, of which only `name` is the block's, {the part's name of a residual: the
        block's name of it, for all residuals but OUTPUT})}. A segment or residual whose name an earlier part also uses
        is called `{part}_{name}` in the block, because the names of a plan's residuals and of dropout keys must be
        unique within a layer."""
        found: dict[str, tuple[tuple[Segment, ...], dict[str, str]]] = {}
        taken: dict[str, set[str]] = {"segments": set(), "residuals": set()}

        def names_of(part: str, kind: str, own: list[str]) -> dict[str, str]:
            """{a part's own name: the block's} of its segments or residuals (`kind`, a key of `taken`)."""
            names = {name: f"{part}_{name}" if name in taken[kind] else name for name in own}
            taken[kind] |= set(own)
            return names

        for part, module in self.parts.items():
            segments = module.segments()
            named = names_of(part, "segments", [s.name for s in segments])
            residuals = names_of(part, "residuals", [n for s in segments for n in s.outputs if n != OUTPUT])
            found[part] = tuple(dataclasses.replace(s, name=named[s.name]) for s in segments), residuals
        return found

    def residuals(self) -> tuple[Residual, ...]:
        """The values of the layer that its backward may read, in the order in which they are computed. A plan decides
        the placement of each; the first, layer_input, cannot be recomputed. layer_output (the next layer's input),
        auxiliary values and those from outside (`takes`) are not among them."""
        made = [residual for segment in self.segments() for residual in segment.makes]
        return (Residual(LAYER_INPUT, recomputable=False), *made[:-1])

    def matrices(self) -> list[PartMatrix]:
        """The weight matrices of the layer that can have an adapter or, if `quantizable`, be quantised, in the order of
        their products. models/lora.py lists a model's matrices by it, and the planner counts their bytes."""
        named = (name for segment in self.segments() for name in segment.matrices)
        parted = ((name, name.partition(".")) for name in named)
        return [PartMatrix(part, rest, matrix_of(self, name)) for name, (part, _, rest) in parted]

    @property
    def order(self) -> BackwardOrder:
        """The settings by which the stack runs the whole layer's backward, combined from those that its feed-forwards
        declare: derivatives_at_once if any has it, weights_first only if all have it, and all their `shared` and
        `free`, by the block's names (INPUT becomes the stream's value that the part reads)."""
        orders, shared, free = [], [], []
        for part, module in self.parts.items():
            if part not in self.mixers:
                orders.append(module.order)
                names = self._own_segments()[part][1] | {INPUT: places_of(self.stages)[0][part].reads}
                shared += [names[name] for name in module.order.shared]
                free += [names[name] for name in module.order.free]
        return BackwardOrder(
            derivatives_at_once=any(order.derivatives_at_once for order in orders),
            shared=tuple(shared),
            weights_first=all(order.weights_first for order in orders),
            free=tuple(free),
        )

    # ---- for the planner

    def forward_bytes(self, sizes: Sizes) -> float:
        """An estimate of the bytes in memory at the end of the layer's forward in addition to the residuals, for the
        planner's forecasts of forwards, in training and without a backward. It is the largest need of a feed-forward; a
        layer without one needs its input, its output and the difference of the two. sizes: the sizes of the residuals
        of one micro-batch on one device, by the block's names."""
        found = [
            module.forward_bytes(self.sizes_of(part, sizes))
            for part, module in self.parts.items()
            if part not in self.mixers
        ]
        return max(found, default=3.0 * sizes[LAYER_INPUT])

    def backward_bytes(self, part: str, sizes: Sizes) -> Scratch:
        """The scratch memory, in bytes, that the backward of one part needs in addition to the residuals; of a layer's
        parts the planner counts the largest need. For a mixer `around` (bytes of other segments' partial gradients that
        exist at the same time) is 0, because a mixer states only what its own computation needs.
        part: the name of a mixer or feed-forward of the layer. sizes: the sizes of the residuals of one micro-batch on
        one device, by the block's names."""
        found = self.parts[part].backward_bytes(self.sizes_of(part, sizes))
        return Scratch(found, 0.0, covers_mixer=False) if part in self.mixers else found

    def waiting_bytes(self, part: str, sizes: Sizes) -> float:
        """An estimate of the bytes of results of the mixer `part` that are in device memory while the backward of a
        later feed-forward of the layer runs, although the mixer's own backward comes after it.
        It is a multiple (models/fitted.py) of one of the mixer's residuals. The planner adds it to the memory of that
        backward only if the feed-forward's scratch memory covers the mixer (Scratch.covers_mixer). sizes: the sizes of
        the residuals of one micro-batch on one device, by the block's names."""
        return self.parts[part].waiting_bytes(self.sizes_of(part, sizes))

    def sizes_of(self, part: str, sizes: Sizes) -> Sizes:
        """A copy of the layer's Sizes in which the residuals of one part have the part's own names beside the block's,
        because the part's formulas look them up so; `sizes` itself if the names are the same. An own name hides the
        residual of an earlier part with this name, also in `recomputed`.

        part: the name of a mixer or feed-forward of the layer. sizes: by the block's names of residuals."""
        changed = {own: name for own, name in self._own_segments()[part][1].items() if own != name}
        if not changed:
            return sizes
        recomputed = {own for own, name in changed.items() if name in sizes.recomputed}
        return dataclasses.replace(
            sizes,
            residuals={**sizes.residuals, **{own: sizes[name] for own, name in changed.items()}},
            recomputed=(sizes.recomputed - changed.keys()) | recomputed,
        )

    # ---- generation

    @property
    def state_reads(self) -> tuple[str, ...]:
        """The block's names of the residuals that `first_state` reads to build the mixers' states for generation; a
        prefill must compute and return these."""
        return tuple(self._own_segments()[part][1][name] for part, m in self.mixers.items() for name in m.state_reads)

    def first_state(
        self, values: Mapping[str, jax.Array], lengths: jax.Array, new_tokens: int, context: Context
    ) -> dict[str, object]:
        """Builds {mixer's name: its state for generation, any pytree} after prompts have run through the layer.

        Args:
          values: {name: value} of the residuals that `state_reads` names, computed from the prompts.
          lengths: int32[B], tokens of each prompt.
          new_tokens: for how many more tokens than `values` have positions the states must have room.
          context: the layer's spec, and a layout of rows with one prompt each, with their rotary tables.
        """
        found: dict[str, object] = {}
        for part, mixer in self.mixers.items():
            names = self._own_segments()[part][1]
            own = {name: values[names[name]] for name in mixer.state_reads}
            found[part] = mixer.first_state(own, lengths, new_tokens, context)
        return found

    def step(
        self,
        layer_input: jax.Array,
        state: Mapping[str, object],
        at: jax.Array,
        context: Context,
        taken: Mapping[str, object] | None = None,
    ):
        """Runs the next N tokens of each row in generation: one while rows decode, more for a chunk of a long prompt.
        _layer_step (layer_steps.py) calls it, unless N is 1 and plain_layer.py has a faster step for all of the model.

        Args:
          layer_input: [B, N, hidden].
          state: {mixer's name: its state}, from `first_state` or the previous step.
          at: int32[B], the position of the first of the N tokens of each row, which is also the number of tokens that
            the state has already. A negative number marks a row that does not decode; its results are ignored.
          context: the layer's spec, and a layout with the rotary tables of these positions, in which rows that do not
            decode are padding.
          taken: {name: value} of what the layer takes from outside (`takes`) for these tokens, as the decoder or an
            earlier layer's `step` gave it; None: it takes nothing.
        Returns:
          (layer_output [B, N, hidden], {mixer's name: its state after these tokens}, {name: value} of what the layer
            gives to later layers)
        """
        values, after, given = {LAYER_INPUT: layer_input, **(taken or {})}, {}, {}
        context = dataclasses.replace(context, taken=taken or {})
        places, norms = places_of(self.stages)
        for part, module in self.parts.items():
            segments = self.part_segments(part)
            if part in state:
                place = places[part]
                x = self.normed(part, values[place.reads])
                if getattr(module, "gives", {}):
                    out, after[part], more = module.step_giving(x, state[part], at, context)
                    given |= more
                else:
                    out, after[part] = module.step(x, state[part], at, context)
                values[place.makes] = self.added(part, None if place.adds_to is None else values[place.adds_to], out)
                segments = segments[-1:] if part in norms else ()
            for segment in segments:
                if not segment.aux:
                    outputs = segment.run(self, context, *map(values.get, segment.reads))
                    values |= zip(segment.outputs, outputs, strict=True)
        return values[LAYER_OUTPUT], after, given


def _in_block(segment: Segment, part: str, place: Place, names: Mapping[str, str], apart: bool) -> tuple[Segment, ...]:
    """Converts one segment of a part into one or two segments of the block, whose `run` takes the block as its module.

    Values are renamed to the block's names, names of matrices get the part's name in front, each segment that reads
    INPUT computes it by the norm before the part, and the part's output is added as `place` says. If the output has a
    norm, that norm and the addition are a segment of their own: the norm's derivative reads the output, which would
    otherwise be computed again by a matrix product. A segment with its own backward may not read INPUT or make OUTPUT
    (AssertionError).

    part: its name. names: {the part's name of a residual: the block's name of it}. apart: whether the segment reads
    INPUT as a value of its own, with the name of the norm before the part, and does not norm it.
    """
    ending = segment.outputs == (OUTPUT,)
    stream = {STREAM: place.reads, INPUT: place.norm if apart else place.reads}
    reads = tuple(stream.get(name) or names.get(name, name) for name in segment.reads)
    adds = ending and place.post_norm is None
    added = adds and place.adds_to is not None and place.adds_to not in reads

    def run(block: Block, context: Context, *values):
        """The `run` of the block's segment: the part's own, with the norm before it, and its output added if `adds`."""
        own = values[:-1] if added else values
        if not apart:
            norm = block.to_norm if segment.norms else block.normed
            own = [norm(part, v) if name == INPUT else v for name, v in zip(segment.reads, own, strict=True)]
        outputs = segment.run(getattr(block, part), context, *own)
        if not adds:
            return tuple(outputs)
        x = None if place.adds_to is None else values[-1 if added else reads.index(place.adds_to)]
        return (block.added(part, x, outputs[0]),)

    def add(block: Block, context: Context, out: jax.Array, *x: jax.Array):
        """The `run` of a second segment: norms the part's output and adds it to x, if there is one."""
        del context
        return (block.added(part, x[0] if x else None, out),)

    backward = segment.backward
    if backward is not None:
        assert INPUT not in segment.reads and not ending, "a backward of its own has no norm in it"
        backward = functools.partial(_backward_in_block, segment.backward, part)
    made = place.makes if adds else f"{part}_out"
    with_before = segment.with_before
    if with_before is not None:
        with_before = _in_block(with_before, part, place, names, apart)[0]
    first = dataclasses.replace(
        segment,
        reads=(*reads, place.adds_to) if added else reads,
        makes=(dataclasses.replace(segment.makes[0], name=made),) if ending else _renamed(segment.makes, names),
        run=run,
        backward=backward,
        with_before=with_before,
        matrices=tuple(f"{part}.{name}" for name in segment.matrices),
    )
    if not ending or adds:
        return (first,)
    adds_to = () if place.adds_to is None else (place.adds_to,)
    after = Segment(f"{part}_post_norm", (made, *adds_to), (Residual(place.makes),), add, tokenwise=segment.tokenwise)
    return first, after


def _renamed(residuals: tuple[Residual, ...], names: Mapping[str, str]) -> tuple[Residual, ...]:
    """Gives residuals of a part the block's names, also in their field `decided_with`; all else stays the same.

    names: {the part's name of a residual: the block's name of it}, for all residuals of the part."""

    def one(residual: Residual) -> Residual:
        """A residual under its block's names."""
        decided_with = residual.decided_with and names[residual.decided_with]
        return dataclasses.replace(residual, name=names[residual.name], decided_with=decided_with)

    return tuple(map(one, residuals))


def _sum_norm_segment(norm: SumNorm, tokenwise: bool) -> Segment:
    """The segment of the block that norms the sum of a stage's outputs and adds it to the residual stream
    (Block._on_stream). It is the last of Block.part_segments of the stage's last part.

    norm: the names of the norm, of the sum and of the stream's values. tokenwise: whether the segment may run over
    tiles of tokens, with the segment before it (Segment.tokenwise); if False it runs on whole rows."""

    def run(block: Block, context: Context, total: jax.Array, x: jax.Array):
        """Norms the sum `total` and adds it to the stream's value x."""
        del context
        return (block._on_stream(x, getattr(block, norm.name)(total), norm.makes),)

    return Segment(norm.name, (norm.total, norm.adds_to), (Residual(norm.makes),), run, tokenwise=tokenwise)


def _backward_in_block(backward, part: str, block_of, trainable, *arguments):
    """Calls the hand-written backward of a part's segment, whose module is the part, in a layer, where the stack passes
    the whole block. It returns the result, whose gradients are those of the block's trainable tensors.

    Args:
      backward: the Backward of the part's segment.
      part: the part's name.
      block_of: builds the whole block from trainable tensors.
      trainable: the block's trainable tensors.
      arguments: the other arguments of a Backward: context, inputs, outputs and gradients.
    """
    return backward(lambda trainable: getattr(block_of(trainable), part), trainable, *arguments)
