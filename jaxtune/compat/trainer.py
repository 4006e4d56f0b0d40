"""SFTConfig, SFTTrainer and train_on_responses_only over jaxtune.train."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from jaxtune.compat.arguments import (
    FIXED_RESPONSES,
    FIXED_SFT,
    FIXED_TRAINER,
    OPTIMIZERS,
    RESIDUALS,
    SCHEDULES,
    choose,
    refuse,
)
from jaxtune.compat.model import CompatModel
from jaxtune.models.decoder import Decoder
from jaxtune.models.quant import is_quantized
from jaxtune.train.config import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    MemoryConfig,
    MetricsConfig,
    ModelConfig,
    OptimConfig,
    ScheduleConfig,
    TrainConfig,
)
from jaxtune.train.data.labels import IGNORE, derive_markers
from jaxtune.train.trainer import Trainer


@dataclasses.dataclass
class _SFTFields:
    """The arguments of SFTConfig that are followed."""

    output_dir: str = "trainer_output"
    per_device_train_batch_size: int = 4
    per_device_eval_batch_size: int | None = None
    gradient_accumulation_steps: int = 2
    max_steps: int = -1
    num_train_epochs: float = 3.0
    learning_rate: float = 5e-5
    weight_decay: float = 0.001
    optim: str = "adamw_8bit"
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    max_grad_norm: float | None = 1.0
    lr_scheduler_type: str = "linear"
    warmup_steps: float = 0
    warmup_ratio: float = 0.1
    logging_steps: int = 1
    report_to: str | Sequence[str] | None = "none"
    seed: int = 3407
    bf16: bool | None = None
    fp16: bool | None = None
    gradient_checkpointing: bool | str | None = None
    save_strategy: str = "steps"
    save_steps: int = 500
    save_total_limit: int | None = None
    eval_strategy: str = "no"
    eval_steps: int | None = None
    max_length: int | None = None
    max_seq_length: int | None = None
    packing: bool = False
    dataset_text_field: str = "text"
    dataset_num_proc: int | None = None
    completion_only_loss: bool | None = None
    assistant_only_loss: bool = False


class SFTConfig(_SFTFields):
    """TRL's SFTConfig: the fields of _SFTFields; any other argument must ask for nothing."""

    def __init__(self, output_dir: str = "trainer_output", **arguments: Any):
        known = {field.name for field in dataclasses.fields(_SFTFields)}
        others = {name: value for name, value in arguments.items() if name not in known}
        refuse("SFTConfig", others, FIXED_SFT, _SFTFields)
        super().__init__(output_dir or "trainer_output", **{n: v for n, v in arguments.items() if n in known})


