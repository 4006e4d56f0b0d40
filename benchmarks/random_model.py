"""Models of a published shape with random weights, made on the device and encoded layer by layer."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtune.models.config import DecoderConfig, Source
from jaxtune.models.decoder import Decoder
from jaxtune.models.files import passthrough
from jaxtune.models.files.quant import quantize
from jaxtune.models.layers.block import Block
from jaxtune.models.layers.expert_linear import ExpertLinear
from jaxtune.models.layers.per_layer import PerLayerInputs
from jaxtune.models.linear import frozen
from jaxtune.models.lora import copy_structure, freeze, matrices
from jaxtune.models.norm import norm_of
from jaxtune.models.placement import host_table, partition
from jaxtune.models.registry import config_from_hf, text_config, tower_config
from jaxtune.pallas.formats import FP8, MXFP4, dense
from jaxtune.pallas.formats.fp8 import TILE

_SCALE = 127 - 8  # of MXFP4: 2^-8


def random_model(
    hf: Mapping[str, Any],
    key: jax.Array,
    load_in: str | None = None,
    mesh: jax.sharding.Mesh | None = None,
    tables_on_host: bool = False,
    on_host: bool = False,
    folder: Path | None = None,
) -> Decoder:
    """A bfloat16 model of the shape that a config.json states; load_in as in from_pretrained, or "mxfp4": the experts
    alone are in MXFP4, with random codes, as gpt-oss is published. tables_on_host: the tables of embeddings are numpy
    arrays, as loading for a run with an adapter leaves them. on_host: all arrays are (for `in_one_piece`), so that the
    device never has more than a layer, or the embedding and the head. folder: of the processor's file; hf is then the
    config.json around a text's, and the model has its tower.

    One layer at a time is made and, where asked, encoded and divided over a mesh: its 16-bit weights are gone before
    the next one's exist. So a model fits whose 16-bit weights do not, and one that no device can hold alone. Embedding
    and head come last, and never exist in float32: the memory that they then take is what layers were made in.

    The initial weights are smaller than the config's where the model is wide: else the logits' variance alone puts the
    first loss more than 1 over ln V, and a record of it would be refused.
    """
    outer, hf = dict(hf), text_config(dict(hf))
    config = config_from_hf(hf)
    config = dataclasses.replace(config, initializer_range=min(config.initializer_range, config.hidden_size**-0.5))
    keys = jax.random.split(key, config.num_layers + 2)[2:]  # Decoder's own: the weights are those of model_from_config
    with jax.enable_x64(False):
        model = nnx.eval_shape(
            lambda: Decoder(dataclasses.replace(config, layers=config.layers[:1]), jax.random.key(0), "bfloat16")
        )
    model.layers = nnx.List([])
    model.norm = norm_of(config, config.hidden_size, "bfloat16")
    if config.per_layer_size is not None:  # of all layers, and not of the one that the decoder was made with
        model.per_layer = per_layer_inputs(config, jax.random.fold_in(key, 0), tables_on_host)
    if load_in:
        model = freeze(model)

    def placed(module):
        """The graph and the state of a module, on the mesh or the host."""
        graph, state = nnx.split(module)
        if on_host:
            return graph, jax.device_get(state)
        return graph, state if mesh is None else jax.device_put(state, partition.shardings(state, mesh))

    def encode(model):
        """The model, whose layer is encoded."""
        if load_in == "mxfp4":
            return experts_in_mxfp4(model)
        return quantize(model, load_in) if load_in else model

    layers = []
    for spec, layer_key in zip(config.layers, keys, strict=True):
        model.config = dataclasses.replace(config, layers=(spec,))
        model.layers = nnx.List([Block(config, spec, layer_key, "bfloat16")])
        jax.block_until_ready(nnx.state(model.layers))  # else the host runs ahead: what programs take piles up
        encoded = encode(model)
        layers.append(jax.block_until_ready(placed(encoded.layers[0])))
        model.layers, encoded = nnx.List([]), None
    model.config, outside = config, jax.random.split(key, config.num_layers + 2)[:2]
    for module, own in zip((model.embedding, model.head), outside, strict=True):
        if module is not None:
            with jax.enable_x64(False):
                module.weight.set_value(_drawn(own, module.weight.shape, config.initializer_range))
    if tables_on_host and model.head is not None:
        model.embedding.weight.set_value(np.asarray(model.embedding.weight.get_value()))
    model = nnx.merge(*placed(model))
    model.layers = nnx.List([nnx.merge(*layer) for layer in layers])
    if load_in and load_in != "mxfp4":
        model = quantize(model, load_in)  # what is outside of the layers
    model.source = Source(path="random weights", config=json.dumps(hf))
    if folder is not None:
        model.vision = tower_config(outer).make(jax.random.fold_in(key, 1), "bfloat16")
        around = passthrough.around_tower(outer, folder)
        model.source = dataclasses.replace(model.source, passthrough=around, nested=True)
    return model


@functools.partial(jax.jit, static_argnums=1)
def _drawn(key: jax.Array, shape: tuple[int, ...], std: float) -> jax.Array:
    """What Embedding and Linear draw for their weights, to the bit, without float32 numbers in memory."""
    return (jax.random.normal(key, shape, jnp.float32) * std).astype(jnp.bfloat16)


def in_one_piece(model: Decoder, tables_on_host: bool = False) -> Decoder:
    """The model with its arrays put on the device one after the other, but for the tables of embeddings with
    tables_on_host. Making them there left gaps between them, which loading does not leave, and a step's temporary
    memory, one block, needs what they hold. Arrays that are on the device already are deleted."""
    graph, state = nnx.split(model)
    leaves, structure = jax.tree.flatten(state)
    tables = host_table.tables_of(state, model.tables if tables_on_host else ())
    numbers = [np.asarray(leaf) for leaf in leaves]
    for leaf in leaves:
        if isinstance(leaf, jax.Array):
            leaf.delete()
    stay = {id(table) for table in tables.values()}
    placed = [leaf if id(leaf) in stay else jax.block_until_ready(jax.device_put(leaf)) for leaf in numbers]
    return nnx.merge(graph, jax.tree.unflatten(structure, placed))


def per_layer_inputs(config: DecoderConfig, key: jax.Array, table_on_host: bool) -> PerLayerInputs:
    """A model's per-layer embeddings, random, in bfloat16. With table_on_host they are drawn on the CPU, so that their
    table (5.6 GB of Gemma 4 E4B) never takes the device's memory."""
    if not table_on_host:
        return PerLayerInputs(config, key, "bfloat16")
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        made = PerLayerInputs(config, jax.device_put(key, jax.local_devices(backend="cpu")[0]), "bfloat16")
    graph, state = nnx.split(made)
    table = np.asarray(made.weight.get_value())
    made = nnx.merge(graph, jax.device_put(state, jax.local_devices()[0]))
    made.weight.set_value(table)
    return made


def experts_in_mxfp4(model: Decoder) -> Decoder:
    """The model with its experts in MXFP4, in the order of gpt-oss's files, with random codes and one scale: encoding
    the experts of gpt-oss-120b would take longer than a benchmark may. Their standard deviation is near 0.011."""
    model = copy_structure(model)
    for number, (_, matrix) in enumerate(matrices(model)):
        if isinstance(matrix, ExpertLinear):
            count, last, rows = matrix.weight.shape
            codes = jax.random.bits(jax.random.key(number), (count, rows, last // 2), "uint8")
            scales = jnp.full((count, rows, last // MXFP4.row_block), _SCALE, jnp.uint8)
            matrix.weight = frozen(matrix.weight.replace(MXFP4(codes, scales, swapped=True)))
    return model


def in_blocks(model: Decoder) -> Decoder:
    """The model with its linears and experts in FP8 with scales of 128 x 128, as official checkpoints are published."""
    model = copy_structure(model)
    for _, matrix in matrices(model):
        encoded = FP8.encode(dense(matrix.stored_weight, model.dtype), TILE)
        matrix.weight = frozen(matrix.weight.replace(encoded))
    return model
