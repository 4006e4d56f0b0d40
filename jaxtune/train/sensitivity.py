"""Which matrices of a model suffer most from a format, measured on rows, and the precision map that this gives for a
given memory. It is the work of `jaxtune sensitivity`, which calls all public functions here.

A matrix's loss is the mean divergence KL(model || model with this matrix alone quantised) of the next-token
distributions, in nats, over the rows' trained tokens. `Sensitivity.measure` finds it for every `Matrix` with a forward
pass each, `choose` keeps those in the model's dtype that lose most for each byte that quantising them saves, and
`Sensitivity.divergence` measures what a choice loses as a whole, because losses of single matrices need not add up.
`model_and_batches` loads the model and the rows, and `patterns` and `as_recipe` write the choice as a recipe.
`_quantizable` lists the matrices; `_hidden`, `_rounded` and `_divergence` are the compiled steps of a measurement."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from flax import nnx

from jaxtune.models.components import components
from jaxtune.models.decoder import Decoder
from jaxtune.models.layers.expert_linear import ExpertLinear
from jaxtune.models.linear import Linear
from jaxtune.models.lora import copy_structure
from jaxtune.models.precision import Component
from jaxtune.pallas.formats import FORMATS, Stored, dense
from jaxtune.pallas.linear_cross_entropy import linear_divergence
from jaxtune.train.config import TrainConfig
from jaxtune.train.config.objective import ObjectiveConfig
from jaxtune.train.data.batches import Batch
from jaxtune.train.data.dataset import TokenDataset
from jaxtune.train.folder.run_rows import Reader, run_rows
from jaxtune.train.loading import load_model
from jaxtune.train.objectives.sft import SFT

_BATCH_TOKENS = 8192  # of a forward pass


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A matrix (or a layer's stack of experts' matrices) that can be quantised, and what quantising it costs and saves,
    as `Sensitivity.measure` finds it; `jaxtune sensitivity` prints the worst, and `choose` weighs all of them."""

    name: str
    """The name of its module in checkpoints, such as "model.layers.0.mlp.down_proj"."""
    loss: float
    """The mean divergence if it alone is quantised, in nats a token."""
    plain_bytes: int
    """Its bytes in the model's dtype."""
    packed_bytes: int
    """Its bytes in the format, scales included."""

    @property
    def saved_bytes(self) -> int:
        """The bytes that quantising it saves: plain_bytes minus packed_bytes. `choose` divides the loss by them, and
        the command sums them."""
        return self.plain_bytes - self.packed_bytes


@functools.partial(jax.jit, static_argnums=0)
def _hidden(graph: nnx.GraphDef, state: nnx.State, batch: Batch) -> jax.Array:
    """The hidden states [B, T, hidden] of the model nnx.merge(graph, state) for `batch`, by which `Sensitivity` keeps
    the unquantised model's predictions; compiled once for each shape of a batch."""
    return nnx.merge(graph, state).hidden_states(batch.tokens, batch.segment_ids, batch.positions)


@functools.partial(jax.jit, static_argnums=0)
def _divergence(graph: nnx.GraphDef, state: nnx.State, batch: Batch, expected: jax.Array) -> jax.Array:
    """float32[]: the sum of KL(expected || model) over the tokens of `batch`, each times its weight in the batch (0 if
    it is not trained on), in nats, for the model nnx.merge(graph, state). `Sensitivity.divergence` divides it by the
    sum of the weights. expected: the hidden states [B, T, hidden] of the unquantised model, which has the same head."""
    model = nnx.merge(graph, state)
    hidden = model.hidden_states(batch.tokens, batch.segment_ids, batch.positions)
    head, hidden = model.head_operands(hidden)
    scale, cap = model.config.logit_scale, model.config.final_soft_cap
    total, *_ = linear_divergence(
        hidden,
        head,
        expected.astype(hidden.dtype),
        head,
        batch.weights,
        beta=0.0,
        logit_scale=scale,
        soft_cap=cap,
        teacher_logit_scale=scale,
        teacher_soft_cap=cap,
        head_gradient=False,
    )
    return total


@functools.partial(jax.jit, static_argnums=1)
def _rounded(weight: jax.Array, format: str) -> jax.Array:
    """`weight` [..., out, in] as it is read again after it was stored in `format`, in its own dtype. By it
    `Sensitivity` computes with what the format loses, without storing the weights in the format."""
    return dense(FORMATS[format].encode(weight), weight.dtype)


