"""What a run is, decided once from its config, model and rows. The plan (mesh, micro-batches, what is moved) is not in
it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import optax

from jaxtune.models.ends import ends_of
from jaxtune.system import processes
from jaxtune.train.config import CheckpointConfig, EvaluationConfig, TrainConfig
from jaxtune.train.config.file import config_to_dict
from jaxtune.train.config.sections import Unset, in_steps
from jaxtune.train.data import TokenDataset
from jaxtune.train.data.batches import BatchSource
from jaxtune.train.data.packing.steps import pack_steps
from jaxtune.train.data.rendering.pictures import picture_options
from jaxtune.train.digests import code_of
from jaxtune.train.engine.trained_model import TrainedModel
from jaxtune.train.evaluation.answer_metrics import AnswerMetrics, answer_metrics
from jaxtune.train.folder.record import (
    in_first_words,
    model_sections,
    require_own_folder,
    require_same_settings,
    with_today,
)
from jaxtune.train.objectives.named import objective_of
from jaxtune.train.objectives.objective import Objective
from jaxtune.train.optimizer.schedule import total_steps
from jaxtune.train.planning.step_spec import StepSpec
from jaxtune.train.references.stored_teachers import StoredTeacher
from jaxtune.train.sampled.rollouts import SampledAnswers
from jaxtune.train.spec import checks, own_parts
from jaxtune.train.spec.pictures import refusal
from jaxtune.train.spec.run_rows import Reader, alike, run_rows
from jaxtune.train.spec.update_rule import UpdateRule, update_rule

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class UserParts:
    """What a user's code gives in place of sections of the config; None: the config's."""

    objective: Objective | None = None
    optimizer: optax.GradientTransformation | None = None
    schedule: optax.Schedule | None = None


@dataclass(frozen=True)
class RunRows:
    """The rows of a run, tokenised, as it reads them."""

    batches: BatchSource
    train: TokenDataset | None
    """None if they are not known before the run."""
    held_out: TokenDataset | None
    """Those with a loss."""
    further: Mapping[str, TokenDataset]
    """Further sets with a loss, by name."""
    answers: AnswerMetrics | None
    """Of evaluation.generate."""


@dataclass(frozen=True)
class RunSpec:
    config: TrainConfig
    """As the run's folder records it: the model's own formats, the day of its template, the length of sampled rows."""
    step: StepSpec
    """What the plan is asked for; its mesh is the config's."""
    objective: Objective
    update: UpdateRule
    total_steps: int
    evaluation: EvaluationConfig
    """every_steps counts steps, as in `checkpoint`."""
    checkpoint: CheckpointConfig
    identities: Mapping[str, object]
    """Of the parts that a user's code gave."""
    code: Mapping[str, str]
    """Of the functions that a user's code gave."""


def decided_objective(config: TrainConfig, user_objective: Objective | None = None) -> Objective:
    """The objective, after all checks that need neither model nor rows. Collective.

    ConfigError or ValueError for keys that do not go together, or that processes have differently.
    """
    objective = objective_of(config.objective, user_objective)
    objective.refuses(config.data, config.mesh, config.evaluation, config.checkpoint)
    if processes.count() > 1:
        require_same_settings(config_to_dict(config))
    checks.require_fit_for_processes(config.evaluation, config.optim)
    if config.objective.exact:
        checks.require_fit_for_exact(config.neftune_noise_alpha)
    if config.steps is not None:
        checks.require_starts_within(config.steps, config.profile, config.profile.steps, config.qat)
    return objective


