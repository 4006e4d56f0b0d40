"""TRL's DPOTrainer, ORPOTrainer, KTOTrainer and RewardTrainer with their configs."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtune.compat.arguments import choose, report_idle
from jaxtune.compat.model import CompatModel
from jaxtune.compat.rows import columns_of
from jaxtune.compat.settings import SFTConfig, move_quantization_config, plain_value, resolved_config
from jaxtune.compat.tables import DPO, KTO, ORPO, REFERENCE_MODEL, REWARD, TRAINER
from jaxtune.compat.trainer import SFTTrainer
from jaxtune.compat.transformers_names import load_named, load_plain, with_dtype
from jaxtune.models.decoder import Decoder
from jaxtune.models.heads import SCORE
from jaxtune.models.lora import matrices
from jaxtune.models.reward import reward_model
from jaxtune.system.terminal import say
from jaxtune.train.config.objective import PAIR_LOSSES, ObjectiveConfig, without_effect
from jaxtune.train.data.batches import Batch
from jaxtune.train.data.dataset import TokenDataset
from jaxtune.train.data.packing.pairs import PairDataset
from jaxtune.train.data.rendering.formats import LABELLED, PREFERENCE
from jaxtune.train.data.tokens.documents import identity
from jaxtune.train.objectives.kto import mismatched_in_groups
from jaxtune.train.objectives.loss import Forward
from jaxtune.train.objectives.named import objective_of
from jaxtune.train.objectives.preference import sum_log_probs
from jaxtune.train.trainer import Trainer


@dataclasses.dataclass(init=False)
class PreferenceConfig(SFTConfig):
    """Base of the configs of all trainers but SFTTrainer."""

    disable_dropout: bool  # True: the adapter's dropout is turned off; False: it is used


@dataclasses.dataclass(init=False)
class DPOConfig(PreferenceConfig):
    """TRL's DPOConfig."""

    section = "dpo"  # of the tables of defaults
    table = DPO  # the arguments that are not fields: without effect here, or refused

    # the factor of the log-ratios to the reference model; with "ipo" their difference is to be 1 / (2 beta)
    beta: float
    # one of TRL's but "aot", "aot_unpaired" and "sft", or a list with one
    loss_type: str | Sequence[str] = "sigmoid"
    label_smoothing: float = 0.0  # of the losses "robust" and "exo_pair": the probability of a wrong label
    f_divergence_type: str = "reverse_kl"  # or "forward_kl", "js_divergence", "alpha_divergence"
    f_alpha_divergence_coef: float = 0.5  # of alpha_divergence
    discopop_tau: float = 0.05  # of the loss "discopop"
    # True: the reference's log-probabilities are computed once before the run; False: in every step
    precompute_ref_log_probs: bool
    max_prompt_length: int | None = None  # prompts lose their first tokens over it; None: they are not cut


@dataclasses.dataclass(init=False)
class ORPOConfig(PreferenceConfig):
    """TRL's ORPOConfig."""

    section = "orpo"  # of the tables of defaults
    table = ORPO  # the arguments that are not fields: without effect here, or refused

    # the factor of the odds-ratio term, which is added to the cross-entropy of the prompt and the chosen answer
    beta: float
    max_prompt_length: int | None = None  # as DPOConfig's, of texts that are longer than a row


@dataclasses.dataclass(init=False)
class KTOConfig(PreferenceConfig):
    """TRL's KTOConfig. Rows keep their order, as each one also gets an answer of another row of its micro-batch."""

    section = "kto"  # of the tables of defaults
    table = KTO  # the arguments that are not fields: without effect here, or refused
    orders = {"sequential": "given"}  # {value of train_sampling_strategy: TokenDataset's name for that order}

    beta: float  # the factor of the log-ratios to the reference model
    loss_type: str = "kto"  # or "apo_zero_unpaired", which takes 0 for the KL term
    desirable_weight: float  # the factor of the loss of rows with label True
    undesirable_weight: float  # the factor of the loss of rows with label False
    # True: the reference's log-probabilities are computed once before the run; False: in every step
    precompute_ref_log_probs: bool
    max_prompt_length: int | None = None  # as DPOConfig's, of texts that are longer than a row


@dataclasses.dataclass(init=False)
class RewardConfig(PreferenceConfig):
    """TRL's RewardConfig."""

    section = "reward"  # of the tables of defaults
    table = REWARD  # the arguments that are not fields: without effect here, or refused

    # the factor of the squared sum of a pair's two rewards, which is added to the loss; None: it is not added
    center_rewards_coefficient: float | None


