"""What a run says about its model: the trainable tensors, and a warning for a CPU."""

from __future__ import annotations

import collections
import re

import jax
from flax import nnx
from rich.table import Table

from jaxtune.models.decoder import Decoder
from jaxtune.models.files.quant import parameter_counts, parameters
from jaxtune.system.invocation import spelled
from jaxtune.train.engine.trained_model import trainable_names

# Parameters of a model that takes minutes for a step on a CPU.
LARGE_FOR_A_CPU = 400_000_000


def cpu_note(model: Decoder) -> str:
    """A warning if a model of 400 million parameters or more is to train on a CPU, else "". Arrays may be abstract."""
    count = parameters(nnx.state(model))
    if jax.default_backend() != "cpu" or count < LARGE_FOR_A_CPU:
        return ""
    return (
        f"warning: no GPU was found, and {count / 1e9:.1f} B parameters on a CPU take minutes for each step: "
        f"'{spelled('doctor')}' says what is missing; --plan plan.device='RTX 4090' plans for a card elsewhere"
    )


def trained_table(model: Decoder) -> Table:
    """The trainable tensors; those of different layers with one name and shape share a line. Arrays may be abstract."""
    trainable = nnx.state(model, nnx.Param)
    groups: dict[tuple, list] = collections.defaultdict(list)
    for name, leaf in zip(trainable_names(trainable), jax.tree.leaves(trainable), strict=True):
        match = re.fullmatch(r"layers\.(\d+)\.(.*)", name)
        layer, tensor_name = (int(match[1]), match[2]) if match else (None, name)
        groups[(tensor_name, tuple(leaf.shape))].append((layer, leaf.size))
    count, total = parameter_counts(model)
    table = Table(
        title=f"Trainable: {count:,} of {total:,} parameters ({100 * count / total:.2f} %)",
        title_justify="left",
        box=None,
    )
    for column in ("tensor", "shape", "layers", "parameters"):
        table.add_column(column, justify="right" if column == "parameters" else "left")
    for (name, shape), members in groups.items():
        layers = [layer for layer, _ in members if layer is not None]
        where = _ranges(layers) if layers else "-"
        table.add_row(name, " x ".join(map(str, shape)), where, f"{sum(size for _, size in members):,}")
    return table


def _ranges(numbers: list[int]) -> str:
    """Indices of layers as "0-3, 5, 7-8"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
