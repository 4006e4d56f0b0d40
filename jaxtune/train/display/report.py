"""Texts and tables for the screen. A run prints before it starts: its trainable tensors (`trained_table`), its data
(`data_summary`), its numeric settings (`precision_notes`), its plan (`plan_lines`), the time and price that it will
take (`finish_line`), if it was resumed with more steps the learning rate from there on (`new_rates`), and on a CPU a
warning (`cpu_note`). `measured_lines` compares the plan with what the first steps took. `parameter_counts` counts a
model's parameters, for jaxtune.compat too. `held_out_warnings` is also for `jaxtune evaluate`. `check` is the report of
--check; `memory_plan` and `plan_elsewhere` are those of --plan: with the step compiled, and from shapes alone."""

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
from jaxtune.models.fake_quant import FakeQuant
from jaxtune.models.files.quant import not_quantized, parameters, qat_spec
from jaxtune.models.placement.host_table import TITLES
from jaxtune.models.precision import DTYPES
from jaxtune.models.residual_plan import Placement
from jaxtune.system.invocation import spelled
from jaxtune.system.terminal import fitted, printable
from jaxtune.train.config import ScheduleConfig, TrainConfig
from jaxtune.train.data.batches import BatchSource
from jaxtune.train.data.dataset import TokenDataset
from jaxtune.train.data.preview import MARKS, preview
from jaxtune.train.display.metrics import duration
from jaxtune.train.planning.cost import StepCost
from jaxtune.train.planning.devices import Device
from jaxtune.train.planning.forecasts import Forecast, codes_seconds, state_seconds
from jaxtune.train.planning.layer_forecasts import product_time
from jaxtune.train.planning.plan import residuals_text
from jaxtune.train.program.loss import AuxLosses
from jaxtune.train.program.tensors import trainable_names


def parameter_counts(model: Decoder) -> tuple[int, int]:
    """(trainable, all): the two numbers of parameters of `model`, for the title of `trained_table`, and for methods of
    jaxtune.compat such as num_parameters. jaxtune itself only shows them. Both include adapters, and the second counts
    each element of a quantised weight as one, however it is packed."""
    return parameters(nnx.state(model, nnx.Param)), parameters(nnx.state(model))


# Parameters of a model that takes minutes for a step on a CPU.
LARGE_FOR_A_CPU = 400_000_000


def cpu_note(model: Decoder) -> str:
    """A warning that a large model is about to be trained on a CPU, with what to do, which the train command prints
    before a run (not with --check or --plan); "" if JAX has an accelerator, or the model has fewer than 400 million
    parameters. The model's arrays may be abstract (jax.ShapeDtypeStruct)."""
    count = parameters(nnx.state(model))
    if jax.default_backend() != "cpu" or count < LARGE_FOR_A_CPU:
        return ""
    return (
        f"warning: no GPU was found, and {count / 1e9:.1f} B parameters on a CPU take minutes for each step: "
        f"'{spelled('doctor')}' says what is missing; --plan plan.device='RTX 4090' plans for a card elsewhere"
    )


