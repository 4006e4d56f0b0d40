"""Texts and tables for the screen: what a run prints before it starts, and the reports of --check and --plan."""

from __future__ import annotations

import collections
import re
import statistics
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.typing import ArrayLike
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from jaxtune.conversations.dates import parsed_day
from jaxtune.models.components import followed
from jaxtune.models.decoder import Decoder
from jaxtune.models.files.quant import not_quantized, parameters, qat_spec
from jaxtune.models.placement.host_table import TITLES
from jaxtune.models.precision import DTYPES
from jaxtune.models.qat.fake_quant import FakeQuant
from jaxtune.models.stack.residual_plan import Placement
from jaxtune.system.invocation import spelled
from jaxtune.system.terminal import fitted, printable
from jaxtune.train.config import ScheduleConfig, TrainConfig
from jaxtune.train.data.batches import BatchSource
from jaxtune.train.data.dataset import TokenDataset
from jaxtune.train.data.rendering.preview import MARKS, preview
from jaxtune.train.display.metrics import duration
from jaxtune.train.planning.cost import StepCost
from jaxtune.train.planning.devices import Device
from jaxtune.train.planning.forecasts import Forecast, codes_seconds, state_seconds
from jaxtune.train.planning.layer_forecasts import product_time
from jaxtune.train.planning.plan import residuals_text
from jaxtune.train.program.loss import AuxLosses
from jaxtune.train.program.tensors import trainable_names


def parameter_counts(model: Decoder) -> tuple[int, int]:
    """(trainable, all) parameters, adapters included; each element of a quantised weight counts as one."""
    return parameters(nnx.state(model, nnx.Param)), parameters(nnx.state(model))


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


def data_summary(
    train: TokenDataset | None,
    held_out: TokenDataset | None,
    batches: BatchSource,
    total_steps: int,
    warmup_steps: int,
    context_length: int,
) -> str:
    """The rows, steps and epochs of a run in words, with warnings below.

    train: None if the rows are not all known before the run.
    context_length: the positions that the model was made for.
    held_out: None: nothing is evaluated. batches: those of training. total_steps, warmup_steps: optimizer steps.
    """
    rows, *steps = batches.described(total_steps)
    lines = [rows]
    if held_out is not None:
        lines.append(f"evaluation rows: {held_out.report}")
    lines += steps
    warnings = [*([] if train is None else train.warnings()), *batches.warnings(), *held_out_warnings(train, held_out)]
    if batches.length > context_length:
        warnings.append(
            f"data.length = {batches.length:,} is more than the {context_length:,} positions that the model was made "
            f"for: rows hold several documents, none of which may be longer than {context_length:,} tokens"
        )
    if warmup_steps > total_steps:
        warnings.append(
            f"schedule.warmup_steps = {warmup_steps:,}, of {total_steps:,} steps in all: the learning rate only rises, "
            "and does not reach optim.learning_rate; lower it, or set schedule.warmup_ratio in its place"
        )
    return "\n".join(printable(line) for line in [*lines, *(f"warning: {line}" for line in warnings)])


def held_out_warnings(train: TokenDataset | None, held_out: TokenDataset | None) -> list[str]:
    """Warnings of `held_out` that `train` does not give too, and how many documents are in both.

    train: None: the rows are not all known before the run.
    """
    if held_out is None:
        return []
    # Rows that data.eval_rows takes out of the training file were counted with it but are not trained on.
    train_warnings, documents = [] if train is None else train.warnings(), held_out.documents
    warnings = [line for line in held_out.warnings() if line not in train_warnings]
    if train is None:
        return [f"evaluation rows: {line}" for line in warnings]
    if documents.tokens is not train.documents.tokens and (shared := documents.also_in(train.documents)):
        warnings.append(
            f"{shared:,} of {len(documents):,} documents are also trained on: their loss says nothing about others"
        )
    return [f"evaluation rows: {line}" for line in warnings]


def today_note(today: str | None) -> list[str]:
    """A line on the day that the chat template writes (data.today); [] for None."""
    if today is None:
        return []
    day = f"{parsed_day(today):%d %b %Y}"
    return [
        f"the chat template writes today's date: {day} in all rows (data.today); the saved template, chat and serve "
        "write the day of asking"
    ]


