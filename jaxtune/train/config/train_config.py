"""TrainConfig, the configuration of one run, with the checks that concern several of its sections."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict

from jaxtune.models.precision import DTYPES
from jaxtune.pallas.format_names import LOADED
from jaxtune.train.config.checks import (
    ConfigError,
    not_negative,
    positive,
    require,
    require_usable_numbers,
    unique_names,
)
from jaxtune.train.config.model import AdapterConfig, ModelConfig
from jaxtune.train.config.objective import DEFAULT_OBJECTIVE, ObjectiveConfig
from jaxtune.train.config.precision import REST, Precision
from jaxtune.train.config.qat import QatConfig
from jaxtune.train.config.sections import (
    OF_ANSWERS,
    REWARDS,
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    ExportConfig,
    GuardConfig,
    MemoryConfig,
    MeshConfig,
    MetricsConfig,
    OptimConfig,
    PlanConfig,
    ProfileConfig,
    ScheduleConfig,
    require_shared_rows,
    require_step_size,
)
from jaxtune.train.config.step_unit import StepUnit

DEFAULT_OUTPUT = "runs/{recipe}"
# Sections that can be given as a single string, and the key that it sets: `qat: int4` sets qat.format.
SHORTHANDS = {"qat": "format", "objective": "name"}


def _by_name(section: str) -> BeforeValidator:
    """A pydantic validator with which a section of SHORTHANDS may be a string: "int4" for qat is {"format": "int4"}."""

    def mapping(value: object) -> object:
        if isinstance(value, str):
            return {SHORTHANDS[section]: value}
        if not isinstance(value, dict):
            return value
        # After this function pydantic no longer knows that the value comes from JSON, where it accepts lists as tuples.
        return {key: tuple(item) if isinstance(item, list) else item for key, item in value.items()}

    return BeforeValidator(mapping)


@dataclass(frozen=True)
class TrainConfig:
    """The configuration of one training run: what a recipe sets, with defaults. Checked when it is made: ConfigError.

    Some values are completed then: epochs becomes 1 without steps, {recipe} in output "default", ~ the home folder, and
    a map in `precision` gets a dtype for "*".
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    model: ModelConfig
    data: DataConfig
    adapter: Annotated[AdapterConfig | None, "LoRA adapter; null trains all parameters."] = None
    steps: Annotated[int | None, "Optimizer steps to run; this or epochs."] = None
    epochs: Annotated[float | None, "Passes over the data; 1 when steps is not set either."] = None
    rows_per_step: Annotated[
        int, "Rows of data.length tokens in an optimizer step, over all devices; see data.packing: step."
    ] = 8
    micro_batches: Annotated[
        int | None, "Parts in which the rows of a step are computed in turn; null: the fastest number that fits."
    ] = None
    precision: Annotated[
        Literal["bf16", "fp32", "fp16"] | dict[str, str],
        "Compute dtype (optim.weights: storage), or a map of module patterns to dtypes and formats; '*': the rest.",
    ] = "bf16"
    seed: Annotated[int, "Seed of the adapter's start, the order of the rows, dropout and noise."] = 0
    deterministic: Annotated[bool, "The same bits on every run; may cost speed."] = False
    whole_graphs: Annotated[
        bool | None,
        "Launch a step's programs as whole CUDA graphs; false: as XLA does by itself; null: on one GPU, for steps that "
        "are forecast below 0.1 s.",
    ] = None
    max_grad_norm: Annotated[float | None, "Clip the global gradient norm to this; null: never."] = 1.0
    neftune_noise_alpha: Annotated[
        float | None, "Noise on the embeddings while training, of up to this / sqrt(a document's tokens x hidden size)."
    ] = None
    router_aux_loss_coef: Annotated[
        float | None,
        "Load-balancing loss of experts, times this; null: as config.json says (0 unless output_router_logits).",
    ] = None
    router_z_loss_coef: Annotated[float, "Mean square of the routers' log-sum-exp, times this."] = 0.0
    objective: Annotated[
        ObjectiveConfig, "What is trained for; `objective: dpo` sets objective.name.", _by_name("objective")
    ] = DEFAULT_OBJECTIVE
    optim: OptimConfig = OptimConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    qat: Annotated[
        QatConfig | None, "Train for weights in a low-bit format; `qat: int4` sets qat.format.", _by_name("qat")
    ] = None
    memory: MemoryConfig = MemoryConfig()
    plan: PlanConfig = PlanConfig()
    mesh: Annotated[MeshConfig | None, "Which devices share the work; null: chosen by the planner."] = None
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    guards: GuardConfig = GuardConfig()
    metrics: MetricsConfig = MetricsConfig()
    profile: ProfileConfig = ProfileConfig()
    export: ExportConfig = ExportConfig()
    output: Annotated[str, "Folder for everything the run writes; {recipe} is the recipe's name."] = DEFAULT_OUTPUT

    @property
    def numbers(self) -> Precision:
        """What `precision` comes to; optim.weights is the dtype of trained weights."""
        return Precision.of(self.precision)

    @property
    def computes_in(self) -> str:
        return self.numbers.computes_in

    @property
    def dtype(self) -> str:
        return self.numbers.dtype

    @property
    def components(self) -> Mapping[str, str]:
        return self.numbers.components

    @property
    def loss_coefficients(self) -> dict[str, float | None]:
        """{name: coefficient} of the layers' own losses; None: as config.json says."""
        keys = [key for key in self.__dataclass_fields__ if key.endswith("_loss_coef")]
        return {key.removesuffix("_coef"): getattr(self, key) for key in keys}

    @property
    def unit(self) -> StepUnit:
        """What rows_per_step counts."""
        return StepUnit(self.data.packing)

    def shared_by(self, devices: int) -> TrainConfig:
        """The config for a plan before rows are read: with as many rows as examples, rounded up so that `devices` share
        those of a micro-batch equally; itself if rows are counted.
        """
        if not self.unit.counts_examples:
            return self
        multiple = devices * (self.micro_batches or 1)
        return dataclasses.replace(self, rows_per_step=-(-self.rows_per_step // multiple) * multiple)

    def __post_init__(self) -> None:
        require_usable_numbers(self, "")
        if self.steps is not None and self.epochs is not None:
            raise ConfigError(f"steps = {self.steps} and epochs = {self.epochs} are both set: keep one")
        if self.data.streaming or self.data.mixed:
            cause = "data.streaming: the end of a stream" if self.data.streaming else "data.train: the end of a mixture"
            require(
                self.steps is not None,
                "steps",
                None,
                f"{cause} is not known, so that epochs cannot be counted; set steps (and leave epochs out)",
            )
        if self.steps is None and self.epochs is None:
            object.__setattr__(self, "epochs", 1.0)
        # A configuration built in Python has no recipe, so {recipe} becomes "default". The ~ of output=~/runs is
        # expanded here, because a shell does not.
        object.__setattr__(self, "output", os.path.expanduser(self.output.replace("{recipe}", "default")))
        for key in ("steps", "epochs", "rows_per_step", "micro_batches", "max_grad_norm", "neftune_noise_alpha"):
            positive(key, getattr(self, key))
        for key in ("seed", "router_aux_loss_coef", "router_z_loss_coef"):
            not_negative(key, getattr(self, key))
        require(self.output != "", "output", "", "must name a folder")
        self._check_division_of_steps()
        self._check_answers()
        self._check_precision()
        self._check_adapter()
        self._check_qat()
        self._check_evaluation()

    def _check_division_of_steps(self) -> None:
        """A step's tokens must fit in int32, its rows divide evenly; mesh.fsdp > 1 rules out some keys."""
        require_step_size(self.rows_per_step, self.data.length, self.micro_batches)
        share = self.objective.top_entropy_quantile
        require(
            share is None or share == 1.0 or self.micro_batches is not None,
            "micro_batches",
            None,
            f"objective.top_entropy_quantile = {share}: its tokens are chosen in each micro-batch, whose number would "
            "follow the free memory; set micro_batches (1: they are chosen in the whole step)",
        )
        if self.mesh is not None and -1 not in self.mesh.sizes and not self.unit.counts_examples:
            require_shared_rows(self.rows_per_step, self.micro_batches, self.mesh, math.prod(self.mesh.sizes))
        divides = None if self.mesh is None else self.mesh.divides_tensors
        if divides is not None:
            require(
                not self.optim.offload,
                "optim.offload",
                True,
                f"{divides} divides the states over devices, which states in host memory are not yet; "
                "unset one of them",
            )

    def _check_answers(self) -> None:
        """Keys of evaluation.generate without it."""
        evaluation = self.evaluation
        for key, default in (("generate_rows", 64), ("temperature", 0.0)):
            require(
                bool(evaluation.generate) or getattr(evaluation, key) == default,
                f"evaluation.{key}",
                getattr(evaluation, key),
                "is of the answers of evaluation.generate; set that, or leave it out",
            )

    def _check_precision(self) -> None:
        """Checks a map of `precision`, sets its "*", and replaces one that has only "*" by the word."""
        if isinstance(self.precision, str):
            return
        object.__setattr__(self, "precision", {**self.precision, REST: self.precision.get(REST, "bf16")})
        require(
            self.precision[REST] in DTYPES,
            f"precision.{REST}",
            self.precision[REST],
            f"must be {', '.join(DTYPES)}, in which the model computes; the layers' format is model.load_in",
        )
        for pattern, word in self.components.items():
            key, words = f"precision.{pattern}", ", ".join((*DTYPES, *LOADED))
            require(word in DTYPES or word in LOADED, key, word, f"is no dtype or format; there are {words}")
            require(
                word in DTYPES or self.adapter is not None,
                key,
                word,
                "quantised weights are frozen and train through an adapter: set adapter: {}, or name a dtype",
            )
        if not self.components:
            object.__setattr__(self, "precision", self.precision[REST])

    def _check_adapter(self) -> None:
        """Keys that need an adapter, or that one rules out."""
        if self.model.from_config is not None and self.adapter is not None:
            raise ConfigError(
                "adapter is set with model.from_config: training from scratch trains all; set adapter: null"
            )
        require(
            self.model.load_in is None or self.adapter is not None,
            "model.load_in",
            self.model.load_in,
            "quantised weights are frozen and train through an adapter: set adapter: {}, or model.load_in: null",
        )
        require(
            self.optim.weights != "bf16" or self.adapter is None,
            "optim.weights",
            "bf16",
            "adapters are kept in fp32; unset it, or set adapter: null",
        )
        require(
            not self.optim.offload or self.adapter is None,
            "optim.offload",
            True,
            "the states of adapters are small, and a plan moves them where that helps; unset it, or set adapter: null",
        )
        require(
            not self.optim.offload or self.max_grad_norm is not None,
            "max_grad_norm",
            None,
            "optim.offload needs it: clipping bounds what an update can reach before it is made",
        )

    def _check_qat(self) -> None:
        if self.qat is None:
            return
        start = self.qat.start
        require(self.steps is None or start < self.steps, "qat.start", start, f"must be below steps = {self.steps}")

    def _check_evaluation(self) -> None:
        has_eval = self.data.eval is not None or self.data.eval_rows > 0
        for key in ("every_steps", "every_epochs", "at_start"):
            value = getattr(self.evaluation, key)
            require(has_eval or not value, f"evaluation.{key}", value, "needs rows: set data.eval or data.eval_rows")
        for key, value in self.evaluation.asking:
            require(
                self.data.eval is not None, key, value, "needs held-out rows to ask: set data.eval to a file of them"
            )
        guards = self.guards
        often = self.evaluation.every_steps or self.evaluation.every_epochs
        require(
            guards.patience is None or bool(often and has_eval),
            "guards.patience",
            guards.patience,
            "needs evaluations during the run: set evaluation.every_steps or every_epochs, and data.eval or eval_rows",
        )
        self._check_rewards()
        self._check_best(has_eval)

    def _check_rewards(self) -> None:
        """ "rewards" in evaluation.generate needs reward functions, stands alone, and is for answers of one turn."""
        generate, objective = self.evaluation.generate, self.objective
        if REWARDS not in generate:
            return
        require(
            bool(objective.reward_funcs),
            "evaluation.generate",
            list(generate),
            "rewards are the functions of objective.reward_funcs, and there are none; name functions",
        )
        require(len(generate) == 1, "evaluation.generate", list(generate), "rewards stand alone; or name all functions")
        several = next(
            (key for key in ("tools", "environment_factory", "rollout_func") if getattr(objective, key)), None
        )
        require(
            several is None,
            "evaluation.generate",
            list(generate),
            f"an evaluation samples answers of one turn, and the rewards are for those of objective.{several}; name "
            "functions for answers of one turn",
        )

    def _check_best(self, has_eval: bool) -> None:
        """checkpoint.best must be a metric that evaluations have; else a run would end without a best checkpoint."""
        best, generate = self.checkpoint.best, self.evaluation.generate
        if best is None:
            return
        evaluates = self.evaluation.every_steps or self.evaluation.every_epochs or self.evaluation.at_end
        require(
            bool(has_eval and evaluates),
            "checkpoint.best",
            best,
            "needs evaluations: set data.eval, evaluation.every_steps",
        )
        require(
            generate != () or not best.startswith(OF_ANSWERS),
            "checkpoint.best",
            best,
            "evaluations have no answers; name functions in evaluation.generate, and set eval_answers/NAME, of which "
            "NAME is one of them",
        )
        rewards = generate == (REWARDS,)
        require(
            best != "eval_reward" or rewards,
            "checkpoint.best",
            best,
            "evaluations have it with evaluation.generate = [rewards]; set that, or eval_answers/NAME",
        )
        functions = (self.objective.reward_funcs or ()) if rewards else generate
        names = unique_names([name.rpartition(":")[2] for name in functions])
        require(
            not best.startswith("eval_answers/") or best.removeprefix("eval_answers/") in names,
            "checkpoint.best",
            best,
            f"evaluations have no such function; they have {', '.join(names)}",
        )
