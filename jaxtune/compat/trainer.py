"""SFTTrainer, the base of all other trainers, and train_on_responses_only."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from flax import nnx

from jaxtune.compat import folders
from jaxtune.compat.adapters import add_lora, lora_settings
from jaxtune.compat.arguments import choose, report_idle, settle
from jaxtune.compat.callbacks import (
    Events,
    TrainerControl,
    TrainerState,
    best_name,
    checked_callback,
    with_first_name,
    with_trained,
)
from jaxtune.compat.defaults import version
from jaxtune.compat.kept import keep_programs
from jaxtune.compat.measures import ComputeMetrics, EvalPrediction, Preprocess, predict_rows, run_compute_metrics
from jaxtune.compat.model import CompatModel
from jaxtune.compat.peft_names import with_adapter
from jaxtune.compat.rows import TOKENS, Tokenised, require_one_set, rows_and_format, token_dataset
from jaxtune.compat.saves import save, saved_into
from jaxtune.compat.seeds import begin_at
from jaxtune.compat.settings import (
    SFTConfig,
    TrainingArguments,
    max_steps,
    metrics_config,
    move_quantization_config,
    plain_value,
    precision,
    resolved_config,
    row_length,
    schedule_config,
    steps_between,
    total_steps,
    trained_tokens,
)
from jaxtune.compat.tables import OPTIMIZERS, PADDING_COLLATORS, RESIDUALS, RESPONSES, TRAINER
from jaxtune.compat.transformers_names import load_named
from jaxtune.compat.vision import UnslothVisionDataCollator, has_pictures, plain_tokenizer
from jaxtune.compat.wording import ScriptWords
from jaxtune.conversations import dates
from jaxtune.export.hub import require_login
from jaxtune.models.decoder import Decoder
from jaxtune.models.files.quant import computes_in_fp8, stored_in
from jaxtune.system.files import atomic_write
from jaxtune.system.progress import show_timing
from jaxtune.system.terminal import say
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
from jaxtune.train.config.objective import ObjectiveConfig, example_of
from jaxtune.train.config.step_unit import StepUnit
from jaxtune.train.data.dataset import TokenDataset
from jaxtune.train.data.packing.pairs import PairDataset
from jaxtune.train.data.rendering.templates import derive_markers
from jaxtune.train.data.rows.streamed import InOrder, is_stream
from jaxtune.train.data.tokens.documents import Documents
from jaxtune.train.folder.checkpoint import saved_steps
from jaxtune.train.folder.record import with_today
from jaxtune.train.folder.run_folder import CHECKPOINTS
from jaxtune.train.log.metrics import JSONL
from jaxtune.train.loop.run import by_set
from jaxtune.train.objectives.loss import declared_losses
from jaxtune.train.objectives.named import objective_of
from jaxtune.train.optimizer.optim import embedding_tensors
from jaxtune.train.trainer import Trainer

_LOOKED_AT = 10  # rows, in which pictures are looked for
_TRL_WINDOW = 1_000  # the rows of a stream that TRL packs at a time


@dataclasses.dataclass(frozen=True)
class TrainOutput:
    """What train() returns, as in transformers."""

    global_step: int  # optimizer steps done, those before a continued run included
    training_loss: float  # mean loss of the steps of this call of train(); NaN if it made none
    # train_runtime (seconds), train_loss, epoch, train_samples_per_second and train_steps_per_second
    metrics: dict[str, float]


class PredictionOutput(NamedTuple):
    """What predict() returns, as in transformers; EvalPrediction says what a row is."""

    predictions: object  # float32[rows, length, vocab] logits, or the joined results of preprocess_logits_for_metrics
    # int32[rows, length]: the row's token where it is trained on, -100 elsewhere; the logits at position t predict the
    # label at position t + 1
    label_ids: np.ndarray
    metrics: dict[str, float]  # such as {"test_loss": 1.2}


class Accelerator:
    """accelerate's object for scripts: one process, which is the main one."""

    is_main_process = is_local_main_process = True
    num_processes, process_index = 1, 0

    def print(self, *words: object, sep: str = " ", **options: object) -> None:
        del options
        say(sep.join(map(str, words)))

    def wait_for_everyone(self) -> None:
        """Returns at once: there is one process."""