def check(model: Decoder, summary: str, batches: BatchSource, tokenizer: Any, console: Console) -> None:
    """Prints the report of --check: trainable tensors, the data (`summary`), and one packed row, or a prompt."""
    colours = console.color_system is not None
    mark_words = "green" if colours else f"between {MARKS[0]} and {MARKS[1]}"
    if batches.sees_model:
        title = "A prompt, to which the model samples answers during the run:"
        sample_text = Text(printable(tokenizer.decode(batches.first_prompt())))
    else:
        title = f"One packed row: what is trained is {mark_words}, the rest is only read."
        sample_text = preview(batches.batch_at(0), tokenizer, 0, marks=not colours)
    header: list[RenderableType] = [trained_table(model), Text(), Text(fitted(summary, console))]
    console.print(Group(*header, Text(f"\n{title}\n"), sample_text))


def precision_notes(
    config: TrainConfig,
    storage: Mapping[str, str],
    gradients: str,
    aux_losses: AuxLosses,
    model: Decoder,
    qat: FakeQuant | None,
) -> list[str]:
    """Sentences on the numeric settings of a run, and on the reference of dpo and kto with a loaded adapter.

    storage: {"weights", "optimizer": dtype or format}.
    gradients: how they are summed and sent, in words.
    qat: how linears are rounded; None: not at all.
    """
    rounding = ", matrices rounded stochastically and the rest in fp32" if storage["weights"] == "bf16" else ""
    host = ", in host memory" if config.optim.offload else ""
    notes = [
        f"compute {config.computes_in}; trainable weights {storage['weights']}{rounding}; gradients {gradients}; "
        f"optimizer state {storage['optimizer']}{host}"
    ]
    notes += _module_notes(followed(model, plain=bool(config.components)), config.computes_in)
    if aux_losses:
        notes.append(f"added to the loss: {aux_losses}")
    if qat is not None:
        start = 0 if config.qat is None else config.qat.start
        skipped = not_quantized(model, qat)
        unrounded = f"; not rounded, as groups do not divide their input: {_last_parts(skipped)}" if skipped else ""
        operands = "weights and activations" if qat.rounds_inputs else "weights"
        groups = "" if qat.group_size is None else f", groups of {qat.group_size}"
        clipped = "; numbers outside the range of their scale get no gradient" if qat.clips else ""
        observed = "; activations under scales observed on the rows of the first step" if qat.observes else ""
        notes.append(
            f"QAT: {operands} rounded to {qat.format}{groups}, from step {start}{unrounded}{clipped}{observed}"
        )
    adapter_qat = qat_spec(model)
    if adapter_qat is not None and (qat is None or adapter_qat.grid != qat.grid):
        notes.append(
            f"the adapter was trained with merged weights rounded to {adapter_qat}, and this run "
            f"{'does not round them' if qat is None else 'rounds them in another way'}; the section qat sets how"
        )
    path = config.adapter and config.adapter.path
    if path and config.objective.name in ("dpo", "kto"):
        notes.append(
            f"{config.objective.name}: the reference is the model without its adapter, and not the model with "
            f"adapter.path = {path!r}; to use that as reference, merge it first ({spelled(f'export {path} FOLDER')}), "
            "set model.path=FOLDER, adapter.path=null"
        )
    return notes


def _last_parts(names: list[str]) -> str:
    """ "q_proj (2), down_proj (2)" for dotted names of modules."""
    return ", ".join(
        f"{last_name} ({n})" for last_name, n in collections.Counter(n.rpartition(".")[2] for n in names).items()
    )


def _module_notes(words: Mapping[str, str], computes_in: str) -> list[str]:
    """A sentence on {module: dtype or format}; [] without any."""
    by_word: dict[str, list[str]] = {}
    for name, word in words.items():
        by_word.setdefault(word, []).append(name)
    clauses = [
        f"{'stored and computed' if word in DTYPES else 'stored'} in {word}: {_last_parts(names)}"
        for word, names in by_word.items()
    ]
    end = f"products are summed in fp32, and values between modules are in {computes_in}"
    return [f"precision by module: {'; '.join(clauses)}; {end}"] if clauses else []


# ---- the plan

# Placements in the order in which a plan is printed.
_PLACEMENTS: dict[Placement, str] = {
    "keep": "kept",
    "fp8": "kept in FP8",
    "offload": "on the host",
    "recompute": "computed again",
}


