"""Most sections of a configuration: frozen dataclasses with defaults and help texts (the second argument of
`Annotated`). `__post_init__` checks what types cannot express, also of configurations made in Python: ConfigError.
"""

from __future__ import annotations

import datetime
import math
import re
from dataclasses import dataclass, replace
from typing import Annotated, Literal, get_args

from pydantic import ConfigDict

from jaxtune.conversations.templates import checked_arguments
from jaxtune.train.config.checks import LARGEST_INTEGER, ConfigError, fraction, not_negative, positive, require
from jaxtune.train.config.step_unit import Packing, StepUnit

_STRICT = ConfigDict(extra="forbid")
_DAY = re.compile(r"\d{4}-\d{2}-\d{2}")
REWARDS = "rewards"  # evaluation.generate: the functions that the run's objective learns from
OF_ANSWERS = ("eval_answer", "eval_reward")  # how the names of metrics of answers begin

# The keys of `data` that decide how rows are tokenised and packed: arguments of `jaxtune.train.data.prepare`.
ROW_OPTIONS = (
    "format",
    "columns",
    "template",
    "train_on",
    "instruction_part",
    "response_part",
    "last_response_only",
    "mask_spans",
    "length",
    "packing",
    "overflow",
    "on_bad_row",
    "patches_per_row",
)

# Columns of the formats of rows, which data.columns finds under other names.
COLUMN_NAMES = (
    *("messages", "conversations", "instruction", "input", "output", "prompt", "completion", "text", "system", "tools"),
    *("chosen", "rejected", "label", "margin", "answer", "history", "images"),
)


def is_greatest(metric: str, choice: bool | None) -> bool:
    """Whether the greatest value of a metric is the best one: as chosen, else unless its name ends in "loss"."""
    return not metric.endswith("loss") if choice is None else choice


def _is_day(text: str) -> bool:
    try:
        return bool(_DAY.fullmatch(text)) and bool(datetime.date.fromisoformat(text))
    except ValueError:
        return False


class Unset(int):
    """The default of a number in whose place a run may take a better one."""


