"""The decoder, a plain nnx.Module: embedding, layers, final norm and head."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtune.models import initial
from jaxtune.models.config import DecoderConfig, Source
from jaxtune.models.layers.block import Block
from jaxtune.models.layers.per_layer import PER_LAYER, PerLayerInputs
from jaxtune.models.linear import Linear
from jaxtune.models.norm import norm_of
from jaxtune.models.placement import gathers, host_table, partition
from jaxtune.models.qat.fake_quant import FakeQuant
from jaxtune.models.rope import rotary_tables
from jaxtune.models.stack.residual_plan import RECOMPUTE, ResidualPlan
from jaxtune.models.stack.stack import run_in_parts
from jaxtune.models.vision.pictures import Pictures
from jaxtune.models.vision.tower import Tower, TowerConfig
from jaxtune.pallas import one_order
from jaxtune.pallas.attention import PackedLayout, packed_layout
from jaxtune.pallas.draws import uniform
from jaxtune.pallas.meshes import on_any_mesh

logger = logging.getLogger(__name__)


class Embedding(nnx.Module):
    """The token embedding's weight [vocab, hidden], which a tied head reads too.

    Attributes:
      original: the weight before training if it trains beside adapters (modules_to_save); else None.
      compute: the dtype's name in which a tied head computes logits; None: that of the hidden states.
    """

    original: nnx.Variable | None = None
    compute: str | None = None

    def __init__(self, config: DecoderConfig, key: jax.Array, dtype):
        shape = (config.vocab_size, config.hidden_size)
        self.weight: nnx.Variable = nnx.Param(
            initial.normal(key, shape, config.initializer_range, dtype),
            axes=("vocab", "hidden"),
        )


@jax.custom_vjp
def _rows(weight: jax.Array, tokens: jax.Array) -> jax.Array:
    """weight[tokens], with gradients of a token's occurrences summed in float32."""
    return weight[tokens]


def _rows_bwd(residuals, drows):
    weight, tokens = residuals
    total = jnp.zeros(weight.shape, jnp.float32).at[tokens].add(drows.astype(jnp.float32))
    return total.astype(weight.dtype), None


_rows.defvjp(lambda weight, tokens: (weight[tokens], (weight, tokens)), _rows_bwd)


def noised(x: jax.Array, layout: PackedLayout, key: jax.Array, alpha: float) -> jax.Array:
    """Adds NEFTune's noise (arXiv:2310.05914) to embeddings: uniform within +-alpha / sqrt(tokens of the document *
    hidden). It does not depend on packing, nor on how rows are divided over devices.

      x: [B, T, hidden], the embeddings.
      layout: has the bounds of each token's document.
      key: draws the noise; another one each step.
      alpha: the noise's strength, such as 5.
    """
    rows, length, hidden = x.shape
    tokens = jnp.maximum(layout.doc_end - layout.doc_start, 1).astype(jnp.float32)
    largest = alpha * jax.lax.rsqrt(tokens * hidden)[..., None]
    uniform_draws = uniform(key, (rows * length, hidden), partition.row_shard_index()).reshape(x.shape)
    return (x + largest * (2.0 * uniform_draws - 1.0)).astype(x.dtype)


def _on_any_mesh[**P, R](method: Callable[P, R]) -> Callable[P, R]:
    """Lets a Decoder method whose first argument is an array run on a mesh with axes of any type."""

    computed: Callable = method

    @on_any_mesh
    def run(array, model, *arguments, **options):
        return computed(model, array, *arguments, **options)

    @functools.wraps(method)
    def called(self, array, *arguments, **options):
        return run(array, self, *arguments, **options)

    return called


