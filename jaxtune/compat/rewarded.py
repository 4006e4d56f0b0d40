"""TRL's GRPOTrainer and RLOOTrainer with their configs. Answers are sampled from the model that trains, in the same
process, and rewarded by the script's functions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtune.compat.arguments import choose, report_idle, settle, shown
from jaxtune.compat.completions import Completions
from jaxtune.compat.defaults import Library
from jaxtune.compat.kept import keep_programs
from jaxtune.compat.model import CompatModel
from jaxtune.compat.preference import PreferenceConfig, PreferenceTrainer, trained_before
from jaxtune.compat.reward_models import with_reward_models
from jaxtune.compat.rows import require_one_set
from jaxtune.compat.settings import move_quantization_config, plain_value, resolved_config
from jaxtune.compat.tables import GRPO, REWARDED_TRAINER, RLOO
from jaxtune.compat.trainer import TrainOutput
from jaxtune.compat.transformers_names import load_named
from jaxtune.compat.vllm_names import SamplingParams
from jaxtune.models.decoder import Decoder
from jaxtune.models.ends import ends_of
from jaxtune.system.terminal import say
from jaxtune.train.callbacks import Between, Callback
from jaxtune.train.config import TrainConfig
from jaxtune.train.config.objective import ObjectiveConfig, without_effect
from jaxtune.train.config.sections import REWARDS
from jaxtune.train.data.batches import Batch
from jaxtune.train.data.rendering.templates import trained_tokenizer
from jaxtune.train.data.rows.streamed import is_stream
from jaxtune.train.objectives.named import objective_of
from jaxtune.train.objectives.policy import log_probs_of
from jaxtune.train.sampled.prompts import AnswerSteps, UserFunctions
from jaxtune.train.sampled.reward_functions import RewardFunction, RewardFunctions, RewardOptions, Turns
from jaxtune.train.sampled.reward_log import RewardLog
from jaxtune.train.sampled.rollout_function import RolloutModel
from jaxtune.train.sampled.rollouts import Score
from jaxtune.train.sampled.sources import sampled_source
from jaxtune.train.sampled.tools import Tools
from jaxtune.train.trainer import Trainer
from jaxtune.train.user_code.calling import running

_ALL_ROWS = 2**31 - 1  # the most rows of eval_dataset that are answered
# Arguments that have the names of the objective's options.
_SHARED = (
    "beta",
    "num_generations",
    "max_completion_length",
    "temperature",
    "top_p",
    "repetition_penalty",
    "mask_truncated_completions",
    "num_iterations",
    "epsilon",
    "epsilon_high",
)
_OF_GRPO = (
    "delta",
    "use_bias_correction_kl",
    "top_entropy_quantile",
    "entropy_coef",
    "sapo_temperature_pos",
    "sapo_temperature_neg",
)
_CHOICES = {
    "loss_type": ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo"),
    "importance_sampling_level": ("token", "sequence"),
    "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
}
_SCALES = {True: "group", False: "none", "group": "group", "batch": "batch", "none": "none"}


@dataclasses.dataclass(init=False)
class RewardedConfig(PreferenceConfig):
    """Arguments that GRPOConfig and RLOOConfig share. As in TRL, per_device_train_batch_size counts answers, not
    prompts. Lengths are in tokens.
    """

    section = "grpo"  # of the tables of defaults
    disable_dropout: bool  # True: the adapter's dropout is turned off; False: it is used
    num_generations: int  # answers that are sampled to each prompt
    # longer prompts lose their first tokens, also where max_length and the model leave less room beside
    # max_completion_length; None: a prompt that leaves no room is refused
    max_prompt_length: int | None = None
    max_completion_length: int  # the most tokens of an answer
    generation_batch_size: int | None  # answers that are sampled at once; None: steps_per_generation decides
    steps_per_generation: int | None  # the same in micro-batches; None: the answers of one update
    # How answers are sampled; the defaults change nothing.
    temperature: float
    top_p: float
    top_k: int | None
    min_p: float | None
    repetition_penalty: float
    chat_template_kwargs: Mapping[str, object] | None = None  # variables of the chat template, data.template_arguments
    beta: float  # the factor of the KL term; 0: there is none
    num_iterations: int  # how often each answer is trained on
    epsilon: float  # the ratio of probabilities is clipped below at 1 - epsilon (not with "cispo" and "sapo")
    epsilon_high: float | None  # and above at 1 + epsilon_high ("cispo": at epsilon_high); None: epsilon's value
    reward_weights: Sequence[float] | None  # a factor for each reward function; None: 1 for each
    mask_truncated_completions: bool  # True: answers cut at max_completion_length do not count in the loss
    # True: each logged step prints answers of the latest generation, and sends them to W&B and trackio as tables.
    # rollouts.jsonl in output_dir has them in any case
    log_completions: bool
    num_completions_to_print: int | None  # None: all of the generation
    # True: every ref_model_sync_steps updates the reference of beta becomes ref_model_mixup_alpha parts of the model as
    # it is then, and the other parts of what it was
    sync_ref_model: bool = False
    ref_model_mixup_alpha: float = 0.6
    ref_model_sync_steps: int = 512
    log_unique_prompts: bool  # True: the tables have one answer to each prompt
    vllm_sampling_params: SamplingParams | None = None  # what it sets comes before temperature, top_p, ... above

    def _fill(self, library: Library, given: Mapping[str, object]) -> None:
        super()._fill(library, given)
        params: object = self.vllm_sampling_params
        if params is None:
            return
        name = f"{type(self).__name__}: vllm_sampling_params"
        if not isinstance(params, SamplingParams):
            raise ValueError(f"{name} is a {type(params).__name__}; from jaxtune.compat import SamplingParams")
        if params.n != 1 or params.ignore_eos or params.stop_token_ids:
            raise ValueError(f"{name}: n, ignore_eos and stop_token_ids are not supported; leave them out")
        ours = {"max_tokens": "max_completion_length"}
        vars(self).update({ours.get(one, one): value for one, value in params.changed.items()})


@dataclasses.dataclass(init=False)
class GRPOConfig(RewardedConfig):
    """TRL's GRPOConfig. Fields with vllm_ correct for the difference between the sampler's and the trainer's
    probabilities; vLLM is not used.
    """

    table = GRPO  # the arguments that are not fields: without effect here, or refused

    max_tool_calling_iterations: int | None  # the most rounds of tool calls in an answer; None: no limit
    delta: float | None  # bounds the ratio from above in answers with negative advantage; None: no bound
    loss_type: str  # "grpo", "dr_grpo", "dapo", "bnpo", "cispo" or "sapo"
    importance_sampling_level: str  # a ratio for each "token", or one for each answer ("sequence")
    multi_objective_aggregation: str  # or "normalize_then_sum": how rewards become one
    # advantages are divided by the standard deviation of the rewards: "group" or True: of the answers to a prompt;
    # "batch": of all answers sampled at once; "none" or False: they are not divided. Unused with "normalize_then_sum"
    scale_rewards: str | bool
    top_entropy_quantile: float  # the share of tokens, those of largest entropy, that count in the loss
    entropy_coef: float  # the factor of the mean entropy, which is subtracted from the loss
    # the slope of the sigmoid by which "sapo" clips ratios: for advantages of 0 or less, and for those above 0
    sapo_temperature_neg: float
    sapo_temperature_pos: float
    use_bias_correction_kl: bool  # True: the KL term is multiplied by the ratio; False: it is not
    # True: the loss corrects for the sampler's probabilities, by the mode and within the bounds below; False: not
    vllm_importance_sampling_correction: bool
    # or "token_mask", "token_truncate" (the default with float8_kv_cache=True), "sequence_truncate"
    vllm_importance_sampling_mode: str
    # bounds of the ratio of the trainer's probabilities to the sampler's; None: no bound
    vllm_importance_sampling_clip_max: float | None
    vllm_importance_sampling_clip_min: float | None


@dataclasses.dataclass(init=False)
class RLOOConfig(RewardedConfig):
    """TRL's RLOOConfig."""

    section = "rloo"  # of the tables of defaults
    table = RLOO  # the arguments that are not fields: without effect here, or refused

    num_generations: int  # answers that are sampled to each prompt
    beta: float  # beta times an answer's divergence from the reference is subtracted from its reward
    reward_clip_range: Sequence[float] | None = None  # the least and the greatest reward of an answer; None: no limits
    # True: advantages get mean 0 and standard deviation 1 over all answers sampled at once; False: they do not
    normalize_advantages: bool