@dataclass(frozen=True)
class DataConfig:
    """Which rows are trained on and evaluated, how they are read, tokenised and packed, and which tokens count."""

    __pydantic_config__ = _STRICT

    train: Annotated[
        str | tuple[str, ...] | tuple[tuple[str, float], ...],
        "Training rows: a JSONL, JSON, Parquet or CSV file, a folder of them, or a `datasets` folder or name "
        "(name:config:split); a list of these; or a list of [rows, weight], which are mixed in these shares. "
        "rows.jsonl[:1000] means its first 1,000 rows.",
    ]
    eval: Annotated[str | None, "Held-out rows, in the same formats."] = None
    eval_rows: Annotated[
        int | float,
        "Without data.eval: this many distinct rows are taken out of data.train for evaluation; below 1: this share.",
    ] = 0
    format: Annotated[str, "Format of the rows; 'auto' reads it from their columns."] = "auto"
    columns: Annotated[
        dict[str, str] | None,
        "Names of the columns in data.train and data.eval, where they have others, e.g. {prompt: question, "
        "completion: reply}.",
    ] = None
    template: Annotated[str | None, "Name or file of a chat template; default: the tokenizer's own."] = None
    today: Annotated[
        str | None,
        "The day that a chat template writes into rows, e.g. 2026-11-28; default: the day when the run first started.",
    ] = None
    template_arguments: Annotated[
        dict[str, bool | int | float | str | None] | None,
        "Variables of the chat template, e.g. {enable_thinking: false}; the saved template has them as defaults.",
    ] = None
    train_on: Annotated[
        Literal["responses", "turns", "completion", "all"],
        "Tokens that count in the loss; turns: also what the template writes behind the token that ends a response; "
        "completion: all behind the prompt (both as TRL).",
    ] = "responses"
    instruction_part: Annotated[str | None, "Text that opens a user turn: masks by markers, not by the template."] = (
        None
    )
    response_part: Annotated[str | None, "Text that opens an assistant turn; goes with data.instruction_part."] = None
    last_response_only: Annotated[bool, "Train on the last response of a conversation only."] = False
    mask_spans: Annotated[
        tuple[tuple[str, str], ...] | None,
        "Spans of responses that are not trained on, as [opening, closing], e.g. [[<think>, </think>]].",
    ] = None
    length: Annotated[
        int, "Tokens in a row; of sampled answers, if it is left out: what the longest prompts and answers fill best."
    ] = Unset(2048)
    packing: Annotated[
        Packing,
        "Fill rows with several whole documents; false: one padded document a row; step: a step has rows_per_step "
        "documents (or pairs), which share rows.",
    ] = True
    overflow: Annotated[
        Literal["truncate", "split", "drop", "error"],
        "Documents longer than data.length: cut, divided, left out, or an error.",
    ] = "truncate"
    on_bad_row: Annotated[Literal["error", "skip"], "Rows that cannot be used; they are reported as file:line."] = (
        "error"
    )
    max_pixels: Annotated[
        int | None, "A picture with more pixels is made smaller; null: as the model's preprocessor_config.json says."
    ] = None
    patches_per_row: Annotated[int | None, "Patches of pictures for which a row has room; null: as the rows need."] = (
        None
    )
    images: Annotated[
        str | None, "Folder of pictures named by relative paths; null: that of the rows' file, then the working one."
    ] = None
    remote_images: Annotated[bool, "Fetch pictures that are named by http and https addresses."] = False
    streaming: Annotated[
        bool, "Read data.train during the run, in constant memory, instead of tokenising all of it before."
    ] = False
    buffer_size: Annotated[int, "Rows of a stream that are read, shuffled and packed at a time."] = 10_000
    max_rows: Annotated[int | None, "Read no more than this many rows."] = None
    cache_dir: Annotated[str | None, "Folder of the token cache; default: in the user's cache folder."] = None
    num_workers: Annotated[int | None, "Processes that tokenise; default: up to one for each CPU, at most 16."] = None

    @property
    def trained_template(self) -> str | None:
        """The template as the trained model's tokenizer has it: `template`, or with arguments the tokenizer's."""
        return "tokenizer" if self.template_arguments and self.template is not None else self.template

    def __post_init__(self) -> None:
        require(self.length >= 2, "data.length", self.length, "must be 2 or more")
        require(self.today is None or _is_day(self.today), "data.today", self.today, "must be a day such as 2026-11-28")
        try:
            checked_arguments(self.template_arguments, "data.template_arguments")
        except ValueError as error:
            raise ConfigError(str(error)) from None
        not_negative("data.eval_rows", self.eval_rows)
        require(
            self.eval_rows < 1 or self.eval_rows == int(self.eval_rows),
            "data.eval_rows",
            self.eval_rows,
            "must be a number of rows, or a share of them below 1",
        )
        for name in self.columns or ():
            names = ", ".join(COLUMN_NAMES)
            require(name in COLUMN_NAMES, "data.columns", name, f"is not a column of any format; there are {names}")
        positive("data.max_rows", self.max_rows)
        positive("data.max_pixels", self.max_pixels)
        positive("data.patches_per_row", self.patches_per_row)
        positive("data.buffer_size", self.buffer_size)
        self._require_what_can_be_streamed()
        positive("data.num_workers", self.num_workers)
        if self.eval is not None:
            require(
                self.eval_rows == 0, "data.eval_rows", self.eval_rows, "takes rows out of data.train; unset data.eval"
            )
        for key, partner in (("instruction_part", "response_part"), ("response_part", "instruction_part")):
            if getattr(self, key) is not None:
                require(getattr(self, partner) is not None, f"data.{partner}", None, f"data.{key} needs it: set both")
                require(getattr(self, key) != "", f"data.{key}", "", "must not be empty")
                trains = self.train_on in ("responses", "turns")
                require(trains, f"data.{key}", getattr(self, key), "needs data.train_on=responses or turns")
        for pair in self.mask_spans or ():
            require(
                all(mark.strip() for mark in pair),
                "data.mask_spans",
                self.mask_spans,
                "an opening and a closing must not be empty, as in [[<think>, </think>]]",
            )
        if self.last_response_only:
            trains = self.train_on in ("responses", "turns")
            require(trains, "data.last_response_only", True, "needs data.train_on=responses or turns")

    @property
    def mixed(self) -> tuple[tuple[str, float], ...]:
        """The (rows, weight) pairs that `train` mixes; empty without weights."""
        sets = () if isinstance(self.train, str) else self.train
        return tuple(entry for entry in sets if not isinstance(entry, str))

    def _require_what_can_be_streamed(self) -> None:
        """Refuses what needs all rows before the run, if rows are streamed or mixed."""
        require(self.train != (), "data.train", [], "must name rows")
        for rows, weight in self.mixed:
            positive(f"data.train, the weight of {rows}", weight)
        if self.streaming:
            why = "a stream, whose rows are not all known before it is read"
        elif self.mixed:
            why = "several sets of rows, which are mixed during the run"
        else:
            return
        require(self.eval_rows == 0, "data.eval_rows", self.eval_rows, f"data.train is {why}; set data.eval to a file")
        require(
            not StepUnit(self.packing).counts_examples,
            "data.packing",
            self.packing,
            f"data.train is {why}, so steps cannot be packed before the run; set it to true or false",
        )
        require(
            self.max_rows is None or not self.streaming,
            "data.max_rows",
            self.max_rows,
            f"data.train is {why}; `steps` says how much of it is read",
        )


