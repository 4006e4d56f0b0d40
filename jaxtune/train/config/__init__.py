"""The configuration of a run: a TrainConfig of sections, checked when it is made, its reading and its writing."""

from jaxtune.train.config.checks import ConfigError
from jaxtune.train.config.model import AdapterConfig, ModelConfig
from jaxtune.train.config.objective import ObjectiveConfig
from jaxtune.train.config.precision import Precision
from jaxtune.train.config.qat import QatConfig
from jaxtune.train.config.sections import (
    ROW_OPTIONS,
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
from jaxtune.train.config.train_config import DEFAULT_OUTPUT, SHORTHANDS, TrainConfig

__all__ = [
    "DEFAULT_OUTPUT",
    "ROW_OPTIONS",
    "SHORTHANDS",
    "AdapterConfig",
    "CheckpointConfig",
    "ConfigError",
    "DataConfig",
    "EvaluationConfig",
    "ExportConfig",
    "GuardConfig",
    "MemoryConfig",
    "MeshConfig",
    "MetricsConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "OptimConfig",
    "PlanConfig",
    "Precision",
    "ProfileConfig",
    "QatConfig",
    "ScheduleConfig",
    "TrainConfig",
]
