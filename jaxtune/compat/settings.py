"""The arguments of a run, and the sections of a TrainConfig that they mean."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from jaxtune.compat.arguments import choose, settle
from jaxtune.compat.defaults import Library, defaults
from jaxtune.compat.rows import TOKENS
from jaxtune.compat.tables import ORDERS, SFT
from jaxtune.convert.schedules import schedule_keys
from jaxtune.convert.tables import table
from jaxtune.models.decoder import Decoder
from jaxtune.train.config import MetricsConfig, ScheduleConfig


@dataclasses.dataclass(init=False)
class SFTConfig:
    """TRL's SFTConfig. Arguments that a script does not give are TRL's defaults, or Unsloth's once a trainer of
    FastLanguageModel's model has it.

    An update is an optimizer step; intervals below 1 are shares of all updates. ValueError: an argument without a field
    that would change the result. load_best_model_at_end keeps a copy of the best trained weights in host memory.
    """

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
    report_timing: bool = False  # True: train() ends with a table of the seconds since the script's start, by phase
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
        """Counts an argument that a script changes later as given."""
        vars(self).update({name: value, "given": self.given | {name}})

    def __getattr__(self, name: str) -> Any:
        """The default of an argument that has no field here."""
        if not name.startswith("_") and name in (library_defaults := defaults(type(self).library, type(self).section)):
            return library_defaults[name]
        raise AttributeError(f"{type(self).__name__} has no argument {name!r}")

    def _fill(self, library: Library, arguments: Mapping[str, object]) -> None:
        """Sets all arguments; `arguments` may have some without a field, which callbacks may read."""
        library_defaults = defaults(library, self.section)
        field_defaults = {
            field.name: field.default if library_defaults.get(field.name) is None else library_defaults[field.name]
            for field in dataclasses.fields(self)
        }
        values = {name: None if value is dataclasses.MISSING else value for name, value in field_defaults.items()}
        if arguments.get("fp16"):  # of both TRL takes the other one only where a script does not say
            values["bf16"] = False
        vars(self).update(values | dict(arguments))
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
_MODELS = ("packing", "gradient_checkpointing", "max_length", "vllm_importance_sampling_mode")


class TrainingArguments(SFTConfig):
    """transformers' TrainingArguments, whose defaults stay in any trainer; fields that it lacks have the trainer's."""

    section = "training_arguments"
    library: ClassVar[Library] = "transformers"


def resolved_config(
    args: Any, kind: type[SFTConfig], model: object, overriding: Mapping[str, object] | None = None
) -> SFTConfig:
    """The arguments of a trainer as a `kind`, with Unsloth's defaults if a Fast class made the model, else TRL's; those
    of TrainingArguments stay. ValueError: `args` is of another class.

      overriding: arguments of the trainer that replace those of `args`.
    """
    library: Library = "Unsloth" if getattr(model, "fast", False) else "TRL"
    config = args or kind()
    if not isinstance(config, SFTConfig):
        source = "TRL" if type(config).__module__.startswith("trl.") else "transformers"
        return _config_of(kind, library, _foreign(config, kind) | dict(overriding or {}), source)
    named: Library = vars(config).get("library", library)  # settled before
    names = [field.name for field in dataclasses.fields(kind)]
    values = {name: getattr(config, name) for name in names if name in config.given}
    if isinstance(config, TrainingArguments):
        of_transformers = defaults("transformers", config.section).keys() - _MODELS
        values |= {name: getattr(config, name) for name in names if name in of_transformers}
        return _config_of(kind, library, values | dict(overriding or {}), "transformers")
    return _config_of(kind, library, values | dict(overriding or {}), named)


def _config_of(kind: type[SFTConfig], library: Library, values: Mapping[str, Any], named: Library) -> SFTConfig:
    config = kind(**values)
    config._fill(library, values)
    vars(config)["library"] = named
    return config


def _foreign(args: Any, kind: type[SFTConfig]) -> dict[str, Any]:
    """The arguments of an object of transformers' or TRL's classes, its own defaults included."""
    kinds = [base.__name__ for base in type(args).__mro__]
    if not dataclasses.is_dataclass(args) or "TrainingArguments" not in kinds:
        raise ValueError(f"SFTTrainer: args is a {type(args).__name__}; use jaxtune.compat.{kind.__name__}")
    fields = {field.name for field in dataclasses.fields(kind)}
    arguments = {}
    for field in dataclasses.fields(args):
        name, value = field.name, plain_value(getattr(args, field.name))
        default = plain_value(field.default_factory() if callable(field.default_factory) else field.default)
        if name in _MODELS:
            is_argument = value and value != default
        else:  # its defaults differ from ours, so its values are taken as they are
            is_argument = name in fields or (name in kind.table and value != default and name not in _FILLED)
        if is_argument:
            arguments[name] = value
    return arguments


def move_quantization_config(args: SFTConfig, trainer_arguments: dict[str, object], model: object) -> None:
    """Moves the trainer's quantization_config to the arguments that load its model; ValueError for a loaded model."""
    config = trainer_arguments.pop("quantization_config", None)
    if config is None:
        return
    if not isinstance(model, str | os.PathLike):
        raise ValueError("quantization_config belongs to from_pretrained: the trainer's model is loaded already")
    args.model_init_kwargs = {**(args.model_init_kwargs or {}), "quantization_config": config}