def resolve(
    config: TrainConfig,
    model: TrainedModel,
    tokenizer: PreTrainedTokenizerFast | None,
    stored: StoredTeacher,
    parts: UserParts,
    train_rows: object = None,
    eval_rows: object = None,
    *,
    further_eval_rows: Mapping[str, object] = MappingProxyType({}),
    trains: bool = True,
    profile_steps: int = 0,
    checks_folder: bool = False,
) -> tuple[RunSpec, RunRows]:
    """Reads and tokenises the rows, and decides the run. Collective.

      tokenizer: with the rows' chat template.
      train_rows, eval_rows: None: the config's.
      further_eval_rows: {name: rows} of sets that are evaluated beside eval_rows.
      trains: False: rows of data.eval_rows stay out of training even if others are evaluated on.
      checks_folder: refuse another run's output folder before rows are read.

    ConfigError or ValueError for what does not go together, or rows that cannot be used.
    """
    objective = decided_objective(config, parts.objective)
    void = config.optim, config.schedule, config.objective
    own_parts.require_nothing_beside(*void, parts.optimizer, parts.schedule, parts.objective)
    own_reference = isinstance(train_rows, SampledAnswers) and train_rows.own_reference
    checks.require_trainable(objective, model, config.optim.embedding_learning_rate, own_reference)
    sections = model_sections(model.prepared, config.model, config.adapter, config.numbers)
    dated = with_today(config.data, Path(config.output), tokenizer)
    config = dataclasses.replace(config, **sections, data=dated)
    ends = ends_of(model.given, tokenizer) if objective.samples else ()
    data = dataclasses.replace(config.data, template=config.data.trained_template)
    rows_config = dataclasses.replace(config, data=data)
    tower, pictures = model.given.vision, None
    refused = refusal(objective, config.qat)
    if refused is None:
        pictures = picture_options(model.given, tokenizer, data)
    reader = Reader(objective, tokenizer, rows_config, model.given.config, tuple(ends), pictures)
    held_out_source = config.data.eval if eval_rows is None else eval_rows
    rewards = train_rows.rewards if isinstance(train_rows, SampledAnswers) else None
    answers = answer_metrics(
        config.evaluation,
        data,
        held_out_source,
        tokenizer,
        model.given,
        config.objective,
        rewards,
        seed=config.seed,
        deterministic=config.deterministic,
        pictures=pictures,
    )
    config = dataclasses.replace(config, **in_first_words(config.data, config.adapter))
    if checks_folder:
        require_own_folder(config_to_dict(config), isinstance(config.data.length, Unset))
    train, held_out = stored.attach(*run_rows(reader, train_rows, eval_rows, not trains))
    sets = [] if held_out is None else [held_out]
    sets += stored.attach_further({name: reader.tokenised(rows) for name, rows in further_eval_rows.items()})
    batches = train if isinstance(train, BatchSource) else train.batches(config.rows_per_step, seed=config.seed)
    steps = total_steps(config.steps, config.epochs, batches.steps_per_epoch)
    if isinstance(train, TokenDataset) and train.unit.counts_examples:
        division = config.rows_per_step, config.micro_batches, config.mesh, config.seed
        batches, sets = pack_steps(train, sets, steps, *division)
    if config.data.patches_per_row is None and batches.patches:
        sets = [data.with_patches(max(batches.patches, data.rows.largest_patches)) for data in sets]
    sets = alike(sets)
    held_out = None if held_out is None else sets.pop(0)
    further = dict(zip(further_eval_rows, sets, strict=True))
    if isinstance(batches, SampledAnswers) and isinstance(config.data.length, Unset):
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, length=batches.length))
    of_tower = None if tower is None else tower.config
    held_out_patches = 0 if held_out is None else held_out.rows.patches
    step = StepSpec.of(config, objective, batches, parts.optimizer, model.keeps_model, of_tower, held_out_patches)
    checks.require_sampling(step.needs.sampler, batches)
    checks.require_observable(model.qat, step.needs)
    checks.require_starts_within(steps, config.profile, profile_steps, config.qat)
    rows = RunRows(batches, train if isinstance(train, TokenDataset) else None, held_out, further, answers)
    counts = steps, batches.steps_per_epoch
    spec = RunSpec(
        config=config,
        step=step,
        objective=objective,
        update=update_rule(config.optim, config.schedule, config.max_grad_norm, steps, parts.optimizer, parts.schedule),
        total_steps=steps,
        evaluation=in_steps(config.evaluation, *counts),
        checkpoint=in_steps(config.checkpoint, *counts),
        identities=own_parts.identities(model.trainable, steps, parts.optimizer, parts.schedule, parts.objective),
        code=code_of(_functions(rows, parts.objective)),
    )
    return spec, rows


def _functions(rows: RunRows, objective: Objective | None) -> dict[str, Callable]:
    """The functions of a user's code, by what they are for."""
    functions = dict(rows.batches.functions())
    if rows.answers is not None and not rows.answers.are_rewards:
        scoring = rows.answers.functions
        functions |= {
            f"evaluation {name}": function for name, function in zip(scoring.names, scoring.functions, strict=True)
        }
    if objective is not None:
        functions[f"objective {type(objective).__name__}"] = type(objective)
    return functions
