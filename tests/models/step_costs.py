"""Costs of a step for a config, from shapes."""

from jaxtune.models.config import DecoderConfig
from jaxtune.train.config import CheckpointConfig, DataConfig, ExportConfig, TrainConfig
from jaxtune.train.planning.cost import StepCost, abstract_model, step_cost
from jaxtune.train.planning.step_spec import StepSpec


def costs_of(shape: DecoderConfig, config: TrainConfig) -> StepCost:
    spec = StepSpec.of(config)
    return step_cost(abstract_model(shape, spec.model), spec)


def phase_sections(config: TrainConfig) -> tuple[str | None, DataConfig, CheckpointConfig, ExportConfig]:
    """Arguments of `phases_of`."""
    return config.model.load_in, config.data, config.checkpoint, config.export