_Optimizer = Literal["adamw", "adamw_8bit", "lion", "lion_8bit", "muon", "adafactor", "sgd"]
_Schedule = Literal[
    "linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt", "warmup_stable_decay", "constant"
]
OPTIMIZERS, SCHEDULES = get_args(_Optimizer), get_args(_Schedule)
# Optimizers whose states may be in host memory: an update is bounded before it is computed.
HOSTED_OPTIMIZERS = ("adamw", "adamw_8bit", "lion", "lion_8bit")
_MOMENTUM = {"muon": 0.95}  # by optim.name; 0.9 of all others


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer and its numbers, and how trained weights and its states are stored. `weights` null is bf16 for
    matrices if the run computes in bf16 and trains over 2 billion parameters, else fp32.
    """

    __pydantic_config__ = _STRICT

    name: Annotated[
        _Optimizer,
        "Optimizer; adamw_8bit stores its state in 2 bytes a parameter, lion_8bit in 1; muon: of matrices, AdamW of "
        "embeddings, output head and the others.",
    ] = "adamw"
    learning_rate: Annotated[float, "Peak learning rate."] = 2e-4
    embedding_learning_rate: Annotated[
        float | None, "Peak learning rate of embed_tokens and lm_head where they train; null: learning_rate."
    ] = None
    weight_decay: Annotated[float, "Decoupled weight decay; never on norms and biases."] = 0.0
    beta1: Annotated[float, "Decay of the first moment (adamw, muon's AdamW); weight of the momentum (lion)."] = 0.9
    beta2: Annotated[float, "Decay of the second moment (adamw, muon's AdamW) or of the momentum (lion)."] = 0.999
    eps: Annotated[float, "Added to the root of the second moment (adamw, muon's AdamW)."] = 1e-8
    momentum: Annotated[float | None, "Momentum of sgd (null: 0.9) and muon (null: 0.95)."] = None
    weights: Annotated[
        Literal["fp32", "bf16"] | None,
        "How trained weights are kept; bf16: matrices, rounded stochastically; null: that above 2B of them in bf16.",
    ] = None
    offload: Annotated[
        bool, "Keep the optimizer's states in host memory (adamw, lion, in 8 bits too; full fine-tuning)."
    ] = False

    def __post_init__(self) -> None:
        if self.momentum is None:
            object.__setattr__(self, "momentum", _MOMENTUM.get(self.name, 0.9))
        positive("optim.learning_rate", self.learning_rate)
        positive("optim.embedding_learning_rate", self.embedding_learning_rate)
        not_negative("optim.weight_decay", self.weight_decay)
        fraction("optim.beta1", self.beta1, below_one=True)
        fraction("optim.beta2", self.beta2, below_one=True)
        positive("optim.eps", self.eps)
        fraction("optim.momentum", self.momentum, below_one=True)
        require(
            not self.offload or self.name in HOSTED_OPTIMIZERS,
            "optim.offload",
            True,
            f"optim.name = {self.name} keeps its states on the device; use {', '.join(HOSTED_OPTIMIZERS)}, or unset it",
        )


_DECAYS = Literal["linear", "cosine", "1-sqrt"]


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate over the steps, as a share of its peak. In a warm-up of n steps the first has 1 / n of the peak
    (0 with zero_start); then the rate falls to min_ratio, unless it is "constant" or "inverse_sqrt". warmup_ratio
    replaces warmup_steps, decay_ratio decay_steps; a key that `name` does not read is an error.
    """

    __pydantic_config__ = _STRICT

    name: Annotated[_Schedule, "Shape after the warm-up."] = "linear"
    warmup_steps: Annotated[int, "Steps of warm-up."] = 0
    warmup_ratio: Annotated[float | None, "The same as a share of all steps."] = None
    zero_start: Annotated[
        bool, "The first step of a warm-up has a rate of 0, as in transformers; else the peak / its steps."
    ] = False
    min_ratio: Annotated[
        float,
        "Lowest learning rate as a share of the peak (not of constant, inverse_sqrt); a warm-up of warmup_stable_decay "
        "begins at it too.",
    ] = 0.0
    cycles: Annotated[int, "Number of cosine decays from the peak (cosine_with_restarts)."] = 1
    waves: Annotated[float, "Waves of a cosine (cosine, warmup_stable_decay): 0.5 falls once, 1 rises again."] = 0.5
    power: Annotated[float, "Exponent of the share of steps that remains (polynomial)."] = 1.0
    timescale: Annotated[
        int | None, "Steps in which the rate falls by the root of 2 (inverse_sqrt); null: the warm-up's, or 10,000."
    ] = None
    decay_steps: Annotated[int | None, "Last steps, in which the rate falls (warmup_stable_decay)."] = None
    decay_ratio: Annotated[float | None, "The same as a share of all steps."] = None
    stable_steps: Annotated[
        int | None, "Steps at the peak (warmup_stable_decay); null: all between warm-up and decay."
    ] = None
    decay: Annotated[_DECAYS, "Shape of the fall (warmup_stable_decay)."] = "cosine"
    warmup: Annotated[_DECAYS, "Shape of the warm-up (warmup_stable_decay)."] = "linear"

    def __post_init__(self) -> None:
        not_negative("schedule.warmup_steps", self.warmup_steps)
        fraction("schedule.warmup_ratio", self.warmup_ratio, below_one=True)
        fraction("schedule.min_ratio", self.min_ratio)
        fraction("schedule.decay_ratio", self.decay_ratio)
        for key in ("cycles", "waves", "power", "timescale", "decay_steps"):
            positive(f"schedule.{key}", getattr(self, key))
        not_negative("schedule.stable_steps", self.stable_steps)
        for key, names in _READ_BY.items():
            value, default = getattr(self, key), type(self).__dataclass_fields__[key].default
            require(
                value == default or self.name in names,
                f"schedule.{key}",
                value,
                f"needs schedule.name = {' or '.join(names)}",
            )
        if self.warmup_ratio is not None:
            require(
                self.warmup_steps == 0, "schedule.warmup_steps", self.warmup_steps, "unset it or schedule.warmup_ratio"
            )
        if self.name == "warmup_stable_decay":
            require(
                (self.decay_steps is None) != (self.decay_ratio is None),
                "schedule.decay_steps",
                self.decay_steps,
                "set it or schedule.decay_ratio, one of them: warmup_stable_decay falls in these last steps",
            )


