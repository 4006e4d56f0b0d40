"""The gated short convolution, a mixer (LFM2): a projection gives two gates and x; each channel of the first gate times
x is convolved over the last tokens of its document; the second gate times that is projected.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtune.models import initial, values
from jaxtune.models.config import DecoderConfig
from jaxtune.models.fitted import DELTA_NET_BYTES
from jaxtune.models.layers.delta_net import Convolution
from jaxtune.models.layers.segment import INPUT, OUTPUT, Context, Residual, Segment, Sizes
from jaxtune.models.linear import Linear
from jaxtune.pallas.attention import packed_layout
from jaxtune.pallas.delta_rule import short_convolution


@dataclasses.dataclass(frozen=True)
class ShortConvolutionShape:
    """Raises ValueError for `taps` that are no positive integer."""

    hf_name: ClassVar[str] = "conv"  # the part's name in Hugging Face's tensor names

    taps: int  # each output is a weighted sum over this many tokens

    def __post_init__(self):
        values.whole("conv_L_cache", self.taps)

    def make(self, config: DecoderConfig, key: jax.Array, dtype) -> ShortConvolution:
        return ShortConvolution(self, config, key, dtype)


class ShortConvolution(nnx.Module):
    """Attributes have the names of Hugging Face's tensors."""

    state_reads = ("gates",)
    has_cache = False

    def __init__(self, shape: ShortConvolutionShape, config: DecoderConfig, key: jax.Array, dtype):
        self.shape = shape
        keys, hidden, std = initial.split(key, 3), config.hidden_size, config.initializer_range
        self.in_proj = Linear(hidden, 3 * hidden, bias=False, std=std, key=keys[0], dtype=dtype)
        self.conv = Convolution(hidden, shape.taps, std, keys[1], dtype)
        self.out_proj = Linear(hidden, hidden, bias=False, std=std, key=keys[2], dtype=dtype)

    def segments(self) -> tuple[Segment, ...]:
        def mix(mixer, context, out):
            return (mixer.out_proj(out, context.key),)

        return (
            Segment("enter", (INPUT,), (Residual("gates"),), ShortConvolution._enter, matrices=("in_proj",)),
            Segment("convolve", ("gates",), (Residual("convolved"),), ShortConvolution._convolve),
            Segment("mix", ("convolved",), (Residual(OUTPUT),), mix, matrices=("out_proj",)),
        )

    def _enter(self, context: Context, x: jax.Array):
        return (self.in_proj(x, context.key),)

    def _convolve(self, context: Context, gates: jax.Array):
        inner, gate = _divided(gates)
        return (gate * self._over(inner, context.layout),)

    def _over(self, inner: jax.Array, layout) -> jax.Array:
        return short_convolution(inner, self.conv.weight[...][:, 0], layout, activation=None)

    # ---- generation

    def first_state(self, values: Mapping[str, jax.Array], lengths: jax.Array, new_tokens: int, context: Context):
        """What the convolution reads of each prompt's last tokens: [B, taps - 1, hidden], zero before the prompt."""
        inner, _ = _divided(values["gates"])
        indices = lengths[:, None] + jnp.arange(1 - self.shape.taps, 0)
        window = jnp.take_along_axis(inner, jnp.maximum(indices, 0)[..., None], axis=1)
        return jnp.where((indices >= 0)[..., None], window, 0)

    def step(self, x: jax.Array, state: jax.Array, positions: jax.Array, context: Context):
        """(output, the state after the next N tokens of each row, x [B, N, hidden]). positions: not used."""
        inner, gate = _divided(self.in_proj(x))
        history, before = jnp.concatenate([state, inner], axis=1), state.shape[1]
        out = self._over(history, packed_layout((len(history), history.shape[1])))[:, before:]
        last = context.layout.counts()[:, None] + jnp.arange(before, dtype=jnp.int32)
        return self.out_proj(gate * out), jnp.take_along_axis(history, last[..., None], axis=1)

    # ---- for the planner

    def waiting_bytes(self, sizes: Sizes) -> float:
        return 0.0

    def backward_bytes(self, sizes: Sizes) -> float:
        """Of the three parts and their gradients, and the residual stream; not measured on a GPU yet."""
        return 2 * sizes["gates"] + DELTA_NET_BYTES.of("triton", sizes.device).stream * sizes["layer_input"]


def _divided(gates: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(what is convolved, the gate of what comes of it), [B, T, hidden] each."""
    entry_gate, exit_gate, x = jnp.split(gates, 3, axis=-1)
    return entry_gate * x, exit_gate
