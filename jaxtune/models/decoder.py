"""The decoder, a plain nnx.Module: embedding, layers, final norm and head. `Decoder` is what loading returns, and what
training, generation and saving take; layers themselves are in models/layers, and models/stack.py runs them. `Embedding`
has the token embedding's weight, of which `_rows` looks up rows, `noised` adds NEFTune's noise to embeddings in
training, and `_on_any_mesh` lets Decoder's methods run on a mesh of several devices."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtune.models.config import DecoderConfig, Source
from jaxtune.models.fake_quant import FakeQuant
from jaxtune.models.layers.block import Block
from jaxtune.models.layers.per_layer import PER_LAYER, PerLayerInputs
from jaxtune.models.linear import Linear
from jaxtune.models.norm import norm_of
from jaxtune.models.placement import gathers, host_table, partition
from jaxtune.models.residual_plan import ResidualPlan
from jaxtune.models.rope import rotary_tables
from jaxtune.models.stack import run_stack
from jaxtune.pallas.attention import PackedLayout, packed_layout
from jaxtune.pallas.draws import uniform
from jaxtune.pallas.meshes import on_any_mesh


class Embedding(nnx.Module):
    """The token embedding: weight [vocab, hidden], which Decoder.embed reads, and a tied head too. It holds the weight
    and computes nothing itself.

    Args:
      config: of the decoder; gives the sizes and the range of initial weights.
      key: draws the initial weight.
      dtype: of the weight.

    Attributes:
      original: the weight before training if the embedding is trained beside adapters (modules_to_save), which
        without_adapter puts back; else None.
      compute: the dtype's name in which a tied head computes logits, where a precision map names one
        (models/precision.py); None: that of the hidden states.
    """

    original: nnx.Variable | None = None
    compute: str | None = None

    def __init__(self, config: DecoderConfig, key: jax.Array, dtype):
        shape = (config.vocab_size, config.hidden_size)
        self.weight: nnx.Variable = nnx.Param(
            (jax.random.normal(key, shape, jnp.float32) * config.initializer_range).astype(dtype),
            axes=("vocab", "hidden"),
        )


@jax.custom_vjp
def _rows(weight: jax.Array, tokens: jax.Array) -> jax.Array:
    """Looks up the rows weight[tokens] of an embedding: [B, T, hidden] in the weight's dtype for weight [vocab, hidden]
    and tokens int32[B, T]. In the backward, the gradients of a token's occurrences are added up in float32; the
    gradient of plain indexing would be added up in the weight's dtype, and in bfloat16 small gradients would be lost.
    Decoder.embed and the per-layer embeddings look up their rows by it."""
    return weight[tokens]


def _rows_bwd(residuals, drows):
    """The backward rule of `_rows`: (the gradient of weight, summed in float32 and then cast to weight's dtype; None
    for tokens). residuals: (weight, tokens) of the forward. drows: [B, T, hidden], the gradient of the rows that were
    looked up."""
    weight, tokens = residuals
    total = jnp.zeros(weight.shape, jnp.float32).at[tokens].add(drows.astype(jnp.float32))
    return total.astype(weight.dtype), None


_rows.defvjp(lambda weight, tokens: (weight[tokens], (weight, tokens)), _rows_bwd)


def noised(x: jax.Array, layout: PackedLayout, key: jax.Array, alpha: float) -> jax.Array:
    """Adds to each number of x [B, T, hidden], the embeddings, its own uniform noise of at most alpha / sqrt(tokens of
    the document * hidden), plus or minus; the result has x's dtype. Training does so as regularisation (NEFTune,
    arXiv:2310.05914).

    How large the noise can be does not depend on how documents are packed. The numbers drawn do not depend on how rows
    are divided over devices.

    Args:
      layout: the document boundaries of the batch, which give the length of each token's document.
      key: draws the noise.
      alpha: the strength of the noise, NEFTune's alpha.
    """
    rows, length, hidden = x.shape
    tokens = jnp.maximum(layout.doc_end - layout.doc_start, 1).astype(jnp.float32)
    largest = alpha * jax.lax.rsqrt(tokens * hidden)[..., None]
    drawn = uniform(key, (rows * length, hidden), partition.part_of_rows()).reshape(x.shape)
    return (x + largest * (2.0 * drawn - 1.0)).astype(x.dtype)


def _on_any_mesh[**P, R](method: Callable[P, R]) -> Callable[P, R]:
    """A decorator for a method of Decoder whose first argument after `self` is an array. It lets the method run with
    arrays on a mesh of several devices with axes of any type (pallas/meshes.py). If the mesh has Explicit axes, the
    leading axes of each result are divided as those of that first argument, up to the first axis in which their sizes
    differ, and the others are not divided; on other meshes XLA decides.

    meshes.on_any_mesh does this for functions, and goes by the first array among all arguments. For a method that would
    be one of the weights in `self`, so this decorator moves the array before `self`."""

    computed: Callable = method

    @on_any_mesh
    def run(array, model, *arguments, **options):
        """The method with its array before the model, because on_any_mesh goes by the first array."""
        return computed(model, array, *arguments, **options)

    @functools.wraps(method)
    def called(self, array, *arguments, **options):
        """The decorated method, with `self` first."""
        return run(array, self, *arguments, **options)

    return called


class Decoder(nnx.Module):
    """A causal language model, or with another head (config.head) a model that scores texts. Calling it computes logits
    or scores; training calls `run` and computes the loss from the hidden states, because the logits of all tokens would
    need much memory. `embed`, `given` and `layout` make what a pass through the layers needs; generation, which runs
    the layers itself, calls the first two.

    Every weight starts as an `nnx.Param` (trainable), except a layer's `layer_scalar`, which is `Frozen`;
    get_peft_model turns the base's weights into `Frozen`. Weights are cast to the compute dtype on use, so fp32 master
    weights of a bf16 compute need nothing else.

    On a mesh of several devices with axes of any type, a model whose weights are not divided runs as the operations do
    (pallas/meshes.py): place the tokens' rows and the weights on the mesh, or set the mesh (jax.set_mesh).

    Args:
      config: shape and features.
      key: draws the initial weights, which are normal with config.initializer_range (norms one, biases zero).
      dtype: of weights and compute: bfloat16, float16 or float32.
    Attributes:
      embedding, layers, norm: the Embedding, the list of Blocks, and the final norm.
      head: the Linear that gives logits or scores; None if the embedding is the head (tied).
      per_layer: computes the per-layer embeddings (Gemma 4); None for other models.
      source, base_digest, base_fingerprint: where the weights came from, and digests of them (64 hexadecimal digits of
        config.json and all bytes, by which runs and adapters refuse another base; or of a sample). Loading sets them,
        and model_from_config the first two; else None.
      qat: the grid to which quantisation-aware training rounded the weights; None: they are on none. (While a
        model trains so, its matrices round when they compute: Linear.fake_quant.)
    """

    # A frozen model that this one is trained to imitate (train/objectives/teachers.py); it is no part of this model's
    # outputs and files.
    teacher: Decoder | None = None

    def __init__(self, config: DecoderConfig, key: jax.Array, dtype="bfloat16"):
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
            keys = jax.random.split(key, config.num_layers + 2)
            self.embedding = Embedding(config, keys[0], dtype)
            blocks = [Block(config, spec, k, dtype) for spec, k in zip(config.layers, keys[2:], strict=True)]
            self.layers = nnx.List(blocks)
            self.norm = norm_of(config, config.hidden_size, dtype)
            own = None if config.per_layer_size is None else PerLayerInputs(config, jax.random.fold_in(key, 0), dtype)
            self.per_layer = own
            size, std = (config.hidden_size, config.head.outputs or config.vocab_size), config.initializer_range
            tied = config.tie_embeddings
            self.head = None if tied else Linear(*size, bias=False, std=std, key=keys[1], dtype=dtype)

    @property
    def head_variable(self) -> nnx.Variable:
        """The variable with the head's weight, which is the embedding's if the head is tied: [vocab, hidden] of a
        language model, [outputs, hidden] of another head. It is an nnx.Param if the head is trained. The loss, adapters
        and the planner read it without knowing whether the head is tied."""
        return self.embedding.weight if self.head is None else self.head.weight

    def head_operands(self, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The two factors of the logits, which the loss multiplies itself, a part of the vocabulary at a time.
        `logits`, by which generation chooses tokens, calls it too, and so does training_logprobs (generate.py). They
        are: (the head's whole weight, [vocab, hidden] or of another head [outputs, hidden], as it is stored, gathered
        if it is divided over devices; the argument `hidden`, the hidden states [..., hidden], cast to the dtype in
        which the logits are computed). That is the hidden states' own dtype, or the one that a precision map gives the
        head (models/precision.py)."""
        head, hidden = gathers.whole_beside(self.head_variable, hidden)
        return head, hidden.astype(self.head_compute or hidden.dtype)

    @property
    def head_compute(self) -> str | None:
        """The name of the dtype that a precision map gives the head for its product; None: the dtype of the hidden
        states, which is the model's. head_operands and generation compute by it, and the planner counts with it."""
        return (self.embedding if self.head is None else self.head).compute

    @property
    def weight_dtype(self) -> jnp.dtype:
        """The dtype of the weights that are not quantised and that no precision map names: that of the final norm's
        weight, which is never trained whole beside adapters; or the model's dtype, if a precision map gives that norm
        another one. A new head (models/reward.py) gets it, and the bound on the error of a merged model's logits
        follows from it. A trained embedding or head that is merged gets the dtype of the weight that it replaces."""
        return jnp.dtype(self.dtype) if self.norm.compute else self.norm.weight.get_value().dtype

    @property
    def name_or_path(self) -> str | None:
        """The folder or hub name that the weights were loaded from, as the caller named it; for random weights of
        model_from_config the config's path, or "a config" if it was given as a mapping; None if the Decoder was made
        directly. The report of a run that distils, and the config that the compat package makes for one, name the
        teacher by it."""
        return None if self.source is None else self.source.path

    @property
    def tables(self) -> dict[str, nnx.Variable]:
        """{"embedding", "per_layer": weight [vocabulary, size]} of the tables of which a pass reads the rows of its
        tokens and nothing else: the token embedding, unless the head is tied to it, and the table of per-layer
        embeddings, if there is one. A run may have them on the host (placement/host_table.py)."""
        found = {} if self.head is None else {"embedding": self.embedding.weight}
        return found if self.per_layer is None else {**found, "per_layer": self.per_layer.weight}

    @property
    def needs_rows(self) -> bool:
        """Whether any of `tables` has no rows, because a run has it on the host, so that `run` must be given the rows
        of its tokens. A run asks it before each forward pass, and passes the batch's rows only then."""
        return any(map(host_table.has_no_rows, self.tables.values()))

    def embed(self, tokens: jax.Array, rows: jax.Array | None = None) -> jax.Array:
        """tokens int32[B, T] -> their embeddings [B, T, hidden] in the compute dtype (`dtype`), multiplied by
        config.embedding_scale. `run` and generation call it. Ids outside the vocabulary raise no error here; they are
        refused where data is prepared. rows: [B, T, hidden], the tokens' rows of the embedding's weight, for a model
        whose embedding is on the host; None: they are looked up, and ValueError is raised if it is there."""
        with jax.named_scope("embed"):
            # Ids outside the vocabulary are refused where data is prepared; XLA would clamp them without an error.
            x = host_table.rows_of("embedding", self.embedding.weight, tokens, _rows, rows).astype(self.dtype)
            if self.config.embedding_scale != 1.0:
                x = x * jnp.asarray(self.config.embedding_scale, x.dtype)
            return x

    def given(
        self,
        tokens: jax.Array,
        x: jax.Array,
        dropout_key: jax.Array | None = None,
        per_layer_rows: jax.Array | None = None,
    ) -> list[dict[str, jax.Array]] | None:
        """Computes the inputs that the layers get in addition to the residual stream: the embeddings that each layer
        has of its own (per-layer embeddings, Gemma 4). Returns one {name of the input: [B, T, size]} for each layer, or
        None for a model without such embeddings. `run` passes them to run_stack (its argument `given`), and generation
        to the layers that it runs itself.

        Args:
          tokens: int32[B, T].
          x: [B, T, hidden], the input of the first layer, from which these embeddings are computed too.
          dropout_key: the key of the dropout mask of the adapter on the projection of x; None: no dropout.
          per_layer_rows: [B, T, layers * size], the tokens' rows of the table of these embeddings, for a model whose
            table is on the host; None: they are looked up in the model's table.
        Raises:
          ValueError: the table is on the host, and per_layer_rows is None.
        """
        if self.per_layer is None:
            return None
        with jax.named_scope("embed"):
            return [{PER_LAYER: value} for value in self.per_layer(tokens, x, _rows, dropout_key, per_layer_rows)]

    def layout(
        self,
        shape: tuple[int, int],
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        max_documents: int | None = None,
    ) -> PackedLayout:
        """Computes what all layers need of a batch beside its values, once for all of them: a PackedLayout with the
        document boundaries and the rotary tables. `run` calls it, in training and in forward passes over whole texts;
        generation makes layouts of its own, for prompts too.

        Args:
          shape: (rows, length) of the batch.
          segment_ids: int32[B, T], the document of each token in a packed row; 0 is padding. None: one document per
            row.
          positions: int32[B, T]; None: they restart with each document. If they are given, a document is taken to be as
            long as its last token's position + 1, which decides its factors in longrope.
          max_documents: an upper bound on the documents of a row, which allows faster attention; None: not known.
        """
        with jax.named_scope("layout"):
            layout = packed_layout(shape, segment_ids, max_documents)
            if positions is None:
                positions, lengths = layout.positions(), layout.doc_end - layout.doc_start
            else:  # a document's length is its last token's position + 1
                last = jnp.maximum(layout.doc_end - 1, 0)
                lengths = jnp.take_along_axis(jnp.broadcast_to(positions, shape), last, axis=1) + 1
            tables = rotary_tables(self.config, positions, lengths)
            return PackedLayout(layout.doc_start, layout.doc_end, tables, layout.max_documents, layout.full)

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
    ) -> tuple[jax.Array, dict[str, Any]]:
        """Runs the model without its head: tokens int32[B, T] -> (hidden states, auxiliary values). Training calls it,
        and computes the loss from the hidden states.

        Args:
          segment_ids: int32[B, T], the document of each token in a packed row; 0 is padding. None: one document per
            row.
          positions: int32[B, T]; by default they restart with each document.
          max_documents: an upper bound on the documents of a row, which allows faster attention; see PackedLayout.
          plan: the placement of each layer's residuals; everything is kept by default.
          dropout_key: draws the adapters' dropout masks in training; None: no dropout.
          gradient_sums: {layer's index: sums, an nnx.State like that of the layer's nnx.Params}, to which the layers'
            gradients are added during the backward, so that no second set of them exists; see run_stack. None:
            gradients are returned as usual.
          aux: names of values that layers compute beside their outputs and that are returned too, such as
            "router_sums", the sums for the experts' load-balancing loss.
          noise: (key, alpha) of NEFTune's noise on the embeddings in training (noised); None: no noise.
          table_rows: {name in `tables`: [B, T, size], the tokens' rows} of the tables that a run has on the host; None:
            all rows are looked up in the model's tables.

        Returns:
          ([B, T, hidden] after the final norm, in the compute dtype; {name: sum over the layers} of the values `aux`
            names)

        Raises:
          ValueError: a plan that does not fit the layers or the rows, or a name in `aux` that no layer has (run_stack);
            a table on the host of which table_rows has no rows.
        """
        if len(self.layers) != len(self.config.layers):
            raise ValueError(
                f"the model has {len(self.layers)} layers, and its config {len(self.config.layers)}: with a layer more "
                "or less, set model.config = dataclasses.replace(model.config, layers=...), one entry for each layer"
            )
        rows, length = tokens.shape
        layout = self.layout((rows, length), segment_ids, positions, max_documents)
        table_rows = table_rows or {}
        x = self.embed(tokens, table_rows.get("embedding"))
        if noise is not None:
            with jax.named_scope("embed"):
                x = noised(x, layout, *noise)
        own_key = None if dropout_key is None else jax.random.fold_in(dropout_key, self.config.num_layers)
        given = self.given(tokens, x, own_key, table_rows.get("per_layer"))
        layers = self.layers, self.config.layers
        x, values = run_stack(*layers, x, layout, plan, dropout_key, gradient_sums, aux, given)
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
    ) -> jax.Array:
        """The hidden states [B, T, hidden] after the final norm, in the compute dtype. The arguments are those of
        `run`."""
        return self.run(
            tokens, segment_ids, positions, max_documents=max_documents, plan=plan, dropout_key=dropout_key
        )[0]

    @_on_any_mesh
    def logits(self, hidden: jax.Array, rows: jax.Array | None = None) -> jax.Array:
        """Hidden states [..., hidden] -> logits float32[..., vocab], scaled and soft-capped where the config says so.
        The product is computed in the hidden states' dtype, or in the one that a precision map gives the head. Decoding
        steps, lm-eval's scores and reward models use it; the losses of language models compute logits themselves
        (head_operands).

        Another head gives float32[..., Head.outputs], which is [..., 1] of a score head, the only other one so far. Its
        values are neither scaled nor capped, as in transformers. rows: int32[n], the rows of the head, tokens of
        the vocabulary, for which logits are computed, so that fewer are in memory at a time; None: all of them."""
        head, hidden = self.head_operands(hidden)
        precision = jax.lax.Precision.HIGHEST if hidden.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
        head = (head if rows is None else head[rows]).astype(hidden.dtype)
        logits = jnp.einsum("...d,vd->...v", hidden, head, preferred_element_type=jnp.float32, precision=precision)
        if not self.config.head.is_text:
            return logits
        if self.config.logit_scale != 1.0:
            logits = logits * self.config.logit_scale
        cap = self.config.final_soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def __call__(
        self, tokens: jax.Array, segment_ids: jax.Array | None = None, positions: jax.Array | None = None
    ) -> jax.Array:
        """tokens int32[B, T] -> logits float32[B, T, vocab], or the scores float32[B, T, 1] of a head that scores
        texts.

        Args:
          segment_ids: int32[B, T], the document of each token in a packed row; 0 is padding. None: one document per
            row.
          positions: int32[B, T]; None: they restart with each document.
        """
        return self.logits(self.hidden_states(tokens, segment_ids, positions))
