"""Which matrices suffer most from a format, and the precision map for a given memory.

A matrix's loss is the mean divergence KL(model || model with this matrix alone quantised) of next-token distributions,
in nats, over trained tokens; all matrices of a kind, such as "v_proj", can be measured as one. `choose` keeps those
that lose most for each byte saved. The choice is measured as a whole, too, as single losses need not add up.
"""

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
from jaxtune.train.config import EvaluationConfig, GuardConfig, MeshConfig, ProfileConfig, TrainConfig
from jaxtune.train.config.objective import ObjectiveConfig
from jaxtune.train.data.batches import Batch
from jaxtune.train.spec.loading import loading
from jaxtune.train.spec.run_spec import decided_objective
from jaxtune.train.trainer import Trainer

_BATCH_TOKENS = 8192  # of a forward pass


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A matrix, or a layer's stack of experts', that can be quantised; or all of a kind."""

    name: str
    """Its module in checkpoints, such as "model.layers.0.mlp.down_proj"; of a kind, the end of the names."""
    loss: float
    """Nats a token, if it alone is quantised."""
    plain_bytes: int
    packed_bytes: int
    """In the format, scales included."""
    kept_bytes: int | None = None
    """In the format in which it may stay; None: in 16 bits."""

    @property
    def saved_bytes(self) -> int:
        return self.plain_bytes - self.packed_bytes

    @property
    def extra_bytes(self) -> int:
        """What it takes more if it stays."""
        return (self.plain_bytes if self.kept_bytes is None else self.kept_bytes) - self.packed_bytes


@functools.partial(jax.jit, static_argnums=0)
def _hidden(graph: nnx.GraphDef, state: nnx.State, batch: Batch) -> jax.Array:
    return nnx.merge(graph, state).hidden_states(batch.tokens, batch.segment_ids, batch.positions)


@functools.partial(jax.jit, static_argnums=0)
def _divergence(graph: nnx.GraphDef, state: nnx.State, batch: Batch, expected: jax.Array) -> jax.Array:
    """Sum of KL(expected || model) over tokens, times their weights, in nats. expected: unquantised hidden states."""
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
    """`weight` [..., out, in] as read back from `format`, in its own dtype."""
    return dense(FORMATS[format].encode(weight), weight.dtype)


class Sensitivity:
    """Measures what quantising matrices changes on fixed rows. Keeps the unquantised model's hidden states of all rows
    in host memory.

      model: unquantised, on one device, without adapters, with a text head.
      format: of model.load_in, such as "nf4".
      kinds: all matrices whose names end alike are measured as one.
      kept_in: the format of what stays, such as "int8"; None: it is not quantised.

    `tokens`: trained tokens. ValueError for another model, or nothing to measure.
    """

    def __init__(
        self, model: Decoder, batches: Sequence[Batch], format: str, kinds: bool = False, kept_in: str | None = None
    ):
        _require_measurable(model)
        self.format, self.kept_in, self.batches = format, kept_in, batches
        self.tokens = float(sum(np.asarray(batch.weights).sum() for batch in batches))
        if not self.tokens:
            raise ValueError("sensitivity: no token of these rows is trained on, so there is nothing to measure")
        self._model = model
        self.modules: dict[str, list[str]] = {}
        """{name of what is measured as one: its modules}"""
        for component, _ in _quantizable(model):
            name = component.name.rpartition(".")[2] if kinds else component.name
            self.modules.setdefault(name, []).append(component.name)
        if not self.modules:
            raise ValueError(f"sensitivity: the model has no matrix that can be stored in {format}")
        graph, state = nnx.split(model)
        self.weight_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        self._expected = [np.asarray(_hidden(graph, state, batch)) for batch in batches]

    @property
    def count(self) -> int:
        """Matrices, or kinds, to measure."""
        return len(self.modules)

    def measure(self, progress: Callable[[int], None] = lambda count: None) -> list[Matrix]:
        """Measures each by a forward pass over all rows; the callback gets 1 after each."""
        weights = {component.name: module.weight.get_value() for component, module in _quantizable(self._model)}
        matrices = []
        for name, modules in self.modules.items():
            ours = [weights[module] for module in modules]
            packed, kept = (
                sum(_stored_bytes(weight, format) for weight in ours) for format in (self.format, self.kept_in)
            )
            plain = sum(weight.nbytes for weight in ours)
            matrices.append(Matrix(name, self.divergence([name]), plain, packed, kept))
            progress(1)
        return matrices

    def divergence(self, names: Sequence[str] | None = None, kept: Sequence[str] = ()) -> float:
        """Nats a token that the model loses with those of these names (None: all) quantised, and `kept` in the format
        in which they stay; the model stays as it is. For [] it is what two programs of the same numbers differ by.
        """
        names = list(self.modules) if names is None else names
        formats = {module: self.format for name in names for module in self.modules[name]}
        formats |= {module: self.kept_in for name in kept for module in self.modules[name]}
        model = copy_structure(self._model)
        for component, module in _quantizable(model):
            if (format := formats.get(component.name)) is not None:
                module.weight = module.weight.replace(_rounded(module.weight.get_value(), format))
        graph, state = nnx.split(model)
        sums = [_divergence(graph, state, *pair) for pair in zip(self.batches, self._expected, strict=True)]
        return sum(map(float, sums)) / self.tokens


def _stored_bytes(weight: jax.Array, format: str | None) -> int:
    """Of a weight in a format, scales included; None: as it is."""
    stored = weight if format is None else jax.eval_shape(FORMATS[format].encode, weight)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(stored))


def _require_measurable(model: Decoder) -> None:
    """ValueError without a head for text, or for quantised weights."""
    if not model.config.head.is_text:
        raise ValueError("sensitivity: the model has no head for text, whose next-token distributions are compared")
    if any(isinstance(module.weight.get_value(), Stored) for *_, module in components(model)):
        raise ValueError(
            "sensitivity: the checkpoint stores quantised weights, which are compared with unquantised ones: "
            "name the model that it was made from"
        )


def _quantizable(model: Decoder) -> list[tuple[Component, Linear | ExpertLinear]]:
    """Linears and experts of layers, without routers; the modules are the model's own."""
    candidates = ((component, module) for component, _, module in components(model) if component.quantizable)
    return [(component, module) for component, module in candidates if isinstance(module, Linear | ExpertLinear)]


