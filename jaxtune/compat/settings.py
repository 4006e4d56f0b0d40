"""The arguments of a run, and the values and sections of a TrainConfig that they mean."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from jaxtune.compat.arguments import choose, settle
from jaxtune.compat.defaults import Library, defaults
from jaxtune.compat.tables import ORDERS, SFT
from jaxtune.convert.schedules import schedule_keys
from jaxtune.convert.tables import table
from jaxtune.models.decoder import Decoder
from jaxtune.train.config import MetricsConfig, ScheduleConfig


@dataclasses.dataclass(init=False)
class SFTConfig:
    """TRL's SFTConfig: the arguments of a run, by name (output_dir also first). Until a trainer has it, arguments that
    a script does not give are TRL's defaults; a trainer of a model that FastLanguageModel made takes Unsloth's
    (defaults.py). An update is an optimizer step. Intervals below 1 (save_steps and the like) are shares of all
    updates. An argument that is not a field is accepted if it has no effect here, or has a value that changes nothing;
    any other raises a ValueError.

    With load_best_model_at_end a copy of the best trained weights of this call of train() is kept in host memory, and
    the model has these weights when train() returns. metric_for_best_model (then "loss" by default, which is eval_loss)
    names the number of an evaluation that is compared, and greater_is_better says whether the best is the greatest
    (True) or the least (False)."""

    table = SFT  # the arguments that are not fields: which have no effect here, and which are refused (Argument)
    orders = ORDERS  # {value of train_sampling_strategy: TokenDataset's name for that order of the rows}
    section = "sft"  # of the tables of defaults
    library: ClassVar[Library] = "TRL"  # whose defaults are taken
    given: ClassVar[frozenset[str]] = frozenset()  # names of the arguments that the script gave

    # Fields without a value have that of the library; a value here is for configs that lack the field there.
    output_dir: str  # the folder of checkpoints and metrics
    # True: also a run in output_dir that has not finished, and could be continued, is replaced
    overwrite_output_dir: bool = False
    run_name: str | None = None  # of the run at W&B and Trackio, and on its page; None: output_dir's
    per_device_train_batch_size: int  # rows of a micro-batch
    gradient_accumulation_steps: int  # micro-batches of an update
    max_steps: int  # updates of the run; 0 or less: num_train_epochs decides
    num_train_epochs: float  # how often the rows are trained on, if max_steps is 0 or less
    learning_rate: float  # the peak
    embedding_learning_rate: float | None = None  # that of embed_tokens and lm_head; None: learning_rate
    weight_decay: float
    optim: str  # as transformers names them: convert/transformers.yaml
    adam_beta1: float
    adam_beta2: float
    adam_epsilon: float
    max_grad_norm: float | None  # the gradient's global norm is clipped at it; None or 0: it is not
    neftune_noise_alpha: float | None  # the scale of noise on the embeddings (NEFTune); None: no noise
    lr_scheduler_type: str  # as transformers names them: convert/transformers.yaml
    lr_scheduler_kwargs: Mapping[str, Any] | None  # arguments of the scheduler
    warmup_steps: float  # updates; below 1: a share of all updates
    warmup_ratio: float | None = None  # the older name of a share, where warmup_steps is not given
    logging_steps: float  # updates between two logged lines
    report_to: str | Sequence[str] | None  # "tensorboard", "wandb", "trackio", or several of them
    project: str  # Trackio's project, unless TRACKIO_PROJECT is set
    seed: int  # of the order of rows, of dropout and of the values of a new adapter
    bf16: bool | None  # True: computation in bfloat16, or float16 with fp16; else in the model's dtype
    fp16: bool | None
    # True: residuals may be recomputed or offloaded; False: they stay on the device; None: as the model was loaded
    gradient_checkpointing: bool | str | None
    save_strategy: str  # a checkpoint every save_steps updates; or after each "epoch"; or "no"
    save_steps: float  # updates between two checkpoints, with save_strategy "steps"
    save_total_limit: int | None  # the number of checkpoints that are kept; None or 0: all
    eval_strategy: str  # or "steps", an evaluation every eval_steps updates; or after each "epoch"
    eval_steps: float | None  # updates between two evaluations, with eval_strategy "steps"; None: logging_steps
    # the most tokens of a row: the least of these two and the model's max_seq_length; all None: 1,024 (row_length)
    max_length: int | None = None
    max_seq_length: int | None = None
    packing: bool | None = None  # True: documents fill rows, which an update counts; None: as the model was loaded
    train_sampling_strategy: str = "random"  # a key of `orders`
    dataset_text_field: str = "text"  # the column of texts
    dataset_num_proc: int | None = None  # processes that tokenise
    # of rows with prompt and completion, False: all tokens are trained on; True (which refuses other rows) or None:
    # those of the completion
    completion_only_loss: bool | None = None
    assistant_only_loss: bool = False  # True: of a conversation, only the assistant's messages are trained on
    chat_template_path: str | None = None  # a chat template, as data.template takes it; None: the tokenizer's
    model_init_kwargs: Mapping[str, Any] | None = None  # arguments of from_pretrained for a model given by its name
    router_aux_loss_coef: float | None = None  # the factor of the experts' load-balancing loss; None: the model's
    eval_on_start: bool  # True: it is also evaluated before the first update
    load_best_model_at_end: bool
    metric_for_best_model: str | None
    greater_is_better: bool | None  # None: True unless the metric's name ends with "loss"
    full_determinism: bool  # True: repeated runs have equal bits
    push_to_hub: bool = False  # True: what was trained is uploaded once, after the run
    hub_model_id: str | None = None  # the hub's repository; None: the name of output_dir
    hub_private_repo: bool | None = None  # True: a repository that is made is private
    hub_token: str | None = None  # of the hub; None: this machine's login

    def __init__(self, output_dir: str | None = None, **arguments: Any):
        fields = {field.name: field.default for field in dataclasses.fields(self)}
        others = {name: value for name, value in arguments.items() if name not in fields}
        settle("SFTConfig" if type(self) is TrainingArguments else type(self).__name__, others, self.table, type(self))
        if output_dir:
            arguments["output_dir"] = output_dir
        vars(self)["given"] = frozenset(arguments)
        self._fill(self.library, arguments)

    def __setattr__(self, name: str, value: object) -> None:
        """A script may change an argument later: it then counts as given."""
        vars(self).update({name: value, "given": self.given | {name}})

    def __getattr__(self, name: str) -> Any:
        """The default of an argument that has no field here."""
        if not name.startswith("_") and name in (known := defaults(type(self).library, type(self).section)):
            return known[name]
        raise AttributeError(f"{type(self).__name__} has no argument {name!r}")

    def _fill(self, library: Library, given: Mapping[str, object]) -> None:
        """Sets all arguments; `given` may have some without a field, which callbacks may read."""
        known = defaults(library, self.section)
        own = {
            field.name: field.default if known.get(field.name) is None else known[field.name]
            for field in dataclasses.fields(self)
        }
        found = {name: None if value is dataclasses.MISSING else value for name, value in own.items()}
        if given.get("fp16"):  # of both TRL takes the other one only where a script does not say
            found["bf16"] = False
        vars(self).update(found | dict(given))
        if self.load_best_model_at_end and self.metric_for_best_model is None:
            vars(self)["metric_for_best_model"] = "loss"


# Fields that transformers' classes fill in by themselves; their values have no effect.
_FILLED = (
    "accelerator_config",
    "activation_checkpointing",
    "dataloader_pin_memory",
    "debug",
    "disable_tqdm",
    "hub_strategy",
    "logging_dir",
)
# If an object of transformers' classes leaves these at a default or at False, they count as not given.
_MODELS = ("packing", "gradient_checkpointing", "max_length")


class TrainingArguments(SFTConfig):
    """transformers' TrainingArguments, whose defaults stay in any trainer; fields that transformers lacks have the
    trainer's. torch is not needed."""

    section = "training_arguments"
    library: ClassVar[Library] = "transformers"


