"""One layer, as the chain of segments that stack.py runs:

layer_input -> project -> query, key, value -> [attention] -> attention_out, lse -> mix -> mid
            -> expand -> gate, up -> contract -> layer_output
"""

from __future__ import annotations

import jax
from flax import nnx

from jaxtune.models.attention import Attention
from jaxtune.models.config import DecoderConfig
from jaxtune.models.mlp import MLP
from jaxtune.models.norm import RMSNorm


class Block(nnx.Module):
    """Attention and MLP with their norms and residual additions. Holds nothing that differs from layer to layer."""

    def __init__(self, config: DecoderConfig, key: jax.Array, dtype):
        keys = jax.random.split(key)

        def norm(wanted):
            return RMSNorm(config.hidden_size, config.norm_eps, config.norm_offset, dtype) if wanted else None

        self.attention = Attention(config, keys[0], dtype)
        self.mlp = MLP(config, keys[1], dtype)
        self.attention_norm = norm(config.pre_norm)
        self.mlp_norm = norm(config.pre_norm)
        self.attention_post_norm = norm(config.post_norm)
        self.mlp_post_norm = norm(config.post_norm)

    def project(self, layer_input: jax.Array, rotary, key=None):
        x = layer_input if self.attention_norm is None else self.attention_norm(layer_input)
        return self.attention.project(x, rotary, key)

    def mix(self, attention_out: jax.Array, layer_input: jax.Array, key=None) -> jax.Array:
        x = self.attention.output(attention_out, key)
        return layer_input + (x if self.attention_post_norm is None else self.attention_post_norm(x))

    def expand(self, mid: jax.Array, key=None) -> tuple[jax.Array, jax.Array]:
        return self.mlp.gate_up(mid if self.mlp_norm is None else self.mlp_norm(mid), key)

    def contract(self, gate: jax.Array, up: jax.Array, mid: jax.Array, key=None) -> jax.Array:
        x = self.mlp.down(gate, up, key)
        return mid + (x if self.mlp_post_norm is None else self.mlp_post_norm(x))
