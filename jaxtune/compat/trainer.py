"""SFTConfig, SFTTrainer and train_on_responses_only over jaxtune.train."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtune.compat.adapters import adapted, lora_settings
from jaxtune.compat.arguments import choose, settle, tell
from jaxtune.compat.callbacks import Events, TrainerControl, TrainerState, checked, with_trained
from jaxtune.compat.measures import EvalPrediction, measures
from jaxtune.compat.model import CompatModel, FastLanguageModel
from jaxtune.compat.rows import Tokenised, rows_and_format
from jaxtune.compat.settings import (
    SFTConfig,
    TrainingArguments,
    given_arguments,
    metrics_config,
    plain_value,
    precision,
    schedule_config,
    steps_between,
    trained_tokens,
)
from jaxtune.compat.tables import OPTIMIZERS, RESIDUALS, RESPONSES, TRAINER
from jaxtune.models.quant import computes_in_fp8, stored_in
from jaxtune.train.callbacks import Callback
from jaxtune.train.config import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    MemoryConfig,
    ModelConfig,
    OptimConfig,
    TrainConfig,
)
from jaxtune.train.data.templates import derive_markers
from jaxtune.train.metrics import JSONL
from jaxtune.train.objectives.config import ObjectiveConfig
from jaxtune.train.trainer import Trainer


@dataclasses.dataclass(frozen=True)
class TrainOutput:
    """What train() returns, as in transformers. metrics: train_runtime in seconds, train_loss."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]


