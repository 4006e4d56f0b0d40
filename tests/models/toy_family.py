"""A family of models whose layers differ: attention before an MLP of another width, and the toy parts."""

from __future__ import annotations

from toy_feed_forward import Square
from toy_mixer import Decay

from jaxtune.models.config import LayerSpec
from jaxtune.models.families.common import Family
from jaxtune.models.layers.attention import AttentionShape
from jaxtune.models.layers.mlp import MLPShape

HF = {
    "model_type": "toy",
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "hidden_act": "silu",
}

LAYERS = (
    LayerSpec(),
    LayerSpec().replaced(mixer=Decay(12)),
    LayerSpec().replaced(mixer=Decay(20), mlp=Square(32)),
    LayerSpec(window=4).replaced(mixer=AttentionShape(4, 2, 8, 8**-0.5), mlp=MLPShape(40)),
)
FAMILY = Family("toy", "ToyForCausalLM", fields={"layers": LAYERS}, written={"num_hidden_layers": len(LAYERS)})
