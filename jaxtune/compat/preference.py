"""TRL's DPOTrainer, ORPOTrainer, KTOTrainer and RewardTrainer with their configs, built on SFTTrainer's run."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flax import nnx

from jaxtune.compat.arguments import choose
from jaxtune.compat.model import CompatModel
from jaxtune.compat.rows import columns_of
from jaxtune.compat.settings import SFTConfig, given_arguments
from jaxtune.compat.tables import DPO, KTO, ORPO, REFERENCE_MODEL, REWARD, TRAINER
from jaxtune.compat.trainer import SFTTrainer, loaded
from jaxtune.models.decoder import Decoder
from jaxtune.models.lora import matrices
from jaxtune.models.reward import reward_model
from jaxtune.system.terminal import say
from jaxtune.train.config.objective import ObjectiveConfig
from jaxtune.train.data import TokenDataset
from jaxtune.train.data.formats import LABELLED, PREFERENCE
from jaxtune.train.data.pairs import PairDataset
from jaxtune.train.objectives.kto import mismatched_in_groups


@dataclasses.dataclass(init=False)
class PreferenceConfig(SFTConfig):
    """The fields that the preference configs (DPOConfig, ORPOConfig, ...) share, beside those of SFTConfig, whose
    __init__ they have."""

    disable_dropout: bool = True  # whether the adapter's dropout is turned off


@dataclasses.dataclass(init=False)
class DPOConfig(PreferenceConfig):
    """TRL's DPOConfig, with Unsloth's defaults as SFTConfig; loss_type: sigmoid, hinge or ipo."""

    table = DPO

    beta: float = 0.1
    loss_type: str | Sequence[str] = "sigmoid"
    precompute_ref_log_probs: bool = False


@dataclasses.dataclass(init=False)
class ORPOConfig(PreferenceConfig):
    """TRL's ORPOConfig."""

    table = ORPO

    beta: float = 0.1


@dataclasses.dataclass(init=False)
class KTOConfig(PreferenceConfig):
    """TRL's KTOConfig. Rows keep their order, because each is compared with the answer of an earlier one."""

    table = KTO
    orders = {"sequential": "given"}

    train_sampling_strategy: str = "sequential"
    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    precompute_ref_log_probs: bool = False


@dataclasses.dataclass(init=False)
class RewardConfig(PreferenceConfig):
    """TRL's RewardConfig."""

    table = REWARD

    center_rewards_coefficient: float | None = None


def _with_rates(module: Decoder, rates: Mapping[str, float]) -> Decoder:
    """Sets the dropout rates of a module's adapters, in place, and returns it. `rates` has a rate for the name of each
    matrix that has an adapter."""
    for name, matrix in matrices(module):
        if matrix.lora is not None:
            matrix.lora.rate = rates[name]
    return module


class PreferenceTrainer(SFTTrainer):
    """The base class of the preference trainers: rows with the columns `columns`, no packing, and by default no
    dropout. Arguments are those of SFTTrainer."""

    table = TRAINER | REFERENCE_MODEL
    older = SFTTrainer.older | {
        *("beta", "label_smoothing", "loss_type", "max_length", "max_prompt_length", "max_completion_length"),
        *("truncation_mode", "padding_value", "label_pad_token_id", "is_encoder_decoder", "disable_dropout"),
        *("generate_during_eval", "precompute_ref_log_probs", "sync_ref_model", "f_divergence_type"),
        *("desirable_weight", "undesirable_weight", "reference_free"),
    }
    form = PREFERENCE
    columns: tuple[str, ...] = ("chosen", "rejected")

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
        """{name of a matrix that has an adapter: the adapter's dropout rate} of the script's model."""
        return {name: matrix.lora.rate for name, matrix in matrices(self.model.module) if matrix.lora is not None}

    def _to_train(self) -> Decoder:
        """The model, without dropout if that is turned off: another module over the same arrays."""
        if not self.args.disable_dropout:
            return self.model.module
        return _with_rates(nnx.merge(*nnx.split(self.model.module)), dict.fromkeys(self._rates(), 0.0))

    def _handing_back(self) -> Callable[[Decoder], Decoder]:
        """A function that gives a module of the run, which may train without dropout, the dropout rates that the
        script's model has."""
        rates = self._rates()
        return lambda module: _with_rates(module, rates)

    def _packing(self) -> bool:
        """False; raises ValueError if the script asks for packing."""
        if self.args.packing:
            name = type(self.args).__name__
            raise ValueError(f"{name}: packing = True is not supported. Instead: jaxtune train with objective=...")
        return False

    def _read(self, dataset: Any, formatting_func: Any) -> tuple[Any, str]:
        """(rows, their format) of a script's data set.

        Raises:
          ValueError: it lacks one of the trainer's `columns`, or a formatting_func is given.
        """
        name = type(self).__name__
        if formatting_func is not None:
            raise ValueError(f"{name}: it has no formatting_func; give columns prompt, {', '.join(self.columns)}")
        if not hasattr(dataset, "column_names") and not isinstance(dataset, str):
            dataset = list(dataset)
        columns = None if isinstance(dataset, str) else columns_of(dataset, type(self).__name__)
        if columns is not None and (missing := [one for one in self.columns if one not in columns]):
            raise ValueError(
                f"{name}: the data set has no column {', '.join(missing)}; it has {', '.join(map(str, columns))}"
            )
        return dataset, self.form

    def _train_on(self) -> str:
        """Which tokens are trained on: those of the responses."""
        return "responses"