ENDLESS = ("constant", "inverse_sqrt")  # schedules that fall to no lowest rate
# {key: the schedules that read it}
_WSD = ("warmup_stable_decay",)
_READ_BY = {
    "min_ratio": tuple(name for name in SCHEDULES if name not in ENDLESS),
    "cycles": ("cosine_with_restarts",),
    "waves": ("cosine", *_WSD),
    "power": ("polynomial",),
    "timescale": ("inverse_sqrt",),
    **dict.fromkeys(("decay_steps", "decay_ratio", "stable_steps", "decay", "warmup"), _WSD),
}


@dataclass(frozen=True)
class MemoryConfig:
    """The memory that a run may use (budget_gb in GiB: a card sold as 24 GB has 24 GiB), and whether each residual, a
    value of the forward that the backward needs, is kept, recomputed, stored in FP8 or offloaded.
    """

    __pydantic_config__ = _STRICT

    budget_gb: Annotated[
        float | None, "The run keeps to a card of this size, in GB as cards are sold; default: all there is."
    ] = None
    plan: Annotated[
        str | None,
        "Fixed placements of residuals: keep, recompute, fp8, or gate=offload, up=recompute; null: the fastest that "
        "fits.",
    ] = None

    def __post_init__(self) -> None:
        positive("memory.budget_gb", self.budget_gb)
        require(self.plan != "", "memory.plan", self.plan, "must be a plan such as keep, or null")