class _Synced(Callback):
    """Mixes the model into the reference of its trainer every ref_model_sync_steps updates."""

    is_users = False

    def __init__(self, trainer: RewardedTrainer):
        self._trainer, self._every = trainer, trainer.args.ref_model_sync_steps

    def between(self, moment: Between) -> None:
        if moment.step % self._every == 0:
            self._trainer.mix_reference(moment.model())


class RewardedTrainer(PreferenceTrainer):
    """Base of GRPOTrainer and RLOOTrainer, which sample answers to prompts and train on their rewards.

    Args:
      model: a CompatModel, or a hub name or folder, loaded for rows of max_prompt_length (None: 512) plus
        max_completion_length tokens.
      reward_funcs: functions of (prompts, completions, **columns) that return a number for each answer, or reward
        models, by name or loaded; None: environments or rollout_func give the rewards.
      train_dataset: rows with a column `prompt`, text or messages.
      eval_dataset: such rows, which get one answer at every evaluation: metrics eval_reward and eval_answers/NAME. Not
        with tools, environments or rollout_func.
      processing_class: the tokenizer; None: the model's.
      reward_processing_classes: the tokenizer of each of reward_funcs; None, or None for one of them: its own.
      tools: functions with types and a docstring that the model may call.
      rollout_func: a function of (prompts, trainer) that samples the answers by generate_rollout_completions and
        returns a dict of lists, as in TRL; not with tools or environments.
      environment_factory: makes an environment, an object whose methods are tools; or {name: such a function}.
      others: further arguments of SFTTrainer, but compute_metrics and preprocess_logits_for_metrics.
    Attributes:
      reward_funcs, reward_processing_classes: as lists, with the models that were loaded.
      rollout_model: the sampling model during a call of rollout_func.
    """

    config_type: type[RewardedConfig]
    table = REWARDED_TRAINER
    columns = ("prompt",)
    trained = "responses"

    def __init__(
        self,
        model: CompatModel | str | os.PathLike,
        reward_funcs: RewardFunction | str | CompatModel | Sequence[RewardFunction | str | CompatModel] | None = None,
        args: object = None,
        train_dataset: object = None,
        eval_dataset: object = None,
        processing_class: object = None,
        reward_processing_classes: object = None,
        tools: Sequence[Callable] | None = None,
        rollout_func: Callable | None = None,
        environment_factory: Callable | Mapping[str, Callable] | None = None,
        **others: object,
    ):
        # Until the trainer is gone, its calls of train share an event loop, as clients of async rewards need.
        until_gone = contextlib.ExitStack()
        until_gone.enter_context(running())
        weakref.finalize(self, until_gone.close)
        name = type(self).__name__
        logits = ("compute_metrics", "preprocess_logits_for_metrics")  # of SFTTrainer's parameters
        settle(name, {argument: others.pop(argument) for argument in logits if argument in others}, self.table)
        self._tools = Tools(tools or (), environment_factory) if tools or environment_factory else None
        self._rollout_func, self.rollout_model = rollout_func, None
        if rollout_func is not None and self._tools is not None:
            raise ValueError(f"{name}: rollout_func samples answers itself; leave out tools and environment_factory")
        functions: list = []
        if reward_funcs is not None:
            functions += reward_funcs if isinstance(reward_funcs, list | tuple) else [reward_funcs]
        for argument in functions:
            if not callable(argument) and not isinstance(argument, str | os.PathLike):
                raise ValueError(
                    f"{name}: reward_funcs has {shown(argument)}; give functions of (prompts, completions, **columns) "
                    "that return a list of numbers, or reward models"
                )
        if not functions and not environment_factory and rollout_func is None:
            unknown = {one: value for one, value in others.items() if one not in self.table and one not in self.older}
            settle(name, unknown, {}, RewardedTrainer.__init__)  # perhaps they are under another name
            raise ValueError(
                f"{name}: reward_funcs = {reward_funcs!r}: give a function, an environment_factory or a rollout_func"
            )
        config: Any = resolved_config(args, self.config_type, model)
        move_quantization_config(config, others, model)
        require_one_set(train_dataset, name, "train_dataset")
        if eval_dataset is not None:
            require_one_set(eval_dataset, name, "eval_dataset")
        self._functions, self.reward_processing_classes = with_reward_models(
            name, functions, reward_processing_classes, config
        )
        evaluates = plain_value(config.eval_strategy) not in ("no", None) or config.eval_on_start
        if evaluates and (self._tools is not None or rollout_func is not None):
            raise ValueError(
                f"{self.config_type.__name__}: eval_strategy = {plain_value(config.eval_strategy)!r} is not supported "
                "with tools, environments and rollout_func: an evaluation samples answers of one turn; leave it at 'no'"
            )
        if eval_dataset is not None and not evaluates:
            report_idle(name, "eval_dataset", "eval_strategy is 'no'")
            eval_dataset = None
        if isinstance(model, str | os.PathLike):
            model = load_named(os.fspath(model), config, full=others.get("peft_config") is None)
        self._weights = getattr(config, "reward_weights", None)
        super().__init__(model, args, train_dataset, eval_dataset, processing_class, **others)
        params = getattr(self.args, "vllm_sampling_params", None)
        end = getattr(self.tokenizer, "eos_token", None)
        if params is not None and any(text != end for text in params.stop):
            raise ValueError(
                f"{self.config_type.__name__}: vllm_sampling_params: stop = {params.stop!r} is not supported: an "
                f"answer ends with the model's own end, {end!r}"
            )
        self._kept: nnx.State | None = None  # the trained weights of the reference, unless it is the adapter off
        if self.args.beta:
            reference = "its adapter off"
            if not self.model.has_adapter or trained_before(self.model.module):
                copied = (
                    "the adapter that was trained before" if self.model.has_adapter else "its weights as they are now"
                )
                reference = f"a copy of {copied}"
                self._kept = jax.tree.map(jnp.copy, nnx.state(self.model.module, nnx.Param))
            say(f"{name}: the reference of beta = {self.args.beta} is the model with {reference}")
        if self.args.sync_ref_model and (not self.args.beta or self.model.has_adapter):
            why = "the reference is the model with its adapter off" if self.args.beta else "without beta there is none"
            raise ValueError(f"{self.config_type.__name__}: sync_ref_model = True: {why}; leave it at False")

    @property
    def ref_model(self) -> CompatModel | None:
        """The reference of beta, if it has weights of its own."""
        if self._kept is None:
            return None
        graph, _, others = nnx.split(self.model.module, nnx.Param, ...)
        module = nnx.merge(graph, jax.tree.map(jnp.copy, self._kept), others)
        return CompatModel(module, self.model.tokenizer, self.model.max_seq_length, None, full_finetuning=True)

    def mix_reference(self, module: Decoder) -> None:
        """Moves the reference towards `module`, as sync_ref_model says."""
        share, trained = self.args.ref_model_mixup_alpha, nnx.state(module, nnx.Param)
        assert self._kept is not None
        self._kept = jax.tree.map(
            lambda old, new: ((1.0 - share) * old + share * new).astype(old.dtype), self._kept, trained
        )

    @property
    def reward_funcs(self) -> list[RewardFunction]:
        return list(self._functions)

    # ---- the arguments

    def _measured_names(self) -> list[str]:
        """Of an evaluation by rewards."""
        return ["eval_reward", *(f"eval_answers/{name}" for name in self._parts().all_rewards().names)]

    @property
    def _answers(self) -> int:
        """Answers of an update: the batch size times the micro-batches, in whole groups of num_generations."""
        args, micro_batches = self.args, self.args.gradient_accumulation_steps
        batch, group = args.per_device_train_batch_size, args.num_generations
        if batch * micro_batches % group:
            report_idle(
                type(args).__name__,
                f"per_device_train_batch_size = {batch}",
                f"an update has whole groups: num_generations = {group} answers are taken instead, as in Unsloth",
            )
            batch = group
        return batch * micro_batches

    def _steps_per_generation(self) -> int:
        """Updates that share the answers sampled at once; ValueError if these are not a multiple of an update's."""
        args, answers = self.args, self._answers
        if args.generation_batch_size is not None:
            argument, count = f"generation_batch_size = {args.generation_batch_size}", args.generation_batch_size
        elif args.steps_per_generation is not None:
            argument = f"steps_per_generation = {args.steps_per_generation}"
            count = args.steps_per_generation * answers // args.gradient_accumulation_steps
        else:
            return 1
        if count % answers:
            raise ValueError(
                f"{type(args).__name__}: {argument} is a generation of {count} answers, of which an update takes "
                f"{answers}; that an update takes answers of two generations is not supported. Instead: a multiple"
            )
        return count // answers

    def _objective(self) -> ObjectiveConfig:
        """The section `objective` of the run's config, from TRL's settings."""
        args, rewards = self.args, self._parts().all_rewards()
        options = {name: getattr(args, name) for name in _SHARED}
        options |= dict(
            reward_funcs=rewards.names,
            reward_weights=rewards.weights,
            steps_per_generation=self._steps_per_generation(),
            top_k=max(0, args.top_k or 0),  # vLLM's -1 is all tokens
            min_p=args.min_p or 0.0,
            cache=self.model.cache,
        )
        if isinstance(args, RLOOConfig):
            options |= dict(normalize_advantages=args.normalize_advantages)
            options |= dict(reward_clip_range=args.reward_clip_range and tuple(map(float, args.reward_clip_range)))
            return ObjectiveConfig("rloo", **options)
        where = type(args).__name__
        options |= {name: getattr(args, name) for name in _OF_GRPO}
        options |= {
            name: choose(where, name, getattr(args, name), dict(zip(choices, choices, strict=True)))
            for name, choices in _CHOICES.items()
        }
        options["scale_rewards"] = choose(where, "scale_rewards", args.scale_rewards, _SCALES)
        corrections = ("correction", "mode", "clip_max", "clip_min")
        options |= {
            f"importance_sampling_{name}": getattr(args, f"vllm_importance_sampling_{name}") for name in corrections
        }
        if self.model.cache is not None and "vllm_importance_sampling_mode" not in args.given:
            options["importance_sampling_mode"] = None  # the default beside such a cache is not TRL's
        for option, why in without_effect("grpo", options).items():
            is_vllm = option in (
                "importance_sampling_mode",
                "importance_sampling_clip_max",
                "importance_sampling_clip_min",
            )
            report_idle(where, f"vllm_{option}" if is_vllm else option, why.removesuffix("; leave it out"))
            options[option] = None
        return ObjectiveConfig("grpo", **options)

    def _parts(self, reference: Score | None = None) -> UserFunctions:
        """The script's functions, with the arguments that TRL passes to reward functions. NaN is None, as in TRL."""
        log = RewardLog()
        extra_arguments = {"trainer_state": getattr(self, "state", None), **log.arguments}
        options = RewardOptions(also=extra_arguments, nan_is_none=True, log=log)
        return UserFunctions(
            RewardFunctions.of(self._functions, **options) if self._functions else None,
            self._weights,
            options,
            self._tools,
            None if self._rollout_func is None else self._rollout,
            getattr(self.args, "max_tool_calling_iterations", None),
            chooses_length=True,
            longest_prompt=self.args.max_prompt_length,
            reference=reference,
        )

    def _read(self, dataset: object, formatting_func: object) -> tuple[object, str]:
        """(the rows, "auto": their format is detected later); ValueError for a stream or without prompts."""
        if is_stream(dataset):
            raise ValueError(
                f"{type(self).__name__}: train_dataset is an IterableDataset, which is not supported; prompts are read "
                "before the run. Instead: a list of its rows"
            )
        if formatting_func is not None:
            raise ValueError(f"{type(self).__name__}: it has no formatting_func; give a column `prompt`")
        rows, _ = super()._read(dataset, None)
        return rows, "auto"

    def config(self, resume: Literal["auto", "never"] = "never", prepared: bool = True) -> TrainConfig:
        """The TrainConfig of the run: rows_per_step counts the answers of an update, which are packed. A
        max_prompt_length also bounds the rows, with max_completion_length. Parameters as in SFTTrainer.config.
        """
        config, args = super().config(resume, prepared), self.args
        length, evaluation = config.data.length, config.evaluation
        if args.max_prompt_length is not None:
            length = min(length, args.max_prompt_length + args.max_completion_length)
        arguments = dict(args.chat_template_kwargs or {}) or None
        data = dataclasses.replace(config.data, length=length, packing=True, template_arguments=arguments)
        if config.data.eval is not None:
            how = dict(max_new_tokens=args.max_completion_length, temperature=args.temperature)
            evaluation = dataclasses.replace(evaluation, generate=(REWARDS,), generate_rows=_ALL_ROWS, **how)
        tables = "prompts" if args.log_unique_prompts else True
        metrics = dataclasses.replace(config.metrics, rollout_tables=tables if args.log_completions else False)
        return dataclasses.replace(
            config, data=data, evaluation=evaluation, metrics=metrics, rows_per_step=self._answers
        )

    # ---- the run

    def _reference(self, temperature: float) -> Score | None:
        """Maps (model, Batch) to log-probabilities under the weights before the first train(), or those that
        sync_ref_model made of them; None where none is needed.
        """
        if self._kept is None:
            return None

        def score(model: Decoder, batch: Batch) -> np.ndarray:
            graph, _, untrained = nnx.split(model, nnx.Param, ...)
            return log_probs_of(temperature, nnx.merge(graph, self._kept, untrained), batch)

        return score

    def _run(
        self, resume: Literal["auto", "never"] = "never", prepared: bool = True, callbacks: Sequence[Callback] = ()
    ) -> Trainer:
        config, held_out = self.config(resume, prepared), self._rows.get("eval")
        if self.args.log_completions:
            callbacks = [*callbacks, Completions(config.metrics.log_every, self.args.num_completions_to_print)]
        if self.args.sync_ref_model:
            callbacks = [*callbacks, _Synced(self)]
        objective, module = objective_of(config.objective), self.model.module
        assert objective.packed is not None
        source = sampled_source(
            objective,
            self._rows["train"],
            trained_tokenizer(self.tokenizer, config.data.template, config.data.template_arguments),
            AnswerSteps(config.data, config.rows_per_step, config.micro_batches, config.mesh, config.seed),
            ends_of(module, self.tokenizer),
            module.config.context_length,
            self._parts(self._reference(objective.packed.temperature)),
        )
        return Trainer(self._to_train(), self.tokenizer, config, source, held_out, callbacks=callbacks)

    def _rollout(self, prompts: list[Turns], model: RolloutModel) -> Mapping[str, Sequence]:
        assert self._rollout_func is not None
        self.rollout_model = model
        try:
            return self._rollout_func(prompts, self)
        finally:
            self.rollout_model = None

    @functools.cached_property
    def _prepared(self) -> Trainer:
        """A jaxtune Trainer that does not train, and whose steps may be unknown; made at the first use."""
        return self._run(prepared=False)

    def _trainer(self, resume: Literal["auto", "never"] = "never", callbacks: Sequence[Callback] = ()) -> Trainer:
        keep_programs()
        return self._run(resume, callbacks=callbacks)

    def train(self, resume_from_checkpoint: bool | str | os.PathLike | None = None) -> TrainOutput:
        """SFTTrainer's. ValueError also for a run with sync_ref_model that is to be continued."""
        if resume_from_checkpoint and self.args.sync_ref_model:
            raise ValueError(
                f"{type(self).__name__}: resume_from_checkpoint = {resume_from_checkpoint!r}: with sync_ref_model = "
                "True a run is not continued, because its reference is in no checkpoint; begin it anew"
            )
        return super().train(resume_from_checkpoint)

    def evaluate(self, *_: object, **__: object) -> NoReturn:
        """Raises ValueError, as predict does: sampled answers have no held-out loss."""
        raise ValueError(
            f"{type(self).__name__}: evaluate and predict are not supported. Instead: the rewards that every step "
            "logs, eval_dataset, or answers of model.generate to held-out prompts"
        )

    predict = evaluate