class SFTTrainer(ScriptWords):
    """TRL's SFTTrainer on top of jaxtune.train.Trainer: `train` puts the trained module into `self.model`, the given
    model or, with peft_config, a new one. ValueError: nothing would train, or the data sets have different formats.

    Args:
      model: a CompatModel; or a hub name or folder, which is trained whole without peft_config.
      args: SFTConfig or TrainingArguments, also transformers' and TRL's own.
      train_dataset, eval_dataset: a datasets.Dataset, a list of dicts, or a path, with a column dataset_text_field,
        messages or conversations, or prompt and completion. A stream to train on needs max_steps; one to evaluate on is
        read whole. As in TRL, all tokens of text and messages are trained on, and only completions.
      processing_class, tokenizer: the tokenizer, by either name; None: the model's.
      formatting_func: maps a row to a text, or the columns of a batch to texts.
      compute_metrics: maps an EvalPrediction to {name: number}.
      preprocess_logits_for_metrics: maps (logits, labels) of one row to what compute_metrics gets.
      quantization_config: of a model that is loaded by name.
      others: arguments of SFTConfig that older scripts pass here (`older`), which override `args`.
    """

    config_type: type[SFTConfig] = SFTConfig
    tag = "sft"  # of the model, beside "trl"
    balances_experts = True  # whether TRL adds the experts' load-balancing loss although the model's config does not
    table = TRAINER  # the arguments that are not parameters: which have no effect here, and which are refused
    # Arguments of the config that older versions of TRL accepted as arguments of the trainer.
    older: frozenset[str] = frozenset(
        ("dataset_text_field", "max_seq_length", "packing", "dataset_num_proc", "neftune_noise_alpha")
        + ("model_init_kwargs", "dataset_kwargs", "eval_packing")
    )

    _rows: dict[str, Any]  # under "train" and "eval", before they are tokenised
    _today: str | None = None  # the day that the chat template writes, once it is known
    _stepped = False  # whether train() has begun to change the model

    def __init__(
        self,
        model: CompatModel | str | os.PathLike,
        args: Any = None,
        train_dataset: object = None,
        eval_dataset: object = None,
        processing_class: object = None,
        tokenizer: object = None,
        formatting_func: Callable[[Any], Any] | None = None,
        peft_config: object = None,
        compute_metrics: ComputeMetrics | None = None,
        preprocess_logits_for_metrics: Preprocess | None = None,
        callbacks: Sequence[Any] | None = None,
        quantization_config: object = None,
        **others: Any,
    ):
        require_one_set(train_dataset, type(self).__name__, "train_dataset")
        moved = self.older & others.keys()
        ours = isinstance(args, SFTConfig)
        if ours and not isinstance(args, self.config_type) and type(args) not in (SFTConfig, TrainingArguments):
            name, expected = type(self).__name__, self.config_type.__name__
            raise ValueError(f"{name}: args is a {type(args).__name__}; use {expected}")
        older_arguments = {name: others.pop(name) for name in sorted(moved)}
        self.args: Any = resolved_config(args, self.config_type, model, older_arguments)
        move_quantization_config(self.args, {"quantization_config": quantization_config}, model)
        if older := sorted(moved - SFTTrainer.older):
            say(f"{type(self).__name__}: {', '.join(older)}: taken as arguments of {self.config_type.__name__}")
        if ours:  # unused values are kept, because callbacks may read them
            vars(self.args).update(vars(args) | vars(self.args))
        collator = others.get("data_collator")
        if type(collator).__name__ in PADDING_COLLATORS and not getattr(collator, "mlm", False):
            others.pop("data_collator")
            report_idle(type(self).__name__, "data_collator", "rows are packed or padded already")
        self._vision = others.pop("data_collator") if isinstance(collator, UnslothVisionDataCollator) else None
        settle(type(self).__name__, others, self.table, SFTTrainer)
        if isinstance(model, str | os.PathLike):
            shows = any(map(has_pictures, _first_rows(train_dataset)))
            model = load_named(os.fspath(model), self.args, full=peft_config is None, pictures=shows)
        if not isinstance(model, CompatModel):
            raise ValueError(
                f"SFTTrainer: model is a {type(model).__name__}; give a name or folder, or load it with "
                "FastLanguageModel"
            )
        if peft_config is not None:
            model = _with_adapter(model, type(self).__name__, peft_config, self.args.seed)
        if not model.has_adapter and not model.full_finetuning:
            raise ValueError(
                "SFTTrainer: the model has no adapter: call FastLanguageModel.get_peft_model, or load it with "
                "full_finetuning=True"
            )
        begin_at(self.args.seed)
        self.model, self.accelerator = model, Accelerator()
        model.add_model_tags(["trl", self.tag])
        self.processing_class = processing_class or tokenizer or model.tokenizer
        self.tokenizer = plain_tokenizer(self.processing_class)
        if self._vision is not None:
            formatting_func = None
        self._rows, self._format, self._formatting = {}, "", formatting_func
        self._rows["train"], self._format = self._read(train_dataset, formatting_func)
        held_out = self._held_out(eval_dataset)
        self._eval_names = list(held_out) if isinstance(eval_dataset, Mapping) else []
        if held_out:
            self._rows["eval"] = held_out.pop(next(iter(held_out)))
        self._further_rows = held_out
        self._masking: dict[str, Any] = {"train_on": self._train_on()}
        if self._vision is not None and self._vision.responses is not None:
            self._masking = response_masking(self.tokenizer, *self._vision.responses)
        self.compute_metrics, self.preprocess_logits_for_metrics = compute_metrics, preprocess_logits_for_metrics
        self.callbacks = [checked_callback(callback) for callback in callbacks or ()]
        self.state, self.control = TrainerState(), TrainerControl()
        config = self.config(prepared=False)  # raises errors before the data are tokenised
        self._require_best()
        self.state.logging_steps = config.metrics.log_every
        self.state.train_batch_size = self.args.per_device_train_batch_size
        self._events().tell("on_init_end")

    def _measured_names(self) -> list[str]:
        """The names of an evaluation's numbers, without those of compute_metrics."""
        objective = objective_of(self._objective())
        own = objective.metrics(dict.fromkeys(("loss", "count", *objective.sums), 0.0))
        names = ("loss", objective.unit, *own)
        return [
            f"eval_{prefix}{name}" for prefix in [f"{name}_" for name in self._eval_names] or [""] for name in names
        ]

    def _require_best(self) -> None:
        """Raises ValueError if metric_for_best_model names what an evaluation does not measure."""
        metric = self.args.metric_for_best_model
        if metric is None or self.compute_metrics is not None or self._strategies()[1] == "no":
            return
        names = self._measured_names()
        if best_name(self.args) not in names:
            raise ValueError(
                f"{type(self.args).__name__}: metric_for_best_model = {metric!r} is not in an evaluation; set one of "
                f"{', '.join(names)}, or give compute_metrics that measures it"
            )

    def _held_out(self, eval_dataset: object) -> dict[str, object]:
        """{name: rows for jaxtune} of one set, by the name "", or of a dict of them; ValueError for another format."""
        sets = eval_dataset if isinstance(eval_dataset, Mapping) else {"": eval_dataset}
        held_out = {}
        for name, dataset in sets.items() if eval_dataset is not None else ():
            held_out[str(name)], form = self._read(dataset, self._formatting)
            if form not in (self._format, TOKENS):
                raise ValueError(
                    f"{type(self).__name__}: train_dataset is {self._format}, eval_dataset is {form}: make them alike"
                )
        return held_out

    def _read(self, dataset: Any, formatting_func: Callable[[Any], Any] | None) -> tuple[Any, str]:
        """(rows for jaxtune, the name of their format, such as "messages")."""
        if self._vision is not None and self._vision.formatting_func is not None:
            dataset = [self._vision.formatting_func(row) for row in dataset]
        return rows_and_format(dataset, self.args.dataset_text_field, formatting_func, self.args.completion_only_loss)

    def _train_on(self) -> str:
        """data.train_on, unless train_on_responses_only says otherwise."""
        return trained_tokens(self.args, self._format)

    def _objective(self) -> ObjectiveConfig:
        return ObjectiveConfig()

    def _packing(self) -> bool:
        """Whether documents share rows and an update counts rows, not documents."""
        return self.model.packing if self.args.packing is None else self.args.packing

    def _to_train(self) -> Decoder:
        """The module that is trained or evaluated."""
        return self.model.module

    def _order(self) -> Any:
        """train_sampling_strategy as TokenDataset names it; ValueError for a value that the config lacks."""
        args, strategy = self.args, plain_value(self.args.train_sampling_strategy)
        return choose(type(args).__name__, "train_sampling_strategy", strategy, args.orders)

    def _rows_for(self, data: TokenDataset) -> TokenDataset:
        """Tokenised rows in the form that the run needs."""
        return data

    def _handing_back(self) -> Callable[[Decoder], Decoder]:
        """A function that maps a run's module to the script's."""
        return lambda module: module

    def add_callback(self, callback: Any) -> None:
        """Adds a callback, an instance or a class; ValueError if `checked_callback` refuses it."""
        self.callbacks.append(checked_callback(callback))

    def pop_callback(self, callback: Any) -> Any:
        """Removes and returns `callback`, or the first one of that class; None if there is none."""
        for registered in self.callbacks:
            if isinstance(registered, callback) if isinstance(callback, type) else registered is callback:
                self.callbacks.remove(registered)
                return registered
        return None

    def remove_callback(self, callback: Any) -> None:
        """Removes `callback`, or the first one of that class."""
        self.pop_callback(callback)

    def _events(
        self, leave: Callable[[int], Any] = lambda step: None, measure: Callable[[], dict[str, float]] = dict
    ) -> Events:
        """What passes a run's events to the script's callbacks. leave: writes a checkpoint-N folder, given N. measure:
        returns the numbers of compute_metrics for the current model; by default none.
        """
        return Events(
            self.args,
            self.state,
            self.control,
            self.model,
            self.tokenizer,
            self.callbacks,
            measure,
            self._handing_back(),
            leave,
            self._eval_names,
            self.router_aux_loss_coef,
        )

    @property
    def _output(self) -> Path:
        return Path(self.args.output_dir).expanduser()

    def config(self, resume: Literal["auto", "never"] = "never", prepared: bool = True) -> TrainConfig:
        """The TrainConfig for the arguments. An update has as many examples (with packing, packed rows) as in
        transformers.

          resume: "auto" continues the run in output_dir.
          prepared: False: rows are not tokenised to count an epoch's steps; numbers that depend on them are left out.
        """
        args, source = self.args, self.model.module.source
        batch, micro_batches = args.per_device_train_batch_size, args.gradient_accumulation_steps
        saves, evaluates = self._strategies()
        # Rows must be tokenised before an epoch's steps can be counted.
        epoch = self._epoch_steps if prepared and "epoch" in (saves, evaluates) else None
        self._order()
        streamed = is_stream(self._rows["train"])
        steps = max_steps(args, streamed)
        if steps is None and prepared:
            steps = total_steps(args, self._epoch_steps)

        def every(name: str) -> int | None:
            return steps_between(args, name, lambda: steps)

        log_every = every("logging_steps") or 1
        every_save = every("save_steps") if saves == "steps" else {"no": None, "epoch": epoch}[saves]
        every_evaluation = {"no": None, "epoch": epoch, "steps": every("eval_steps") or log_every}[evaluates]
        packing, section = self._packing(), self._objective()
        objective = objective_of(section)
        # These losses depend on which examples share a micro-batch; all others are sums over examples.
        # Padded, a stream trains on the same rows in as many steps.
        unit = StepUnit.of_trainers(example_of(section.name), packing, known=not streamed)
        keeps_micro_batches = packing or objective.by_micro_batch
        residuals = self.model.residuals
        if args.gradient_checkpointing is not None:
            residuals = choose("SFTConfig", "gradient_checkpointing", args.gradient_checkpointing, RESIDUALS)
        stored: Any = stored_in(self.model.module)
        config = TrainConfig(
            model=ModelConfig(
                path="in memory" if source is None else source.path,
                load_in=stored,
                compute="fp8" if computes_in_fp8(self.model.module) else None,
            ),
            data=DataConfig(
                train=folders.ROWS,
                eval="eval_dataset" if "eval" in self._rows else None,
                format="auto" if self._format == TOKENS else self._format,
                length=row_length(args, self.model, getattr(self._vision, "max_seq_length", None)),
                packing=objective.samples or unit.packing,
                buffer_size=_TRL_WINDOW if streamed and packing else DataConfig.buffer_size,
                template=args.chat_template_path,
                today=self._today,
                num_workers=args.dataset_num_proc,
                max_pixels=self._max_pixels(),
                **self._masking,
            ),
            objective=section,
            adapter=self.model.adapter,
            steps=steps,
            epochs=args.num_train_epochs if steps is None else None,
            rows_per_step=batch * micro_batches,
            micro_batches=micro_batches if keeps_micro_batches else None,
            precision=precision(args, self.model.module),
            seed=args.seed,
            deterministic=args.full_determinism,
            router_aux_loss_coef=self.router_aux_loss_coef or args.router_aux_loss_coef,
            max_grad_norm=args.max_grad_norm or None,
            neftune_noise_alpha=args.neftune_noise_alpha,
            optim=self._optim(),
            schedule=schedule_config(args, steps),
            memory=MemoryConfig(plan=residuals),
            checkpoint=CheckpointConfig(
                every_steps=every_save,
                every_minutes=None,
                keep=args.save_total_limit or 1_000_000,
                resume=resume,
            ),
            evaluation=EvaluationConfig(
                every_steps=every_evaluation,
                at_start=args.eval_on_start,
                at_end=evaluates == "epoch",
            ),
            metrics=metrics_config(args, log_every),
            output=os.fspath(args.output_dir),
        )
        data = with_today(config.data, Path(config.output), self.tokenizer)
        config = dataclasses.replace(config, data=data)
        self._today = config.data.today
        return config

    def _max_pixels(self) -> int | None:
        """Of a picture: the collator's or the processor's, whichever is less."""
        limits = [getattr(self._vision, "max_pixels", None), getattr(self.processing_class, "max_pixels", None)]
        return min((limit for limit in limits if isinstance(limit, int)), default=None)

    def _strategies(self) -> tuple[str, str]:
        """(save_strategy, eval_strategy), each "steps", "epoch" or "no"; ValueError for contradictions."""
        args, strategies = self.args, {"steps": "steps", "no": "no", "epoch": "epoch"}
        saves = choose("SFTConfig", "save_strategy", plain_value(args.save_strategy), strategies)
        evaluates = choose("SFTConfig", "eval_strategy", plain_value(args.eval_strategy), strategies)
        if evaluates != "no" and "eval" not in self._rows:
            raise ValueError(f"SFTConfig: eval_strategy = {evaluates!r} needs eval_dataset")
        if args.load_best_model_at_end and evaluates == "no":
            raise ValueError("SFTConfig: load_best_model_at_end = True needs eval_strategy = 'steps' or 'epoch'")
        return saves, evaluates

    def _optim(self) -> OptimConfig:
        """The section `optim` of the run's config. ValueError for an optimizer that is not here."""
        args = self.args
        optimizer: Any = choose("SFTConfig", "optim", plain_value(args.optim), OPTIMIZERS)
        rate = args.embedding_learning_rate
        if rate is not None and not any(embedding_tensors(nnx.state(self.model.module, nnx.Param))):
            raise ValueError(
                f"{type(args).__name__}: embedding_learning_rate = {rate}: neither embed_tokens nor lm_head trains; "
                "name them in target_modules of FastLanguageModel.get_peft_model"
            )
        return OptimConfig(
            name=optimizer,
            learning_rate=args.learning_rate,
            embedding_learning_rate=rate,
            weight_decay=args.weight_decay,
            beta1=args.adam_beta1,
            beta2=args.adam_beta2,
            eps=args.adam_epsilon,
            momentum=0.0,
        )

    @functools.cached_property
    def _prepared(self) -> Trainer:
        """A Trainer of the tokenised rows that does not train; built at its first use."""
        config = self.config(prepared=False)
        train, held_out = (_ready(rows, config.data) for rows in (self._train_rows(), self._rows.get("eval")))
        further = {name: _ready(rows, config.data) for name, rows in self._further_rows.items()}
        return Trainer(self._to_train(), self.tokenizer, config, train, held_out, further_eval_rows=further)

    def _train_rows(self) -> object:
        """The script's rows to train on; a stream keeps its order, whatever train_sampling_strategy is."""
        rows = self._rows["train"]
        return InOrder(rows) if is_stream(rows) else rows

    @property
    def _epoch_steps(self) -> int:
        """Steps of an epoch, at least 1; tokenises the rows. ValueError if they are streamed."""
        per_epoch = self._prepared.batches.steps_per_epoch
        if per_epoch is None:
            raise ValueError(
                f"{type(self.args).__name__}: train_dataset is streamed, and nobody knows how long its epochs are: set "
                "save_strategy and eval_strategy to 'steps' or 'no', and steps by their number"
            )
        return max(1, per_epoch)

    def _trainer(self, resume: Literal["auto", "never"] = "never", callbacks: Sequence[Callback] = ()) -> Trainer:
        keep_programs()
        data, rows = self._prepared, self._train_rows()
        if data.train_data is not None:
            rows = dataclasses.replace(self._rows_for(data.train_data), order=self._order())
        held_out = None if data.eval_data is None else self._rows_for(data.eval_data)
        further = {name: self._rows_for(rows) for name, rows in data.further_eval_data.items()}
        given = (self._to_train(), self.tokenizer, self.config(resume), rows, held_out)
        return Trainer(*given, callbacks=callbacks, further_eval_rows=further)

    @property
    def train_dataset(self) -> Sequence[dict[str, list[int]]]:
        """The rows as they train, with TRL's columns (Tokenised.of). Streamed rows, and prompts, are as given."""
        data = self._prepared.train_data
        return self._rows["train"] if data is None else self._shown(data)

    def _shown(self, data: TokenDataset) -> Tokenised:
        """With packing=True in packed rows; held-out rows are always packed for an evaluation."""
        rows = self._rows_for(data)
        packed = isinstance(rows, PairDataset) or self._packing()
        return Tokenised.of(rows if packed else dataclasses.replace(rows, packing=False))

    @property
    def eval_dataset(self) -> Sequence[dict[str, list[int]]] | dict[str, Sequence[dict[str, list[int]]]] | None:
        """The rows that are held out, as train_dataset; {name: rows} of a dict of sets; None without any."""
        if "eval" not in self._rows:
            return None
        sets = [self._prepared.eval_data, *self._prepared.further_eval_data.values()]
        rows = [self._rows["eval"] if data is None else self._shown(data) for data in sets]
        return dict(zip(self._eval_names, rows, strict=True)) if self._eval_names else rows[0]

    @property
    def router_aux_loss_coef(self) -> float:
        """The factor of the experts' load-balancing loss: the config's, else the model's; 0 without experts. In SFT,
        DPO and KTO the model's counts whatever its output_router_logits is, as in TRL.
        """
        asked, declared = self.args.router_aux_loss_coef, declared_losses(self.model.module)
        own = {loss.name: coefficient for _, loss, coefficient in declared.losses}.get("router_aux_loss")
        if asked is not None:
            if asked and own is None:
                raise ValueError(
                    f"{type(self.args).__name__}: router_aux_loss_coef = {asked}: the model is not a "
                    "Mixture-of-Experts model; leave it out"
                )
            return asked
        if own is not None and self.balances_experts and self.args.library == "TRL":
            return float(getattr(self.model.config, "router_aux_loss_coef", own))
        return own or 0.0

    @property
    def aux_loss_enabled(self) -> bool:
        """Whether the loss has the experts' load-balancing loss."""
        return self.router_aux_loss_coef != 0.0

    def train(self, resume_from_checkpoint: bool | str | os.PathLike | None = None) -> TrainOutput:
        """Trains the model, which then has the trained (or best) weights, and writes them to output_dir/checkpoint-N.
        If an exception ends the run, the model keeps the weights that it had.

        ValueError: output_dir has a run that could be continued, or another program's, or the path is no checkpoint.
          resume_from_checkpoint: True continues from the last checkpoint, if there is one; the path of a checkpoint-N
            folder from that one, and replaces later ones; None or False replaces a finished run.
        """
        say(f"{type(self).__name__}: defaults: {version(self.args.library)}'s")
        if self.args.push_to_hub:
            require_login(self.args.hub_token)
        output = self._output
        resumes, from_step = folders.resumed(resume_from_checkpoint, output)
        folders.require_own(output)
        if not resumes and folders.replace_run(output, bool(self.args.overwrite_output_dir)):
            self._take_this_day()
        checkpoint_folders = folders.Checkpoints(output, self.tokenizer, self.state, self.args.save_total_limit)
        events = self._events(
            lambda step: checkpoint_folders.write(self.model.module, step), lambda: self._measured_by_script(trainer)
        )
        trainer = self._trainer("auto" if resumes else "never", [events])
        say("\n".join(rows_report(type(self).__name__, trainer)))
        self.state.log_history = trainer.history
        module_before, start_time = self.model.module, time.monotonic()
        stepped_before, self._stepped = self._stepped, True
        try:
            per_epoch = trainer.batches.steps_per_epoch or trainer.total_steps  # of a stream, as in transformers
            config = trainer.config
            scheduled = {
                "log": config.metrics.log_every,
                "evaluate": config.evaluation.every_steps,
                "save": config.checkpoint.every_steps,
            }
            events.begin(scheduled, config.data.eval is not None, trainer.total_steps, per_epoch)
            trained = self._handing_back()(trainer.train(from_step=from_step))
        except BaseException as error:
            self.model.module = module_before  # the weights of an interrupted run were donated
            self._stepped = stepped_before
            self._say_after(error, len(trainer.history))
            raise
        steps = trainer.steps_done
        self.state.global_step, self.state.epoch = steps, steps / per_epoch
        self.model.module = trained
        is_written = checkpoint_folders.write(trained, steps)
        if events.best is not None:
            self.model.module = with_trained(trained, events.best)
            best = self.state.best_global_step
            assert best is not None
            if checkpoint_folders.write(self.model.module, best):
                self.state.best_model_checkpoint = str(checkpoint_folders.folder(best))
        if is_written:
            say(f"{type(self).__name__}: what was trained is in {checkpoint_folders.folder(steps)}")
        if resumes and self.args.load_best_model_at_end:
            events.note_better(output / JSONL, steps)
        losses = [line["loss"] for line in trainer.history if "loss" in line]
        measured = self._measured(losses, trainer.config.rows_per_step, time.monotonic() - start_time)
        measured |= _unlogged(trainer)
        events.closed(measured)
        events.tell("on_train_end")
        if self.args.push_to_hub:
            try:
                self.push_to_hub()
            except ValueError as error:  # what was trained stays
                say(f"{type(self).__name__}: not uploaded: {error}; trainer.push_to_hub() tries again")
        if self.args.report_timing:
            show_timing(output)
        return TrainOutput(steps, measured["train_loss"], measured)

    def evaluate(
        self, eval_dataset: object = None, ignore_keys: object = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Evaluates the current model, calls on_log and on_evaluate, and returns the numbers: "eval_loss",
        "eval_targets" (trained tokens; "eval_pairs", "eval_examples"), and those of the objective and of
        compute_metrics.

        ValueError: no rows, another format than the trained ones, or logits of more than half of the host's memory.
          eval_dataset: None: the trainer's. A dict, as at init, evaluates each of its data sets, and names have its key
            behind the prefix.
          ignore_keys: has no effect.
          metric_key_prefix: replaces "eval" in the names.
        """
        if isinstance(eval_dataset, Mapping):
            each = (
                self.evaluate(rows, ignore_keys, f"{metric_key_prefix}_{name}") for name, rows in eval_dataset.items()
            )
            return {key: value for values in each for key, value in values.items()}
        trainer = self._trainer() if eval_dataset is None else self._on(eval_dataset)
        values = trainer.evaluate(stepped=self._stepped) | self._measured_by_script(trainer)
        events, names = self._events(), self._eval_names if eval_dataset is None else []
        values = with_first_name(values, names)
        for of_set in by_set(values, names)[bool(names) :]:
            told = _renamed(of_set, metric_key_prefix)
            events.tell("on_log", logs=told)
            events.tell("on_evaluate", metrics=told)
        return _renamed(values, metric_key_prefix)

    def predict(
        self, test_dataset: object, ignore_keys: object = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Logits, labels and the numbers of `evaluate` for rows of train_dataset's format, padded to the trainer's
        length; calls no callback. ValueError as in `evaluate`.

          ignore_keys: has no effect.
          metric_key_prefix: replaces "eval" in the names.
        """
        del ignore_keys
        trainer = self._on(test_dataset)
        values = trainer.evaluate(stepped=self._stepped)
        assert trainer.eval_data is not None
        prediction = self._predicted(trainer.eval_data)
        if self.compute_metrics is not None:
            values |= run_compute_metrics(prediction, self.compute_metrics)
        return PredictionOutput(prediction.predictions, prediction.label_ids, _renamed(values, metric_key_prefix))

    def _on(self, dataset: object) -> Trainer:
        """A jaxtune Trainer that evaluates the current model on these rows and trains nothing."""
        require_one_set(dataset, type(self).__name__, "test_dataset")
        rows, form = self._read(dataset, self._formatting)
        if form not in (self._format, TOKENS):
            raise ValueError(f"SFTTrainer: train_dataset is {self._format}, these rows are {form}: make them alike")
        config = self.config(prepared=False)
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, eval="eval_dataset"))
        train, rows = self._prepared.train_data or self._train_rows(), _ready(rows, config.data)
        trainer = Trainer(self._to_train(), self.tokenizer, config, train, rows, trains=False)
        tokenised = trainer.eval_data
        assert tokenised is not None  # config and rows ask for them
        held_out = self._rows_for(tokenised)
        if held_out is tokenised:
            return trainer
        return Trainer(self._to_train(), self.tokenizer, config, train, held_out, trains=False)

    def _measured_by_script(self, trainer: Trainer) -> dict[str, float]:
        """The numbers of compute_metrics on the trainer's held-out sets; {} without compute_metrics."""
        found: dict[str, float] = {}
        sets = {"": trainer.eval_data, **trainer.further_eval_data} if self.compute_metrics is not None else {}
        for name, held_out in sets.items():
            assert held_out is not None and self.compute_metrics is not None  # it is called after an evaluation
            values = run_compute_metrics(self._predicted(held_out), self.compute_metrics)
            found |= _renamed(values, f"eval_{name}" if name else "eval")
        return found

    def _predicted(self, held_out: TokenDataset) -> EvalPrediction:
        if held_out.documents.pictures is not None:
            raise ValueError(
                "SFTTrainer: predictions and compute_metrics over rows with pictures are not supported yet"
            )
        if not self._packing():
            held_out = dataclasses.replace(held_out, packing=False)
        rows = held_out.batches(1, shuffle=False)
        return predict_rows(self.model.module, rows, self.preprocess_logits_for_metrics)

    def _measured(self, losses: Sequence[float], rows: int, seconds: float) -> dict[str, float]:
        """The metrics of a TrainOutput: `rows` of each step, `seconds` of all."""
        return {
            "train_runtime": seconds,
            "train_samples_per_second": len(losses) * rows / seconds,
            "train_steps_per_second": len(losses) / seconds,
            "train_loss": sum(losses) / len(losses) if losses else math.nan,
            "epoch": self.state.epoch,
        }

    def _take_this_day(self) -> None:
        """In a run that begins anew, rows have the current day where the template writes it."""
        if self._today not in (None, dates.today()):
            self._today = None
            self.__dict__.pop("_prepared", None)

    def _say_after(self, error: BaseException, steps: int) -> None:
        saved = saved_steps(self._output / CHECKPOINTS)
        continues = f"; train(resume_from_checkpoint=True) continues from step {saved[-1]}" if saved else ""
        say(
            f"{type(self).__name__}: {type(error).__name__} ended the run after {steps} logged steps: the model holds "
            f"the weights from before train(){continues}"
        )

    def log_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Prints the metrics on stdout, sorted by name, under a heading with `split`, such as "train"."""
        say(f"***** {split} metrics *****")
        for name in sorted(metrics):
            value = metrics[name]
            say(f"  {name} = {value:,.4f}" if isinstance(value, float) else f"  {name} = {value}")

    def save_metrics(self, split: str, metrics: Mapping[str, Any], combined: bool = True) -> None:
        """Writes output_dir/SPLIT_results.json, and with `combined` merges the metrics into
        output_dir/all_results.json.
        """
        self._output.mkdir(parents=True, exist_ok=True)
        _write(self._output / f"{split}_results.json", dict(metrics))
        if combined:
            path = self._output / "all_results.json"
            earlier_metrics = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            _write(path, earlier_metrics | dict(metrics))

    def save_state(self) -> None:
        """Writes the progress of the run to output_dir/trainer_state.json."""
        self._output.mkdir(parents=True, exist_ok=True)
        folders.write_state(self._output, self.state)

    def is_world_process_zero(self) -> bool:
        """Always True: there is one process."""
        return self.state.is_world_process_zero

    def is_local_process_zero(self) -> bool:
        """Always True: there is one process."""
        return self.state.is_local_process_zero

    def end(self) -> None:
        """Does nothing: nothing is left open here."""

    def push_to_hub(self, commit_message: str | None = None, **others: Any) -> None:
        """Uploads what save_model saves to args.hub_model_id, else to output_dir's name. Arguments have no effect."""
        del commit_message, others
        args = self.args
        name = args.hub_model_id or self._output.name
        self.model.push_to_hub(name, token=args.hub_token, private=args.hub_private_repo)
        say(f"{type(self).__name__}: pushed to the hub: {name}")

    def save_model(self, output_dir: str | os.PathLike | None = None) -> None:
        """Saves the adapter, or without one the whole model, and the tokenizer into a folder (None: output_dir)."""
        folder = self._output if output_dir is None else Path(output_dir)
        saved_into(folder, "save_model", lambda new: save(self.model.module, new, self.tokenizer))


