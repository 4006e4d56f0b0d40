"""TrainConfig, the configuration of one run: its sections, and the checks that concern several of them. `_by_name` lets
two sections (`SHORTHANDS`) be given as a single string."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict

from jaxtune.models.precision import DTYPES
from jaxtune.pallas.format_names import LOADED
from jaxtune.train.config.checks import (
    LARGEST_INTEGER,
    ConfigError,
    not_negative,
    positive,
    require,
    require_usable_numbers,
    unique_names,
)
from jaxtune.train.config.model import AdapterConfig, ModelConfig
from jaxtune.train.config.objective import DEFAULT_OBJECTIVE, ObjectiveConfig
from jaxtune.train.config.qat import QatConfig
from jaxtune.train.config.sections import (
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
)

DEFAULT_OUTPUT = "runs/{recipe}"
_REST = "*"  # the pattern in `precision` that says in which dtype the model computes
# Sections that can be given as a single string, and the key that it sets: `qat: int4` sets qat.format.
SHORTHANDS = {"qat": "format", "objective": "name"}


def _by_name(section: str) -> BeforeValidator:
    """A pydantic validator for the section `section` of `SHORTHANDS`, which lets it be given as a single string: "int4"
    for qat becomes {"format": "int4"}. It runs before pydantic's own checks, to which it passes everything else (of a
    mapping, with lists changed to tuples). The fields `objective` and `qat` have it; a config that is made in Python
    gets the sections themselves."""

    def mapping(value: object) -> object:
        """The section's value as pydantic shall check it: a string as {its key: the string}, a mapping with lists
        changed to tuples, and anything else unchanged."""
        if isinstance(value, str):
            return {SHORTHANDS[section]: value}
        if not isinstance(value, dict):
            return value
        # After this function pydantic no longer knows that the value comes from JSON, where it accepts lists as tuples.
        return {key: tuple(each) if isinstance(each, list) else each for key, each in value.items()}

    return BeforeValidator(mapping)


@dataclass(frozen=True)
class TrainConfig:
    """The configuration of one training run: what a recipe (a YAML file) sets, with defaults. It has a section for
    each subject, a dataclass that describes its own keys. It is checked when it is made: a value that cannot be used,
    or keys that contradict each other, raise ConfigError. Some values are completed then: epochs becomes 1 without
    steps, {recipe} in output becomes "default" and ~ the home folder, and a map in `precision` gets a dtype for "*"."""

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
    def computes_in(self) -> str:
        """The word of the dtype in which the model computes, "bf16", "fp32" or "fp16": `precision`, or what it gives
        "*" if it is a map. Other code reads it here, so that it need not distinguish the two."""
        return self.precision if isinstance(self.precision, str) else self.precision[_REST]

    @property
    def dtype(self) -> str:
        """The name of the dtype in which the model computes, such as "bfloat16", as jax.numpy names it. The model and
        its teacher are loaded and compute in it, and the planner and the share of the device's peak speed are computed
        for it. It is not the dtype in which trained weights are stored (optim.weights)."""
        return DTYPES[self.computes_in]

    @property
    def components(self) -> dict[str, str]:
        """The precision map of single modules, {pattern of modules' names: dtype, such as "fp32", or format, such as
        "nf4"} (models/precision.py); {} if `precision` is a single dtype. The pattern "*" is not in it. Loading stores
        frozen weights by it, and the model of the run computes by it; the planner counts with it."""
        given = {} if isinstance(self.precision, str) else self.precision
        return {pattern: word for pattern, word in given.items() if pattern != _REST}

    def require_rows_for(self, devices: int) -> None:
        """Raises `ConfigError` unless the rows of a micro-batch (rows_per_step / micro_batches; without micro_batches,
        all rows of a step) can be divided evenly among `devices` devices. The config's own checks call it if `mesh`
        gives that number; the run calls it again with the mesh that it chose, and so does --plan for this machine."""
        rows = self.rows_per_step // (self.micro_batches or 1)
        require(
            rows % devices == 0,
            self.mesh.keys if self.mesh else "mesh.data",
            devices,
            f"must divide the {rows} rows of a micro-batch (rows_per_step / micro_batches)",
        )

    def __post_init__(self) -> None:
        """Checks the whole configuration, and raises ConfigError for the first fault: a number that the compiled
        programs cannot use, or keys of different sections that contradict each other. Sets `epochs` to 1 if `steps` is
        not set either, replaces {recipe} and ~ in `output`, and completes `precision` if it is a map."""
        require_usable_numbers(self, "")
        if self.steps is not None and self.epochs is not None:
            raise ConfigError(f"steps = {self.steps} and epochs = {self.epochs} are both set: keep one")
        if self.data.streaming or self.data.mixed:
            what = "data.streaming: the end of a stream" if self.data.streaming else "data.train: the end of a mixture"
            require(
                self.steps is not None,
                "steps",
                None,
                f"{what} is not known, so that epochs cannot be counted; set steps (and leave epochs out)",
            )
            require(
                not self.objective.precompute_ref_log_probs,
                "objective.precompute_ref_log_probs",
                True,
                "needs all rows before the run, and rows that are streamed or mixed are not known then; leave it out",
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
        self._check_exact_match()
        self._check_prompts()
        self._check_precision()
        self._check_adapter()
        self._check_qat()
        self._check_evaluation()

    def _check_division_of_steps(self) -> None:
        """Raises `ConfigError` if a step has more tokens than int32 can count, or its rows cannot be divided evenly
        into micro-batches or, if `mesh` gives their number, among devices, or if mesh.fsdp divides weights and a key is
        set that does not work then: optim.offload, an objective that samples answers, or evaluations in which the model
        generates. `__post_init__` calls it; nothing is loaded for it."""
        tokens = self.rows_per_step * self.data.length
        require(
            tokens <= LARGEST_INTEGER,
            "rows_per_step",
            self.rows_per_step,
            f"times data.length = {self.data.length} is {tokens:,} tokens a step; at most {LARGEST_INTEGER:,}",
        )
        rows, parts = self.rows_per_step, self.micro_batches or 1
        require(rows % parts == 0, "micro_batches", parts, f"must divide rows_per_step = {rows}")
        if self.mesh is not None and -1 not in self.mesh.sizes:
            self.require_rows_for(math.prod(self.mesh.sizes))
        divides = None if self.mesh is None else self.mesh.divides_tensors
        if divides is not None:
            require(
                not self.optim.offload,
                "optim.offload",
                True,
                f"{divides} divides the states over devices, which states in host memory are not yet; "
                "unset one of them",
            )
            require(
                self.objective.name != "distill" or self.objective.on_policy == 0,
                "objective.on_policy",
                1.0 if self.objective.on_policy is None else self.objective.on_policy,
                f"nothing is sampled from weights that {divides} divides; set 0, or leave {divides} out",
            )
            if self.mesh is not None and self.objective.samples:
                self.require_whole_weights(self.mesh)
            for key, value in self.evaluation.asking:
                require(
                    False,
                    key,
                    value,
                    f"generation does not run on weights that {divides} divides; unset it, and generate from "
                    "what the run saves",
                )

    def require_whole_weights(self, mesh: MeshConfig) -> None:
        """Raises `ConfigError` if mesh.fsdp is not 1, because nothing is sampled from weights that are divided over
        devices. It is for runs that train on answers which the model samples. mesh: the one that the run chose
        (setup.require_sampling), because self.mesh may be None or leave a size open; the checks of the config, and of a
        run of several processes before it reads anything, give self.mesh (a default one for None)."""
        require(
            mesh.fsdp == 1,
            "mesh.fsdp",
            mesh.fsdp,
            f"objective.name = {self.objective.name} samples answers, for which each device needs whole weights; set "
            "mesh.fsdp=1 and mesh.data to the number of devices, and model.load_in=nf4 if they do not fit",
        )

    def _check_exact_match(self) -> None:
        """Raises `ConfigError` if evaluation.exact_match_rows is set with an objective whose rows have no single right
        answer (dpo, orpo and simpo, but not kto) or whose model writes no answers (reward), or if evaluation.generate
        is set with the objective reward. `__post_init__` calls it; nothing is loaded for it."""
        why = "a reward model writes no answers" if self.objective.name == "reward" else "its rows have no right answer"
        require(
            self.objective.name in ("sft", "kto", "grpo", "rloo", "distill") or not self.evaluation.exact_match_rows,
            "evaluation.exact_match_rows",
            self.evaluation.exact_match_rows,
            f"{why} (objective = {self.objective.name}); leave it out",
        )
        require(
            self.objective.name != "reward" or not self.evaluation.generate,
            "evaluation.generate",
            list(self.evaluation.generate),
            "a reward model writes no answers (objective = reward); leave it out",
        )

    def _check_prompts(self) -> None:
        """ConfigError if a key of `data` or `evaluation` is set that has no effect with this objective: grpo and rloo
        read only prompts of rows."""
        name, data = self.objective.name, self.data
        idle = (
            *(("format", "auto"), ("train_on", "responses"), ("instruction_part", None), ("response_part", None)),
            *(("last_response_only", False), ("mask_spans", None), ("packing", True), ("overflow", "truncate")),
        )
        for key, default in idle if name in ("grpo", "rloo") else ():
            require(
                getattr(data, key) == default,
                f"data.{key}",
                getattr(data, key),
                f"objective.name = {name} reads only the prompts of rows, and packs sampled answers; leave it out",
            )
        asked = self.evaluation
        for key, default in (("generate_rows", 64), ("temperature", 0.0)):
            require(
                bool(asked.generate) or getattr(asked, key) == default,
                f"evaluation.{key}",
                getattr(asked, key),
                "is of the answers of evaluation.generate; set that, or leave it out",
            )

    def _check_precision(self) -> None:
        """Raises `ConfigError` if `precision` is a map with an unknown word, with a format and no adapter, or with a
        word for "*" that is no dtype. A map without "*" gets "*": "bf16", and one that has only "*" is replaced by its
        word. `__post_init__` calls it; whether a pattern fits a module of the model is checked later."""
        if isinstance(self.precision, str):
            return
        object.__setattr__(self, "precision", {**self.precision, _REST: self.precision.get(_REST, "bf16")})
        require(
            self.precision[_REST] in DTYPES,
            f"precision.{_REST}",
            self.precision[_REST],
            f"must be {', '.join(DTYPES)}, in which the model computes; the layers' format is model.load_in",
        )
        for pattern, word in self.components.items():
            key, known = f"precision.{pattern}", ", ".join((*DTYPES, *LOADED))
            require(word in DTYPES or word in LOADED, key, word, f"is no dtype or format; there are {known}")
            require(
                word in DTYPES or self.adapter is not None,
                key,
                word,
                "quantised weights are frozen and train through an adapter: set adapter: {}, or name a dtype",
            )
        if not self.components:
            object.__setattr__(self, "precision", self.precision[_REST])

    def _check_adapter(self) -> None:
        """Raises `ConfigError` if a key is set that needs an adapter and there is none (model.load_in), or that an
        adapter rules out (model.from_config, optim.weights=bf16, optim.offload), or optim.offload without
        max_grad_norm: offloaded states are updated tensor by tensor, and only with clipping does a step know before an
        update whether all new weights will be finite. `__post_init__` calls it; nothing is loaded for it."""
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
        """Raises `ConfigError` if quantisation-aware training (the section qat) is on, `steps` is set, and qat.start,
        the steps without rounding, is not below it. With epochs, setup.require_starts_within checks it later."""
        if self.qat is None:
            return
        start = self.qat.start
        require(self.steps is None or start < self.steps, "qat.start", start, f"must be below steps = {self.steps}")

    def _check_evaluation(self) -> None:
        """Raises `ConfigError` if evaluations are asked for (every_steps, at_start) and there are no held-out rows (for
        evaluations by generation: no data.eval), if evaluation.generate names rewards that cannot be used, or if
        checkpoint.best names a metric that evaluations will not have. `__post_init__` calls it; whether the rows can be
        read is checked later."""
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
        """Raises `ConfigError` if evaluation.generate has "rewards", and the objective has no reward functions, other
        functions stand beside it, or answers have several turns, which evaluations do not sample. `_check_evaluation`
        calls it when a config is made; the functions are not loaded for it."""
        asked, wanted = self.evaluation.generate, self.objective
        if REWARDS not in asked:
            return
        require(
            bool(wanted.reward_funcs),
            "evaluation.generate",
            list(asked),
            "rewards are the functions of objective.reward_funcs, and there are none; name functions",
        )
        require(len(asked) == 1, "evaluation.generate", list(asked), "rewards stand alone; or name all functions")
        several = next((key for key in ("tools", "environment_factory", "rollout_func") if getattr(wanted, key)), None)
        require(
            several is None,
            "evaluation.generate",
            list(asked),
            f"an evaluation samples answers of one turn, and the rewards are for those of objective.{several}; name "
            "functions for answers of one turn",
        )

    def _check_best(self, has_eval: bool) -> None:
        """Raises `ConfigError` if checkpoint.best names a metric that evaluations will not have: there are none after a
        step; it is of answers, and evaluation.generate is empty or has no such function; it is eval_reward, and
        generate is not [rewards]; or it is another, and the objective is grpo or rloo, whose evaluations have no loss.
        Without checkpoint.best nothing is checked. has_eval: whether there are held-out rows. `_check_evaluation` calls
        it when a config is made, so that a run does not end without a best checkpoint."""
        best, asked = self.checkpoint.best, self.evaluation.generate
        if best is None:
            return
        wanted = self.evaluation.every_steps or self.evaluation.every_epochs or self.evaluation.at_end
        require(
            bool(has_eval and wanted),
            "checkpoint.best",
            best,
            "needs evaluations: set data.eval, evaluation.every_steps",
        )
        of_answers = best.startswith(("eval_answer", "eval_reward"))
        require(
            asked != () if of_answers else self.objective.name not in ("grpo", "rloo"),
            "checkpoint.best",
            best,
            f"evaluations have {'no answers' if of_answers else f'no loss with {self.objective.name}'}; name functions "
            "in evaluation.generate, and set eval_answers/NAME, of which NAME is one of them",
        )
        rewards = asked == (REWARDS,)
        require(
            best != "eval_reward" or rewards,
            "checkpoint.best",
            best,
            "evaluations have it with evaluation.generate = [rewards]; set that, or eval_answers/NAME",
        )
        functions = (self.objective.reward_funcs or ()) if rewards else asked
        names = unique_names([name.rpartition(":")[2] for name in functions])
        require(
            not best.startswith("eval_answers/") or best.removeprefix("eval_answers/") in names,
            "checkpoint.best",
            best,
            f"evaluations have no such function; they have {', '.join(names)}",
        )
