"""The configuration of a run: the sections (sections.py, model.py, objective.py, qat.py), the whole configuration
(train_config.py), checks of values (checks.py), reading and writing of YAML (file.py), and the translation of other
programs' configurations (elsewhere.py). This module exports TrainConfig, ConfigError, some constants and the
sections."""

from jaxtune.train.config.checks import ConfigError
from jaxtune.train.config.model import AdapterConfig, ModelConfig
from jaxtune.train.config.objective import ObjectiveConfig
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
    "ProfileConfig",
    "QatConfig",
    "ScheduleConfig",
    "TrainConfig",
]