def rows_report(name: str, trainer: Trainer) -> list[str]:
    """Lines about a run's rows: those of `jaxtune train`, and what users of TRL may not expect.

    name: the trainer's class, which begins the latter.
    """
    lines = trainer.data_summary().splitlines()
    data, source = trainer.train_data, trainer.batches
    if data is None or source.steps_per_epoch is None:
        return lines
    report, a_step = data.report, source.rows_per_step
    if data.unit.shares_rows:
        plain = -(-report.documents // a_step)
        lines.append(
            f"{name}: packing=True: an update has {a_step:,} packed rows, so that an epoch has "
            f"{source.steps_per_epoch:,} updates; without packing it has {plain:,}"
        )
    if report.truncated:
        share = report.truncated / max(1, report.documents)
        lines.append(f"{name}: {share:.1%} of the documents are cut at {data.length:,} tokens (max_length)")
    share = report.trained_tokens / max(1, report.tokens)
    lines.append(f"{name}: {share:.1%} of the tokens are trained on")
    return lines


def _ready(rows: object, data: DataConfig) -> object:
    """Rows that are tokens already as a TokenDataset; others as they are."""
    return token_dataset(rows, data) if isinstance(rows, Documents) else rows


def _unlogged(trainer: Trainer) -> dict[str, float]:
    """Means of the objective's numbers over the steps after the last logged one, which TRL's closing line has."""
    objective, every = objective_of(trainer.config.objective), trainer.config.metrics.log_every
    own = {"aux_loss", *objective.metrics(dict.fromkeys(("loss", "count", *objective.sums), 0.0))}
    own |= {"reward", "reward_std", "frac_reward_zero_std", "kl"}
    names = dict.fromkeys(name for line in trainer.history for name in line if name in own or "/" in name)
    lines = [line for line in trainer.history if "loss" in line and line["step"] > trainer.steps_done // every * every]
    found = {name: [line[name] for line in lines if isinstance(line.get(name), int | float)] for name in names}
    return {name: sum(values) / len(values) for name, values in found.items() if values}


def _write(path: Path, values: Mapping[str, Any]) -> None:
    atomic_write(path, json.dumps(values, indent=4, sort_keys=True, default=float) + "\n")


def _renamed(values: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """{"test_loss": ...} for {"eval_loss": ...} and the prefix "test"."""
    return {f"{prefix}_{name.removeprefix('eval_')}": value for name, value in values.items()}


def _with_adapter(model: CompatModel, where: str, peft_config: object, seed: int) -> CompatModel:
    settings = lora_settings(where, peft_config)
    return with_adapter(model, *add_lora(model.module, "LoraConfig", seed, experts_too=False, **settings))


def response_masking(tokenizer, instruction_part: str | None, response_part: str | None, last_response_only: bool):
    """Values of DataConfig with which only responses are trained on; arguments as in train_on_responses_only."""
    markers: dict[str, str | None] = {"instruction_part": instruction_part, "response_part": response_part}
    missing = [name for name, marker in markers.items() if marker is None]
    if len(missing) == 2:
        markers = dict(zip(markers, derive_markers(tokenizer), strict=True))
    elif missing:
        raise ValueError(f"train_on_responses_only: {missing[0]} = None: give both parts, or neither to derive them")
    return {"train_on": "turns", **markers, "last_response_only": last_response_only}


def _first_rows(dataset) -> list[Mapping[str, object]]:
    """Of a list or a data set with a length, in which pictures are looked for."""
    if isinstance(dataset, str | os.PathLike) or is_stream(dataset):
        return []
    return [dataset[index] for index in range(min(len(dataset), _LOOKED_AT))]


def unsloth_train(trainer: SFTTrainer, *arguments: object, **others: object) -> TrainOutput:
    """trainer.train(...), whose sums over micro-batches need no mending here."""
    train: Callable[..., TrainOutput] = trainer.train
    return train(*arguments, **others)


def train_on_responses_only(
    trainer: SFTTrainer,
    instruction_part: str | None = None,
    response_part: str | None = None,
    last_response_only: bool = False,
    tokenizer: Any = None,
    **others: Any,
) -> SFTTrainer:
    """Sets a trainer, in place, to train only on what follows response_part, up to the end of the turn.

    instruction_part, response_part: what begins a turn of the user and of the assistant; both None: derived from the
      chat template; ValueError if they cannot be.
    last_response_only: only a conversation's last answer is trained on.
    tokenizer: whose template is read; None: the trainer's.
    """
    settle("train_on_responses_only", others, RESPONSES, train_on_responses_only)
    tokenizer = plain_tokenizer(tokenizer or trainer.tokenizer)
    trainer._masking = response_masking(tokenizer, instruction_part, response_part, last_response_only)
    trainer.__dict__.pop("_prepared", None)
    trainer.config(prepared=False)
    return trainer