def plain_value(setting: Any) -> Any:
    """The value of a member of transformers' enumerations ("steps"); any other setting unchanged."""
    return getattr(setting, "value", setting)


def trained_tokens(args: SFTConfig, form: str) -> str:
    """data.train_on for the tokens that TRL trains on; ValueError if the rows' format does not fit the arguments."""
    if form == TOKENS:  # the rows say what trains
        return "all"
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
DEFAULT_PROMPT = 512  # tokens of a prompt for which rows have room beside an answer of max_completion_length


def row_length(args: SFTConfig, model: Any, collated: int | None = None) -> int:
    """The most tokens of a row: the least of the limits that are set, else 1,024 (more for an answer of
    max_completion_length after a prompt) or the model's context length. collated: the collator's limit.
    """
    limits = (args.max_length, args.max_seq_length, model.max_seq_length, collated)
    least = min((length for length in limits if length is not None), default=None)
    if least is not None:
        return least
    free = max(DEFAULT_LENGTH, DEFAULT_PROMPT + (getattr(args, "max_completion_length", None) or 0))
    return min(free, model.module.config.context_length)


def max_steps(args: SFTConfig, streamed: bool) -> int | None:
    """The updates that max_steps asks for; None: num_train_epochs decides, which raises ValueError for a stream."""
    if args.max_steps > 0:
        return args.max_steps
    if streamed:
        raise ValueError(
            f"{type(args).__name__}: max_steps = {args.max_steps}: train_dataset is an IterableDataset, whose length "
            "is not known; set max_steps"
        )
    return None


def total_steps(args: SFTConfig, steps_per_epoch: int) -> int:
    """Updates of a run, as transformers counts them."""
    return args.max_steps if args.max_steps > 0 else max(1, math.ceil(args.num_train_epochs * steps_per_epoch))


def schedule_config(args: SFTConfig, steps: int | None) -> ScheduleConfig:
    """The section `schedule`. With `steps` None a warm-up that is a share becomes 0: not for training."""
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
    """The precision of the run's config: that of bf16 or fp16, else of the dtype in which `module` computes."""
    if args.bf16 and args.fp16:
        raise ValueError("SFTConfig: bf16 and fp16 are both True: keep one")
    if args.bf16 or args.fp16:
        return "bf16" if args.bf16 else "fp16"
    return {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[module.dtype]


def steps_between(args: SFTConfig, name: str, total: Callable[[], int | None]) -> int | None:
    """The field `name`, such as save_steps, in steps; a float below 1 is a share of total(). None: not known. total:
    returns the run's steps; called only for a share.
    """
    value = getattr(args, name)
    if isinstance(value, float) and 0 < value < 1:
        steps = total()
        return None if steps is None else math.ceil(steps * value)
    if value is not None and value != int(value):
        raise ValueError(f"SFTConfig: {name} = {value}: must be a whole number, or below 1: a share of all steps")
    return None if value is None else int(value)


def metrics_config(args: SFTConfig, log_every: int) -> MetricsConfig:
    """The section `metrics`; projects are those of WANDB_PROJECT and TRACKIO_PROJECT, if they are set."""
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