def trained_table(model: Decoder) -> Table:
    """A rich Table of a model's trainable tensors, which the train command prints before a run and with --check: name,
    shape, layers and number of parameters, with the numbers of trainable and of all parameters in the title. Tensors of
    different layers with the same name and shape share a line. The model's arrays may be abstract
    (jax.ShapeDtypeStruct)."""
    trainable = nnx.state(model, nnx.Param)
    groups: dict[tuple, list] = collections.defaultdict(list)
    for name, leaf in zip(trainable_names(trainable), jax.tree.leaves(trainable), strict=True):
        match = re.fullmatch(r"layers\.(\d+)\.(.*)", name)
        place, rest = (int(match[1]), match[2]) if match else (None, name)
        groups[(rest, tuple(leaf.shape))].append((place, leaf.size))
    count, total = parameter_counts(model)
    table = Table(
        title=f"Trainable: {count:,} of {total:,} parameters ({100 * count / total:.2f} %)",
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
    """The indices `numbers` of layers as text, in ascending order, with consecutive ones as a range: "0-3, 5, 7-8".
    `trained_table` shows by it in which layers a tensor is trained."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def data_summary(
    train: TokenDataset | None,
    held_out: TokenDataset | None,
    batches: BatchSource,
    total_steps: int,
    warmup_steps: int,
    context_length: int,
) -> str:
    """The rows, steps and epochs of a run in words, a line each, and below them warnings about them ("warning: ...").
    The train command prints it before a run and with --check, and jaxtune.compat's trainers print it too.

    Args:
      train: the tokenised rows to train on; None if they are not all known before the run.
      held_out: the tokenised rows of evaluations; None: there are none.
      batches: the source of the steps' batches.
      total_steps: the number of steps of the run.
      warmup_steps: the config's schedule.warmup_steps; a warning says if they are more than all steps.
      context_length: the number of positions that the model was made for; a warning says if rows are longer.
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
    """Warnings about the rows of an evaluation, a sentence each: the warnings of `held_out` that `train` does not give
    too, and how many documents of `held_out` are also trained on, if there are any (not counted if `train` is None, or
    both were split from one set). `data_summary` contains them, and `jaxtune evaluate` prints them alone.

    Args:
      train: the rows that are trained on; None if they are not all known before the run.
      held_out: the rows of the evaluation; None: there is none, and no warning.
    """
    if held_out is None:
        return []
    # Rows that data.eval_rows takes out of the training file were counted with it but are not trained on.
    known, documents = [] if train is None else train.warnings(), held_out.documents
    found = [line for line in held_out.warnings() if line not in known]
    if train is None:
        return [f"evaluation rows: {line}" for line in found]
    if documents.tokens is not train.documents.tokens and (same := documents.also_in(train.documents)):
        found.append(
            f"{same:,} of {len(documents):,} documents are also trained on: their loss says nothing about others"
        )
    return [f"evaluation rows: {line}" for line in found]


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
    """Prints the report of --check, which shows what a run would train on without training. The train command calls it.

    Args:
      model: the model, whose trainable tensors are listed; its arrays may be abstract (jax.ShapeDtypeStruct).
      summary: the data in words, as data_summary returned it.
      batches: the source of the batches; the first packed row of the first batch is shown with its loss mask, or if
        rows are made of answers that the model samples, the first prompt.
      tokenizer: decodes that row or prompt.
      console: where the report is printed.
    """
    colours = console.color_system is not None
    how = "green" if colours else f"between {MARKS[0]} and {MARKS[1]}"
    if batches.sees_model:
        title = "A prompt, to which the model samples answers during the run:"
        shown = Text(printable(tokenizer.decode(batches.first_prompt())))
    else:
        title = f"One packed row: what is trained is {how}, the rest is only read."
        shown = preview(batches.batch_at(0), tokenizer, 0, marks=not colours)
    parts: list[RenderableType] = [trained_table(model), Text(), Text(fitted(summary, console))]
    console.print(Group(*parts, Text(f"\n{title}\n"), shown))


def precision_notes(
    config: TrainConfig,
    storage: Mapping[str, str],
    gradients: str,
    aux_losses: AuxLosses,
    model: Decoder,
    qat: FakeQuant | None,
) -> list[str]:
    """Sentences on the numeric settings of a run, which it prints before its first step (--check and --plan do not):
    the dtypes of computation, weights, gradients and optimizer state; and, where they apply, modules with a precision
    of their own, losses that the layers add, the rounding of quantisation-aware training (QAT), that it differs from
    the one of an adapter's earlier training, and, for dpo and kto with a loaded adapter, which model is the reference.

    Args:
      config: the run's.
      storage: {"weights", "optimizer": the dtype or format in which they are stored}, in words.
      gradients: the dtype in which gradients are summed over micro-batches, and how devices send them, in words.
      aux_losses: losses of the layers themselves, such as a router's, that are added to the objective's loss.
      model: the model as it was given, whose modules are named; if it has an adapter that QAT trained, its format is
        compared with `qat`.
      qat: how QAT rounds the model's linears; None: not at all.
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
        left = f"; not rounded, as groups do not divide their input: {_last_parts(skipped)}" if skipped else ""
        what = "weights and activations" if qat.rounds_inputs else "weights"
        groups = "" if qat.group_size is None else f", groups of {qat.group_size}"
        clipped = "; numbers outside the range of their scale get no gradient" if qat.clips else ""
        observed = "; activations under scales observed on the rows of the first step" if qat.observes else ""
        notes.append(f"QAT: {what} rounded to {qat.format}{groups}, from step {start}{left}{clipped}{observed}")
    before = qat_spec(model)
    if before is not None and (qat is None or before.grid != qat.grid):
        notes.append(
            f"the adapter was trained with merged weights rounded to {before}, and this run "
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
    """How many of `names`, dotted names of modules, have each last part, in words for a note: "q_proj (2), down_proj
    (2)"; "" without names. `precision_notes` names by it the modules with a precision of their own, and those that QAT
    leaves out."""
    return ", ".join(f"{part} ({n})" for part, n in collections.Counter(n.rpartition(".")[2] for n in names).items())


def _module_notes(words: Mapping[str, str], computes_in: str) -> list[str]:
    """[a sentence on the modules that have a precision of their own], or [] if there are none, for `precision_notes`.
    words: {module's name: dtype, such as "fp32", or format, such as "nf4"} of these modules. computes_in: the word of
    the dtype in which the other modules compute."""
    by_word: dict[str, list[str]] = {}
    for name, word in words.items():
        by_word.setdefault(word, []).append(name)
    said = [
        f"{'stored and computed' if word in DTYPES else 'stored'} in {word}: {_last_parts(names)}"
        for word, names in by_word.items()
    ]
    end = f"products are summed in fp32, and values between modules are in {computes_in}"
    return [f"precision by module: {'; '.join(said)}; {end}"] if said else []


# ---- the plan

# Placements in the order in which a plan is printed.
_PLACEMENTS: dict[Placement, str] = {
    "keep": "kept",
    "fp8": "kept in FP8",
    "offload": "on the host",
    "recompute": "computed again",
}


def plan_lines(forecast: Forecast, parts: StepCost, device: Device, budget_bytes: float | None) -> list[str]:
    """A plan in words, a line each, which Planner.lines and --plan show: the placement of each residual, with its bytes
    on a device in a micro-batch and what it costs, the predicted peak and speed; and, where they apply, the tables of
    embeddings and optimizer states on the host, transposed codes, what is sent between devices, that the plan may not
    fit, the speed of experts, and (Device.host_note) the host's memory, if a container or job is limited to a part of
    it or the device is of another machine.

    Args:
      forecast: the plan, with the memory and the times that are predicted for it.
      parts: the sizes of the step's work and memory (rows, length, residuals) from which the forecast was made.
      device: the device; for a CPU only the first line and that of the tables are given, because its rates are unknown.
      budget_bytes: the bytes of device memory that a step may take; None: no limit.
    """
    plan = forecast.plan
    parts, rows = parts.placed(plan), parts.rows // plan.micro_batches
    split = f"{plan.micro_batches} micro-batches of" if plan.micro_batches > 1 else "one micro-batch of"
    what = residuals_text(plan.residuals)
    what += " (nothing is computed twice)" if what == "keep" else ""
    lines = [f"plan: {what}; {split} {rows} x {parts.length:,} tokens", *_table_lines(parts)]
    if device.name == "cpu":
        return lines
    tokens = parts.rows / plan.micro_batches / parts.devices * parts.length
    for placement, words in _PLACEMENTS.items():
        named = (name for layer in plan.residuals.layers for name in layer.named(placement, parts.known))
        counts = collections.Counter(name for name in named if parts.residuals[name])
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
        seconds, lost = forecast.collective_seconds, forecast.exposed_seconds
        lines.append(f"  between {parts.devices} devices: {seconds:.3f} s a step, of which {lost:.3f} s are lost")
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


def _table_lines(parts: StepCost) -> list[str]:
    """A line on the tables of embeddings if the plan has them on the host, or on that of per-layer embeddings if it
    trains and therefore stays on the device; [] otherwise. `plan_lines` contains it. parts: the step's costs under the
    plan."""
    if parts.table_on_host:
        rows, names = parts.rows * parts.length * parts.table.row_bytes, parts.table.names
        return [
            f"  {' and '.join(TITLES[name] for name in names)} on the host ({parts.table.bytes / 1e9:.2f} GB); "
            f"{'its' if len(names) == 1 else 'their'} rows of each batch are copied to the device beside its work "
            f"({rows / 1e9:.2f} GB a step)"
        ]
    return ["  table of per-layer embeddings on the device: it is trained"] if parts.table.trains else []


def finish_line(forecast: Forecast, steps: int | None, dollars_per_hour: float | None, devices: int = 1) -> str:
    """One line with the predicted time of a run under its plan, and its price if that of a device is given, without
    evaluations and saves. A run prints it before its first step, and --plan with the plan, unless the device is a CPU.
    If the number of steps is not known, they are those of a million tokens.

    Args:
      forecast: what is predicted for the plan.
      steps: the number of steps that the run makes, of a resumed one those that are left; None: unknown.
      dollars_per_hour: the price of one device; None: no price is given.
      devices: the number of devices that the run uses.
    """
    if steps is None:
        what, seconds = "a million tokens take", 1e6 / forecast.tokens_per_second
    else:
        what, seconds = f"{steps:,} steps take", steps * forecast.step_seconds
    price = "" if dollars_per_hour is None else f", for {seconds / 3600 * dollars_per_hour * devices:,.2f} dollars"
    return f"{what} {duration(seconds)}{price}, evaluations and saves not counted"


def measured_lines(forecast: Forecast, device: Device, step_seconds: list[float], peak_bytes: int) -> list[str]:
    """[a line with the plan's predicted peak memory and speed beside the measured ones], which the Monitor prints after
    the third step; [] on a CPU, whose rates are unknown. The measured speed is that of the median step. The plan is not
    changed by it.

    Args:
      forecast: what was predicted for the plan of the step.
      device: the device.
      step_seconds: the duration in seconds of each step after the first one; at least one.
      peak_bytes: the measured peak of device memory, in bytes.
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
    """Prints on `console` the report of --plan for a step that was compiled for this machine's device and fits it: the
    predicted memory at the peak by what uses it, and the peak that the compiler reports. The caller (show_memory) has
    printed the plan in words above, and has found a plan that fits; here that is not checked.

    Args:
      forecast: the prediction for the plan.
      compiled_bytes: the step's peak memory in bytes, as the compiler reports it.
      compile_seconds: how long compiling the step took.
      budget_bytes: the bytes of device memory that a step may take; None: no limit.
      console: where it is printed.
    Returns:
      {"predicted", "compiled", "limit" if there is a budget: GB}, for callers in Python; the command does not use it.
    """
    figures = {"predicted": forecast.peak_bytes / 1e9, "compiled": compiled_bytes / 1e9}
    console.print(_parts_table(forecast))
    console.print(f"the compiler says {figures['compiled']:.3f} GB (compiled in {compile_seconds:.1f} s)")
    if budget_bytes is not None:
        figures["limit"] = budget_bytes / 1e9
        console.print(f"there are {figures['limit']:.1f} GB: the step fits")
    return figures


def _parts_table(forecast: Forecast) -> Table:
    """A rich Table of the device memory that `forecast` predicts for the peak of the step: a line for each use of the
    memory (such as weights), in GB, the largest first, and their sum, the predicted peak, in the last line. Both
    reports of --plan show it."""
    table = Table(title="Memory at the peak, on each device", title_justify="left", box=None)
    table.add_column("part")
    table.add_column("GB", justify="right")
    for name, value in sorted(forecast.parts.items(), key=lambda part: -part[1]):
        table.add_row(name, f"{value / 1e9:.3f}")
    table.add_row("predicted peak", f"{forecast.peak_bytes / 1e9:.3f}")
    return table


def plan_elsewhere(
    forecast: Forecast,
    parts: StepCost,
    device: Device,
    budget_bytes: float,
    longest: int,
    positions: int,
    console: Console,
) -> None:
    """Prints the report of a --plan that is computed from shapes alone: the plan in words, the memory at the step's
    peak by what uses it, and the longest row that fits (`longest` tokens; 0: not even 1,024), beside the model's
    positions. It warns of more pinned host memory than machines with the device usually let be pinned."""
    lines = plan_lines(forecast, parts, device, budget_bytes)
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
    wanted: ScheduleConfig, schedule: optax.Schedule | None, step: int, skipped: ArrayLike, total_steps: int
) -> list[str]:
    """[a sentence about the learning rate of a run that is resumed with more steps than before: its schedule from here,
    and the rate in the next step]; [] if the rate does not depend on the number of steps, or is not known. A run prints
    it when it resumes. The caller finds out whether the run is longer.

    Args:
      wanted: config.schedule.
      schedule: maps the number of updates made to the learning rate; None if it is not known.
      step: the number of steps done.
      skipped: the number of them whose updates were skipped, because numbers were not finite.
      total_steps: the number of steps of the longer run.
    """
    if schedule is None or (wanted.name == "constant" and wanted.warmup_ratio is None):
        return []
    rate = float(np.asarray(schedule(step - np.asarray(skipped))))
    return [
        f"the run is longer than it was: from here the learning rate follows the {wanted.name} schedule of "
        f"{total_steps:,} steps, and is {rate:.3g} in step {step + 1:,}"
    ]