class Sensitivity:
    """Measures what quantising matrices of one model changes on fixed rows, for `jaxtune sensitivity`. It keeps the
    hidden states of the unquantised model for all rows in host memory, with which the quantised ones are compared.

    Args:
      model: a language model with a head for text, all weights unquantised and on one device, without adapters.
      batches: the rows; at least one token has a weight.
      format: the format to measure, a value of model.load_in such as "nf4".

    Attributes:
      format, batches: the arguments.
      tokens: the number of trained tokens in the batches (the sum of their weights).
      weight_bytes: the bytes of all weights of the unquantised model.

    Raises:
      ValueError: the model has another head or quantised weights, or no matrix in its layers that can be quantised; no
        token of the batches has a weight.
    """

    def __init__(self, model: Decoder, batches: Sequence[Batch], format: str):
        if not model.config.head.is_text:
            raise ValueError("sensitivity: the model has no head for text, whose next-token distributions are compared")
        if any(isinstance(module.weight.get_value(), Stored) for *_, module in components(model)):
            raise ValueError(
                "sensitivity: the checkpoint stores quantised weights, which are compared with unquantised ones: "
                "name the model that it was made from"
            )
        self.format, self.batches = format, batches
        self.tokens = float(sum(np.asarray(batch.weights).sum() for batch in batches))
        if not self.tokens:
            raise ValueError("sensitivity: no token of these rows is trained on, so there is nothing to measure")
        self._model = model
        self._names = [each.name for each, *_ in _quantizable(model)]
        if not self._names:
            raise ValueError(f"sensitivity: the model has no matrix that can be stored in {format}")
        graph, state = nnx.split(model)
        self.weight_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        self._expected = [np.asarray(_hidden(graph, state, batch)) for batch in batches]

    @property
    def count(self) -> int:
        """The number of matrices that can be quantised, whatever the format, each of which `measure` measures: the
        length of the progress bar."""
        return len(self._names)

    def measure(self, done: Callable[[int], None] = lambda count: None) -> list[Matrix]:
        """Measures every matrix by a forward pass over all rows, with this matrix alone quantised; returns them in the
        model's order, for the command's table and for `choose`. done: called with 1 after each, to show progress."""
        found = []
        for each, module in _quantizable(self._model):
            weight = module.weight.get_value()
            packed = jax.eval_shape(FORMATS[self.format].encode, weight)
            size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(packed))
            found.append(Matrix(each.name, self.divergence([each.name]), weight.nbytes, size))
            done(1)
        return found

    def divergence(self, names: Sequence[str] | None = None) -> float:
        """The mean divergence, in nats a token, of the model with these modules (None: all that can be) quantised from
        the model itself, which stays as it is. `measure` calls it for single matrices, and the command for all, for a
        choice, and for [], when nothing is quantised, and the result is only what two programs of the same numbers
        differ by. names: of modules in checkpoints, as Matrix.name; others are ignored."""
        names = self._names if names is None else names
        model = copy_structure(self._model)
        for each, module in _quantizable(model):
            if each.name in names:
                module.weight = module.weight.replace(_rounded(module.weight.get_value(), self.format))
        graph, state = nnx.split(model)
        sums = [_divergence(graph, state, *pair) for pair in zip(self.batches, self._expected, strict=True)]
        return sum(map(float, sums)) / self.tokens


def _quantizable(model: Decoder) -> list[tuple[Component, Linear | ExpertLinear]]:
    """The modules of `model` that can be quantised, whatever the format: the linears and experts of its layers, without
    routers, as (Component, module), in the model's order. `Sensitivity` measures them, and `patterns` looks for a short
    name among them. The Component has the module's name in checkpoints. `module` is the model's own, in which a caller
    may replace the weight."""
    found = ((each, module) for each, _, module in components(model) if each.quantizable)
    return [(each, module) for each, module in found if isinstance(module, Linear | ExpertLinear)]


