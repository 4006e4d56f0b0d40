"""The configuration of a run: its sections (sections.py), what checks them (checks.py) and the YAML file (file.py)."""

from jaxtune.train.config.checks import ConfigError
from jaxtune.train.config.model import AdapterConfig, ModelConfig
from jaxtune.train.config.objective import ObjectiveConfig
from jaxtune.train.config.sections import (
    DEFAULT_OUTPUT,
    ROW_OPTIONS,
    SHORTHANDS,
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    MemoryConfig,
    MeshConfig,
    MetricsConfig,
    OptimConfig,
    PlanConfig,
    ProfileConfig,
    QatConfig,
    ScheduleConfig,
    TrainConfig,
)

__all__ = [
    "DEFAULT_OUTPUT",
    "ROW_OPTIONS",
    "SHORTHANDS",
    "AdapterConfig",
    "CheckpointConfig",
    "ConfigError",
    "DataConfig",
    "EvaluationConfig",
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
