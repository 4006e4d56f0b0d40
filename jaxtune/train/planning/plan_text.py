"""A memory plan in words, beside what was compiled and measured, and the reports of --plan."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from jaxtune.system.terminal import fitted
from jaxtune.train.log.metrics import duration
from jaxtune.train.planning.cost import StepCost
from jaxtune.train.planning.devices import Device
from jaxtune.train.planning.forecasts import Forecast, pass_seconds, tower_forecast
from jaxtune.train.planning.layer_forecasts import product_time
from jaxtune.train.planning.movables.movable import Outcome
from jaxtune.train.planning.plan import StepPlan

_BY_LINK = 0.9  # of its time, from which on a pass is bound by the link


def plan_lines(forecast: Forecast, costs: StepCost, device: Device, budget_bytes: float | None) -> list[str]:
    """A plan in words: what it moves, with its bytes and cost, and the predicted peak and speed.

    costs: the step's costs.
    device: on a CPU, whose rates are unknown, only the first lines.
    budget_bytes: of device memory; None: no limit.
    """
    plan = forecast.plan
    costs, rows = costs.placed(plan.moved), costs.shape.rows // plan.micro_batches
    split = f"{plan.micro_batches} micro-batches of" if plan.micro_batches > 1 else "one micro-batch of"
    text = plan.text + (" (nothing is computed twice)" if plan.text == "keep" else "")
    lines = [f"plan: {text}; {split} {rows} x {costs.shape.length:,} tokens"]
    if costs.tower is not None:
        trained = "trained" if costs.tower.trains else "frozen"
        layers = costs.tower.parts.shape.num_layers
        text = f"  pictures: room for {costs.tower.patches:,} patches a row, in a {trained} "
        text += f"tower of {layers} layers" if layers else "embedder"
        if device.name != "cpu":
            text += f": {plan.micro_batches * tower_forecast(costs, plan.micro_batches, device).seconds:.3f} s a step"
        lines.append(text)
        if costs.tower.both_ways:
            lines.append(
                f"  in {costs.tower.both_ways} layers a picture's tokens see each other: attention by Triton kernels, "
                "in fp32 and on a CPU by plain JAX; forecasts count faster kernels"
            )
    outcome = Outcome(plan.residuals, plan.micro_batches, forecast.recompute_seconds, forecast.wait_seconds)
    for movable in costs.movables.values():
        lines += movable.lines(costs, outcome, device)
    if device.name == "cpu":
        return lines
    if costs.shape.devices > 1:
        seconds, lost = forecast.collective_seconds, forecast.exposed_seconds
        lines.append(f"  between {costs.shape.devices} devices: {seconds:.3f} s a step, of which {lost:.3f} s are lost")
    peak = f"  predicted peak {forecast.peak_bytes / 1e9:.2f} GB"
    peak += "" if budget_bytes is None else f" of {budget_bytes / 1e9:.2f} GB"
    speed = f"{forecast.tokens_per_second:,.0f} tokens/s, {forecast.step_seconds:.3f} s a step"
    lines.append(f"{peak}; {speed} ({device.name}: {device.note})")
    if budget_bytes is not None and forecast.peak_bytes > budget_bytes:
        lines.append(
            "  it is the smallest plan, over what is left when the allocator loses as much as it may: it may fit"
        )
    if costs.layers.has_experts:
        share = f"{product_time(device).experts:.0%}"
        lines.append(f"  experts' products are taken to run at {share} of dense ones' speed, as measured on an H200")
    if device.host_note:
        lines.append(f"  host memory: {device.host_note}; the plan pins {forecast.host_bytes / 1e9:.2f} GB")
    return lines


def finish_line(
    forecast: Forecast, steps: int | None, dollars_per_hour: float | None, devices: int = 1, samples: bool = False
) -> str:
    """The predicted time of a run, and its price, without evaluations and saves.

    steps: that are left; None: unknown, and the time of a million tokens is given.
    dollars_per_hour: of one device; None: no price.
    samples: whether the run samples its rows, whose time is not predicted.
    """
    if steps is None:
        subject, seconds = "a million tokens take", 1e6 / forecast.tokens_per_second
    else:
        subject, seconds = f"{steps:,} steps take", steps * forecast.step_seconds
    price = "" if dollars_per_hour is None else f", for {seconds / 3600 * dollars_per_hour * devices:,.2f} dollars"
    uncounted = "sampling, evaluations and saves" if samples else "evaluations and saves"
    return f"{subject} {duration(seconds)}{price}, {uncounted} not counted"


def pass_lines(plan: StepPlan, costs: StepCost, device: Device, rows: Mapping[str, int]) -> list[str]:
    """The predicted time of passes without a backward, whose weights stream; [] where all are on the device.

    rows: {whose pass: over how many rows}; none over 0.
    """
    costs = costs.placed(plan.moved)
    if device.name == "cpu" or not costs.moved.link_bytes or not any(rows.values()):
        return []
    seconds = pass_seconds(costs, plan, device) / costs.shape.rows
    link = plan.micro_batches * costs.moved.link_bytes * costs.shape.num_layers / (device.link or device.copy)
    by = "the link" if link >= _BY_LINK * seconds * costs.shape.rows else "products"
    passes = (f"{whose} over {count:,} rows {duration(count * seconds)}" for whose, count in rows.items() if count)
    return [
        f"  a pass without a backward makes {costs.shape.length / seconds:,.0f} tokens/s, bound by {by}: "
        f"{', '.join(passes)}"
    ]


def measured_lines(
    forecast: Forecast, device: Device, step_seconds: list[float], peak_bytes: int, in_steps: bool = True
) -> list[str]:
    """The plan's prediction beside the measured peak and the median step; [] on a CPU.

    step_seconds: without the first step's; none where other work, as sampling, is within them. in_steps: whether the
    peak is theirs: choosing products, XLA takes what is free.
    """
    if device.name == "cpu":
        return []
    bound = "" if in_steps else "at most "
    line = f"plan: peak {forecast.peak_bytes / 1e9:.2f} GB predicted, {bound}{peak_bytes / 1e9:.2f} measured"
    if step_seconds:
        measured = forecast.tokens / statistics.median(step_seconds)
        line += f"; {forecast.tokens_per_second:,.0f} tokens/s predicted, {measured:,.0f} measured"
    return [line]


def memory_plan(
    forecast: Forecast, compiled_bytes: float, compile_seconds: float, budget_bytes: float | None, console: Console
) -> dict[str, float]:
    """Prints the memory at the peak by use and the compiler's peak, and returns {"predicted", "compiled",
    "limit": GB}.
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
