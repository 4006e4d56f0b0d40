"""What a step asks of the planner."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import optax

from jaxtune.models.heads import Head
from jaxtune.models.placement import partition
from jaxtune.models.vision.tower import TowerConfig
from jaxtune.train.config import AdapterConfig, MeshConfig, ModelConfig, OptimConfig, TrainConfig
from jaxtune.train.config.objective import ObjectiveConfig
from jaxtune.train.config.precision import Precision
from jaxtune.train.config.sections import MemoryConfig, require_shared_rows, require_step_size
from jaxtune.train.data.batches import BatchSource
from jaxtune.train.objectives.named import objective_of
from jaxtune.train.objectives.objective import Objective, RunNeeds

_TILE = 64  # keys that attention's kernels multiply at a time


@dataclass(frozen=True)
class ModelSpec:
    """Which model trains."""

    base: ModelConfig
    adapter: AdapterConfig | None
    precision: Precision
    head: Head
    objective: ObjectiveConfig
    """Names the teacher that runs beside."""
    seed: int = 0
    tower: TowerConfig | None = None
    """None: it reads no pictures."""

    @property
    def adapts(self) -> bool:
        return self.adapter is not None

    @property
    def dropout(self) -> bool:
        """Whether the adapter has any."""
        return self.adapter is not None and self.adapter.lora_dropout > 0


@dataclass(frozen=True)
class StepSpec:
    model: ModelSpec
    rows: int
    """Of a step, over all devices."""
    length: int
    """Tokens of a row."""
    patches: int
    """Of pictures, for which a row has room; 0: none."""
    micro_batches: int | None
    """None: free."""
    mesh: MeshConfig | None
    """None: one device."""
    memory: MemoryConfig
    optim: OptimConfig
    max_grad_norm: float | None
    needs: RunNeeds
    answers: bool = False
    """Whether evaluations sample from the model."""
    rounds: bool = False
    """Whether it trains with rounded weights (QAT)."""
    optimizer: optax.GradientTransformation | None = None
    """A user's, in place of `optim`'s; only its states count."""
    held_out_patches: int = 0
    """As `patches`, of held-out rows."""
    keeps_model: bool = False
    """Whether the given model stays in memory beside the copies that train."""
    document_tokens: float | None = None
    """BatchSource.document_tokens; None: unknown, and rows count as documents."""

    @property
    def attended(self) -> float:
        """Tokens of the document in which a token attends, on average, at least a tile of keys."""
        mean = self.length if self.document_tokens is None else self.document_tokens
        return float(min(max(mean, _TILE), self.length))

    @property
    def generates(self) -> bool:
        """Whether the run samples from its model."""
        return self.needs.samples or self.answers

    @property
    def mesh_shape(self) -> partition.MeshShape:
        return partition.mesh_shape(*(self.mesh or MeshConfig()).sizes)

    @property
    def forward(self) -> StepSpec:
        """Of a pass without a backward."""
        patches = max(self.patches, self.held_out_patches)
        return dataclasses.replace(self, optimizer=optax.identity(), keeps_model=False, patches=patches)

    def on(self, mesh: MeshConfig, devices: int) -> StepSpec:
        """On a mesh of `devices`. Raises ConfigError unless they can share the rows of a micro-batch."""
        require_step_size(self.rows, self.length, self.micro_batches)
        require_shared_rows(self.rows, self.micro_batches, mesh, devices)
        return dataclasses.replace(self, mesh=mesh)

    @classmethod
    def of(
        cls,
        config: TrainConfig,
        objective: Objective | None = None,
        batches: BatchSource | None = None,
        optimizer: optax.GradientTransformation | None = None,
        keeps_model: bool = False,
        tower: TowerConfig | None = None,
        held_out_patches: int = 0,
    ) -> StepSpec:
        """objective, batches, optimizer: None: the config's. tower: of a model that reads pictures."""
        objective = objective or objective_of(config.objective)
        return cls(
            model=ModelSpec(
                config.model, config.adapter, config.numbers, objective.head, config.objective, config.seed, tower
            ),
            rows=config.rows_per_step if batches is None else batches.rows_per_step,
            length=config.data.length if batches is None else batches.length,
            patches=(config.data.patches_per_row or 0) * (tower is not None) if batches is None else batches.patches,
            micro_batches=config.micro_batches,
            mesh=config.mesh,
            memory=config.memory,
            optim=config.optim,
            max_grad_norm=config.max_grad_norm,
            needs=RunNeeds.of(objective, batches),
            answers=bool(config.evaluation.asking),
            rounds=config.qat is not None,
            optimizer=optimizer,
            document_tokens=None if batches is None else batches.document_tokens,
            keeps_model=keeps_model,
            held_out_patches=held_out_patches,
        )