def plan_lines(forecast: Forecast, parts: StepCost, device: Device, budget_bytes: float | None) -> list[str]:
    """A plan in words: each residual's placement with its bytes on a device in a micro-batch and its cost, the
    predicted peak and speed, and what else the plan does.

      parts: the step's costs.
      device: on a CPU, whose rates are unknown, only the first lines.
      budget_bytes: of device memory; None: no limit.
    """
    plan = forecast.plan
    parts, rows = parts.placed(plan), parts.rows // plan.micro_batches
    split = f"{plan.micro_batches} micro-batches of" if plan.micro_batches > 1 else "one micro-batch of"
    residual_words = residuals_text(plan.residuals)
    residual_words += " (nothing is computed twice)" if residual_words == "keep" else ""
    lines = [f"plan: {residual_words}; {split} {rows} x {parts.length:,} tokens", *_table_lines(parts)]
    if device.name == "cpu":
        return lines
    tokens = parts.rows / plan.micro_batches / parts.devices * parts.length
    for placement, words in _PLACEMENTS.items():
        placed_names = (name for layer in plan.residuals.layers for name in layer.named(placement, parts.all_residuals))
        counts = collections.Counter(name for name in placed_names if parts.residuals[name])
        if not counts:
            continue
        size = sum(parts.residual_bytes(name, tokens) * count for name, count in counts.items())
        cost = {
            "keep": "",
            "fp8": " before",
            "offload": f", {forecast.wait_seconds:.2f} s a step of waiting for the link",
            "recompute": f", {forecast.recompute_seconds:.2f} s a step",
        }[placement]
        names = ", ".join(
            name if count == parts.num_layers else f"{name} ({count} layers)" for name, count in counts.items()
        )
        lines.append(f"  {words} ({size / 1e9:.2f} GB{cost}): {names}")
    if parts.hosted_bytes:
        seconds = state_seconds(parts, device)
        lines.append(f"  optimizer states on the host: {parts.hosted_bytes / 1e9:.2f} GB, {seconds:.2f} s a step")
    if parts.transposed_codes:
        words = (
            f"{parts.codes_bytes / 1e9:.2f} GB, {plan.micro_batches * codes_seconds(parts, device):.3f} s a step less"
        )
        lines.append(f"  codes of FP8 weights are kept transposed, too ({words})")
    if parts.devices > 1:
        seconds, exposed_seconds = forecast.collective_seconds, forecast.exposed_seconds
        lines.append(
            f"  between {parts.devices} devices: {seconds:.3f} s a step, of which {exposed_seconds:.3f} s are lost"
        )
    peak = f"  predicted peak {forecast.peak_bytes / 1e9:.2f} GB"
    peak += "" if budget_bytes is None else f" of {budget_bytes / 1e9:.2f} GB"
    speed = f"{forecast.tokens_per_second:,.0f} tokens/s, {forecast.step_seconds:.3f} s a step"
    lines.append(f"{peak}; {speed} ({device.name}: {device.note})")
    if budget_bytes is not None and forecast.peak_bytes > budget_bytes:
        lines.append(
            "  it is the smallest plan, over what is left when the allocator loses as much as it may: it may fit"
        )
    if parts.has_experts:
        fit = product_time(device)
        lines.append(
            f"  experts are taken to run at {fit.experts_forward:.0%} (forward) and {fit.experts_backward:.0%} "
            "(backward) of the speed of dense products, as measured on an H200"
        )
    if device.host_note:
        lines.append(f"  host memory: {device.host_note}; the plan pins {forecast.host_bytes / 1e9:.2f} GB")
    return lines


def _table_lines(cost: StepCost) -> list[str]:
    """A line on the embedding tables that the plan has on the host, or on one that trains and therefore stays."""
    if cost.table_on_host:
        rows, names = cost.rows * cost.length * cost.table.row_bytes, cost.table.names
        return [
            f"  {' and '.join(TITLES[name] for name in names)} on the host ({cost.table.bytes / 1e9:.2f} GB); "
            f"{'its' if len(names) == 1 else 'their'} rows of each batch are copied to the device beside its work "
            f"({rows / 1e9:.2f} GB a step)"
        ]
    return ["  table of per-layer embeddings on the device: it is trained"] if cost.table.trains else []


def finish_line(forecast: Forecast, steps: int | None, dollars_per_hour: float | None, devices: int = 1) -> str:
    """The predicted time of a run, and its price, without evaluations and saves.

    steps: that are left; None: unknown, and the time of a million tokens is given.
    dollars_per_hour: of one device; None: no price.
    devices: that share the step; the price is of all.
    """
    if steps is None:
        subject, seconds = "a million tokens take", 1e6 / forecast.tokens_per_second
    else:
        subject, seconds = f"{steps:,} steps take", steps * forecast.step_seconds
    price = "" if dollars_per_hour is None else f", for {seconds / 3600 * dollars_per_hour * devices:,.2f} dollars"
    return f"{subject} {duration(seconds)}{price}, evaluations and saves not counted"


