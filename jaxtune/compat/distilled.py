"""TRL's DistillationTrainer and GKDTrainer with their configs, built on SFTTrainer's run.

The teacher is attached to the model that trains, and is on the same device. Answers are sampled from the student in the
same process.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Mapping
from typing import Literal

from jaxtune.compat.arguments import tell
from jaxtune.compat.model import CompatModel
from jaxtune.compat.preference import PreferenceConfig, PreferenceTrainer
from jaxtune.compat.rows import columns_of
from jaxtune.compat.settings import SFTConfig, given_arguments
from jaxtune.compat.tables import DISTILLATION, DISTILLATION_TRAINER, GKD
from jaxtune.compat.trainer import SFTTrainer, loaded
from jaxtune.compat.transformers_names import load_plain
from jaxtune.models.decoder import Decoder
from jaxtune.train.config import TrainConfig
from jaxtune.train.config.objective import ObjectiveConfig
from jaxtune.train.folder.run_rows import is_stream
from jaxtune.train.objectives.teachers import BASE, with_teacher

_USUAL_PROMPT = 512  # tokens of a prompt that a model has room for which the trainer loads by its name


@dataclasses.dataclass(init=False)
class DistilledConfig(PreferenceConfig):
    """The fields that DistillationConfig and GKDConfig share."""

    teacher_model_name_or_path: str | None = None
    teacher_model_init_kwargs: Mapping[str, object] | None = None
    beta: float = 1.0
    temperature: float = 1.0


@dataclasses.dataclass(init=False)
class DistillationConfig(DistilledConfig):
    """TRL's DistillationConfig, with Unsloth's defaults as SFTConfig. An update trains on
    per_device_train_batch_size * gradient_accumulation_steps answers."""

    table = DISTILLATION

    learning_rate: float = 1e-6
    disable_dropout: bool = False
    max_completion_length: int = 512
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0


@dataclasses.dataclass(init=False)
class GKDConfig(DistilledConfig):
    """TRL's GKDConfig. The temperature is that of sampling alone, as in TRL, where the loss has none."""

    table = GKD

    temperature: float = 0.9
    lmbda: float = 0.5
    beta: float = 0.5
    max_new_tokens: int = 128


class DistilledTrainer(PreferenceTrainer):
    """The base class of DistillationTrainer and GKDTrainer.

    Args:
      model: a CompatModel, or a hub name or folder, as for SFTTrainer.
      teacher_model: the teacher, a CompatModel or its hub name or folder; None takes args.teacher_model_name_or_path,
        or, if the model has an adapter, the model with its adapter off, which is printed.
      args: DistillationConfig or GKDConfig, also TRL's own.
      others: further arguments of SFTTrainer.
    Raises:
      ValueError: there is no teacher, or its vocabulary is another; an argument that is not supported, by its name.
    """

    config_type: type[DistilledConfig]
    table = DISTILLATION_TRAINER

    def __init__(
        self,
        model: CompatModel | str | os.PathLike,
        teacher_model: CompatModel | str | os.PathLike | None = None,
        args: object = None,
        train_dataset: object = None,
        eval_dataset: object = None,
        processing_class: object = None,
        **others: object,
    ):
        name, found = type(self).__name__, given_arguments(args, self.config_type)
        if isinstance(model, str | os.PathLike):
            roomy = copy.copy(found)
            roomy.max_length = self._room(found)
            model = loaded(os.fspath(model), roomy, full=others.get("peft_config") is None)
        self._teacher = _teacher(name, teacher_model, found)
        super().__init__(model, args, train_dataset, eval_dataset, processing_class, **others)
        if self._teacher is not None:
            with_teacher(self.model.module, self._teacher.module)  # refuses another vocabulary before rows are read
        elif self.model.has_adapter:
            tell(name, "teacher_model = None", "the teacher is the model with its adapter off")
        else:
            raise ValueError(
                f"{name}: there is no teacher: give teacher_model, or teacher_model_name_or_path of the config. A "
                "model with an adapter can be its own, with the adapter off"
            )

    def _room(self, args: object) -> int | None:
        """The tokens of a row for which a model is loaded that is given by its name. args: the script's config."""
        return getattr(args, "max_length", None)

    def _to_train(self) -> Decoder:
        """The student with its teacher attached."""
        return with_teacher(super()._to_train(), None if self._teacher is None else self._teacher.module)

    def _objective(self) -> ObjectiveConfig:
        """The objective's section of the config."""
        teacher = BASE if self._teacher is None else self._teacher.module.name_or_path or "in memory"
        return dataclasses.replace(ObjectiveConfig("distill", teacher=teacher, beta=self.args.beta), **self._drawing())

    def _drawing(self) -> dict[str, float | int]:
        """The options of the objective that say how answers are sampled, and how many."""
        raise NotImplementedError

    @property
    def _samples(self) -> bool:
        """Whether any answers are sampled."""
        return True

    def config(self, resume: Literal["auto", "never"] = "never", prepared: bool = True) -> TrainConfig:
        """As SFTTrainer.config; if answers are sampled, rows_per_step counts the rows of the data of an update, which
        are packed with their answers. The arguments are those of SFTTrainer.config."""
        made = super().config(resume, prepared)
        if not self._samples:
            return made
        return dataclasses.replace(made, data=dataclasses.replace(made.data, packing=True))