def _with_rates(module: Decoder, rates: Mapping[str, float]) -> Decoder:
    """Sets the adapters' dropout rates, {name of the matrix: rate}, in place, and returns `module`."""
    for name, matrix in matrices(module):
        if matrix.lora is not None:
            matrix.lora.rate = rates[name]
    return module


def trained_before(module: Decoder) -> bool:
    """Whether an adapter of `module` has been trained: any of its B matrices, zero in a new adapter, is not zero."""
    loras = [matrix.lora for _, matrix in matrices(module) if matrix.lora is not None]
    return any(bool(lora.b[...].any()) for lora in loras)


class PreferenceTrainer(SFTTrainer):
    """Base of all trainers but SFTTrainer: checks the columns of rows, trains on responses, and turns the adapter's
    dropout off unless disable_dropout is False. ValueError: formatting_func or packing=True.

    A subclass sets `config_type` and the attributes below where they differ, and defines `_objective`.
    """

    balances_experts = False
    table = TRAINER | REFERENCE_MODEL  # the arguments that are not parameters: without effect here, or refused
    # the config's arguments that older versions of TRL accepted as arguments of the trainer
    older = SFTTrainer.older | {
        *("beta", "label_smoothing", "loss_type", "max_length", "max_prompt_length", "max_completion_length"),
        *("truncation_mode", "padding_value", "label_pad_token_id", "is_encoder_decoder", "disable_dropout"),
        *("generate_during_eval", "precompute_ref_log_probs", "sync_ref_model", "f_divergence_type"),
        *("desirable_weight", "undesirable_weight", "reference_free"),
    }
    form = PREFERENCE  # the name of the rows' format
    trained = "completion"  # data.train_on
    cuts_all_prompts = False  # whether max_prompt_length is of all prompts, or of texts longer than a row
    columns: tuple[str, ...] = ("chosen", "rejected")  # the columns that rows must have

    def __init__(self, *args: Any, **arguments: Any):
        if (length := arguments.pop("max_target_length", None)) is not None:  # an older name
            arguments["max_completion_length"] = length
        super().__init__(*args, **arguments)
        rate = max(self._rates().values(), default=0.0)
        if rate and self.args.disable_dropout:
            say(
                f"{type(self).__name__}: lora_dropout = {rate} is turned off, as in TRL; disable_dropout=False keeps it"
            )

    def _rates(self) -> dict[str, float]:
        """The adapters' dropout rates in the script's model: {name of the matrix: rate}."""
        return {name: matrix.lora.rate for name, matrix in matrices(self.model.module) if matrix.lora is not None}

    def _to_train(self) -> Decoder:
        """The script's module, or with disable_dropout another one over the same arrays, without dropout."""
        if not self.args.disable_dropout:
            return self.model.module
        return _with_rates(nnx.merge(*nnx.split(self.model.module)), dict.fromkeys(self._rates(), 0.0))

    def _handing_back(self) -> Callable[[Decoder], Decoder]:
        """A function that gives a module of the run, in place, the dropout rates of the script's model."""
        rates = self._rates()
        return lambda module: _with_rates(module, rates)

    def _packing(self) -> bool:
        """False: an update counts examples. They share rows all the same, without an effect on results."""
        if self.args.packing:
            name = type(self.args).__name__
            raise ValueError(f"{name}: packing = True is not supported. Instead: jaxtune train with objective=...")
        return False

    def _read(self, dataset: Any, formatting_func: Any) -> tuple[Any, str]:
        """(the rows, the name of their format); ValueError if a column is missing or there are no rows."""
        name = type(self).__name__
        if formatting_func is not None:
            raise ValueError(f"{name}: it has no formatting_func; give columns prompt, {', '.join(self.columns)}")
        if not hasattr(dataset, "column_names") and not isinstance(dataset, str | os.PathLike):
            dataset = list(dataset)
        columns = None if isinstance(dataset, str | os.PathLike) else columns_of(dataset, name)
        if columns is not None and (missing := [column for column in self.columns if column not in columns]):
            raise ValueError(
                f"{name}: the data set has no column {', '.join(missing)}; it has {', '.join(map(str, columns))}"
            )
        return dataset, self.form

    @functools.cached_property
    def _prepared(self) -> Trainer:
        """SFTTrainer's, with prompts cut at max_prompt_length."""
        config, most = self.config(prepared=False), getattr(self.args, "max_prompt_length", None)
        rows: list[Any] = [self._train_rows(), self._rows.get("eval"), *self._further_rows.values()]
        if most is not None:
            objective, size = objective_of(config.objective), self.model.module.config.vocab_size
            for index, data in enumerate(rows):
                if data is not None:
                    pairs = objective.prepare(data, self.tokenizer, config.data, vocab_size=size, max_rows=None)
                    assert isinstance(pairs, PairDataset)
                    rows[index] = self._with_short_prompts(pairs, most)
        further = dict(zip(self._further_rows, rows[2:], strict=True))
        return Trainer(self._to_train(), self.tokenizer, config, *rows[:2], further_eval_rows=further)

    def _with_short_prompts(self, data: PairDataset, most: int) -> PairDataset:
        """Pairs whose prompts have lost their first tokens, so that at most `most` are left."""
        documents = data.documents
        begins = np.array([np.argmax(documents[n].mask) for n in range(len(documents)) if len(documents[n].mask)])
        over = np.zeros(len(documents), np.int64)
        over[np.asarray(documents.lengths) > 0] = np.maximum(begins - most, 0)
        if not self.cuts_all_prompts:
            longest = np.asarray(documents.lengths).reshape(-1, 2).max(1).repeat(2)
            over = np.where(longest > data.length, over, 0)
        if short := int((over.reshape(-1, 2) > 0).any(1).sum()):
            say(f"{type(self).__name__}: max_prompt_length = {most}: {short:,} prompts lose their first tokens")
        shortened = dataclasses.replace(documents, starts=documents.starts + over, lengths=documents.lengths - over)
        return dataclasses.replace(data, documents=shortened)

    def _train_on(self) -> str:
        """The answers. ORPO's cross-entropy counts the prompt all the same."""
        return self.trained