class ReferencedTrainer(PreferenceTrainer):
    """The base class of the trainers whose loss compares the model with a reference, which here is the model with its
    adapter off.

    Raises:
      ValueError: the adapter has been trained before; TRL's reference would be the model with it.
    """

    def __init__(self, *args: Any, **arguments: Any):
        super().__init__(*args, **arguments)
        if any(matrix.lora.b[...].any() for _, matrix in matrices(self.model.module) if matrix.lora is not None):
            raise ValueError(
                f"{type(self).__name__}: the adapter has been trained before, and TRL takes the model with it as the "
                "reference; here that is the model with its adapter off. Merge it first (save_pretrained_merged), "
                "then load the merged folder and give it a new adapter (get_peft_model)"
            )


def PatchDPOTrainer() -> None:
    """Does nothing: preference trainers need no patch here."""


class DPOTrainer(ReferencedTrainer):
    """TRL's DPOTrainer."""

    config_type = DPOConfig

    def _objective(self) -> ObjectiveConfig:
        """The objective's section of the config."""
        args = self.args
        kinds = [args.loss_type] if isinstance(args.loss_type, str) else list(args.loss_type)
        if len(kinds) != 1:
            raise ValueError(f"DPOConfig: loss_type = {kinds!r}: several losses are not supported; give one")
        loss_type: Any = choose("DPOConfig", "loss_type", kinds[0], dict(sigmoid="sigmoid", hinge="hinge", ipo="ipo"))
        return ObjectiveConfig(
            "dpo", beta=args.beta, loss_type=loss_type, precompute_ref_log_probs=args.precompute_ref_log_probs
        )


class ORPOTrainer(PreferenceTrainer):
    """TRL's ORPOTrainer."""

    config_type = ORPOConfig

    def _objective(self) -> ObjectiveConfig:
        """The objective's section of the config."""
        return ObjectiveConfig("orpo", beta=self.args.beta)


class KTOTrainer(ReferencedTrainer):
    """TRL's KTOTrainer, on rows with prompt, completion and label."""

    config_type = KTOConfig
    form = LABELLED
    columns = ("completion", "label")

    def _rows_for(self, data: TokenDataset) -> TokenDataset:
        """The rows in groups of a micro-batch's size. Each row gets the answer of another row of its group, as in TRL:
        KTO's loss estimates its KL term from such mismatched answers."""
        assert isinstance(data, PairDataset)
        return mismatched_in_groups(data, self.args.per_device_train_batch_size)

    def _objective(self) -> ObjectiveConfig:
        """The objective's section of the config."""
        names = ("beta", "desirable_weight", "undesirable_weight", "precompute_ref_log_probs")
        return ObjectiveConfig("kto", **{name: getattr(self.args, name) for name in names})


class RewardTrainer(PreferenceTrainer):
    """TRL's RewardTrainer, on rows with chosen and rejected. A model without a head that scores texts gets one.

    A model that has an adapter must have been loaded with such a head: FastLanguageModel.from_pretrained(num_labels=1).
    """

    config_type = RewardConfig
    table = TRAINER

    def __init__(self, model: CompatModel | str | os.PathLike, args: Any = None, *others: Any, **arguments: Any):
        if isinstance(model, str | os.PathLike):
            model = loaded(os.fspath(model), given_arguments(args, RewardConfig), arguments.get("peft_config") is None)
        if isinstance(model, CompatModel) and model.module.config.head.is_text:
            if model.has_adapter:
                raise ValueError(
                    "RewardTrainer: the model has an adapter and no head that scores texts: load it with "
                    "FastLanguageModel.from_pretrained(num_labels=1), then get_peft_model"
                )
            model.module = reward_model(model.module)
        super().__init__(model, args, *others, **arguments)

    def _objective(self) -> ObjectiveConfig:
        """The objective's section of the config."""
        return ObjectiveConfig("reward", center_rewards_coefficient=self.args.center_rewards_coefficient)
