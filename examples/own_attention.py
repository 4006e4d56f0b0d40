"""Attention of one's own in a layer of a model: a function with the operation's arguments takes its place.

Here each head forgets with distance (ALiBi); whatever replaces `attention` is differentiated by JAX.
"""

import jax
import jax.numpy as jnp
from flax import nnx

import jaxtune
from jaxtune.pallas.attention import packed_layout


def forgetful_attention(query, key, value, layout, *, scale):
    """query [B, T, heads, D], key and value [B, T, kv_heads, D] -> [B, T, heads, D]."""
    heads, length = query.shape[2], query.shape[1]
    key, value = (jnp.repeat(array, heads // array.shape[2], axis=2) for array in (key, value))
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * scale
    index = jnp.arange(length)
    distance = index[:, None] - index[None, :]
    slopes = 2.0 ** (-8.0 * jnp.arange(1, heads + 1) / heads)
    scores = scores - slopes[:, None, None] * distance
    visible = (distance >= 0) & (index[None, None, :] >= layout.doc_start[:, :, None])
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(visible[:, None], scores, -1e30)), value)


jaxtune.use_program_cache()  # the next start compiles nothing that this one compiled
model, tokenizer = jaxtune.from_pretrained("Qwen/Qwen2.5-0.5B-Instruct", dtype="float32")
tokens = jnp.asarray([tokenizer("Once upon a time, there was a small model.")["input_ids"]])
layer = model.layers[0].mixer
x = model.embed(tokens)
layout = packed_layout(tokens.shape)


def run(layer, x):
    shape = (*x.shape[:2], -1, model.config.head_dim)
    query, key, value = (linear(x).reshape(shape) for linear in (layer.q_proj, layer.k_proj, layer.v_proj))
    out = forgetful_attention(query, key, value, layout, scale=model.config.head_dim**-0.5)
    return layer.o_proj(out.reshape(*x.shape[:2], -1))


loss, gradient = nnx.value_and_grad(lambda layer: (run(layer, x) ** 2).mean())(layer)
print(f"{loss:.6f}", jax.tree.map(jnp.shape, nnx.to_pure_dict(gradient)["q_proj"]))