@dataclasses.dataclass(frozen=True)
class TrainOutput:
    """What train() returns, as in transformers. metrics: train_runtime in seconds, train_loss."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class SFTTrainer:
    """TRL's SFTTrainer over jaxtune.train.Trainer. `train` puts the trained module into the model it was given.

    Args:
      model: from FastLanguageModel. processing_class or tokenizer: the model's own by default.
      train_dataset, eval_dataset: a datasets.Dataset, a list of dicts, or a path, with a column dataset_text_field, or
        messages, or prompt and completion. Text and messages are trained on whole, completions alone, as in TRL
        (assistant_only_loss, completion_only_loss and train_on_responses_only change that).
      formatting_func: row -> text, instead of a column.
      dataset_text_field, max_seq_length, packing, dataset_num_proc: as in SFTConfig, where older scripts had them.
    """

    def __init__(
        self,
        model: CompatModel,
        args: SFTConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        tokenizer: Any = None,
        formatting_func: Callable[[Mapping[str, Any]], str | list[str]] | None = None,
        **others: Any,
    ):
        if not isinstance(model, CompatModel):
            raise ValueError(f"SFTTrainer: model is a {type(model).__name__}; load it with FastLanguageModel")
        if args is not None and not isinstance(args, SFTConfig):
            raise ValueError(f"SFTTrainer: args is a {type(args).__name__}; use jaxtune.compat.SFTConfig")
        if train_dataset is None:
            raise ValueError("SFTTrainer: train_dataset is missing")
        moved = {"dataset_text_field", "max_seq_length", "packing", "dataset_num_proc"} & others.keys()
        settings = {field.name: getattr(args or SFTConfig(), field.name) for field in dataclasses.fields(_SFTFields)}
        self.args = SFTConfig(**(settings | {name: others.pop(name) for name in moved}))
        refuse("SFTTrainer", others, FIXED_TRAINER, SFTTrainer)
        if not model.has_adapter and not model.full_finetuning:
            raise ValueError(
                "SFTTrainer: the model has no adapter: call FastLanguageModel.get_peft_model, or load it with "
                "full_finetuning=True"
            )
        self.model = model
        self.tokenizer = self.processing_class = processing_class or tokenizer or model.tokenizer
        self._rows = {}
        self._format = ""
        for split, dataset in (("train", train_dataset), ("eval", eval_dataset)):
            if dataset is not None:
                self._rows[split], form = _rows_and_format(dataset, self.args.dataset_text_field, formatting_func)
                if self._format not in ("", form):
                    raise ValueError(
                        f"SFTTrainer: train_dataset is {self._format}, eval_dataset is {form}: make them alike"
                    )
                self._format = form
        self._masking: dict[str, Any] = {"train_on": _train_on(self.args, self._format)}
        self.state = SimpleNamespace(log_history=[], global_step=0)
        self.config("never")  # mistakes show here, not after the data

    def config(self, resume: str = "never") -> TrainConfig:
        """The TrainConfig that the arguments mean."""
        args, source = self.args, self.model.module.source
        lengths = [length for length in (args.max_length, args.max_seq_length) if length is not None]
        batch, parts = args.per_device_train_batch_size, args.gradient_accumulation_steps
        if args.per_device_eval_batch_size not in (None, batch):
            raise ValueError(
                f"SFTConfig: per_device_eval_batch_size = {args.per_device_eval_batch_size} is not supported; "
                f"evaluation uses per_device_train_batch_size = {batch}: leave it out"
            )
        saves = choose("SFTConfig", "save_strategy", str(args.save_strategy), {"steps": "steps", "no": "no"})
        evaluates = choose("SFTConfig", "eval_strategy", str(args.eval_strategy), {"steps": "steps", "no": "no"})
        if evaluates == "steps" and "eval" not in self._rows:
            raise ValueError("SFTConfig: eval_strategy = 'steps' needs eval_dataset")
        residuals = self.model.residuals
        if args.gradient_checkpointing is not None:
            residuals = choose("SFTConfig", "gradient_checkpointing", args.gradient_checkpointing, RESIDUALS)
        optimizer: Any = choose("SFTConfig", "optim", getattr(args.optim, "value", args.optim), OPTIMIZERS)
        return TrainConfig(
            model=ModelConfig(
                path="in memory" if source is None else source.path,
                load_in="nf4" if is_quantized(self.model.module) else None,
            ),
            data=DataConfig(
                train="train_dataset",
                eval="eval_dataset" if "eval" in self._rows else None,
                format=self._format,
                length=min([self.model.max_seq_length, *lengths]),
                packing=args.packing,
                num_workers=args.dataset_num_proc,
                **self._masking,
            ),
            adapter=self.model.adapter,
            steps=args.max_steps if args.max_steps > 0 else None,
            epochs=None if args.max_steps > 0 else args.num_train_epochs,
            rows_per_step=batch * parts,
            micro_batches=parts,
            precision=_precision(args, self.model.module),
            seed=args.seed,
            max_grad_norm=args.max_grad_norm or None,
            optim=OptimConfig(
                name=optimizer,
                learning_rate=args.learning_rate,
                weight_decay=args.weight_decay,
                beta1=args.adam_beta1,
                beta2=args.adam_beta2,
                eps=args.adam_epsilon,
                momentum=0.0,
            ),
            schedule=_schedule(args),
            memory=MemoryConfig(plan=residuals),
            checkpoint=CheckpointConfig(
                every_steps=args.save_steps if saves == "steps" else None,
                every_minutes=None,
                keep=args.save_total_limit or 1_000_000,
                resume=resume,  # type: ignore[arg-type]
            ),
            evaluation=EvaluationConfig(
                every_steps=(args.eval_steps or args.logging_steps) if evaluates == "steps" else None, at_end=False
            ),
            metrics=_metrics(args),
            output=os.fspath(args.output_dir),
        )

    @functools.cached_property
    def _prepared(self) -> Trainer:
        """Holds the tokenised rows; made when they are first needed, after train_on_responses_only."""
        return self._trainer(self._rows["train"], self._rows.get("eval"))

    def _trainer(self, train_rows, eval_rows, resume: str = "never") -> Trainer:
        return Trainer(self.model.module, self.tokenizer, self.config(resume), train_rows, eval_rows)

    @property
    def train_dataset(self) -> Sequence[dict[str, list[int]]]:
        """The tokenised rows: input_ids, and labels with -100 where nothing is trained."""
        return _Tokenised(self._prepared.train_data.documents)

    def train(self, resume_from_checkpoint: bool | None = None) -> TrainOutput:
        """Trains; afterwards the model holds the trained module.

        Args:
          resume_from_checkpoint: True goes on from the last checkpoint in output_dir.
        """
        if resume_from_checkpoint not in (None, True, False):
            raise ValueError(
                f"train: resume_from_checkpoint = {resume_from_checkpoint!r} is not supported; True goes on from "
                "the last checkpoint in output_dir"
            )
        output = Path(self.args.output_dir)
        if not resume_from_checkpoint and any((output / "checkpoints").glob("step_*")):
            raise ValueError(
                f"train: output_dir = {str(output)!r} holds the checkpoints of a run: pass "
                "resume_from_checkpoint=True to go on from them, or name another folder"
            )
        data = self._prepared
        trainer = self._trainer(data.train_data, data.eval_data, "auto" if resume_from_checkpoint else "never")
        started = time.monotonic()
        self.model.module = trainer.train()
        self.state.log_history = trainer.history
        self.state.global_step = trainer.total_steps
        losses = [line["loss"] for line in trainer.history if "loss" in line]
        loss = sum(losses) / len(losses) if losses else math.nan
        return TrainOutput(trainer.total_steps, loss, {"train_runtime": time.monotonic() - started, "train_loss": loss})

    def evaluate(self) -> dict[str, Any]:
        """{"eval_loss", "eval_targets"} of the model as it is now."""
        data = self._prepared
        return self._trainer(data.train_data, data.eval_data).evaluate()

    def save_model(self, output_dir: str | os.PathLike) -> None:
        self.model.save_pretrained(output_dir)


class _Tokenised(Sequence):
    """Documents as rows of input_ids and labels."""

    def __init__(self, documents):
        self._documents = documents

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        document = self._documents[range(len(self))[index]]
        tokens = np.asarray(document.tokens)
        labels = np.where(np.asarray(document.mask, bool), tokens, IGNORE)
        return {"input_ids": tokens.tolist(), "labels": labels.tolist()}


def _rows_and_format(dataset: Any, text_field: str, formatting_func) -> tuple[Any, str]:
    """(rows for jaxtune, their form), by TRL's rules: a formatting function, a text column, then the known columns."""
    if formatting_func is not None:
        return [{"text": _formatted(formatting_func, row)} for row in dataset], "text"
    if isinstance(dataset, str | os.PathLike):
        return dataset, "auto"
    columns = getattr(dataset, "column_names", None)
    if columns is None:
        dataset = list(dataset)
        if not dataset:
            raise ValueError("SFTTrainer: the data set has no rows")
        columns = list(dataset[0])
    if text_field in columns:
        return (dataset, "text") if text_field == "text" else ([{"text": row[text_field]} for row in dataset], "text")
    for names, form in (
        (["messages"], "messages"),
        (["prompt", "completion"], "prompt_completion"),
        (["conversations"], "sharegpt"),
    ):
        if all(name in columns for name in names):
            return dataset, form
    raise ValueError(
        f"SFTTrainer: dataset_text_field = {text_field!r} is not a column of the data set, nor are messages, or prompt "
        f"and completion; it has {', '.join(map(str, columns))}. Name its text column, or give a formatting_func"
    )


