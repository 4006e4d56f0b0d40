"""What a run shows before it starts: the trained matrices, the data, the memory of the step."""

from __future__ import annotations

import collections
import re
from typing import Any

import jax
from flax import nnx
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from jaxtune.models.decoder import Decoder
from jaxtune.models.quant import parameters
from jaxtune.train.data.preview import preview
from jaxtune.train.step import trainable_names


def parameter_counts(model: Decoder) -> tuple[int, int]:
    """(trainable, all) parameters; adapters count in both, one in four bits as one."""
    return parameters(nnx.state(model, nnx.Param)), parameters(nnx.state(model))


def trained_table(model: Decoder) -> Table:
    """Which tensors train, the same one of every layer in one line."""
    trainable = nnx.state(model, nnx.Param)
    groups: dict[tuple, list] = collections.defaultdict(list)
    for name, leaf in zip(trainable_names(trainable), jax.tree.leaves(trainable), strict=True):
        match = re.fullmatch(r"layers\.(\d+)\.(.*)", name)
        place, rest = (int(match[1]), match[2]) if match else (None, name)
        groups[(rest, tuple(leaf.shape))].append((place, leaf.size))
    count, total = parameter_counts(model)
    table = Table(
        title=f"Trained: {count:,} of {total:,} parameters ({100 * count / total:.2f} %)",
        title_justify="left",
        box=None,
    )
    for column in ("tensor", "shape", "layers", "parameters"):
        table.add_column(column, justify="right" if column == "parameters" else "left")
    for (name, shape), members in groups.items():
        places = [place for place, _ in members if place is not None]
        where = _ranges(places) if places else "-"
        table.add_row(name, " x ".join(map(str, shape)), where, f"{sum(size for _, size in members):,}")
    return table


def _ranges(numbers: list[int]) -> str:
    """0-3, 5, 7-8"""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def data_summary(trainer: Any) -> Text:
    """What became of the rows."""
    lines = [f"training rows: {trainer.train_data.report}"]
    if trainer.eval_data is not None:
        lines.append(f"evaluation rows: {trainer.eval_data.report}")
    for data in (trainer.train_data, trainer.eval_data):
        if data is not None and data.summary.bad_rows:
            shown = "; ".join(data.summary.offenders[:3])
            lines.append(f"left out (data.on_bad_row: skip): {data.summary.bad_rows:,} rows, first {shown}")
    per_epoch = trainer.batches.steps_per_epoch
    lines.append(f"{trainer.total_steps:,} steps; {per_epoch:,} in an epoch of {len(trainer.train_data.rows):,} rows")
    return Text("\n".join(lines))


def check(trainer: Any, model: Decoder, console: Console) -> None:
    """The report of --check: what would be trained, and one packed row with its loss mask."""
    batch = trainer.batches.batch_at(0)
    parts: list[RenderableType] = [
        trained_table(model),
        Text(),
        data_summary(trainer),
        Text("\nOne packed row: trained tokens stand out, the rest is dim.\n"),
        preview(batch, trainer.tokenizer, 0),
    ]
    console.print(Group(*parts))


def memory_plan(trainer: Any, console: Console) -> dict[str, float]:
    """The report of --plan: what the compiler says the step needs on this device, in GB.

    Returns the figures: weights (frozen), state (trainable and optimizer), sums (gradients), work (temporaries of
    forward and backward), total, and limit where the device states one.
    """
    state, sums, frozen = trainer.first_state()

    def size(tree):
        return sum(x.nbytes for x in jax.tree.leaves(tree)) / 1e9

    figures = {"weights": size(frozen), "state": size(state), "sums": size(sums)}
    programs = trainer.compile(state, sums, frozen)
    figures["work"] = programs.accumulate.memory_analysis().temp_size_in_bytes / 1e9
    figures["total"] = sum(figures.values())
    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    table = Table(title="Memory of the train step, on each device", title_justify="left", box=None)
    table.add_column("part")
    table.add_column("GB", justify="right")
    for name, value in figures.items():
        table.add_row(name, f"{value:.3f}")
    console.print(table)
    residuals = trainer.config.memory.residuals
    micro = trainer.config.micro_batches
    console.print(f"residuals: {residuals}; micro_batches: {micro}; compiled in {programs.seconds:.1f} s")
    if limit is not None:
        figures["limit"] = limit / 1e9
        fits = figures["total"] <= figures["limit"]
        console.print(f"this device has {figures['limit']:.1f} GB: the step " + ("fits" if fits else "does not fit"))
        if not fits:
            console.print(
                "what helps: memory.residuals=recompute, more micro_batches, a smaller data.length or rows_per_step"
            )
    return figures