def model_and_batches(config: TrainConfig, rows: int) -> tuple[Decoder, list[Batch]]:
    """(the recipe's model without its adapter, batches of the first `rows` packed rows, held-out ones if there are
    any). Batches have up to 8,192 tokens or one longer row, and may end with padding. ValueError for another objective
    than sft, a precision map, or rows made during the run.
    """
    # One device measures, and nothing trains.
    config = dataclasses.replace(
        config, mesh=MeshConfig(), evaluation=EvaluationConfig(), profile=ProfileConfig(), guards=GuardConfig()
    )
    objective = decided_objective(config)
    if objective.samples or objective.reference_runs or objective.needs_rows_before or objective.unit != "targets":
        raise ValueError(
            f"sensitivity: objective = {objective.label}: the rows must be those of supervised fine-tuning: give "
            "objective=sft and data.train=FILE"
        )
    if config.components:
        raise ValueError(
            f"sensitivity: precision names modules already, such as {next(iter(config.components))!r}: give "
            f"precision={config.computes_in}"
        )
    plain = dataclasses.replace(config.model, load_in=None, compute=None, pictures=False, tower=None)
    config = dataclasses.replace(
        config, model=plain, adapter=None, qat=None, objective=ObjectiveConfig(), precision=config.computes_in
    )
    with loading(config, trains=False, streams=False) as (_, tokenizer, model):
        _require_measurable(model)
        trainer = Trainer(model, tokenizer, config, trains=False)
    dataset = trainer.train_data if trainer.eval_data is None else trainer.eval_data
    if dataset is None:
        raise ValueError(
            "sensitivity: the rows are streamed or mixed: set data.eval to a file of rows, which are then measured on"
        )
    dataset = dataset.in_rows(max(dataset.longest, config.data.length))
    rows = min(rows, len(dataset.rows))
    size = min(rows, max(1, _BATCH_TOKENS // dataset.length))
    batches = []
    for first in range(0, rows, size):
        batches.append(dataset.rows.empty(size))
        for slot, row in enumerate(range(first, min(first + size, rows))):
            dataset.rows.fill(batches[-1], slot, row)
    return model, batches


def choose(matrices: Sequence[Matrix], weight_bytes: int, most_bytes: float) -> list[str]:
    """Names of the matrices that stay so that weights take at most `most_bytes`, greedily by loss for each byte that
    they take more; one that does not fit is passed over. weight_bytes: of the unquantised model. ValueError if even all
    quantised take more.
    """
    room = most_bytes - (weight_bytes - sum(matrix.saved_bytes for matrix in matrices))
    if room < 0:
        raise ValueError(
            f"--memory-gb {most_bytes / 1e9:g}: with all matrices quantised the weights take "
            f"{(most_bytes - room) / 1e9:.2f} GB; give at least as much, or another --format"
        )
    kept_names = set()
    for matrix in sorted(matrices, key=lambda matrix: -matrix.loss / max(matrix.extra_bytes, 1)):
        if matrix.extra_bytes <= room:
            kept_names.add(matrix.name)
            room -= matrix.extra_bytes
    return [matrix.name for matrix in matrices if matrix.name in kept_names]


def patterns(model: Decoder, kept: Sequence[str], word: str) -> dict[str, str]:
    """{pattern: word} of the modules `kept`: the last part of a name, such as "down_proj", if all quantisable modules
    with that end are kept, else the whole name. word: their dtype or format.
    """
    listed, precision_map = [component for component, _ in _quantizable(model)], {}
    for name in kept:
        end = name.rpartition(".")[2]
        alike = [component.name for component in listed if component.matches(end)]
        precision_map[end if set(alike) <= set(kept) else name] = word
    return precision_map


def as_recipe(format: str, computes_in: str, kept: Mapping[str, str]) -> dict[str, object]:
    """Keys of a recipe: all matrices in `format` except those of the precision map `kept`."""
    return {"model": {"load_in": format}, "precision": {"*": computes_in} | dict(kept) if kept else computes_in}