class ReferencedTrainer(PreferenceTrainer):
    """Base of DPOTrainer and KTOTrainer, whose loss has a reference: `ref_model`, whose log-probabilities are computed
    once before the run; without one the model with its adapter off; with a copy of the adapter if that was trained
    before, as in TRL; or before its first step if all its weights train."""

    balances_experts = True
    _kept: nnx.State | None = None  # the adapter of the reference

    @property
    def _precomputes(self) -> bool:
        return self.args.precompute_ref_log_probs or not self.model.has_adapter or self.ref_model is not None

    def __init__(
        self,
        model: CompatModel | str | os.PathLike,
        ref_model: CompatModel | str | os.PathLike | None = None,
        args: object = None,
        *others: object,
        **arguments: object,
    ):
        if hasattr(ref_model, "output_dir"):  # of scripts that leave the reference out
            others = others if args is None else (args, *others)
            ref_model, args = None, ref_model
        if isinstance(model, str | os.PathLike) and ref_model == model:
            ref_model = None  # the model as it is before training, which is the reference
        self.ref_model = self._reference_model(model, ref_model, args)
        super().__init__(model, args, *others, **arguments)
        if self.ref_model is not None:
            sizes = [each.module.config.vocab_size for each in (self.ref_model, self.model)]
            if sizes[0] != sizes[1]:
                raise ValueError(
                    f"{type(self).__name__}: ref_model has a vocabulary of {sizes[0]:,} tokens, and the model one of "
                    f"{sizes[1]:,}: give a reference with the model's tokens"
                )
        self._references: dict[str, np.ndarray] = {}  # by identity of the rows
        if self.ref_model is None and trained_before(self.model.module):
            self._kept = jax.tree.map(jnp.copy, nnx.state(self.model.module, nnx.Param))
            say(f"{type(self).__name__}: the reference is the model with a copy of the adapter that was trained before")

    def _reference_model(self, model: object, ref_model: object, args: object) -> CompatModel | None:
        """The given reference, loaded if it is a name; ValueError if it is the model itself, or none."""
        name = type(self).__name__
        if ref_model is None:
            return None
        if ref_model is model:
            raise ValueError(f"{name}: ref_model is the model itself, which trains: leave it out, or load it again")
        if isinstance(ref_model, str | os.PathLike):
            config = resolved_config(args, self.config_type, model)
            loading = with_dtype(ref_model, config.model_init_kwargs)
            ref_model = load_plain(f"{name}: ref_model", ref_model, config.seed, False, loading)
        if not isinstance(ref_model, CompatModel):
            raise ValueError(f"{name}: ref_model is a {type(ref_model).__name__}; give a name or folder, or load it")
        return ref_model

    def _rows_for(self, data: TokenDataset) -> TokenDataset:
        """With the log-probabilities of a reference that has weights of its own, or known from the same rows."""
        return self._with_reference(data)

    def _own_reference(self) -> Decoder | None:
        """The reference's module; None if it is the trained one, with its adapter off or before its first step."""
        if self.ref_model is not None:
            return self.ref_model.module
        if self._kept is None:
            return None
        graph, _, others = nnx.split(self._to_train(), nnx.Param, ...)
        return nnx.merge(graph, self._kept, others)

    def _with_reference(self, data: TokenDataset) -> TokenDataset:
        assert isinstance(data, PairDataset)
        documents, module = data.documents, self._own_reference()
        if not len(documents) or (module is None and data.reference is None):
            return data
        known = identity(documents, documents.lengths)
        if module is None:  # NaN until a pass over the rows, before the first step, fills the array
            assert data.reference is not None
            self._references.setdefault(known, data.reference)
        elif known not in self._references:
            self._references[known] = _log_probs(module, data)
        return dataclasses.replace(data, reference=self._references[known])


