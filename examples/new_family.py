"""A family that jaxtune does not have: its config.json and its names, said in one class, and everything else follows.

In jaxtune itself this would be a file in jaxtune/models/families and a line in jaxtune/models/registry.py.
"""

import json
import types
from pathlib import Path

import jax

import jaxtune
from jaxtune.models.config import LayerSpec
from jaxtune.models.families import common
from jaxtune.models.hf import model_from_config
from jaxtune.models.registry import FAMILIES


def from_hf(hf):
    """Every second layer sees the last 64 tokens only."""
    layers = [LayerSpec(64 if index % 2 else None) for index in range(hf["num_hidden_layers"])]
    return common.decoder_config(hf, layers=tuple(layers))


def to_hf(config):
    return common.hf_config(config, "HalfLocalForCausalLM")


FAMILIES["half_local"] = types.SimpleNamespace(NORMS=common.LLAMA_NORMS, from_hf=from_hf, to_hf=to_hf)

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
assert [layer.window for layer in again.config.layers] == [None, 64, None, 64]
print(json.loads(Path("half_local/config.json").read_text())["model_type"], jaxtune.generate(again, [[1, 2, 3]], 4))