@dataclass(frozen=True)
class PlanConfig:
    """The device that --plan makes a forecast for, its host memory, and its price."""

    __pydantic_config__ = _STRICT

    device: Annotated[
        str | None,
        "A device that is not here, such as RTX 4090; default: this machine's. memory.budget_gb: a part of its memory.",
    ] = None
    host_gb: Annotated[
        float | None, "Memory of that device's machine, in GB, for each device; default: what is usual beside it."
    ] = None
    dollars_per_hour: Annotated[float | None, "Price of the device, for what a run will cost."] = None

    def __post_init__(self) -> None:
        require(self.host_gb is None or self.host_gb > 0, "plan.host_gb", self.host_gb, "must be over 0")
        positive("plan.dollars_per_hour", self.dollars_per_hour)
        require(
            self.host_gb is None or self.device is not None,
            "plan.host_gb",
            self.host_gb,
            "is of a device that is not here: set plan.device too",
        )


@dataclass(frozen=True)
class MeshConfig:
    """How devices share the work: `data` groups of `fsdp` devices. All divide the rows of a step; the devices of a
    group also divide weights and optimizer states, which each group has whole. One size may be -1: what the other
    leaves.
    """

    __pydantic_config__ = _STRICT

    data: Annotated[int, "Groups of devices that share the rows of a step; -1: what fsdp leaves of all there are."] = 1
    fsdp: Annotated[int, "Devices of a group, which divide weights and optimizer states too; -1: what data leaves."] = 1
    gradient_sync: Annotated[
        Literal["fp32", "bf16", "int8", "int4"], "The numbers in which devices send each other gradients to add them."
    ] = "fp32"
    gradient_rounding: Annotated[
        Literal["error_feedback", "stochastic"],
        "How gradient_sync rounds: error_feedback adds to a step what the one before lost; stochastic keeps nothing. "
        "Sums over fsdp of weights that it divides are stochastic with either.",
    ] = "error_feedback"

    def __post_init__(self) -> None:
        open_keys = []
        for key, value in self.axes.items():
            require(value > 0 or value == -1, f"mesh.{key}", value, "must be greater than 0, or -1 for all devices")
            open_keys += [f"mesh.{key}"] if value == -1 else []
        if len(open_keys) > 1:
            require(False, open_keys[1], -1, f"{open_keys[0]} is -1 too: only one can take what is left")
        key, value = "mesh.gradient_sync", self.gradient_sync
        alone = "nothing is sent on a mesh of one device; set mesh.data (-1: all devices) or mesh.fsdp, or leave it out"
        require(value == "fp32" or self.sizes != (1, 1), key, value, alone)
        key, value = "mesh.gradient_rounding", self.gradient_rounding
        unrounded = "mesh.gradient_sync = fp32 rounds nothing; set mesh.gradient_sync, to int8 for example, or unset it"
        require(value == "error_feedback" or self.gradient_sync != "fp32", key, value, unrounded)

    @property
    def axes(self) -> dict[str, int]:
        """{axis: size}, in the order of partition.AXES; -1: what others leave."""
        return {"data": self.data, "fsdp": self.fsdp}

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(self.axes.values())

    @property
    def keys(self) -> str:
        """The keys whose product is the number of devices, for messages, such as "mesh.data x mesh.fsdp"."""
        names = [f"mesh.{key}" for key, value in self.axes.items() if value != 1 or key == "data"]
        return " x ".join(names)

    @property
    def divides_tensors(self) -> str | None:
        """The setting that divides weights among devices, such as "mesh.fsdp = 4"; None if fsdp is 1."""
        return None if self.fsdp == 1 else f"mesh.fsdp = {self.fsdp}"