def settled(args: Any, kind: type[SFTConfig], model: object, more: Mapping[str, object] | None = None) -> SFTConfig:
    """The arguments of a trainer as a `kind`, with the defaults of the library whose script it is: Unsloth's if a Fast
    class made the model, else TRL's; those of transformers' TrainingArguments stay. Its `library` says which.

    Args:
      args: an object of a config class here, of transformers' or of TRL's, or None.
      kind: the class of the trainer's config, such as SFTConfig.
      model: the trainer's, or its name.
      more: arguments that were given to the trainer, which come before those of `args`.
    Raises:
      ValueError: args is an object of another class, or has a setting that is not supported.
    """
    library: Library = "Unsloth" if getattr(model, "fast", False) else "TRL"
    found = args or kind()
    if not isinstance(found, SFTConfig):
        known = "TRL" if type(found).__module__.startswith("trl.") else "transformers"
        return _of(kind, library, _foreign(found, kind) | dict(more or {}), known)
    named: Library = vars(found).get("library", library)  # settled before
    names = [field.name for field in dataclasses.fields(kind)]
    values = {name: getattr(found, name) for name in names if name in found.given}
    if isinstance(found, TrainingArguments):
        of_transformers = defaults("transformers", found.section).keys() - _MODELS
        values |= {name: getattr(found, name) for name in names if name in of_transformers}
        return _of(kind, library, values | dict(more or {}), "transformers")
    return _of(kind, library, values | dict(more or {}), named)


