"""One layer of the decoder: its parts, in stages, with norms and residual additions around them. Most families have two
stages of one part:

    layer_input -> [norm, mixer] + layer_input -> mid -> [norm, feed-forward] + mid -> layer_output

Parts can also be in parallel on one norm (Command R), or have a normed sum (Gemma 4's experts beside the dense MLP). A
Block runs as a chain of segments, made of its parts' own: values get names that are unique in the layer, and norms and
additions to the stream are added.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtune.models import initial
from jaxtune.models.config import DecoderConfig, LayerSpec
from jaxtune.models.layers.attention import Attention
from jaxtune.models.layers.experts import MoE
from jaxtune.models.layers.mlp import MLP
from jaxtune.models.layers.places import LAYER_INPUT, LAYER_OUTPUT, Connection, SumNorm, connections_of
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

type Renamed = Mapping[str, Mapping[str, str]]  # of Block.renamed


class PartMatrix(NamedTuple):
    part: str  # the block's attribute of the part that has it, such as "mixer"
    name: str  # its dotted name within the part, such as "q_proj" or "experts.down_proj"
    matrix: Any  # Linear or ExpertLinear


class Block(nnx.Module):
    """The modules of one layer: its mixers and feed-forwards (each the attribute that its Part names) and norms. Apart
    from arrays, it contains nothing that differs between layers of a kind, so that their programs are traced once.

      spec: the layer's kind. config: the decoder's. key: draws the weights. dtype: of the weights as stored.
    """

    def __init__(self, config: DecoderConfig, spec: LayerSpec, key: jax.Array, dtype):
        self.stages, self.residual_scale = spec.stages, config.residual_scale
        usual = {"mixer": Attention, "mlp": MLP if config.moe is None else MoE}
        keys = initial.split(key, len(spec.parts))

        def add_norm(name: str, present: bool) -> None:
            setattr(self, name, norm_of(config, config.hidden_size, dtype) if present else None)

        for part, part_key in zip(spec.parts, keys, strict=True):
            make = usual[part.name] if part.config is None else part.config.make
            setattr(self, part.name, make(config, part_key, dtype))
            add_norm(f"{part.name}_norm", part.norm is True)
            add_norm(f"{part.name}_post_norm", part.post_norm)
        for stage in spec.stages:
            if stage.post_norm:
                add_norm(f"{stage.parts[0].name}_sum_norm", True)
        self.layer_scalar = NeverTrained(initial.full((1,), 1, dtype)) if spec.output_scale else None

    @property
    def parts(self) -> dict[str, Any]:
        """{name: module} in the order in which they run."""
        return {part.name: getattr(self, part.name) for stage in self.stages for part in stage.parts}

    @property
    def mixers(self) -> dict[str, Mixer]:
        """The parts that are mixers, which have `state_reads`; all others are feed-forwards."""
        return {name: module for name, module in self.parts.items() if hasattr(module, "state_reads")}

    @property
    def takes(self) -> dict[str, tuple[int, ...]]:
        """{name: shape for one token} of the values that the layer reads from outside (LayerPart)."""
        shapes: dict[str, tuple[int, ...]] = {}
        for module in self.parts.values():
            shapes |= getattr(module, "takes", {})
        return shapes

    @property
    def gives(self) -> dict[str, str]:
        """{the block's name of a residual: the name under which later layers take it} (LayerPart)."""
        return {
            self._own_segments()[part][1][residual]: name
            for part, module in self.parts.items()
            for residual, name in getattr(module, "gives", {}).items()
        }

    def normed(self, part: str, x: jax.Array) -> jax.Array:
        """x [B, T, hidden] through the norm before `part`, if it has one."""
        norm = connections_of(self.stages)[0][part].norm
        return x if norm is None else getattr(self, norm)(x)

    def to_norm(self, part: str, x: jax.Array) -> jax.Array | Normed:
        """As `normed`, but a Normed (norm and x, not multiplied yet) if linears may compute the norm within their
        products.

          part: its name, such as "mixer".
          x: [B, T, hidden], the residual stream.
        """
        name = connections_of(self.stages)[0][part].norm
        norm = None if name is None else getattr(self, name)
        if isinstance(norm, RMSNorm) and (norm.float32 or norm.compute is None):
            return Normed(norm, x)
        return self.normed(part, x)

    def added(self, part: str, x: jax.Array | None, out: jax.Array) -> jax.Array:
        """Adds a part's output, after its post-norm, to x; the output alone if x is None. All are [B, T, hidden].

        part: its name, such as "mixer".
        x: the residual stream, or in a stage whose sum is normed the sum so far, None for its first part.
        out: the part's output, before its post-norm.
        """
        connection = connections_of(self.stages)[0][part]
        out = out if connection.post_norm is None else getattr(self, connection.post_norm)(out)
        if x is None:
            return out
        if connection.in_sum:
            return x + out
        return self._on_stream(x, out, connection.makes)

    def _on_stream(self, x: jax.Array, out: jax.Array, makes: str) -> jax.Array:
        """Adds `out`, times residual_scale, to the residual stream x; at the layer's end (`makes`) times
        `layer_scalar`.
        """
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
        """The chain of segments from layer_input to layer_output; their `run` takes this block as its module.

        tile: neighbouring tokenwise segments become one, which processes this many tokens of each row at a time.
        aux: names of the auxiliary values (such as router_sums) that are wanted; segments of others are left out.
        apart: names of norms. Segments behind one read the normed stream as a value with the norm's name, which the
          caller computes.
        """
        chain = tuple(s for name in self.parts for s in self.part_segments(name, apart))
        chain = tuple(s for s in chain if not s.aux or s.outputs[0] in aux)
        return chain if tile is None else in_tiles(self, chain, tile)

    @property
    def aux(self) -> dict[str, Segment]:
        """{name: the segment that computes it} of the layer's auxiliary values, such as router_sums."""
        return {s.outputs[0]: s for name in self.parts for s in self.part_segments(name) if s.aux}

    def part_segments(self, part: str, apart: Collection[str] = ()) -> tuple[Segment, ...]:
        """The segments of one part as segments of the block, with norms, additions and auxiliary values.

        part: its name, such as "mixer".
        apart: names of norms whose output is a value of the layer, which the caller computes.
        """
        (segments, names), (connections, norms) = self._own_segments()[part], connections_of(self.stages)
        connection = connections[part]
        block_segments = tuple(
            new for s in segments for new in _in_block(s, part, connection, names, connection.norm in apart)
        )
        return block_segments + (
            () if part not in norms else (_sum_norm_segment(norms[part], block_segments[-1].tokenwise),)
        )

    def _own_segments(self) -> dict[str, tuple[tuple[Segment, ...], dict[str, str]]]:
        """{part: (its own segments, {its name of a residual: the block's, unique within the layer})}."""
        by_part: dict[str, tuple[tuple[Segment, ...], dict[str, str]]] = {}
        used_names: dict[str, set[str]] = {"segments": set(), "residuals": set()}

        def names_of(part: str, kind: str, part_names: list[str]) -> dict[str, str]:
            names = {name: f"{part}_{name}" if name in used_names[kind] else name for name in part_names}
            used_names[kind] |= set(part_names)
            return names

        for part, module in self.parts.items():
            segments = module.segments()
            named = names_of(part, "segments", [s.name for s in segments])
            residuals = names_of(part, "residuals", [n for s in segments for n in s.outputs if n != OUTPUT])
            by_part[part] = tuple(dataclasses.replace(s, name=named[s.name]) for s in segments), residuals
        return by_part

    def residuals(self) -> tuple[Residual, ...]:
        """The values that the layer's backward may read, in the order in which they are computed. layer_input cannot be
        recomputed.
        """
        computed = [residual for segment in self.segments() for residual in segment.makes]
        return (Residual(LAYER_INPUT, recomputable=False), *computed[:-1])

    def matrices(self) -> list[PartMatrix]:
        """The matrices that can have an adapter or, if `quantizable`, be quantised, in the order of their products."""
        # Of the parts' own segments: a start asks for the matrices of all layers a dozen times, for each of which the
        # block's segments take a millisecond to make.
        named = [
            (part, module, name)
            for part, module in self.parts.items()
            for segment in module.segments()
            if not segment.aux
            for name in segment.matrices
        ]
        return [PartMatrix(part, name, matrix_of(module, name)) for part, module, name in named]

    @property
    def order(self) -> BackwardOrder:
        """The feed-forwards' settings combined: derivatives_at_once if any has it, weights_first if all do, and all
        their `shared` and `free`, by the block's names.
        """
        orders, shared, free = [], [], []
        for part, module in self.parts.items():
            if part not in self.mixers:
                orders.append(module.order)
                names = self._own_segments()[part][1] | {INPUT: connections_of(self.stages)[0][part].reads}
                shared += [names[name] for name in module.order.shared]
                free += [names[name] for name in module.order.free]
        return BackwardOrder(
            derivatives_at_once=any(order.derivatives_at_once for order in orders),
            shared=tuple(shared),
            weights_first=all(order.weights_first for order in orders),
            free=tuple(free),
        )

    # ---- for the planner

    @property
    def renamed(self) -> Renamed:
        """{part: {its own name of a residual: the block's}} of those that differ."""
        return {
            part: {own: name for own, name in names.items() if own != name}
            for part, (_, names) in self._own_segments().items()
        }

    def forward_bytes(self, sizes: Sizes, renamed: Renamed) -> float:
        """Bytes in memory at the end of the layer's forward beyond the residuals: a feed-forward's largest need.
        renamed: the property, which takes longer to find than all else here.
        """
        needs = [
            module.forward_bytes(sizes_of(part, sizes, renamed))
            for part, module in self.parts.items()
            if part not in self.mixers
        ]
        return max(needs, default=3.0 * sizes[LAYER_INPUT])

    def backward_bytes(self, part: str, sizes: Sizes, renamed: Renamed) -> Scratch:
        """The scratch memory of one part's backward beyond the residuals; a mixer states only its own."""
        scratch = self.parts[part].backward_bytes(sizes_of(part, sizes, renamed))
        return Scratch(scratch, 0.0, covers_mixer=False) if part in self.mixers else scratch

    def waiting_bytes(self, part: str, sizes: Sizes, renamed: Renamed) -> float:
        """Bytes of a mixer's results that exist while the backward of a later feed-forward runs, before the mixer's
        own. sizes: of one micro-batch, residuals by the layer's names.

          part: the mixer's name.
        """
        return self.parts[part].waiting_bytes(sizes_of(part, sizes, renamed))

    # ---- generation

    @property
    def state_reads(self) -> tuple[str, ...]:
        """The residuals that `first_state` reads."""
        return tuple(self._own_segments()[part][1][name] for part, m in self.mixers.items() for name in m.state_reads)

    def first_state(
        self, values: Mapping[str, jax.Array], lengths: jax.Array, new_tokens: int, context: Context
    ) -> dict[str, object]:
        """{mixer's name: its state for generation} after prompts.

        values: {name: value} of the residuals that `state_reads` names.
        lengths: int32[B], tokens of each prompt.
        new_tokens: tokens beyond the prompts for which there must be room.
        context: its layout has one prompt a row, with rotary tables.
        """
        states: dict[str, object] = {}
        for part, mixer in self.mixers.items():
            names = self._own_segments()[part][1]
            mixer_values = {name: values[names[name]] for name in mixer.state_reads}
            states[part] = mixer.first_state(mixer_values, lengths, new_tokens, context)
        return states

    def step(
        self,
        layer_input: jax.Array,
        state: Mapping[str, object],
        positions: jax.Array,
        context: Context,
        taken: Mapping[str, object] | None = None,
    ):
        """Runs the next N tokens of each row in generation: (layer_output [B, N, hidden], {mixer's name: its state
        after them}, {name: value} that the layer gives to later layers).

          layer_input: [B, N, hidden].
          state: {mixer's name: its state}, from first_state or an earlier step.
          positions: int32[B], the position of each row's first token, also the number of tokens in the state; negative
            for a row that does not decode, whose results are ignored.
          context: its layout has the rotary tables of these positions.
          taken: {name: value} that the layer takes from outside for these tokens; None: nothing.
        """
        values, after, given_values = {LAYER_INPUT: layer_input, **(taken or {})}, {}, {}
        context = dataclasses.replace(context, taken=taken or {})
        connections, norms = connections_of(self.stages)
        for part, module in self.parts.items():
            segments = self.part_segments(part)
            if part in state:
                connection = connections[part]
                x = self.normed(part, values[connection.reads])
                if getattr(module, "gives", {}):
                    out, after[part], shared_values = module.step_giving(x, state[part], positions, context)
                    given_values |= shared_values
                else:
                    out, after[part] = module.step(x, state[part], positions, context)
                values[connection.makes] = self.added(
                    part, None if connection.adds_to is None else values[connection.adds_to], out
                )
                # a mixer's own segments are replaced by its step; of these only the norm of the sum remains
                segments = segments[-1:] if part in norms else ()
            for segment in segments:
                if not segment.aux:
                    outputs = segment.run(self, context, *map(values.get, segment.reads))
                    values |= zip(segment.outputs, outputs, strict=True)
        return values[LAYER_OUTPUT], after, given_values


def sizes_of(part: str, sizes: Sizes, renamed: Renamed) -> Sizes:
    """`sizes` with the residuals of `part` also by the part's own names, which hide an earlier part's."""
    if not (changed := renamed[part]):
        return sizes
    recomputed = {part_name for part_name, name in changed.items() if name in sizes.recomputed}
    return dataclasses.replace(
        sizes,
        residuals={**sizes.residuals, **{part_name: sizes[name] for part_name, name in changed.items()}},
        recomputed=(sizes.recomputed - changed.keys()) | recomputed,
    )


def _in_block(
    segment: Segment, part: str, connection: Connection, names: Mapping[str, str], normed_outside: bool
) -> tuple[Segment, ...]:
    """One segment of a part as one or two of the block: a norm of the output and the addition are one of their own."""
    ending = segment.outputs == (OUTPUT,)
    stream = {STREAM: connection.reads, INPUT: connection.norm if normed_outside else connection.reads}
    reads = tuple(stream.get(name) or names.get(name, name) for name in segment.reads)
    makes_sum = ending and connection.post_norm is None
    reads_sum = makes_sum and connection.adds_to is not None and connection.adds_to not in reads

    def run(block: Block, context: Context, *values):
        part_values = values[:-1] if reads_sum else values
        if not normed_outside:
            norm = block.to_norm if segment.norms else block.normed
            part_values = [
                norm(part, v) if name == INPUT else v for name, v in zip(segment.reads, part_values, strict=True)
            ]
        outputs = segment.run(getattr(block, part), context, *part_values)
        if not makes_sum:
            return tuple(outputs)
        x = None if connection.adds_to is None else values[-1 if reads_sum else reads.index(connection.adds_to)]
        return (block.added(part, x, outputs[0]),)

    def add(block: Block, context: Context, out: jax.Array, *x: jax.Array):
        del context
        return (block.added(part, x[0] if x else None, out),)

    backward = segment.backward
    if backward is not None:
        assert INPUT not in segment.reads and not ending, "a backward of its own has no norm in it"
        backward = functools.partial(_backward_in_block, segment.backward, part)
    output_name = connection.makes if makes_sum else f"{part}_out"
    joined_with_previous = segment.joined_with_previous
    if joined_with_previous is not None:
        joined_with_previous = _in_block(joined_with_previous, part, connection, names, normed_outside)[0]
    first = dataclasses.replace(
        segment,
        reads=(*reads, connection.adds_to) if reads_sum else reads,
        makes=(dataclasses.replace(segment.makes[0], name=output_name),) if ending else _renamed(segment.makes, names),
        run=run,
        backward=backward,
        joined_with_previous=joined_with_previous,
        matrices=tuple(f"{part}.{name}" for name in segment.matrices),
    )
    if not ending or makes_sum:
        return (first,)
    adds_to = () if connection.adds_to is None else (connection.adds_to,)
    after = Segment(
        f"{part}_post_norm", (output_name, *adds_to), (Residual(connection.makes),), add, tokenwise=segment.tokenwise
    )
    return first, after


def _renamed(residuals: tuple[Residual, ...], names: Mapping[str, str]) -> tuple[Residual, ...]:
    """The values between a part's segments by the block's names; KeyError for one that `names` lacks."""

    def in_block(residual: Residual) -> Residual:
        partner = residual.decided_with and names[residual.decided_with]
        return dataclasses.replace(residual, name=names[residual.name], decided_with=partner)

    return tuple(map(in_block, residuals))


def _sum_norm_segment(norm: SumNorm, tokenwise: bool) -> Segment:

    def run(block: Block, context: Context, total: jax.Array, x: jax.Array):
        del context
        return (block._on_stream(x, getattr(block, norm.name)(total), norm.makes),)

    return Segment(norm.name, (norm.total, norm.adds_to), (Residual(norm.makes),), run, tokenwise=tokenwise)


def _backward_in_block(backward, part: str, block_of, trainable, *arguments):
    """Calls the Backward of a part's segment in a layer, where the trainable tensors are the whole block's."""
    return backward(lambda trainable: getattr(block_of(trainable), part), trainable, *arguments)