def model_and_batches(config: TrainConfig, rows: int) -> tuple[Decoder, list[Batch]]:
    """(the model of a recipe without its adapter, in 16 or 32 bits unless the checkpoint itself stores quantised
    weights; batches of the first `rows` packed rows, held-out ones if the recipe has some, otherwise of those that it
    trains on). Batches have up to 8,192 tokens, or one longer row; the last one may end with rows of padding. config:
    the recipe's; its formats, QAT and adapter are not used.

    Raises:
      ValueError: the recipe has another objective than sft, or a precision map already; it has no held-out rows, and
        trains on rows that are not all read before the run; or the rows cannot be used (run_rows).
    """
    if config.objective.name != "sft":
        raise ValueError(
            f"sensitivity: objective = {config.objective.name}: the rows must be those of supervised fine-tuning: give "
            "objective=sft and data.train=FILE"
        )
    if config.components:
        raise ValueError(
            f"sensitivity: precision names modules already, such as {next(iter(config.components))!r}: give "
            f"precision={config.computes_in}"
        )
    plain = dataclasses.replace(config.model, load_in=None, compute=None)
    config = dataclasses.replace(
        config, model=plain, adapter=None, qat=None, objective=ObjectiveConfig(), precision=config.computes_in
    )
    model, tokenizer = load_model(config)
    train, held_out = run_rows(Reader(SFT(), tokenizer, config, model.config))
    found = train if held_out is None else held_out
    if not isinstance(found, TokenDataset):
        raise ValueError(
            "sensitivity: the rows are streamed or mixed: set data.eval to a file of rows, which are then measured on"
        )
    found = found.in_rows(max(found.longest, config.data.length))
    rows = min(rows, len(found.rows))
    size = min(rows, max(1, _BATCH_TOKENS // found.length))
    batches = []
    for first in range(0, rows, size):
        batches.append(found.rows.empty(size))
        for slot, row in enumerate(range(first, min(first + size, rows))):
            found.rows.fill(batches[-1], slot, row)
    return model, batches


def choose(matrices: Sequence[Matrix], weight_bytes: int, most_bytes: float) -> list[str]:
    """Chooses the matrices that stay in the model's dtype while all others are quantised, so that the weights take at
    most `most_bytes`, for `jaxtune sensitivity --memory-gb`: those first that lose most for each byte that quantising
    them saves. A matrix that does not fit into what is left is passed over, and smaller ones after it may still be
    chosen.

    Args:
      matrices: all that can be quantised, as `Sensitivity.measure` returns them.
      weight_bytes: the bytes of all weights of the unquantised model.
      most_bytes: the bytes that the weights may take.
    Returns:
      their names, in the order of `matrices`.
    Raises:
      ValueError: the weights take more even if all matrices are quantised.
    """
    left = most_bytes - (weight_bytes - sum(each.saved_bytes for each in matrices))
    if left < 0:
        raise ValueError(
            f"--memory-gb {most_bytes / 1e9:g}: with all matrices quantised the weights take "
            f"{(most_bytes - left) / 1e9:.2f} GB; give at least as much, or another --format"
        )
    kept = set()
    for each in sorted(matrices, key=lambda each: -each.loss / max(each.saved_bytes, 1)):
        if each.saved_bytes <= left:
            kept.add(each.name)
            left -= each.saved_bytes
    return [each.name for each in matrices if each.name in kept]


def patterns(model: Decoder, kept: Sequence[str], word: str) -> dict[str, str]:
    """The precision map {pattern: word} that names the modules `kept` of `model`, as `choose` returns them. A pattern
    is the last part of a name, such as "down_proj", if all modules with this end that can be quantised are kept, and
    otherwise the whole name. `as_recipe` takes the map. word: their dtype, such as "bf16"."""
    listed, found = [each for each, _ in _quantizable(model)], {}
    for name in kept:
        end = name.rpartition(".")[2]
        alike = [each.name for each in listed if each.matches(end)]
        found[end if set(alike) <= set(kept) else name] = word
    return found


def as_recipe(format: str, computes_in: str, kept: Mapping[str, str]) -> dict[str, object]:
    """The keys of a recipe that loads the model with all matrices in `format`, such as "nf4", except those of the
    precision map `kept`: {"model": {"load_in": format}, "precision": {"*": computes_in} and the entries of `kept`}.
    "precision" is `computes_in` alone if `kept` is empty. `jaxtune sensitivity` prints them as YAML. computes_in: the
    dtype in which the run computes, such as "bf16"."""
    return {"model": {"load_in": format}, "precision": {"*": computes_in} | dict(kept) if kept else computes_in}
