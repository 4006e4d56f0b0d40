"""TRL's DistillationTrainer and GKDTrainer with their configs, built on SFTTrainer's run. DistilledTrainer and
DistilledConfig are their bases; `_teacher` finds and loads the teacher.

A teacher of its own is attached to the model that trains, and is on the same device; without one the teacher is the
student with its adapter off. Answers are sampled from the student in the same process.
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
from jaxtune.compat.settings import SFTConfig, quantised_by, settled
from jaxtune.compat.tables import DISTILLATION, DISTILLATION_TRAINER, GKD
from jaxtune.compat.trainer import SFTTrainer
from jaxtune.compat.transformers_names import load_plain, loaded
from jaxtune.models.decoder import Decoder
from jaxtune.train.config import TrainConfig
from jaxtune.train.config.objective import ObjectiveConfig
from jaxtune.train.folder.run_rows import is_stream
from jaxtune.train.objectives.teachers import BASE, with_teacher

_USUAL_PROMPT = 512  # tokens of a prompt that a model has room for which the trainer loads by its name


@dataclasses.dataclass(init=False)
class DistilledConfig(PreferenceConfig):
    """The base class of DistillationConfig and GKDConfig: the arguments that they share, under TRL's names, beside
    those of SFTConfig and disable_dropout, which is True in GKDConfig and False in DistillationConfig."""

    teacher_model_name_or_path: str | None  # the teacher, if the trainer's argument teacher_model is None
    # transformers' arguments of from_pretrained for a teacher that is given by a name, such as quantization_config
    teacher_model_init_kwargs: Mapping[str, object] | None
    beta: float  # the divergence: 0 forward KL, 1 reverse KL, between them the generalised Jensen-Shannon one
    temperature: float  # divides the logits when answers are sampled; DistillationConfig: in the loss, too


@dataclasses.dataclass(init=False)
class DistillationConfig(DistilledConfig):
    """The arguments of a DistillationTrainer: TRL's DistillationConfig. An update trains on
    per_device_train_batch_size * gradient_accumulation_steps answers."""

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
    """The arguments of a GKDTrainer: TRL's GKDConfig. The temperature divides the logits only
    when answers are sampled, and not in the loss, as in TRL."""

    section = "gkd"  # of the tables of defaults
    table = GKD  # the arguments that are not fields: without effect here, or refused

    temperature: float  # divides the logits when answers are sampled
    lmbda: float  # the probability that a row's answer is sampled from the student
    beta: float  # the divergence, as in DistilledConfig: here half way between forward and reverse KL
    max_new_tokens: int  # the most tokens of a sampled answer


class DistilledTrainer(PreferenceTrainer):
    """The base class of DistillationTrainer and GKDTrainer, which train a student to have the output distributions of a
    teacher. A subclass sets `config_type` to the class of its config, and defines `_drawing` and `_read`.

    Args:
      model: the student: a CompatModel, or a hub name or folder, which is loaded.
      teacher_model: the teacher, a CompatModel or its hub name or folder. None takes args.teacher_model_name_or_path;
        if that is None too, the teacher of a model with an adapter is the same model with its adapter off, which is
        printed, and a model without one raises ValueError.
      args: a DistillationConfig or GKDConfig, or TRL's own object.
      train_dataset, eval_dataset: the rows to train on and to evaluate on, which the subclasses describe.
      processing_class: the tokenizer; None: the model's.
      others: further arguments of SFTTrainer.
    Raises:
      ValueError: there is no teacher, or its vocabulary differs from the student's; or an argument, which the message
        names, is not supported.
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
        name, found = type(self).__name__, settled(args, self.config_type, model)
        quantised_by(found, others, model)
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
        """The number of tokens of the longest row that a student given by its name is loaded for. Here it is the
        config's max_length, or None if that is None or missing: `loaded` then takes the config's max_seq_length if it
        is set, else TRL's default, 1,024; DistillationTrainer, whose rows are made of prompts and sampled answers,
        takes 512 plus max_completion_length. args: the script's config."""
        return getattr(args, "max_length", None)

    def _to_train(self) -> Decoder:
        """Returns the module that the run trains, of which jaxtune's Trainer is made: the student, or with
        disable_dropout=True another module over the same arrays whose adapters have no dropout; with its teacher
        attached, unless the teacher is the student with its adapter off. Raises ValueError if the teacher's vocabulary
        differs."""
        return with_teacher(super()._to_train(), None if self._teacher is None else self._teacher.module)

    def _objective(self) -> ObjectiveConfig:
        """Returns the section `objective` of the run's config: distillation from this teacher, with the script's beta
        and the options of `_drawing`. It names the teacher by its folder or hub name, "in memory" for a teacher without
        a name, or BASE for the model with its adapter off."""
        teacher = BASE if self._teacher is None else self._teacher.module.name_or_path or "in memory"
        return dataclasses.replace(ObjectiveConfig("distill", teacher=teacher, beta=self.args.beta), **self._drawing())

    def _drawing(self) -> dict[str, float | int]:
        """Returns those options of the config's section `objective`, {name: value}, that say what share of the answers
        is sampled from the student, and how, with the loss's temperature. Subclasses define it; here it raises
        NotImplementedError. The share, `on_policy`, is 1 in DistillationTrainer, and lmbda in GKDTrainer. The loss's
        temperature is the script's in DistillationTrainer, and 1 in GKDTrainer. The others are the config's arguments
        under jaxtune's names. `_objective` calls it."""
        raise NotImplementedError

    @property
    def _samples(self) -> bool:
        """Whether the run samples answers from the student (True, except in a GKDTrainer with an lmbda of 0), or trains
        on the rows' answers alone. If it is True, `config` sets data.packing to True, because rows are packed with
        their sampled answers; if not, data.packing stays as SFTTrainer.config sets it. A script cannot set packing=True
        (ValueError). GKDTrainer._drawing reads it too."""
        return True

    def config(self, resume: Literal["auto", "never"] = "never", prepared: bool = True) -> TrainConfig:
        """Returns the TrainConfig of the run, as SFTTrainer.config makes it. If answers are sampled, its data.packing
        is True, because rows are packed with their sampled answers; rows_per_step still counts rows of the data set.

        Args:
          resume: "auto" continues the run in output_dir, "never" starts a new one.
          prepared: True allows tokenising the rows to count an epoch's steps. False does not, as for the constructor's
            check of arguments: every_steps for a strategy "epoch" is then None, and without max_steps `epochs` is set
            in place of `steps`.
        Raises:
          ValueError: an argument of the script that is not supported.
        """
        made = super().config(resume, prepared)
        if not self._samples:
            return made
        arguments = dict(getattr(self.args, "chat_template_kwargs", None) or {}) or None
        data = dataclasses.replace(made.data, packing=True, template_arguments=arguments)
        return dataclasses.replace(made, data=data)