def measured_lines(forecast: Forecast, device: Device, step_seconds: list[float], peak_bytes: int) -> list[str]:
    """The plan's prediction beside the measured peak and the median step; [] on a CPU.

    step_seconds: at least one, without the first step's.
    peak_bytes: on one device, measured by its allocator.
    """
    if device.name == "cpu":
        return []
    seconds = statistics.median(step_seconds)
    predicted, measured = forecast.peak_bytes / 1e9, peak_bytes / 1e9
    return [
        f"plan: peak {predicted:.2f} GB predicted, {measured:.2f} measured; {forecast.tokens_per_second:,.0f} tokens/s "
        f"predicted, {forecast.tokens / seconds:,.0f} measured"
    ]


def memory_plan(
    forecast: Forecast, compiled_bytes: float, compile_seconds: float, budget_bytes: float | None, console: Console
) -> dict[str, float]:
    """Prints the memory at the peak by use and the compiler's peak, and returns {"predicted", "compiled",
    "limit": GB}.

      compiled_bytes: the peak that the compiler reports. compile_seconds: of the step's programs. budget_bytes: of
      device memory; None: no limit.
    """
    figures = {"predicted": forecast.peak_bytes / 1e9, "compiled": compiled_bytes / 1e9}
    console.print(_parts_table(forecast))
    console.print(f"the compiler says {figures['compiled']:.3f} GB (compiled in {compile_seconds:.1f} s)")
    if budget_bytes is not None:
        figures["limit"] = budget_bytes / 1e9
        console.print(f"there are {figures['limit']:.1f} GB: the step fits")
    return figures


def _parts_table(forecast: Forecast) -> Table:
    """The predicted memory at the peak by use, in GB, the largest first."""
    table = Table(title="Memory at the peak, on each device", title_justify="left", box=None)
    table.add_column("part")
    table.add_column("GB", justify="right")
    for name, value in sorted(forecast.parts.items(), key=lambda use: -use[1]):
        table.add_row(name, f"{value / 1e9:.3f}")
    table.add_row("predicted peak", f"{forecast.peak_bytes / 1e9:.3f}")
    return table


def plan_elsewhere(
    forecast: Forecast,
    cost: StepCost,
    device: Device,
    budget_bytes: float,
    longest: int,
    positions: int,
    console: Console,
) -> None:
    """Prints the report of a --plan from shapes alone: the plan, the memory by use, and the longest row that fits
    (`longest` tokens; 0: not even 1,024), beside the model's positions.

      device: the planned one, which need not be here. budget_bytes: of its memory.
    """
    lines = plan_lines(forecast, cost, device, budget_bytes)
    if device.usual_host_bytes is not None and forecast.host_bytes > device.usual_host_bytes:
        lines.append(
            f"warning: the plan pins {forecast.host_bytes / 1e9:.1f} GB of host memory; machines with this device "
            f"usually let {device.usual_host_bytes / 1e9:.1f} GB be pinned"
        )
    row = f"longest single row that fits: {longest:,} tokens" if longest else "no single row of 1,024 tokens fits"
    if longest > positions:
        row += f"; no document of it may be longer than the model's {positions:,} positions (model.rope_scaling)"
    summary = Text(fitted("\n".join(lines), console))
    console.print(Group(summary, Text(), _parts_table(forecast), Text(fitted(row, console))))


def new_rates(
    schedule_config: ScheduleConfig, schedule: optax.Schedule | None, step: int, skipped: ArrayLike, total_steps: int
) -> list[str]:
    """A sentence on the learning rate of a run that is resumed with more steps; [] if these do not change it.

    schedule: maps updates made to the rate; None if unknown.
    skipped: steps without an update.
    schedule_config, total_steps: of the resumed run, not the earlier one. step: steps done.
    """
    if schedule is None or (schedule_config.name == "constant" and schedule_config.warmup_ratio is None):
        return []
    rate = float(np.asarray(schedule(step - np.asarray(skipped))))
    return [
        f"the run is longer than it was: from here the learning rate follows the {schedule_config.name} schedule of "
        f"{total_steps:,} steps, and is {rate:.3g} in step {step + 1:,}"
    ]
