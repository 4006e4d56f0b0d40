"""One layer: norms and residual additions around a mixer and a feed-forward.

layer_input -> [norm, mixer] + layer_input -> mid -> [norm, feed-forward] + mid -> layer_output

In a parallel block the feed-forward is fed what the mixer is: [norm, feed-forward] is of layer_input, with one norm.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtune.models.config import DecoderConfig, LayerSpec
from jaxtune.models.layers.attention import Attention
from jaxtune.models.layers.experts import MoE
from jaxtune.models.layers.mlp import MLP
from jaxtune.models.layers.segment import INPUT, OUTPUT, BackwardOrder, Context, Residual, Segment, matrix_of
from jaxtune.models.layers.tiles import in_tiles
from jaxtune.models.norm import norm_of

LAYER_INPUT, MID, LAYER_OUTPUT = "layer_input", "mid", "layer_output"


class Block(nnx.Module):
    """A mixer and a feed-forward. Holds nothing that differs from layer to layer of one kind.

    The feed-forward's attribute is `mlp`, as in Hugging Face's classes, whatever it is.
    """

    def __init__(self, config: DecoderConfig, spec: LayerSpec, key: jax.Array, dtype):
        keys = jax.random.split(key)

        def norm(wanted):
            return norm_of(config, config.hidden_size, dtype) if wanted else None

        feed_forward = MLP if config.moe is None else MoE
        self.mixer: Any = (spec.mixer.make if spec.mixer else Attention)(config, keys[0], dtype)
        self.mlp: Any = (spec.feed_forward.make if spec.feed_forward else feed_forward)(config, keys[1], dtype)
        self.mixer_norm = norm(config.pre_norm)
        self.mlp_norm = norm(config.pre_norm and not config.parallel)
        self.mixer_post_norm = norm(config.post_norm)
        self.mlp_post_norm = norm(config.post_norm)
        self.parallel, self.residual_scale = config.parallel, config.residual_scale

    @property
    def parts(self) -> dict[str, Any]:
        """{attribute: mixer or feed-forward}, in the order in which they run."""
        return {"mixer": self.mixer, "mlp": self.mlp}

    def normed(self, part: str, x: jax.Array) -> jax.Array:
        norm = self.mixer_norm if self.parallel else getattr(self, f"{part}_norm")
        return x if norm is None else norm(x)

    def added(self, part: str, x: jax.Array, out: jax.Array) -> jax.Array:
        norm = getattr(self, f"{part}_post_norm")
        out = out if norm is None else norm(out)
        if self.residual_scale != 1.0:  # a product in float32, rounded once, as torch has it of a tensor and a number
            out = (out.astype(jnp.float32) * self.residual_scale).astype(out.dtype)
        return x + out

    def segments(self, tile: int | None = None, aux: Collection[str] = ()) -> tuple[Segment, ...]:
        """The chain from layer_input to layer_output; `run` and `backward` take the block, of which `matrices` are.

        Args:
          tile: tokens of each row that tokenwise segments run over at a time, as one segment; None: they run whole.
          aux: the names wanted of what leaves the layer beside its output.
        """
        chain = self.part_segments("mixer") + self.part_segments("mlp")
        chain = tuple(s for s in chain if not s.aux or s.outputs[0] in aux)
        return chain if tile is None else in_tiles(self, chain, tile)

    @property
    def aux(self) -> tuple[str, ...]:
        """Names of all that can leave the layer beside its output."""
        return tuple(name for part in ("mixer", "mlp") for s in self.part_segments(part) if s.aux for name in s.outputs)

    @property
    def order(self) -> BackwardOrder:
        order, fed = self.mlp.order, self._fed("mlp")
        return dataclasses.replace(order, shared=tuple(fed if name == INPUT else name for name in order.shared))

    def _fed(self, part: str) -> str:
        """The value that "mixer" or "mlp" is fed, before its norm."""
        return LAYER_INPUT if part == "mixer" or self.parallel else MID

    def part_segments(self, part: str) -> tuple[Segment, ...]:
        """Those of "mixer" or of "mlp"."""
        ends = (LAYER_INPUT, MID) if part == "mixer" else (MID, LAYER_OUTPUT)
        post_norm = getattr(self, f"{part}_post_norm") is not None
        return tuple(
            made
            for segment in getattr(self, part).segments()
            for made in _in_block(segment, part, self._fed(part), *ends, post_norm)
        )

    def residuals(self) -> tuple[Residual, ...]:
        """What the layer may leave for its backward, in the order in which it is made."""
        made = [residual for segment in self.segments() for residual in segment.makes]
        return (Residual(LAYER_INPUT, recomputable=False), *made[:-1])

    def matrices(self) -> list[tuple[str, str, Any]]:
        """(mixer or mlp, dotted name in it, Linear or ExpertLinear) of every matrix, in the order they multiply."""
        named = (name for segment in self.segments() for name in segment.matrices)
        parted = ((name, name.partition(".")) for name in named)
        return [(part, rest, matrix_of(self, name)) for name, (part, _, rest) in parted]

    # ---- generation

    @property
    def state_reads(self) -> tuple[str, ...]:
        """Residuals that the state of generation begins from."""
        return self.mixer.state_reads

    def first_state(self, values: Mapping[str, jax.Array], lengths: jax.Array, new_tokens: int, context: Context):
        """The mixer's state after prompts; values: of `state_reads`. Arguments as Mixer's."""
        return self.mixer.first_state(values, lengths, new_tokens, context)

    def step(self, layer_input: jax.Array, state, at: jax.Array, context: Context):
        """More tokens of each row, for generation: (layer_output [B, N, hidden], the mixer's next state)."""
        out, state = self.mixer.step(self.normed("mixer", layer_input), state, at, context)
        values = {LAYER_INPUT: layer_input, MID: self.added("mixer", layer_input, out)}
        for segment in self.part_segments("mlp"):
            if not segment.aux:
                values |= zip(segment.outputs, segment.run(self, context, *map(values.get, segment.reads)), strict=True)
        return values[LAYER_OUTPUT], state


def _in_block(segment: Segment, part: str, fed: str, begins: str, ends: str, post_norm: bool) -> tuple[Segment, ...]:
    """A part's segment as one of the block: fed with the normed value `fed`, and added to `begins` where the part
    ends. There a norm of what the part gives is a segment of its own: its derivative reads that value, which would
    otherwise have to be multiplied again."""
    ending = segment.outputs == (OUTPUT,)
    reads = tuple(fed if name == INPUT else name for name in segment.reads)
    adds = ending and not post_norm
    added = adds and begins not in reads

    def run(block: Block, context: Context, *values):
        own = values[:-1] if added else values
        own = [block.normed(part, v) if name == INPUT else v for name, v in zip(segment.reads, own, strict=True)]
        outputs = segment.run(getattr(block, part), context, *own)
        if not adds:
            return tuple(outputs)
        return (block.added(part, values[-1 if added else reads.index(begins)], outputs[0]),)

    def add(block: Block, context: Context, out: jax.Array, x: jax.Array):
        del context
        return (block.added(part, x, out),)

    backward = segment.backward
    if backward is not None:
        assert INPUT not in segment.reads and not ending, "a backward of its own has no norm in it"
        backward = functools.partial(_backward_in_block, segment.backward, part)
    made = f"{part}_out" if post_norm else ends
    first = dataclasses.replace(
        segment,
        reads=(*reads, begins) if added else reads,
        makes=(dataclasses.replace(segment.makes[0], name=made),) if ending else segment.makes,
        run=run,
        backward=backward,
        matrices=tuple(f"{part}.{name}" for name in segment.matrices),
    )
    if not ending or adds:
        return (first,)
    return first, Segment(f"{part}_post_norm", (made, begins), (Residual(ends),), add, tokenwise=segment.tokenwise)


def _backward_in_block(backward, part: str, block_of, trainable, *arguments):
    return backward(lambda trainable: getattr(block_of(trainable), part), trainable, *arguments)