def _log_probs(module: Decoder, data: PairDataset) -> np.ndarray:
    """float32[documents]: the sum over the answer of each document, in nats."""
    longest = int(np.asarray(data.documents.lengths).reshape(-1, 2).sum(1).max())
    rows = copy.copy(data.in_rows(max(longest, 1)).rows)
    rows.reference = None
    graph, state = nnx.split(module)
    say(f"log-probabilities of the reference: one pass over {len(rows):,} rows")

    @jax.jit
    def of_batch(state: nnx.State, batch: Batch) -> jax.Array:
        model = nnx.merge(graph, state)
        return sum_log_probs(model, Forward().frozen(model, batch), batch, Forward()).logps

    found = np.zeros(len(data.documents), np.float32)
    for row in range(len(rows)):
        batch = rows.empty(1)
        rows.fill(batch, 0, row)
        sums = np.asarray(of_batch(state, jax.tree.map(jnp.asarray, batch)))[0]
        pairs = np.asarray(rows.pairs(row))
        found[2 * pairs[:, None] + np.arange(2)] = sums[: len(pairs)]
    return found


def PatchDPOTrainer() -> None:
    """Does nothing: no trainer needs Unsloth's patch here."""


def PatchFastRL(algorithm: object = None, FastLanguageModel: object = None) -> None:
    """Does nothing, as PatchDPOTrainer."""
    del algorithm, FastLanguageModel


class DPOTrainer(ReferencedTrainer):
    """TRL's DPOTrainer: makes the chosen answer likelier than the rejected one, relative to the reference model.

    Rows have chosen and rejected, and prompt unless both are conversations that begin with it.
    """

    config_type, tag = DPOConfig, "dpo"
    cuts_all_prompts = True

    def _objective(self) -> ObjectiveConfig:
        args = self.args
        kinds = [args.loss_type] if isinstance(args.loss_type, str) else list(args.loss_type)
        if len(kinds) != 1:
            raise ValueError(f"DPOConfig: loss_type = {kinds!r}: several losses are not supported; give one")
        loss_type: Any = choose("DPOConfig", "loss_type", kinds[0], dict(zip(PAIR_LOSSES, PAIR_LOSSES, strict=True)))
        names = ("f_divergence_type", "f_alpha_divergence_coef", "discopop_tau", "label_smoothing")
        options: dict[str, Any] = {name: plain_value(getattr(args, name)) for name in names}
        idle = without_effect("dpo", {"loss_type": loss_type, **options})
        if options["label_smoothing"] and loss_type not in ("robust", "exo_pair"):
            idle["label_smoothing"] = "in TRL it belongs to the losses robust and exo_pair"
        for name, why in idle.items():
            report_idle("DPOConfig", name, why.removesuffix("; leave it out"))
            options[name] = 0.0 if name == "label_smoothing" else None
        return ObjectiveConfig(
            "dpo", beta=args.beta, loss_type=loss_type, precompute_ref_log_probs=self._precomputes, **options
        )


class ORPOTrainer(PreferenceTrainer):
    """TRL's ORPOTrainer: cross-entropy of the prompt and the chosen answer, plus a term that compares the odds of both
    answers, without a reference model. Rows as in DPOTrainer.
    """

    config_type, tag = ORPOConfig, "orpo"

    def _objective(self) -> ObjectiveConfig:
        return ObjectiveConfig("orpo", beta=self.args.beta)


_UNPAIRED_AT_ONCE = 1_000  # the pairs whose chosen answers TRL puts before their rejected ones