def _formatted(formatting_func, row: Mapping[str, Any]) -> str:
    text = formatting_func(row)
    if isinstance(text, list) and len(text) == 1:
        text = text[0]
    if not isinstance(text, str):
        raise ValueError(
            f"SFTTrainer: formatting_func returned {type(text).__name__}; it gets one row and must return its text"
        )
    return text


def _train_on(args: SFTConfig, form: str) -> str:
    """Which tokens TRL trains on: completions alone, everything of text and messages, unless told otherwise."""
    if args.assistant_only_loss:
        if form not in ("messages", "sharegpt"):
            raise ValueError(f"SFTConfig: assistant_only_loss = True needs conversations; the rows are {form}")
        return "responses"
    if args.completion_only_loss and form != "prompt_completion":
        raise ValueError(f"SFTConfig: completion_only_loss = True needs prompt and completion; the rows are {form}")
    return "responses" if form == "prompt_completion" and args.completion_only_loss is not False else "all"


def _schedule(args: SFTConfig) -> ScheduleConfig:
    kind = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
    name: Any = choose("SFTConfig", "lr_scheduler_type", kind, SCHEDULES)
    if kind == "constant":  # as in transformers, "constant" has no warm-up
        return ScheduleConfig(name=name)
    if args.warmup_steps >= 1:  # steps win over the ratio
        return ScheduleConfig(name=name, warmup_steps=int(args.warmup_steps))
    return ScheduleConfig(name=name, warmup_ratio=args.warmup_steps or args.warmup_ratio)