class DistillationTrainer(DistilledTrainer):
    """TRL's DistillationTrainer: the student samples an answer to every prompt and learns the teacher's distributions
    over the tokens of that answer. The arguments are those of DistilledTrainer, with a DistillationConfig as `args`. If
    neither teacher_model nor args.teacher_model_name_or_path names a teacher, it is the student with its adapter off; a
    student without an adapter then raises ValueError.

    Rows of train_dataset have a column `prompt` (a text or a list of messages) or `messages`. Rows of eval_dataset must
    have answers, too (a column `completion`, or a last message of the assistant): the divergence is measured over these
    answers, while TRL samples answers there as well.
    """

    config_type = DistillationConfig

    def _room(self, args: object) -> int:
        """Returns the tokens of the longest row that a student given by its name is loaded for: 512 for the prompt,
        plus max_completion_length of `args`, the script's config (512 if it has no such field)."""
        return _USUAL_PROMPT + getattr(args, "max_completion_length", _USUAL_PROMPT)

    def _drawing(self) -> dict[str, float | int]:
        """Returns the options of the config's section `objective` about sampling, {name: value}: on_policy is 1,
        because every answer is sampled from the student; the others are the config's arguments of the same names (None
        for top_k or min_p becomes 0, which is off). Its temperature is also the loss's."""
        names = ("temperature", "max_completion_length", "top_p", "repetition_penalty")
        options = {name: getattr(self.args, name) for name in names}
        return options | dict(on_policy=1.0, top_k=max(0, self.args.top_k or 0), min_p=self.args.min_p or 0.0)

    def _read(self, dataset: object, formatting_func: object) -> tuple[object, str]:
        """Checks a script's data set, and returns (its rows, "auto": their format is detected later). The constructor
        calls it for train_dataset and eval_dataset, and evaluate and predict for rows that the script passes to them.

        Args:
          dataset: a name or path (str or os.PathLike), whose columns are not checked here, a data set with columns, or
            an iterable of rows, which is read into a list.
          formatting_func: must be None, because this trainer does not support one.
        Raises:
          ValueError: the data set is an IterableDataset, is a list without rows, or has neither a column `prompt` nor
            `messages`; or formatting_func is not None.
        """
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
    """TRL's GKDTrainer: a row's answer is sampled from the student with probability lmbda, and otherwise the row's own
    last answer is taken; on either one the student learns the teacher's distributions over the answer's tokens. Rows
    are conversations (`messages`), or have `prompt` and `completion`. TRL draws once for each micro-batch, and this
    trainer once for each row. assistant_only_loss and completion_only_loss have no effect, which is printed.

    Args:
      teacher_model: the teacher, a CompatModel or its hub name or folder. None takes args.teacher_model_name_or_path;
        if that is None too, the teacher is the student with its adapter off, and a student without an adapter raises
        ValueError.
      data_collator: None, or a collator that only pads, which has no effect, as is printed; any other raises
        ValueError.
      model, args, train_dataset, eval_dataset, processing_class: the student, a CompatModel or its name; a GKDConfig;
        the rows to train on and to evaluate on; and the tokenizer (None: the model's).
      others: further arguments of SFTTrainer.
    Raises:
      ValueError: also what DistilledTrainer refuses.
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
        for given in ("assistant_only_loss", "completion_only_loss"):
            if getattr(self.args, given):
                tell(type(self.args).__name__, given, "the last answer of a conversation is trained on, as in TRL")

    @property
    def _samples(self) -> bool:
        """Whether the run samples answers from the student, which is so if lmbda is above 0. `config` then sets
        data.packing to True, and `_drawing` returns the options of sampling."""
        return self.args.lmbda > 0

    def _drawing(self) -> dict[str, float | int]:
        """Returns the options of the config's section `objective` about sampling, {name: value}: on_policy, the share
        of sampled answers, is lmbda, and the loss's temperature is 1, as in TRL; sampling_temperature and
        max_completion_length are the script's temperature and max_new_tokens. Without sampling (lmbda is 0) they are
        only the first two."""
        if not self._samples:
            return dict(temperature=1.0, on_policy=0.0)
        return dict(
            temperature=1.0,
            sampling_temperature=self.args.temperature,
            on_policy=self.args.lmbda,
            max_completion_length=self.args.max_new_tokens,
        )

    def _read(self, dataset: object, formatting_func: object) -> tuple[object, str]:
        """Reads a script's data set: returns (its rows, the name of their format, such as "messages"). The constructor
        calls it for train_dataset and eval_dataset, and evaluate and predict for rows that the script passes to them.

        Args:
          dataset: the data set, with a column `messages`, or with `prompt` and `completion`.
          formatting_func: must be None, because this trainer does not support one.
        Raises:
          ValueError: formatting_func is not None; the columns are of no known format, or there are no rows; or the rows
            are plain texts, which have no answer that is separate from the prompt.
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
    """Returns the teacher of a distillation; None if the script neither gave nor named one: then the student with its
    adapter off is the teacher. A teacher that is given by a name is loaded as the config's teacher_model_init_kwargs
    say, and by default in bfloat16, or the base of an adapter's folder in the dtype that the folder records.
    DistilledTrainer's constructor calls it.

    Args:
      trainer: the name of the trainer's class, for messages.
      teacher_model: the trainer's argument: a CompatModel, a hub name or a folder; None: teacher_model_name_or_path of
        `args` is taken.
      args: the trainer's config.
    Raises:
      ValueError: teacher_model is an object of another class, or teacher_model_init_kwargs has an argument that is
        unknown or would change the result.
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