def unpaired(pairs) -> list[dict[str, object]]:
    """Labelled rows of preference pairs, in TRL's order. Texts without a prompt have what both begin with for one."""
    rows: list[dict[str, object]] = []
    for batch in itertools.batched(pairs, _UNPAIRED_AT_ONCE):
        for side in ("chosen", "rejected"):
            for pair in batch:
                row = {key: value for key, value in pair.items() if key not in ("chosen", "rejected")}
                completion = pair[side]
                if "prompt" not in pair and isinstance(completion, str):
                    both = zip(pair["chosen"], pair["rejected"], strict=False)
                    prompt = "".join(letter for letter, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], both))
                    prompt = prompt.removesuffix(" ")  # the space belongs to the answers
                    row["prompt"], completion = prompt, completion[len(prompt) :]
                rows.append(row | {"completion": completion, "label": side == "chosen"})
    return rows


class KTOTrainer(ReferencedTrainer):
    """TRL's KTOTrainer: makes desirable answers likelier and others less likely, relative to the reference model.

    Rows have completion, label (True: desirable), and prompt unless completion is a conversation that begins with it;
    or they are DPOTrainer's.
    """

    config_type, tag = KTOConfig, "kto"
    form = LABELLED  # the name of the rows' format
    columns = ("completion", "label")

    def _read(self, dataset, formatting_func: object) -> tuple[object, str]:
        """As PreferenceTrainer; of pairs each answer becomes a row, as in TRL."""
        if not isinstance(dataset, str | os.PathLike):
            dataset = dataset if hasattr(dataset, "column_names") else list(dataset)
            columns = columns_of(dataset, type(self).__name__)
            if "completion" not in columns and {"chosen", "rejected"} <= set(columns):
                dataset = unpaired(dataset)
        return super()._read(dataset, formatting_func)

    def _rows_for(self, data: TokenDataset) -> TokenDataset:
        """Rows with mismatched answers as in TRL, for the KL term of the loss "kto"."""
        assert isinstance(data, PairDataset)
        if self.args.loss_type == "apo_zero_unpaired":
            return self._with_reference(data)
        if data.width is not None:  # room for the pairs before, of which the new ones may be longer
            data = dataclasses.replace(data, packing="step", width=None)
        return self._with_reference(mismatched_in_groups(data, self.args.per_device_train_batch_size))

    def _objective(self) -> ObjectiveConfig:
        options = {name: getattr(self.args, name) for name in ("beta", "desirable_weight", "undesirable_weight")}
        kinds = {"kto": "sigmoid", "apo_zero_unpaired": "apo_zero_unpaired"}  # the first is the default's name there
        options["loss_type"] = choose("KTOConfig", "loss_type", self.args.loss_type, kinds)
        return ObjectiveConfig("kto", **options, precompute_ref_log_probs=self._precomputes)


class RewardTrainer(PreferenceTrainer):
    """TRL's RewardTrainer: trains a head that gives a text one number, higher for the chosen text.

    Rows as in DPOTrainer. A model without such a head gets one, in place; ValueError if it has an adapter already: load
    it with FastLanguageModel.from_pretrained(num_labels=1), then add the adapter.
    """

    config_type, tag = RewardConfig, "reward-trainer"
    table = TRAINER

    def __init__(self, model: CompatModel | str | os.PathLike, args: Any = None, *others: Any, **arguments: Any):
        if isinstance(model, str | os.PathLike):
            config = resolved_config(args, RewardConfig, model)
            move_quantization_config(config, arguments, model)
            model = load_named(os.fspath(model), config, arguments.get("peft_config") is None)
        head = model.module.config.head if isinstance(model, CompatModel) else SCORE
        if head.outputs not in (None, SCORE.outputs):
            raise ValueError(
                f"RewardTrainer: the model gives a text {head.outputs} numbers, and reward models require "
                "`num_labels=1`: AutoModelForSequenceClassification.from_pretrained(..., num_labels=1)"
            )
        if isinstance(model, CompatModel) and head.is_text:
            if model.has_adapter:
                raise ValueError(
                    "RewardTrainer: the model has an adapter and no head that scores texts: load it with "
                    "FastLanguageModel.from_pretrained(num_labels=1), then get_peft_model"
                )
            model.module = reward_model(model.module)
        super().__init__(model, args, *others, **arguments)
        tokenizer: Any = self.tokenizer
        if tokenizer.pad_token is None:  # as in TRL
            tokenizer.pad_token = tokenizer.eos_token

    def _objective(self) -> ObjectiveConfig:
        return ObjectiveConfig("reward", center_rewards_coefficient=self.args.center_rewards_coefficient)