def _of(kind: type[SFTConfig], library: Library, values: Mapping[str, Any], named: Library) -> SFTConfig:
    made = kind(**values)
    made._fill(library, values)
    vars(made)["library"] = named
    return made


def _foreign(args: Any, kind: type[SFTConfig]) -> dict[str, Any]:
    """The arguments of an object of transformers' or TRL's classes, its own defaults included."""
    kinds = [one.__name__ for one in type(args).__mro__]
    if not dataclasses.is_dataclass(args) or "TrainingArguments" not in kinds:
        raise ValueError(f"SFTTrainer: args is a {type(args).__name__}; use jaxtune.compat.{kind.__name__}")
    fields = {field.name for field in dataclasses.fields(kind)}
    given = {}
    for field in dataclasses.fields(args):
        name, value = field.name, plain_value(getattr(args, field.name))
        default = plain_value(field.default_factory() if callable(field.default_factory) else field.default)
        if name in _MODELS:
            taken = value and value != default
        else:  # its defaults differ from ours, so its values are taken as they are
            taken = name in fields or (name in kind.table and value != default and name not in _FILLED)
        if taken:
            given[name] = value
    return given


def quantised_by(args: SFTConfig, others: dict[str, object], model: object) -> None:
    """Moves a trainer's argument quantization_config, which TRL takes for a model that is given by its name, to the
    arguments by which the model is loaded; ValueError for a model that is loaded."""
    config = others.pop("quantization_config", None)
    if config is None:
        return
    if not isinstance(model, str | os.PathLike):
        raise ValueError("quantization_config belongs to from_pretrained: the trainer's model is loaded already")
    args.model_init_kwargs = {**(args.model_init_kwargs or {}), "quantization_config": config}


def plain_value(setting: Any) -> Any:
    """The value, such as "steps", of a `setting` that is a member of one of transformers' enumerations; any other
    setting is returned unchanged. It is used before values are compared or looked up, because scripts may pass either
    for an argument."""
    return getattr(setting, "value", setting)


def trained_tokens(args: SFTConfig, form: str) -> str:
    """Which tokens TRL trains on, as a value of data.train_on, in rows of a format such as "messages". ValueError if
    the arguments need rows of another format, or contradict each other."""
    if args.assistant_only_loss:
        if form not in ("messages", "sharegpt", "prompt_completion"):
            raise ValueError(f"SFTConfig: assistant_only_loss = True needs conversations; the rows are {form}")
        if form == "prompt_completion" and args.completion_only_loss is False:
            raise ValueError(
                "SFTConfig: assistant_only_loss = True with completion_only_loss = False would train on responses in "
                "prompts. Instead: rows of one list `messages`"
            )
        return "turns"
    completions = form in ("prompt_completion", "alpaca")
    if args.completion_only_loss and not completions:
        raise ValueError(f"SFTConfig: completion_only_loss = True needs prompt and completion; the rows are {form}")
    return "completion" if completions and args.completion_only_loss is not False else "all"


DEFAULT_LENGTH = 1024  # TRL's max_length, for configs that have none


def row_length(args: SFTConfig, model: Any) -> int:
    """The most tokens of a row: the least of the config's max_length and max_seq_length and of the model's
    max_seq_length, as far as they are not None; all None: 1,024, or the model's context length if that is less."""
    wanted = (args.max_length, args.max_seq_length, model.max_seq_length)
    least = min((length for length in wanted if length is not None), default=None)
    return min(DEFAULT_LENGTH, model.module.config.context_length) if least is None else least


def max_steps(args: SFTConfig, streamed: bool) -> int | None:
    """For SFTTrainer.config: returns the number of updates that the argument max_steps asks for; None if it is not
    positive, so that num_train_epochs decides.

    Args:
      args: the script's SFTConfig, or another of TRL's configs.
      streamed: True: the rows are an IterableDataset, whose number is unknown; False: their number is known.
    Raises:
      ValueError: streamed is True, and max_steps is not positive.
    """
    if args.max_steps > 0:
        return args.max_steps
    if streamed:
        raise ValueError(
            f"{type(args).__name__}: max_steps = {args.max_steps}: train_dataset is an IterableDataset, whose length "
            "is not known; set max_steps"
        )
    return None


