"""One layer, as the chain of segments that stack.py runs:

layer_input -> project -> query, key, value -> [attention] -> attention_out, lse -> mix -> mid
            -> expand -> gate, up -> contract -> layer_output
or, with experts,
        mid -> route -> choice -> expand -> gate_up -> contract -> layer_output
and, where the router has losses of its own, mid, choice -> balance -> router_sums
"""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from jaxtune.models.attention import Attention
from jaxtune.models.config import DecoderConfig
from jaxtune.models.mlp import MLP
from jaxtune.models.moe import MoE
from jaxtune.models.norm import RMSNorm
from jaxtune.pallas.routing import RouterSums


class Block(nnx.Module):
    """Attention and MLP with their norms and residual additions. Holds nothing that differs from layer to layer."""

    def __init__(self, config: DecoderConfig, key: jax.Array, dtype):
        keys = jax.random.split(key)

        def norm(wanted):
            return RMSNorm(config.hidden_size, config.norm_eps, config.norm_offset, dtype) if wanted else None

        self.attention = Attention(config, keys[0], dtype)
        self.mlp = self.make_mlp(config, keys[1], dtype)
        self.attention_norm = norm(config.pre_norm)
        self.mlp_norm = norm(config.pre_norm)
        self.attention_post_norm = norm(config.post_norm)
        self.mlp_post_norm = norm(config.post_norm)

    @staticmethod
    def make_mlp(config: DecoderConfig, key, dtype) -> Any:
        return MLP(config, key, dtype)

    def project(self, layer_input: jax.Array, rotary, key=None):
        x = layer_input if self.attention_norm is None else self.attention_norm(layer_input)
        return self.attention.project(x, rotary, key)

    def mix(self, attention_out: jax.Array, layer_input: jax.Array, key=None) -> jax.Array:
        x = self.attention.output(attention_out, key)
        return layer_input + (x if self.attention_post_norm is None else self.attention_post_norm(x))

    def _normed(self, mid: jax.Array) -> jax.Array:
        return mid if self.mlp_norm is None else self.mlp_norm(mid)

    def _added(self, mid: jax.Array, x: jax.Array) -> jax.Array:
        return mid + (x if self.mlp_post_norm is None else self.mlp_post_norm(x))

    def expand(self, mid: jax.Array, key=None) -> tuple[jax.Array, jax.Array]:
        return self.mlp.gate_up(self._normed(mid), key)

    def contract(self, gate: jax.Array, up: jax.Array, mid: jax.Array, key=None) -> jax.Array:
        return self._added(mid, self.mlp.down(gate, up, key))

    def feed_forward(self, mid: jax.Array) -> jax.Array:
        """mid -> layer_output, for generation."""
        return self.contract(*self.expand(mid), mid)


class MoEBlock(Block):
    """A block with experts in place of the MLP. Norm and router run in each segment that needs them: they are cheap,
    and `choice` is what must be the same everywhere."""

    @staticmethod
    def make_mlp(config: DecoderConfig, key, dtype) -> Any:
        return MoE(config, key, dtype)

    def route(self, mid: jax.Array, real: jax.Array | None = None) -> jax.Array:
        return self.mlp.choose(self._normed(mid), real)

    def balance(self, mid: jax.Array, choice: jax.Array, key=None) -> RouterSums:
        return self.mlp.router_sums(self._normed(mid), choice)

    def expand(self, mid: jax.Array, choice: jax.Array, key=None) -> jax.Array:
        return self.mlp.gate_up(self._normed(mid), choice)

    def contract(self, gate_up: jax.Array, choice: jax.Array, mid: jax.Array, key=None) -> jax.Array:
        return self._added(mid, self.mlp.down(gate_up, choice, self._normed(mid)))

    def feed_forward(self, mid: jax.Array) -> jax.Array:
        choice = self.route(mid)
        return self.contract(self.expand(mid, choice), choice, mid)