class SFTTrainer:
    """TRL's SFTTrainer over jaxtune.train.Trainer. `train` puts the trained module into the model it was given.

    Args:
      model: from FastLanguageModel, or a hub name or folder, which is loaded and trained whole if there is no
        peft_config. args: SFTConfig or TrainingArguments, also transformers' and TRL's own. peft_config: LoraConfig,
        ours or PEFT's: the trainer's model is then a new one. processing_class or tokenizer: the model's by default.
      train_dataset, eval_dataset: a datasets.Dataset, a list of dicts, or a path, with a column dataset_text_field, or
        messages, or prompt and completion. Text and messages are trained on whole, completions alone, as in TRL
        (assistant_only_loss, completion_only_loss and train_on_responses_only change that).
      formatting_func: row -> text, or columns of a batch -> texts, instead of a column.
      compute_metrics: EvalPrediction(predictions, label_ids) -> {name: number}, of each evaluation; see measures.py.
        preprocess_logits_for_metrics: (logits, labels) of one row -> what compute_metrics gets of it.
      callbacks: of TrainerCallback, ours or transformers'; see callbacks.py.
      dataset_text_field, max_seq_length, packing, dataset_num_proc: as in SFTConfig, where older scripts had them.
    """

    config_type: type[SFTConfig] = SFTConfig
    table = TRAINER  # of what is not followed

    def __init__(
        self,
        model: CompatModel | str | os.PathLike,
        args: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        tokenizer: Any = None,
        formatting_func: Callable[[Any], Any] | None = None,
        peft_config: Any = None,
        compute_metrics: Callable[[EvalPrediction], Mapping[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        callbacks: Sequence[Any] | None = None,
        **others: Any,
    ):
        if train_dataset is None:
            raise ValueError("SFTTrainer: train_dataset is missing")
        moved = {"dataset_text_field", "max_seq_length", "packing", "dataset_num_proc"} & others.keys()
        found = given_arguments(args, self.config_type)
        if not isinstance(found, self.config_type) and type(found) not in (SFTConfig, TrainingArguments):
            name, wanted = type(self).__name__, self.config_type.__name__
            raise ValueError(f"{name}: args is a {type(found).__name__}; use {wanted}")
        settings = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
        self.args: Any = self.config_type(**(settings | {name: others.pop(name) for name in moved}))
        vars(self.args).update(vars(found) | vars(self.args))  # what nothing here follows: callbacks may look at it
        collator = others.get("data_collator")
        if type(collator).__name__ in _PADDING_COLLATORS and not getattr(collator, "mlm", False):
            others.pop("data_collator")
            tell(type(self).__name__, "data_collator", "rows are packed or padded already")
        settle(type(self).__name__, others, self.table, SFTTrainer)
        if isinstance(model, str | os.PathLike):
            model = loaded(os.fspath(model), self.args, full=peft_config is None)
        if not isinstance(model, CompatModel):
            raise ValueError(
                f"SFTTrainer: model is a {type(model).__name__}; give a name or folder, or load it with "
                "FastLanguageModel"
            )
        if peft_config is not None:
            model = _with_adapter(model, peft_config, self.args.seed)
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
                self._rows[split], form = self._read(dataset, formatting_func)
                if self._format not in ("", form):
                    raise ValueError(
                        f"SFTTrainer: train_dataset is {self._format}, eval_dataset is {form}: make them alike"
                    )
                self._format = form
        self._masking: dict[str, Any] = {"train_on": self._train_on()}
        self.compute_metrics, self.preprocess_logits_for_metrics = compute_metrics, preprocess_logits_for_metrics
        self.callbacks = [checked(callback) for callback in callbacks or ()]
        self.state, self.control = TrainerState(), TrainerControl()
        config = self.config(prepared=False)  # mistakes show here, not after the data
        self.state.logging_steps, self.state.train_batch_size = config.metrics.log_every, config.rows_per_step
        self._events().tell("on_init_end")

    def _read(self, dataset: Any, formatting_func: Callable[[Any], Any] | None) -> tuple[Any, str]:
        """(rows for jaxtune, their form)"""
        return rows_and_format(dataset, self.args.dataset_text_field, formatting_func)

    def _train_on(self) -> str:
        return trained_tokens(self.args, self._format)

    def _objective(self) -> ObjectiveConfig:
        return ObjectiveConfig()

    def add_callback(self, callback: Any) -> None:
        """A callback, or its class, beside those that are there."""
        self.callbacks.append(checked(callback))

    def pop_callback(self, callback: Any) -> Any:
        """Takes away and returns the callback, or the first one of the class; None if there is none."""
        for one in self.callbacks:
            if isinstance(one, callback) if isinstance(callback, type) else one is callback:
                self.callbacks.remove(one)
                return one
        return None

    def remove_callback(self, callback: Any) -> None:
        """Takes away the callback, or the first one of the class."""
        self.pop_callback(callback)

    def _events(self) -> Events:
        return Events(self.args, self.state, self.control, self.model, self.tokenizer, self.callbacks, self._measure)

    def _measure(self) -> dict[str, float]:
        """What compute_metrics says of the model as it is."""
        if self.compute_metrics is None:
            return {}
        held_out = self._prepared.eval_data
        assert held_out is not None  # there was an evaluation
        rows = held_out.batches(1, shuffle=False)
        return measures(self.model.module, rows, self.compute_metrics, self.preprocess_logits_for_metrics)

    def config(self, resume: str = "never", prepared: bool = True) -> TrainConfig:
        """The TrainConfig that the arguments mean.

        Args:
          prepared: whether rows may be tokenised for it, where steps are counted by epochs or as shares of all.
        """
        args, source = self.args, self.model.module.source
        lengths = [length for length in (args.max_length, args.max_seq_length) if length is not None]
        batch, parts = args.per_device_train_batch_size, args.gradient_accumulation_steps
        strategies = {"steps": "steps", "no": "no", "epoch": "epoch"}
        saves = choose("SFTConfig", "save_strategy", plain_value(args.save_strategy), strategies)
        evaluates = choose("SFTConfig", "eval_strategy", plain_value(args.eval_strategy), strategies)
        if evaluates != "no" and "eval" not in self._rows:
            raise ValueError(f"SFTConfig: eval_strategy = {evaluates!r} needs eval_dataset")
        if args.load_best_model_at_end and evaluates == "no":
            raise ValueError("SFTConfig: load_best_model_at_end = True needs eval_strategy = 'steps' or 'epoch'")
        # Rows must be packed before an epoch's steps can be counted.
        epoch = self._epoch_steps if prepared and "epoch" in (saves, evaluates) else None

        def every(name: str) -> int | None:
            counted = args.max_steps if args.max_steps > 0 else None
            return steps_between(args, name, lambda: counted or (self._prepared.total_steps if prepared else None))

        log_every = every("logging_steps") or 1
        every_save = every("save_steps") if saves == "steps" else {"no": None, "epoch": epoch}[saves]
        every_evaluation = {"no": None, "epoch": epoch, "steps": every("eval_steps") or log_every}[evaluates]
        packing = self.model.packing if args.packing is None else args.packing
        residuals = self.model.residuals
        if args.gradient_checkpointing is not None:
            residuals = choose("SFTConfig", "gradient_checkpointing", args.gradient_checkpointing, RESIDUALS)
        optimizer: Any = choose("SFTConfig", "optim", plain_value(args.optim), OPTIMIZERS)
        stored: Any = stored_in(self.model.module)
        return TrainConfig(
            model=ModelConfig(
                path="in memory" if source is None else source.path,
                load_in=stored,
                compute="fp8" if computes_in_fp8(self.model.module) else None,
            ),
            data=DataConfig(
                train="train_dataset",
                eval="eval_dataset" if "eval" in self._rows else None,
                format=self._format,
                length=min([self.model.max_seq_length, *lengths]),
                packing=packing,
                template=args.chat_template_path,
                num_workers=args.dataset_num_proc,
                **self._masking,
            ),
            objective=self._objective(),
            adapter=self.model.adapter,
            steps=args.max_steps if args.max_steps > 0 else None,
            epochs=None if args.max_steps > 0 else args.num_train_epochs,
            rows_per_step=batch * parts,
            micro_batches=parts,
            precision=precision(args, self.model.module),
            seed=args.seed,
            deterministic=args.full_determinism,
            router_aux_loss_coef=args.router_aux_loss_coef,
            max_grad_norm=args.max_grad_norm or None,
            neftune_noise_alpha=args.neftune_noise_alpha,
            optim=OptimConfig(
                name=optimizer,
                learning_rate=args.learning_rate,
                weight_decay=args.weight_decay,
                beta1=args.adam_beta1,
                beta2=args.adam_beta2,
                eps=args.adam_epsilon,
                momentum=0.0,
            ),
            schedule=schedule_config(args),
            memory=MemoryConfig(plan=residuals),
            checkpoint=CheckpointConfig(
                every_steps=every_save,
                every_minutes=None,
                keep=args.save_total_limit or 1_000_000,
                resume=resume,  # type: ignore[arg-type]
            ),
            evaluation=EvaluationConfig(
                every_steps=every_evaluation,
                at_start=args.eval_on_start,
                at_end=evaluates == "epoch",
            ),
            metrics=metrics_config(args, log_every),
            output=os.fspath(args.output_dir),
        )

    @functools.cached_property
    def _prepared(self) -> Trainer:
        """Holds the tokenised rows; made when they are first needed, after train_on_responses_only."""
        config = self.config(prepared=False)
        return Trainer(self.model.module, self.tokenizer, config, self._rows["train"], self._rows.get("eval"))

    @property
    def _epoch_steps(self) -> int:
        return max(1, self._prepared.batches.steps_per_epoch)

    def _trainer(self, resume: str = "never", callbacks: Sequence[Callback] = ()) -> Trainer:
        data = self._prepared
        config = self.config(resume)
        return Trainer(self.model.module, self.tokenizer, config, data.train_data, data.eval_data, callbacks=callbacks)

    @property
    def train_dataset(self) -> Sequence[dict[str, list[int]]]:
        """The tokenised rows: input_ids, and labels with -100 where nothing is trained."""
        return Tokenised(self._prepared.train_data.documents)

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
        output = Path(self.args.output_dir).expanduser()
        if not resume_from_checkpoint and any((output / "checkpoints").glob("step_*")):
            raise ValueError(
                f"train: output_dir = {str(output)!r} holds the checkpoints of a run: pass "
                "resume_from_checkpoint=True to go on from them, or name another folder"
            )
        events = self._events()
        # Without anybody to tell, no step is waited for.
        told = self.callbacks or self.compute_metrics is not None or self.args.metric_for_best_model is not None
        trainer = self._trainer("auto" if resume_from_checkpoint else "never", [events] if told else [])
        self.state.log_history = trainer.history
        given, started = self.model.module, time.monotonic()
        try:
            events.begin(trainer.config, trainer.total_steps, trainer.batches.steps_per_epoch)
            trained = trainer.train()
        except BaseException:
            self.model.module = given  # not the weights of a moment, which are used up
            raise
        self.model.module = trained if events.best is None else with_trained(trained, events.best)
        if resume_from_checkpoint and self.args.load_best_model_at_end:
            events.tell_of_better(output / JSONL, trainer.steps_done)
        self.state.global_step = trainer.steps_done
        self.state.epoch = trainer.steps_done / trainer.batches.steps_per_epoch
        events.tell("on_train_end")
        losses = [line["loss"] for line in trainer.history if "loss" in line]
        loss = sum(losses) / len(losses) if losses else math.nan
        return TrainOutput(trainer.steps_done, loss, {"train_runtime": time.monotonic() - started, "train_loss": loss})

    def evaluate(self) -> dict[str, Any]:
        """{"eval_loss", "eval_targets"} of the model as it is now, and what compute_metrics says of it."""
        values = self._trainer().evaluate() | self._measure()
        events = self._events()
        events.tell("on_log", logs=values)
        events.tell("on_evaluate", metrics=values)
        return values

    def save_model(self, output_dir: str | os.PathLike) -> None:
        self.model.save_pretrained(output_dir)


# Collators that pad rows of one batch to one length, and do nothing else.
_PADDING_COLLATORS = ("DataCollatorForLanguageModeling", "DataCollatorForSeq2Seq", "DataCollatorWithPadding",
                      "DefaultDataCollator", "DataCollatorWithFlattening")  # fmt: skip


def loaded(name: str, args: SFTConfig, full: bool) -> CompatModel:
    """A model that a script names, as TRL loads it: in 16 bits, with room for max_length tokens (1,024)."""
    given = dict(args.model_init_kwargs or {})
    dtype = given.pop("dtype", given.pop("torch_dtype", None))
    length = args.max_length or args.max_seq_length or 1024
    model, _ = FastLanguageModel.from_pretrained(
        name, length, None if dtype == "auto" else dtype, load_in_4bit=False, full_finetuning=full,
        random_state=args.seed, **given,
    )  # fmt: skip
    return model


def _with_adapter(model: CompatModel, peft_config: Any, seed: int) -> CompatModel:
    module, adapter = adapted(model.module, "LoraConfig", seed, experts_too=False, **lora_settings(peft_config))
    return CompatModel(
        module, model.tokenizer, model.max_seq_length, model.residuals, adapter=adapter,
        random_state=model.random_state, packing=model.packing,
    )  # fmt: skip


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
    settle("train_on_responses_only", others, RESPONSES, train_on_responses_only)
    if instruction_part is None and response_part is None:
        instruction_part, response_part = derive_markers(tokenizer or trainer.tokenizer)
    trainer._masking = {
        "train_on": "responses",
        "instruction_part": instruction_part,
        "response_part": response_part,
        "last_response_only": last_response_only,
    }
    trainer.__dict__.pop("_prepared", None)
    trainer.config(prepared=False)
    return trainer