def require_step_size(rows: int, length: int, micro_batches: int | None) -> None:
    """Raises `ConfigError` unless the tokens of a step fit in int32, and micro-batches divide its rows."""
    tokens, micro_batches = rows * length, micro_batches or 1
    require(
        tokens <= LARGEST_INTEGER,
        "rows_per_step",
        rows,
        f"times data.length = {length} is {tokens:,} tokens a step; at most {LARGEST_INTEGER:,}",
    )
    require(rows % micro_batches == 0, "micro_batches", micro_batches, f"must divide rows_per_step = {rows}")


def require_shared_rows(rows: int, micro_batches: int | None, mesh: MeshConfig, devices: int) -> None:
    """Raises `ConfigError` unless the rows of a micro-batch can be divided evenly among `devices` devices."""
    rows //= micro_batches or 1
    words = f"must divide the {rows} rows of a micro-batch (rows_per_step / micro_batches)"
    require(rows % devices == 0, mesh.keys, devices, words)


def _check_every(section: str, steps: float | None, epochs: float | None) -> None:
    positive(f"{section}.every_steps", steps)
    positive(f"{section}.every_epochs", epochs)
    is_whole = steps is None or steps < 1 or steps == int(steps)
    require(is_whole, f"{section}.every_steps", steps, "must be a number of steps, or a share of all steps below 1")
    both_set = steps is not None and epochs is not None
    require(not both_set, f"{section}.every_epochs", epochs, f"{section}.every_steps is set too: keep one")


def in_steps[T: (CheckpointConfig, EvaluationConfig)](section: T, total_steps: int, steps_per_epoch: int | None) -> T:
    """The section with every_steps as a number of steps, rounded up. steps_per_epoch: None if the rows have no end.
    total_steps: of the run, of which a share may be configured.
    """
    every = section.every_steps
    if section.every_epochs is not None:
        name = "checkpoint" if isinstance(section, CheckpointConfig) else "evaluation"
        require(
            steps_per_epoch is not None,
            f"{name}.every_epochs",
            section.every_epochs,
            f"these rows have no end, so that epochs cannot be counted; set {name}.every_steps, below 1 a share of all",
        )
        every = math.ceil(round(section.every_epochs * (steps_per_epoch or 1), 6))
    elif every is not None:
        every = math.ceil(round(every * total_steps, 6)) if every < 1 else int(every)
    return replace(section, every_steps=every, every_epochs=None)


@dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are saved, which are kept, whether a run resumes ("never" refuses a folder with checkpoints),
    and whether its result is the best of them. Unless it `saves`, only a signal, `best` or a callback saves.
    """

    __pydantic_config__ = _STRICT

    every_steps: Annotated[int | float | None, "Save every this many steps; below 1: this share of all."] = None
    every_epochs: Annotated[float | None, "Save each time this share of an epoch is done, e.g. 0.5."] = None
    every_minutes: Annotated[float | None, "Save when this much time has passed since the last one."] = 30.0
    keep: Annotated[int, "Checkpoints kept; older ones are deleted."] = 2
    resume: Annotated[Literal["auto", "never"], "Continue from the last checkpoint in the output folder, if any."] = (
        "auto"
    )
    best: Annotated[
        str | None,
        "Metric of evaluations, such as eval_loss or eval_answers/exact_number: the checkpoint in which it is best is "
        "kept too, and its weights are the run's result.",
    ] = None
    best_is: Annotated[
        Literal["greatest", "least"] | None,
        "Which value of checkpoint.best is best; default: the least of a name that ends in loss, else the greatest.",
    ] = None

    def __post_init__(self) -> None:
        _check_every("checkpoint", self.every_steps, self.every_epochs)
        positive("checkpoint.every_minutes", self.every_minutes)
        positive("checkpoint.keep", self.keep)
        require(
            self.best is None or self.best.startswith("eval_"),
            "checkpoint.best",
            self.best,
            "name a metric as metrics.jsonl does: eval_loss, or eval_answers/NAME of a function of evaluation.generate",
        )
        require(
            self.best is not None or self.best_is is None,
            "checkpoint.best_is",
            self.best_is,
            "it says which value of checkpoint.best is best; set checkpoint.best, or leave it out",
        )

    @property
    def saves(self) -> bool:
        """Whether the run saves by steps, epochs or minutes."""
        return bool(self.every_steps or self.every_epochs or self.every_minutes)

    @property
    def best_is_greatest(self) -> bool:
        """Whether the greatest value of the metric `best` is the best one."""
        return is_greatest(self.best or "", None if self.best_is is None else self.best_is == "greatest")


@dataclass(frozen=True)
class EvaluationConfig:
    """When held-out rows are evaluated, how many the model answers, and how answers are sampled and measured."""

    __pydantic_config__ = _STRICT

    every_steps: Annotated[int | float | None, "Evaluate every this many steps; below 1: this share of all."] = None
    every_epochs: Annotated[float | None, "Evaluate each time this share of an epoch is done, e.g. 0.25."] = None
    at_start: Annotated[bool, "Evaluate before the first step."] = False
    at_end: Annotated[bool, "Evaluate after the last step."] = True
    exact_match_rows: Annotated[int, "Rows answered by greedy generation and compared word for word; 0: none."] = 0
    max_new_tokens: Annotated[int, "Longest generated answer."] = 64
    sample_rows: Annotated[int, "Answers shown as samples."] = 3
    generate: Annotated[
        tuple[str, ...],
        "Functions that measure answers to held-out rows at each evaluation: file.py:function, or exact_number, "
        "exact_match, ...; [rewards] means objective.reward_funcs.",
    ] = ()
    generate_rows: Annotated[int, "Held-out rows that are answered for evaluation.generate."] = 64
    temperature: Annotated[float, "Of the answers of evaluation.generate; 0: the likeliest tokens."] = 0.0

    def __post_init__(self) -> None:
        _check_every("evaluation", self.every_steps, self.every_epochs)
        positive("evaluation.generate_rows", self.generate_rows)
        not_negative("evaluation.temperature", self.temperature)
        not_negative("evaluation.exact_match_rows", self.exact_match_rows)
        positive("evaluation.max_new_tokens", self.max_new_tokens)
        not_negative("evaluation.sample_rows", self.sample_rows)

    @property
    def asking(self) -> list[tuple[str, object]]:
        """(dotted key, value) of each setting that makes evaluations generate answers."""
        settings = ("exact_match_rows", self.exact_match_rows), ("generate", list(self.generate))
        return [(f"evaluation.{name}", value) for name, value in settings if value]

    def after_last(self, step: int) -> bool:
        """Whether an evaluation is due after the last step, number `step` from 1, whether or not there are rows."""
        return self.at_end or self.between(step)

    def between(self, step: int) -> bool:
        """Whether every_steps asks for an evaluation after `step` (from 1). Shares must have become steps."""
        return self.every_steps is not None and step % self.every_steps == 0


@dataclass(frozen=True)
class GuardConfig:
    """When a run stops by itself: it diverges, trains nothing, or no longer becomes better."""

    __pydantic_config__ = _STRICT

    max_nonfinite_in_row: Annotated[
        int, "Stop after this many non-finite steps in a row; their updates are skipped."
    ] = 5
    adapters_without_gradient: Annotated[
        bool, "Continue if an adapter's gradient is exactly zero in the first steps; otherwise the run stops."
    ] = False

    patience: Annotated[
        int | None, "Stop after this many evaluations in a row in which guards.metric did not become better."
    ] = None
    metric: Annotated[str, "What guards.patience watches: eval_loss, or another metric of evaluations."] = "eval_loss"
    metric_is: Annotated[
        Literal["greatest", "least"] | None,
        "Which value of guards.metric is best; default: the least of a name that ends in loss, else the greatest.",
    ] = None
    min_change: Annotated[float, "A value is better only if it differs from the best by more than this."] = 0.0

    def __post_init__(self) -> None:
        positive("guards.max_nonfinite_in_row", self.max_nonfinite_in_row)
        positive("guards.patience", self.patience)
        not_negative("guards.min_change", self.min_change)
        require(
            self.metric.startswith("eval_"), "guards.metric", self.metric, "name a metric of evaluations: eval_loss"
        )

    @property
    def greatest(self) -> bool:
        """Whether the greatest value of `metric` is the best one."""
        return is_greatest(self.metric, None if self.metric_is is None else self.metric_is == "greatest")


@dataclass(frozen=True)
class MetricsConfig:
    """Where metrics and sampled answers go, and how often."""

    __pydantic_config__ = _STRICT

    tensorboard: Annotated[bool, "Write TensorBoard files (needs the extra tensorboard)."] = False
    wandb_project: Annotated[str | None, "Log to this Weights & Biases project (needs the extra wandb)."] = None
    trackio_project: Annotated[str | None, "Log to this trackio project (needs the extra trackio)."] = None
    run_name: Annotated[str | None, "The run's name there and on its page; null: its folder's."] = None
    log_every: Annotated[int, "Steps between two lines of metrics."] = 1
    rollouts_mb: Annotated[
        float, "The largest size of rollouts.jsonl, the sampled answers with their rewards; 0: none are kept."
    ] = 64.0
    rollout_tables: Annotated[
        bool | Literal["prompts"],
        "Send the sampled answers to Weights & Biases and trackio, too, as tables named completions; prompts: one "
        "answer to each prompt.",
    ] = True

    def __post_init__(self) -> None:
        positive("metrics.log_every", self.log_every)
        not_negative("metrics.rollouts_mb", self.rollouts_mb)


@dataclass(frozen=True)
class ProfileConfig:
    """Which steps are profiled."""

    __pydantic_config__ = _STRICT

    steps: Annotated[int, "Steps to trace; 0: none."] = 0
    start: Annotated[int, "Steps before the first traced one, of those made since the start or a resume."] = 5

    def __post_init__(self) -> None:
        not_negative("profile.steps", self.steps)
        positive("profile.start", self.start)


@dataclass(frozen=True)
class ExportConfig:
    """What `jaxtune train` exports to the output folder in the end; a Trainer exports nothing."""

    __pydantic_config__ = _STRICT

    merged: Annotated[bool, "The whole model, adapter merged in, as a Hugging Face folder."] = True
    adapter: Annotated[bool, "The adapter, as a PEFT folder."] = True