def _precision(args: SFTConfig, module: Decoder) -> Any:
    if args.bf16 and args.fp16:
        raise ValueError("SFTConfig: bf16 and fp16 are both True: keep one")
    if args.bf16 or args.fp16:
        return "bf16" if args.bf16 else "fp16"
    return {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[module.dtype]


def _metrics(args: SFTConfig) -> MetricsConfig:
    loggers = [args.report_to] if isinstance(args.report_to, str) else list(args.report_to or ())
    for name in loggers:
        choose("SFTConfig", "report_to", name, dict.fromkeys(("none", "tensorboard", "wandb"), ""))
    project = os.environ.get("WANDB_PROJECT", "huggingface") if "wandb" in loggers else None
    return MetricsConfig(tensorboard="tensorboard" in loggers, wandb_project=project, log_every=args.logging_steps)


def train_on_responses_only(
    trainer: SFTTrainer,
    instruction_part: str | None = None,
    response_part: str | None = None,
    last_response_only: bool = False,
    tokenizer: Any = None,
    **others: Any,
) -> SFTTrainer:
    """The trainer, set to train on what follows response_part, up to the end of the turn.

    Without the two marker strings they are derived from the chat template.
    """
    refuse("train_on_responses_only", others, FIXED_RESPONSES, train_on_responses_only)
    if instruction_part is None and response_part is None:
        instruction_part, response_part = derive_markers(tokenizer or trainer.tokenizer)
    trainer._masking = {
        "train_on": "responses",
        "instruction_part": instruction_part,
        "response_part": response_part,
        "last_response_only": last_response_only,
    }
    trainer.__dict__.pop("_prepared", None)
    trainer.config()
    return trainer
