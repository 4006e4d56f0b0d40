"""A small real model, widened: the same function at the shape of a large one, with the small one's outliers.

    python scripts/real_model.py MODEL --widen 8 --output FOLDER [--dtype bfloat16]

MODEL is a folder or a GGUF file. Stream, heads and MLP are repeated, W' = tile(W, n x n) / n, norms are repeated, and
the head is a matrix of its own: in exact arithmetic the logits are the small model's. SmolLM2-135M eight times wider
has hidden size 4,608, an MLP of 12,288, 72 and 24 heads of 64, and 6.8 billion parameters.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jaxtune.models.decoder import Decoder
from jaxtune.models.files.weights import tensors_of
from jaxtune.models.hf import from_pretrained, save_pretrained
from jaxtune.models.registry import config_from_hf

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # none of whose constants follows the stream's width
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def widened(model: Decoder, times: int) -> Decoder:
    """The model with `times` the width, whose function is the same.

    Raises:
      ValueError: a family whose function would change, or weights that are quantised.
    """
    if model.config.family not in FAMILIES or model.source is None:
        raise ValueError(f"a {model.config.family} model cannot be widened; only {', '.join(FAMILIES)} can")
    hf = json.loads(model.source.config)
    for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"):
        hf[key] = times * {**hf, "num_key_value_heads": model.config.num_kv_heads}[key]
    hf |= {"head_dim": model.config.head_dim, "tie_word_embeddings": False}
    wide = nnx.eval_shape(lambda: Decoder(config_from_hf(hf), jax.random.key(0), model.dtype))
    small = {name: variable.get_value() for name, variable in tensors_of(model).items()}
    small.setdefault(_HEAD, small[_EMBEDDING])
    for name, variable in tensors_of(wide).items():
        variable.set_value(jax.block_until_ready(_repeated(small[name], variable.get_value().shape, name)))
    wide.source = dataclasses.replace(model.source, config=json.dumps(hf))
    return wide


def _repeated(array: object, shape: tuple[int, ...], name: str) -> jax.Array:
    """A tensor repeated to a shape, divided by the repetitions of its input."""
    if not isinstance(array, jax.Array):
        raise ValueError(f"{name} is a {type(array).__name__}: load the model in 16 or 32 bits to widen it")
    times = tuple(large // small for large, small in zip(shape, array.shape, strict=True))
    inputs = times[-1] if len(shape) == 2 and name != _EMBEDDING else 1
    return jnp.tile(array, times) / jnp.asarray(inputs, array.dtype)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", help="folder or GGUF file")
    parser.add_argument("--widen", type=int, default=8, metavar="N", help="times the width (default: 8)")
    parser.add_argument("--output", required=True, help="folder to write")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    model, tokenizer = from_pretrained(options.model, options.dtype)
    wide = widened(model, options.widen)
    save_pretrained(wide, options.output, tokenizer)
    count = sum(variable.get_value().size for variable in tensors_of(wide).values())
    print(f"{options.output}: {count:,} parameters, hidden size {wide.config.hidden_size:,}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