def total_steps(args: SFTConfig, steps_per_epoch: int) -> int:
    """For SFTTrainer.config: the number of updates of a run, as transformers counts them: the max_steps of `args`, the
    script's config, if it is positive, or else num_train_epochs times `steps_per_epoch`, rounded up, at least 1."""
    return args.max_steps if args.max_steps > 0 else max(1, math.ceil(args.num_train_epochs * steps_per_epoch))


def schedule_config(args: SFTConfig, steps: int | None) -> ScheduleConfig:
    """For SFTTrainer.config: returns the section `schedule` of a run's config from TRL's arguments. "constant" has no
    warm-up, as in transformers.

    Args:
      args: the script's SFTConfig, or another of TRL's configs.
      steps: the number of updates of the run, or None if it is not known yet. A warm-up that is a share of all updates
        then becomes 0 steps, so the result must not be used for training.
    Raises:
      ValueError: the scheduler, or an entry of lr_scheduler_kwargs, is not supported.
    """
    kind, where = str(plain_value(args.lr_scheduler_type)), type(args).__name__
    try:
        keys = schedule_keys(table("trl"), kind, args.lr_scheduler_kwargs or {}, args.learning_rate)
    except ValueError as error:
        raise ValueError(f"{where}: lr_scheduler_type = {error}") from None
    if kind == "constant":  # as in transformers, "constant" has no warm-up
        return ScheduleConfig(**keys)
    # A number below 1 is a share of all steps. Of both names the number of steps counts, unless it is 0.
    warmup = args.warmup_steps
    if args.warmup_ratio is not None and not ("warmup_steps" in args.given and warmup):
        warmup = args.warmup_ratio
    warmup = math.ceil(warmup * (steps or 0)) if warmup < 1 else int(warmup)
    return ScheduleConfig(**keys, warmup_steps=warmup, zero_start=True)


def precision(args: SFTConfig, module: Decoder) -> Any:
    """For SFTTrainer.config: returns the `precision` of a run's config: "bf16" or "fp16" if the field of `args`, the
    script's config, of that name is True, else "bf16", "fp16" or "fp32" by the dtype in which `module` computes. Raises
    ValueError if both are True."""
    if args.bf16 and args.fp16:
        raise ValueError("SFTConfig: bf16 and fp16 are both True: keep one")
    if args.bf16 or args.fp16:
        return "bf16" if args.bf16 else "fp16"
    return {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[module.dtype]


def steps_between(args: SFTConfig, name: str, total: Callable[[], int | None]) -> int | None:
    """For SFTTrainer.config: the value of the field `name` of `args`, the script's config, such as save_steps, as a
    number of steps. As in transformers, a float between 0 and 1 is a share of all steps, rounded up; only then `total`
    is called, which returns the number that `config` has counted before (None: it is not known yet). None if the value
    is None, or if it is a share and the number is not known.

    Raises:
      ValueError: the value is neither whole nor between 0 and 1.
    """
    value = getattr(args, name)
    if isinstance(value, float) and 0 < value < 1:
        steps = total()
        return None if steps is None else math.ceil(steps * value)
    if value is not None and value != int(value):
        raise ValueError(f"SFTConfig: {name} = {value}: must be a whole number, or below 1: a share of all steps")
    return None if value is None else int(value)


def metrics_config(args: SFTConfig, log_every: int) -> MetricsConfig:
    """For SFTTrainer.config: returns the section `metrics` of a run's config: which loggers are used, by report_to of
    `args`, the script's config ("none" or None, "tensorboard", "wandb", "trackio", or a list of them), and `log_every`,
    the number of steps between two logged lines. The projects of wandb and trackio are those of the environment
    variables WANDB_PROJECT and TRACKIO_PROJECT, if they are set, and else wandb's "huggingface" and the field `project`
    of `args`. Raises ValueError for a logger that is not supported."""
    loggers = [args.report_to] if isinstance(args.report_to, str) else list(args.report_to or ())
    for name in loggers:
        choose("SFTConfig", "report_to", name, dict.fromkeys(("none", "tensorboard", "wandb", "trackio"), ""))
    return MetricsConfig(
        tensorboard="tensorboard" in loggers,
        wandb_project=os.environ.get("WANDB_PROJECT", "huggingface") if "wandb" in loggers else None,
        trackio_project=os.environ.get("TRACKIO_PROJECT", args.project) if "trackio" in loggers else None,
        run_name=args.run_name,
        log_every=log_every,
    )
