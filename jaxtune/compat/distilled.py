"""TRL's DistillationTrainer and GKDTrainer. A separate teacher is attached to the model that trains, on the same
device; without one it is the student with its adapter off.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Literal

from jaxtune.compat.arguments import report_idle
from jaxtune.compat.model import CompatModel
from jaxtune.compat.preference import PreferenceConfig, PreferenceTrainer
from jaxtune.compat.rows import columns_of
from jaxtune.compat.settings import SFTConfig, move_quantization_config, resolved_config
from jaxtune.compat.tables import DISTILLATION, DISTILLATION_TRAINER, GKD
from jaxtune.compat.trainer import SFTTrainer
from jaxtune.compat.transformers_names import load_named, load_plain, with_dtype
from jaxtune.models.decoder import Decoder
from jaxtune.train.config import TrainConfig
from jaxtune.train.config.objective import ObjectiveConfig
from jaxtune.train.data.rows.streamed import is_stream
from jaxtune.train.objectives.named import objective_of
from jaxtune.train.objectives.teachers import BASE, with_teacher


@dataclasses.dataclass(init=False)
class DistilledConfig(PreferenceConfig):
    """Arguments that DistillationConfig and GKDConfig share. disable_dropout is True in GKDConfig, else False."""

    teacher_model_name_or_path: str | None  # the teacher, if the trainer's argument teacher_model is None
    # transformers' arguments of from_pretrained for a teacher that is given by a name, such as quantization_config
    teacher_model_init_kwargs: Mapping[str, object] | None
    beta: float  # the divergence: 0 forward KL, 1 reverse KL, between them the generalised Jensen-Shannon one
    temperature: float  # divides the logits when answers are sampled; DistillationConfig: in the loss, too


@dataclasses.dataclass(init=False)
class DistillationConfig(DistilledConfig):
    """TRL's. An update has per_device_train_batch_size * gradient_accumulation_steps answers."""

    section = "distillation"  # of the tables of defaults
    table = DISTILLATION  # the arguments that are not fields: without effect here, or refused

    learning_rate: float
    disable_dropout: bool  # True: the adapter's dropout is turned off; False: it is used
    max_completion_length: int  # the most tokens of a sampled answer
    # How answers are sampled; the defaults change nothing.
    top_p: float
    top_k: int
    min_p: float | None
    repetition_penalty: float
    chat_template_kwargs: Mapping[str, object] | None = None  # variables of the chat template, data.template_arguments


@dataclasses.dataclass(init=False)
class GKDConfig(DistilledConfig):
    """TRL's GKDConfig. As there, the temperature divides the logits only in sampling, not in the loss."""

    section = "gkd"  # of the tables of defaults
    table = GKD  # the arguments that are not fields: without effect here, or refused

    temperature: float  # divides the logits when answers are sampled
    lmbda: float  # the probability that a row's answer is sampled from the student
    beta: float  # the divergence, as in DistilledConfig: here half way between forward and reverse KL
    max_new_tokens: int  # the most tokens of a sampled answer


class DistilledTrainer(PreferenceTrainer):
    """Base of DistillationTrainer and GKDTrainer: trains a student to have a teacher's output distributions.

    A subclass sets `config_type`, and defines `_drawing` and `_read`. ValueError: no teacher, or another vocabulary.

    Args:
      model: the student: a CompatModel, or a hub name or folder.
      teacher_model: likewise; None: teacher_model_name_or_path, or else the student with its adapter off.
      processing_class: the tokenizer; None: the model's.
      others: further arguments of SFTTrainer.
    """

    config_type: type[DistilledConfig]
    trained = "responses"
    table = DISTILLATION_TRAINER  # the arguments that are not parameters: without effect here, or refused

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
        name, config = type(self).__name__, resolved_config(args, self.config_type, model)
        move_quantization_config(config, others, model)
        if isinstance(model, str | os.PathLike):
            model = load_named(os.fspath(model), config, full=others.get("peft_config") is None)
        self._teacher = _teacher(name, teacher_model, config)
        super().__init__(model, args, train_dataset, eval_dataset, processing_class, **others)
        if self._teacher is not None:
            with_teacher(self.model.module, self._teacher.module)  # refuses another vocabulary before rows are read
        elif self.model.has_adapter:
            report_idle(name, "teacher_model = None", "the teacher is the model with its adapter off")
        else:
            raise ValueError(
                f"{name}: there is no teacher: give teacher_model, or teacher_model_name_or_path of the config. A "
                "model with an adapter can be its own, with the adapter off"
            )

    def _to_train(self) -> Decoder:
        """The student with its teacher attached; ValueError for another vocabulary."""
        return with_teacher(super()._to_train(), None if self._teacher is None else self._teacher.module)

    def _objective(self) -> ObjectiveConfig:
        teacher = BASE if self._teacher is None else self._teacher.module.name_or_path or "in memory"
        drawing = self._drawing()
        cache = self.model.cache if drawing["on_policy"] else None  # else nothing is sampled
        plain = ObjectiveConfig("distill", teacher=teacher, beta=self.args.beta)
        return dataclasses.replace(plain, **drawing, cache=cache)

    def _drawing(self) -> dict[str, float | int]:
        """The options of ObjectiveConfig about sampling and the loss's temperature: {name: value}."""
        raise NotImplementedError

    def config(self, resume: Literal["auto", "never"] = "never", prepared: bool = True) -> TrainConfig:
        """The TrainConfig of the run; rows_per_step counts rows of the data set.

        prepared: as in SFTTrainer.config.
        """
        config = super().config(resume, prepared)
        if not objective_of(config.objective).samples:
            return config
        arguments = dict(getattr(self.args, "chat_template_kwargs", None) or {}) or None
        data = dataclasses.replace(config.data, template_arguments=arguments)
        return dataclasses.replace(config, data=data)