class DistillationTrainer(DistilledTrainer):
    """TRL's DistillationTrainer: the student answers prompts and learns the teacher's distributions over its answers.

    Rows have a column `prompt`, text or messages. Held-out rows have answers beside it (a column `completion`, or a
    last message of the assistant), over which the divergence is measured; TRL samples there too.
    """

    config_type = DistillationConfig

    def _room(self, args: object) -> int:
        return _USUAL_PROMPT + getattr(args, "max_completion_length", DistillationConfig.max_completion_length)

    def _drawing(self) -> dict[str, float | int]:
        names = ("temperature", "max_completion_length", "top_p", "repetition_penalty")
        options = {name: getattr(self.args, name) for name in names}
        return options | dict(on_policy=1.0, top_k=max(0, self.args.top_k or 0), min_p=self.args.min_p or 0.0)

    def _read(self, dataset: object, formatting_func: object) -> tuple[object, str]:
        """(rows, their format) of a script's data set; raises ValueError if they have no prompts."""
        name = type(self).__name__
        if is_stream(dataset):
            raise ValueError(
                f"{name}: an IterableDataset is not supported; prompts are read before the run. Instead: a list of its "
                "rows"
            )
        if formatting_func is not None:
            raise ValueError(f"{name}: it has no formatting_func; give a column `prompt`")
        if not hasattr(dataset, "column_names") and not isinstance(dataset, str):
            dataset = list(dataset)  # type: ignore[call-overload]
        if not isinstance(dataset, str) and not {"prompt", "messages"} & {*columns_of(dataset, name)}:
            raise ValueError(f"{name}: the data set has no column `prompt`")
        return dataset, "auto"


class GKDTrainer(DistilledTrainer):
    """TRL's GKDTrainer: with probability lmbda a row's answer is sampled from the student, and else it is the row's own
    last one. Rows are conversations (`messages`), or have prompt and completion.

    TRL draws once for each micro-batch, and this trainer for each row.
    """

    config_type = GKDConfig

    def __init__(
        self,
        model: CompatModel | str | os.PathLike,
        teacher_model: CompatModel | str | os.PathLike | None = None,
        args: object = None,
        data_collator: object = None,
        train_dataset: object = None,
        eval_dataset: object = None,
        processing_class: object = None,
        **others: object,
    ):
        others["data_collator"] = data_collator
        super().__init__(model, teacher_model, args, train_dataset, eval_dataset, processing_class, **others)
        self._masking["last_response_only"] = True

    @property
    def _samples(self) -> bool:
        return self.args.lmbda > 0

    def _drawing(self) -> dict[str, float | int]:
        if not self._samples:
            return dict(temperature=1.0, on_policy=0.0)
        return dict(
            temperature=1.0,
            sampling_temperature=self.args.temperature,
            on_policy=self.args.lmbda,
            max_completion_length=self.args.max_new_tokens,
        )

    def _read(self, dataset: object, formatting_func: object) -> tuple[object, str]:
        """Reads a script's data set: returns (its rows, the name of their format).

        Args:
          dataset: the data set, with a column `messages`, or with `prompt` and `completion`.
          formatting_func: must be None; this trainer accepts the argument only to refuse it with an error.
        Raises:
          ValueError: formatting_func is given, or the rows are plain texts, which have no answer that is separate from
            the prompt.
        """
        if formatting_func is not None:
            raise ValueError(f"{type(self).__name__}: it has no formatting_func; give a column `messages`")
        rows, form = SFTTrainer._read(self, dataset, None)
        if form == "text":
            raise ValueError(f"{type(self).__name__}: rows of texts have no answers; give a column `messages`")
        return rows, form


def _teacher(
    trainer: str, teacher_model: CompatModel | str | os.PathLike | None, args: SFTConfig
) -> CompatModel | None:
    """The teacher that a script gave to a trainer or named in its config; None if it did neither.

    Args:
      trainer: the name of the trainer's class, for messages.
      teacher_model: what the trainer was given.
      args: the trainer's config.
    """
    given = teacher_model if teacher_model is not None else getattr(args, "teacher_model_name_or_path", None)
    if isinstance(given, CompatModel) or given is None:
        return given
    if not isinstance(given, str | os.PathLike):
        raise ValueError(
            f"{trainer}: teacher_model is a {type(given).__name__}; give a name or folder, or load it with "
            "FastLanguageModel"
        )
    where = f"{type(args).__name__}.teacher_model_init_kwargs"
    settings = getattr(args, "teacher_model_init_kwargs", None) or {}
    return load_plain(where, given, None, args.seed, False, settings)