def generate_rollout_completions(trainer: RewardedTrainer, prompts: Sequence[Turns]) -> list[dict[str, object]]:
    """Samples an answer to each prompt, as trl.experimental.openenv's; ValueError outside of rollout_func.

    Returns {"prompt_ids", "completion_ids": token ids, "logprobs": of the answer's tokens, "text"} of each.
      trainer: the one that rollout_func got.
      prompts: texts, or lists of messages.
    """
    model = trainer.rollout_model
    if model is None:
        raise ValueError("generate_rollout_completions: it is called in a trainer's rollout_func")
    ids = [model.encode(prompt) for prompt in prompts]
    return [
        {"prompt_ids": prompt_ids, "completion_ids": row.ids, "logprobs": row.logprobs, "text": model.decode(row.ids)}
        for prompt_ids, row in zip(ids, model.generate(ids), strict=True)
    ]


class GRPOTrainer(RewardedTrainer):
    """TRL's GRPOTrainer: an answer's advantage is its reward less the mean of all answers to its prompt, divided as
    scale_rewards says.
    """

    config_type, tag = GRPOConfig, "grpo"


class RLOOTrainer(RewardedTrainer):
    """TRL's RLOOTrainer: an answer's advantage is its reward, less beta times its divergence from the reference model,
    minus the mean of the other answers to its prompt.
    """

    config_type, tag = RLOOConfig, "rloo"
