"""A family that jaxtune does not have: one declaration, from which its config.json is checked, read and written.

In jaxtune itself this would be a file in jaxtune/models/families and a line in jaxtune/models/registry.py.
"""

import json
from pathlib import Path

import jax

import jaxtune
from jaxtune.models.families.common import Family, LayerTypes
from jaxtune.models.families.common.layers import alternating
from jaxtune.models.hf import model_from_config
from jaxtune.models.registry import FAMILIES

# Every second layer sees the last 64 tokens only, if the config.json says nothing else.
FAMILIES["half_local"] = Family(
    "half_local", "HalfLocalForCausalLM", keys=(LayerTypes(alternating),), defaults={"sliding_window": 64}
)

shape = {
    "model_type": "half_local",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
model = model_from_config(shape, jax.random.key(0))
jaxtune.save_pretrained(model, "half_local")
again, _ = jaxtune.from_pretrained("half_local", dtype="float32")
assert [layer.window for layer in again.config.layers] == [64, None, 64, None]
print(json.loads(Path("half_local/config.json").read_text())["model_type"], jaxtune.generate(again, [[1, 2, 3]], 4))