class Decoder(nnx.Module):
    """A causal language model, or with another head (config.head) a model that scores texts. Calling it computes logits
    or scores; training calls `run` and computes the loss from hidden states, because logits of all tokens need much
    memory.

    Weights start as `nnx.Param` (trained), except a layer's `layer_scalar`. They are cast to the compute dtype on use,
    so fp32 master weights of a bf16 compute need nothing else. On several devices, place tokens and weights on the
    mesh, or set it (jax.set_mesh).

      key: draws the initial weights: normal with config.initializer_range, norms one, biases zero.
      dtype: of weights and compute: bfloat16, float16 or float32.
      tower: of a model that reads pictures, too.

    Attributes:
      head: gives logits or scores; None if the embedding is the head (tied).
      per_layer: computes the per-layer embeddings (Gemma 4), or None.
    """

    # A frozen model that this one is trained to imitate (train/objectives/teachers.py); it is no part of this model's
    # outputs and files.
    teacher: Decoder | None = None
    # Makes features of pictures, which stand at picture tokens; None: the model reads text alone.
    vision: Tower | None = None

    def __init__(self, config: DecoderConfig, key: jax.Array, dtype="bfloat16", tower: TowerConfig | None = None):
        self.config = config
        self.dtype = jnp.dtype(dtype).name
        # Set by hf.py. base_digest covers config.json and every byte of the weights (64 hexadecimal digits); by it, a
        # run and an adapter refuse another base. base_fingerprint, which older versions recorded instead, covers a
        # sample of the weights.
        self.source: Source | None = None
        self.base_digest: str | None = None
        self.base_fingerprint: str | None = None
        # The grid to which QAT rounded the weights, in a model from convert_qat or merge_adapter; save_pretrained
        # writes it to config.json, and from_pretrained reads it.
        self.qat: FakeQuant | None = None
        # Without this the drawn weights would depend on jax_enable_x64, with which XLA may round a draw differently.
        with jax.enable_x64(False):
            keys = initial.split(key, config.num_layers + 2)
            self.embedding = Embedding(config, keys[0], dtype)
            blocks = [Block(config, spec, k, dtype) for spec, k in zip(config.layers, keys[2:], strict=True)]
            self.layers = nnx.List(blocks)
            self.norm = norm_of(config, config.hidden_size, dtype)
            per_layer = None if config.per_layer_size is None else PerLayerInputs(config, initial.folded(key, 0), dtype)
            self.per_layer = per_layer
            size, std = (config.hidden_size, config.head.outputs or config.vocab_size), config.initializer_range
            tied = config.tie_embeddings
            self.head = None if tied else Linear(*size, bias=False, std=std, key=keys[1], dtype=dtype)
            if tower is not None:
                self.vision = _new_tower(tower, key, dtype)

    @property
    def head_variable(self) -> nnx.Variable:
        """The head's weight [vocab or outputs, hidden], which is the embedding's if the head is tied."""
        return self.embedding.weight if self.head is None else self.head.weight

    def head_operands(self, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The factors of the logits: (the head's whole weight as stored, `hidden` in the dtype in which logits are
        computed). A loss multiplies them for a part of the vocabulary at a time.
        """
        head, hidden = gathers.gathered_after(self.head_variable, hidden)
        return head, hidden.astype(self.head_compute or hidden.dtype)

    @property
    def head_compute(self) -> str | None:
        """The dtype's name that a precision map gives the head's product; None: that of the hidden states."""
        return (self.embedding if self.head is None else self.head).compute

    @property
    def weight_dtype(self) -> jnp.dtype:
        """The dtype of weights that are neither quantised nor named by a precision map, read from the final norm, which
        is never trained whole beside adapters.
        """
        return jnp.dtype(self.dtype) if self.norm.compute else self.norm.weight.get_value().dtype

    @property
    def name_or_path(self) -> str | None:
        """The folder or hub name of the weights as the caller named it; for random weights the config's path, "a
        config", or None.
        """
        return None if self.source is None else self.source.path

    @property
    def tables(self) -> dict[str, nnx.Variable]:
        """{"embedding", "per_layer": weight [vocabulary, size]} of the tables of which a pass reads only its tokens'
        rows; a run may have them on the host.
        """
        tables = {} if self.head is None else {"embedding": self.embedding.weight}
        return tables if self.per_layer is None else {**tables, "per_layer": self.per_layer.weight}

    @property
    def needs_rows(self) -> bool:
        """Whether one of `tables` is on the host, so that `run` must get the rows of its tokens."""
        return any(map(host_table.has_no_rows, self.tables.values()))

    def embed(self, tokens: jax.Array, rows: jax.Array | None = None) -> jax.Array:
        """tokens int32[B, T] -> embeddings [B, T, hidden] in the compute dtype, times config.embedding_scale.

        rows: [B, T, hidden], the tokens' rows; ValueError if they are missing for an embedding on the host.
        """
        with jax.named_scope("embed"):
            # Ids outside the vocabulary are refused where data is prepared; XLA would clamp them without an error.
            x = host_table.rows_of("embedding", self.embedding.weight, tokens, _rows, rows).astype(self.dtype)
            if self.config.embedding_scale != 1.0:
                x = x * jnp.asarray(self.config.embedding_scale, x.dtype)
            return x

    @_on_any_mesh
    def picture_features(self, pictures: Pictures, dropout_key: jax.Array | None = None) -> tuple[jax.Array, ...]:
        """The tower's features, each [B, P / merge^2, hidden]. The residuals of a tower that trains are recomputed; a
        frozen one has no backward.

        dropout_key: draws the adapters' dropout masks; None: no dropout.

        Raises ValueError for a model without a tower.
        """
        if self.vision is None:
            raise ValueError("pictures: this model was loaded without its tower; load it with pictures=True")
        patches = self.vision.inputs(pictures.patches, self.dtype)
        pictures = dataclasses.replace(pictures, patches=patches)
        with jax.named_scope("pictures"):
            if self.vision.trains:
                plan = ResidualPlan.uniform(RECOMPUTE, len(self.vision.layers))
                return self.vision(pictures, plan, dropout_key)
            return jax.lax.stop_gradient(self.vision(pictures))

    def with_pictures(
        self,
        x: jax.Array,
        pictures: Pictures,
        dropout_key: jax.Array | None = None,
        features: tuple[jax.Array, ...] | None = None,
    ) -> tuple[jax.Array, list[jax.Array]]:
        """(x [B, T, hidden], the embeddings, with the pictures' features at their tokens; what is added to the stream
        after each of the first layers, [B, T, hidden]).

        features: of `picture_features`; None: they are made here.
        """
        if features is None:
            features = self.picture_features(pictures, dropout_key)
        with jax.named_scope("pictures"):
            index = jnp.asarray(pictures.picture_features)[..., None]

            def put(x: jax.Array, features: jax.Array) -> jax.Array:
                at_tokens = jnp.take_along_axis(features, jnp.maximum(index, 0), axis=1)
                return jnp.where(index >= 0, at_tokens.astype(x.dtype), x)

            first, *deep = features
            return put(x, first), [put(jnp.zeros_like(x), feature) for feature in deep]

    def picture_layout(self, layout: PackedLayout, pictures: Pictures | None) -> PackedLayout:
        """The layout with runs of the tokens of each picture, if they see each other."""
        if pictures is None or self.vision is None or self.vision.config.both_ways is None:
            return layout
        with jax.named_scope("layout"):
            inside = jnp.asarray(pictures.picture_features) >= 0
            return layout.with_runs(inside, windows_only=self.vision.config.both_ways == "windows")

    def per_layer_inputs(
        self,
        tokens: jax.Array,
        x: jax.Array,
        dropout_key: jax.Array | None = None,
        per_layer_rows: jax.Array | None = None,
        pictures: Pictures | None = None,
    ) -> list[dict[str, jax.Array]] | None:
        """The per-layer embeddings (Gemma 4), {name: [B, T, size]} for each layer; None for models without.

        tokens: int32[B, T].
        x: [B, T, hidden], the first layer's input, from which they are computed too.
        dropout_key: draws the adapter's dropout mask; None: no dropout.
        per_layer_rows: [B, T, layers * size], the tokens' rows; ValueError if they are missing for a table on the host.
        pictures: of the rows; None: text alone.
        """
        if self.per_layer is None:
            return None
        placed = None
        if pictures is not None and self.vision is not None and self.vision.config.placeholder is not None:
            placed = jnp.asarray(pictures.picture_features) >= 0
            tokens = jnp.where(placed, self.vision.config.placeholder, tokens)
        with jax.named_scope("embed"):
            by_layer = self.per_layer(tokens, x, _rows, dropout_key, per_layer_rows, placed)
            return [{PER_LAYER: value} for value in by_layer]

    def layout(
        self,
        shape: tuple[int, int],
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        max_documents: int | None = None,
    ) -> PackedLayout:
        """Document boundaries and rotary tables of a batch, for all layers.

        shape: (rows, length).
        segment_ids: int32[B, T], the document of each token in a packed row; 0 is padding. None: one document a row.
        positions: int32[B, T], or int32[B, T, axes] (RopeConfig.sections); None: they restart with each document. If
          given, a document's length is its last token's position + 1 (longrope).
        max_documents: an upper bound on the documents of a row, for faster attention; None: unknown.
        """
        with jax.named_scope("layout"):
            layout = packed_layout(shape, segment_ids, max_documents)
            if positions is None:
                positions, lengths = layout.positions(), layout.doc_end - layout.doc_start
            else:  # a document's length is its last token's position + 1
                last = jnp.maximum(layout.doc_end - 1, 0)
                index = positions if positions.ndim == 2 else positions.max(-1)
                lengths = jnp.take_along_axis(jnp.broadcast_to(index, shape), last, axis=1) + 1
            tables = rotary_tables(self.config, positions, lengths)
            return dataclasses.replace(layout, rotary=tables)

    @_on_any_mesh
    def run(
        self,
        tokens: jax.Array,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        *,
        max_documents: int | None = None,
        plan: ResidualPlan | None = None,
        dropout_key: jax.Array | None = None,
        gradient_sums: Any = None,
        aux: tuple[str, ...] = (),
        noise: tuple[jax.Array, float] | None = None,
        table_rows: Mapping[str, jax.Array] | None = None,
        pictures: Pictures | None = None,
        features: tuple[jax.Array, ...] | None = None,
    ) -> tuple[jax.Array, dict[str, Any]]:
        """Runs the model without its head: (hidden states [B, T, hidden] after the final norm, in the compute dtype;
        {name: sum over the layers} of the values that `aux` names).

          tokens: int32[B, T].
          segment_ids: int32[B, T], the document of each token in a packed row; 0 is padding. None: one document a row.
          positions: int32[B, T], or int32[B, T, axes] of a family with several, each token's position; None: they
            restart with each document.
          max_documents: an upper bound on the documents of a row, for faster attention; None: unknown.
          plan: where each layer's residuals are until the backward; None: all stay in device memory.
          dropout_key: draws the adapters' dropout masks; None: no dropout.
          gradient_sums: {layer's index: state like that of its `nnx.Param`s}, to which the backward adds gradients; its
            cotangent is the new sums, and these `nnx.Param`s get none. None: gradients are returned as usual.
          aux: names of values that layers compute beside their outputs, such as "router_sums".
          noise: (key, alpha) of NEFTune's noise on the embeddings; None: no noise.
          table_rows: {name in `tables`: the tokens' rows [B, T, size]} of tables on the host; None: no table is there.
          pictures: of the rows; None: text alone.
          features: of the pictures, as `picture_features` makes them; None: they are made here.

        Raises ValueError for a plan that does not fit, an unknown name in `aux`, or missing rows.
        """
        if len(self.layers) != len(self.config.layers):
            raise ValueError(
                f"the model has {len(self.layers)} layers, and its config {len(self.config.layers)}: with a layer more "
                "or less, set model.config = dataclasses.replace(model.config, layers=...), one entry for each layer"
            )
        rows, length = tokens.shape
        layout = self.layout((rows, length), segment_ids, positions, max_documents)
        layout = self.picture_layout(layout, pictures)
        table_rows = table_rows or {}
        x = self.embed(tokens, table_rows.get("embedding"))
        if noise is not None:
            with jax.named_scope("embed"):
                x = noised(x, layout, *noise)
        deep = []
        if pictures is not None:
            tower_key = None if dropout_key is None else jax.random.fold_in(dropout_key, self.config.num_layers + 1)
            x, deep = self.with_pictures(x, pictures, tower_key, features)
        projection_key = None if dropout_key is None else jax.random.fold_in(dropout_key, self.config.num_layers)
        layer_inputs = self.per_layer_inputs(tokens, x, projection_key, table_rows.get("per_layer"), pictures)
        sections = range(1, len(deep) + 1), lambda x, index: x + deep[index], self.layers, self.config.layers
        x, values = run_in_parts(*sections, x, layout, plan, dropout_key, gradient_sums, aux, layer_inputs)
        with jax.named_scope("final_norm"):
            return self.norm(x), values

    def hidden_states(
        self,
        tokens: jax.Array,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        *,
        max_documents: int | None = None,
        plan: ResidualPlan | None = None,
        dropout_key: jax.Array | None = None,
        pictures: Pictures | None = None,
    ) -> jax.Array:
        """The hidden states [B, T, hidden] after the final norm, in the compute dtype.

        tokens: int32[B, T].
        segment_ids: int32[B, T], the document of each token in a packed row; 0 is padding. None: one document a row.
        positions: int32[B, T], each token's position; None: they restart with each document.
        max_documents: an upper bound on the documents of a row; None: unknown.
        plan: where each layer's residuals are until the backward; None: all stay in device memory.
        dropout_key: draws the adapters' dropout masks; None: no dropout.
        pictures: of the rows; None: text alone.
        """
        return self.run(
            tokens,
            segment_ids,
            positions,
            max_documents=max_documents,
            plan=plan,
            dropout_key=dropout_key,
            pictures=pictures,
        )[0]

    @_on_any_mesh
    def logits(self, hidden: jax.Array, rows: jax.Array | None = None) -> jax.Array:
        """Hidden states [..., hidden] -> logits float32[..., vocab], scaled and soft-capped by the config; another head
        gives float32[..., Head.outputs], neither scaled nor capped.

          rows: int32[n], the rows of the head for which logits are computed; None: all.
        """
        head, hidden = self.head_operands(hidden)
        precision = jax.lax.Precision.HIGHEST if hidden.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
        head = (head if rows is None else head[rows]).astype(hidden.dtype)
        if one_order.is_exact():
            logits = one_order.product(hidden, head)
        else:
            logits = jnp.einsum("...d,vd->...v", hidden, head, preferred_element_type=jnp.float32, precision=precision)
        if not self.config.head.is_text:
            return logits
        if self.config.logit_scale != 1.0:
            logits = logits * self.config.logit_scale
        cap = self.config.final_soft_cap
        return logits if cap is None else cap * one_order.tanh(logits / cap)

    def __call__(
        self,
        tokens: jax.Array,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        pictures: Pictures | None = None,
    ) -> jax.Array:
        """tokens int32[B, T] -> logits float32[B, T, vocab], or scores float32[B, T, 1]; the rest as for `run`."""
        return self.logits(self.hidden_states(tokens, segment_ids, positions, pictures=pictures))


def abstract_decoder(config: DecoderConfig, dtype, tower: TowerConfig | None = None) -> Decoder:
    """A new Decoder of shapes; the last two are kept."""
    graph, state = _abstract(config, jnp.dtype(dtype).name, tower)
    return nnx.merge(graph, jax.tree.map(lambda shape: shape, state))  # with variables of its own


@functools.lru_cache(2)
def _abstract(config: DecoderConfig, dtype: str, tower: TowerConfig | None) -> tuple[nnx.GraphDef, nnx.State]:
    try:
        with initial.as_shapes():
            graph, state = nnx.split(Decoder(config, initial.NO_KEY, dtype, tower))
    except TypeError as error:  # a family's own module, which draws its weights by itself
        logger.debug("a model's shapes are traced: %s", error)
        return nnx.split(nnx.eval_shape(lambda: Decoder(config, jax.random.key(0), dtype, tower)))
    return graph, jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)


def _new_tower(tower: TowerConfig, key: jax.Array, dtype) -> Tower:
    if not initial.makes_shapes():
        return tower.make(jax.random.fold_in(key, 1), dtype)
    with initial.as_shapes(False):
        return nnx.eval_shape(lambda: tower.make(jax.random.key(0), dtype))
