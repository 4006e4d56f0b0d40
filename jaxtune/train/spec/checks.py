"""What does not go together in a run, beside what a config's own sections and its objective refuse."""

from __future__ import annotations

import jax

from jaxtune.models.qat.fake_quant import FakeQuant
from jaxtune.system import processes
from jaxtune.train.config import ConfigError, EvaluationConfig, OptimConfig, ProfileConfig, QatConfig
from jaxtune.train.data.batches import BatchSource
from jaxtune.train.engine.trained_model import TrainedModel
from jaxtune.train.objectives.objective import Objective, RunNeeds
from jaxtune.train.optimizer.optim import embedding_tensors


def require_sampling(sampler: str | None, batches: BatchSource) -> None:
    """ConfigError if something samples from the model in a way that several processes, which there are, cannot share.

    sampler: in words; None: nothing samples.
    """
    if sampler is not None and (count := processes.count()) > 1 and not batches.samples_together:
        raise ConfigError(
            f"{sampler}: {count} processes cannot share the sampling of answers with tools, environments or rollout "
            "functions, or by a source of your own; run one process, which can use all GPUs of its machine (mesh.data, "
            "mesh.fsdp)"
        )


def require_fit_for_processes(evaluation: EvaluationConfig, optim: OptimConfig) -> None:
    """ValueError for what several processes cannot do: exact match, optim.offload."""
    if (count := processes.count()) == 1:
        return
    if evaluation.exact_match_rows:
        raise ValueError(
            f"evaluation.exact_match_rows = {evaluation.exact_match_rows}: {count} processes cannot answer them before "
            "and after training yet; take evaluation.generate=[exact_match], or unset it"
        )
    if optim.offload:
        raise ValueError(
            f"optim.offload = true: states in host memory are those of one process yet, and this run has {count}; "
            "divide them over the devices (mesh.fsdp)"
        )


def require_fit_for_exact(neftune_noise_alpha: float | None) -> None:
    """ConfigError for what gives a token other bits in training than in sampling, whatever the model."""
    if neftune_noise_alpha:
        raise ConfigError(
            f"neftune_noise_alpha = {neftune_noise_alpha}: with objective.exact training sees what was sampled, "
            "without noise; leave one of them out"
        )
    if (count := processes.count()) > 1:
        raise ConfigError(
            f"objective.exact = true: {count} processes share the sampling, which is not in one order with training "
            "yet; run one process"
        )


def require_starts_within(total_steps: int, profile: ProfileConfig, profile_steps: int, qat: QatConfig | None) -> None:
    """ValueError if profile.start or qat.start is not below the run's steps, which `epochs` leaves unknown until rows
    are read.
    """
    if profile_steps and profile.start >= total_steps:
        raise ValueError(f"profile.start = {profile.start}: the run has only {total_steps} steps")
    if qat is not None and qat.start >= total_steps:
        raise ValueError(f"qat.start = {qat.start}: the run has only {total_steps} steps")


def require_trainable(
    objective: Objective, model: TrainedModel, embedding_rate: float | None, own_reference: bool = False
) -> None:
    """ValueError if nothing trains, no embedding for optim.embedding_learning_rate, or the objective cannot train the
    model. own_reference: it is compared with other weights than its own.
    """
    if not jax.tree.leaves(model.trainable):
        raise ValueError("the model has no trainable tensor: add adapters (get_peft_model) or do not freeze it")
    if not own_reference:
        objective.check(model.prepared)
    require_observable(model.qat, RunNeeds.of(objective))
    if embedding_rate is not None and not any(embedding_tensors(model.trainable)):
        raise ValueError(
            f"optim.embedding_learning_rate = {embedding_rate}: neither embed_tokens nor lm_head trains; name them in "
            "adapter.modules_to_save, or unset it"
        )


def require_observable(qat: FakeQuant | None, needs: RunNeeds) -> None:
    """ValueError if QAT observes activation scales on the first step's rows and this process lacks some before the run:
    sampled rows, or several processes.
    """
    if qat is None or not qat.observes:
        return
    requirement = f"qat.format = {qat.format} observes activations on the rows of the first step"
    if needs.samples:
        raise ValueError(f"{requirement}, and {needs.sampler} samples them during it: take nvfp4 or mxfp4-mxfp4")
    if processes.count() > 1:
        raise ValueError(f"{requirement}, in a run of one process: this one has {processes.count()}")
