"""What a run writes to disks: checkpoints, exports, and values of other models."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
from flax import nnx

from jaxtune.models.decoder import Decoder
from jaxtune.models.files.file_plan import BESIDE_BYTES
from jaxtune.models.files.quant import parameters
from jaxtune.models.lora import has_adapter
from jaxtune.system.disk import free_bytes, nearest
from jaxtune.train.config import CheckpointConfig, ExportConfig
from jaxtune.train.folder.run_folder import ADAPTER, CHECKPOINTS, MERGED

_SHARE_THAT_MATTERS = 0.25  # of the free bytes, from which on they are said


@dataclasses.dataclass(frozen=True)
class Written:
    what: str
    folder: Path
    bytes: float
    count: int = 1

    def __str__(self) -> str:
        size_text = f"{self.bytes / 1e9:.2f} GB"
        return f"{self.what} {size_text}" if self.count == 1 else f"{self.what} {self.count} x {size_text}"


def written_by(
    output: Path,
    checkpoint: CheckpointConfig,
    export: ExportConfig,
    model: Decoder,
    trained_bytes: float,
    checkpoint_bytes: float,
    saved_checkpoints: int,
    steps: int | None = None,
) -> list[Written]:
    """What a run writes to its output folder at most at one time.

    saved_checkpoints: number of checkpoints that it has already.
    steps: of the run; None: any number.
    trained_bytes: of the trained tensors. checkpoint_bytes: of one checkpoint, optimizer states included.
    """
    files, adapted = [], has_adapter(model)
    if checkpoint.saves or checkpoint.best:
        # A new one is whole before an old one is removed, and the best one is kept beside the newest.
        most = checkpoint.keep + 1 + (checkpoint.best is not None)
        if steps is not None and checkpoint.every_steps and not checkpoint.every_minutes:
            most = min(most, saved_checkpoints + math.ceil(steps / checkpoint.every_steps))
        files.append(Written("checkpoints", output / CHECKPOINTS, checkpoint_bytes, max(most - saved_checkpoints, 1)))
    if export.adapter and adapted:
        files.append(Written("adapter", output / ADAPTER, trained_bytes))
    if export.merged:
        size = parameters(nnx.state(model)) * jnp.dtype(model.dtype).itemsize
        files.append(Written("merged model", output / MERGED, float(size + BESIDE_BYTES)))
    return files


def disk_lines(files: Sequence[Written]) -> list[str]:
    """A line for each disk where files take over a quarter of the free room, a warning if they take more than all."""
    disks: dict[int, list[Written]] = {}
    for file in files:
        disks.setdefault(os.stat(nearest(file.folder)).st_dev, []).append(file)
    lines = []
    for several in disks.values():
        need, free = sum(file.bytes * file.count for file in several), free_bytes(several[0].folder)
        about = f"{', '.join(map(str, several))}; {free / 1e9:.2f} GB are free"
        if need > free:
            lines.append(
                f"warning: the disk of {several[0].folder.parent} will need {need / 1e9:.2f} GB: {about}. Free some "
                "space, name another output or data.cache_dir, or set checkpoint.keep=1 or export.merged=false"
            )
        elif need > _SHARE_THAT_MATTERS * free:
            lines.append(f"  on the disk of {several[0].folder.parent}: {about}")
    return lines