class DistillationTrainer(DistilledTrainer):
    """TRL's DistillationTrainer: the student samples an answer to every prompt and learns the teacher's distributions
    over its tokens. Arguments as in DistilledTrainer.

    Rows have `prompt` or `messages`. Rows of eval_dataset also need answers, over which the divergence is measured; TRL
    samples answers there as well.
    """

    config_type = DistillationConfig

    def _drawing(self) -> dict[str, float | int]:
        names = ("temperature", "max_completion_length", "top_p", "repetition_penalty")
        options = {name: getattr(self.args, name) for name in names}
        return options | dict(on_policy=1.0, top_k=max(0, self.args.top_k or 0), min_p=self.args.min_p or 0.0)

    def _read(self, dataset: object, formatting_func: object) -> tuple[object, str]:
        """(the rows, "auto": their format is detected later); ValueError for a stream, no rows, or no prompts."""
        name = type(self).__name__
        if is_stream(dataset):
            raise ValueError(
                f"{name}: an IterableDataset is not supported; prompts are read before the run. Instead: a list of its "
                "rows"
            )
        if formatting_func is not None:
            raise ValueError(f"{name}: it has no formatting_func; give a column `prompt`")
        if isinstance(dataset, str | os.PathLike):
            return dataset, "auto"
        if not hasattr(dataset, "column_names"):
            dataset = list(dataset)  # type: ignore[call-overload]
        if not {"prompt", "messages"} & {*columns_of(dataset, name)}:
            raise ValueError(f"{name}: the data set has no column `prompt`")
        return dataset, "auto"


class GKDTrainer(DistilledTrainer):
    """TRL's GKDTrainer: the answer is sampled from the student with probability lmbda, else it is the row's last one;
    the student learns the teacher's distributions over it. TRL draws once for each micro-batch, this trainer for each
    row. Arguments as in DistilledTrainer.

    Rows are `messages`, or `prompt` and `completion`. data_collator may only pad.
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
        for loss_option in ("assistant_only_loss", "completion_only_loss"):
            if getattr(self.args, loss_option):
                report_idle(
                    type(self.args).__name__, loss_option, "the last answer of a conversation is trained on, as in TRL"
                )

    def _drawing(self) -> dict[str, float | int]:
        if not self.args.lmbda:
            return dict(temperature=1.0, on_policy=0.0)
        return dict(
            temperature=1.0,
            sampling_temperature=self.args.temperature,
            on_policy=self.args.lmbda,
            max_completion_length=self.args.max_new_tokens,
        )

    def _read(self, dataset: object, formatting_func: object) -> tuple[object, str]:
        """(the rows, the name of their format); ValueError for rows without separate answers."""
        if formatting_func is not None:
            raise ValueError(f"{type(self).__name__}: it has no formatting_func; give a column `messages`")
        rows, form = SFTTrainer._read(self, dataset, None)
        if form == "text":
            raise ValueError(f"{type(self).__name__}: rows of texts have no answers; give a column `messages`")
        return rows, form


def _teacher(
    trainer: str, teacher_model: CompatModel | str | os.PathLike | None, args: SFTConfig
) -> CompatModel | None:
    """The teacher that the script gave or named, loaded if it is a name; None: the student with its adapter off."""
    teacher = teacher_model if teacher_model is not None else getattr(args, "teacher_model_name_or_path", None)
    if isinstance(teacher, CompatModel) or teacher is None:
        return teacher
    if not isinstance(teacher, str | os.PathLike):
        raise ValueError(
            f"{trainer}: teacher_model is a {type(teacher).__name__}; give a name or folder, or load it with "
            "FastLanguageModel"
        )
    where = f"{type(args).__name__}.teacher_model_init_kwargs"
    settings = with_dtype(teacher, getattr(args, "teacher_model_init_kwargs", None))
    return load_plain(where, teacher, args.seed, False, settings)
