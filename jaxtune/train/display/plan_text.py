"""A memory plan in words, beside what was compiled and measured, and the reports of --plan."""

from __future__ import annotations

import collections
import statistics

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from jaxtune.models.placement.host_table import TITLES
from jaxtune.models.stack.residual_plan import Placement
from jaxtune.system.terminal import fitted
from jaxtune.train.display.metrics import duration
from jaxtune.train.planning.cost import StepCost
from jaxtune.train.planning.devices import Device
from jaxtune.train.planning.forecasts import Forecast, codes_seconds, state_seconds
from jaxtune.train.planning.layer_forecasts import product_time
from jaxtune.train.planning.plan import residuals_text

# Placements in the order in which a plan is printed.
_PLACEMENTS: dict[Placement, str] = {
    "keep": "kept",
    "fp8": "kept in FP8",
    "offload": "on the host",
    "recompute": "computed again",
}


def plan_lines(forecast: Forecast, costs: StepCost, device: Device, budget_bytes: float | None) -> list[str]:
    """A plan in words: each residual's placement with its bytes on a device in a micro-batch and its cost, the
    predicted peak and speed, and what else the plan does.

      costs: the step's costs.
      device: on a CPU, whose rates are unknown, only the first lines.
      budget_bytes: of device memory; None: no limit.
    """
    plan = forecast.plan
    costs, rows = costs.placed(plan), costs.rows // plan.micro_batches
    split = f"{plan.micro_batches} micro-batches of" if plan.micro_batches > 1 else "one micro-batch of"
    residual_words = residuals_text(plan.residuals)
    residual_words += " (nothing is computed twice)" if residual_words == "keep" else ""
    lines = [f"plan: {residual_words}; {split} {rows} x {costs.length:,} tokens", *_table_lines(costs)]
    if device.name == "cpu":
        return lines
    tokens = costs.rows / plan.micro_batches / costs.devices * costs.length
    for placement, words in _PLACEMENTS.items():
        placed_names = (name for layer in plan.residuals.layers for name in layer.named(placement, costs.all_residuals))
        counts = collections.Counter(name for name in placed_names if costs.residuals[name])
        if not counts:
            continue
        size = sum(costs.residual_bytes(name, tokens) * count for name, count in counts.items())
        cost = {
            "keep": "",
            "fp8": " before",
            "offload": f", {forecast.wait_seconds:.2f} s a step of waiting for the link",
            "recompute": f", {forecast.recompute_seconds:.2f} s a step",
        }[placement]
        names = ", ".join(
            name if count == costs.num_layers else f"{name} ({count} layers)" for name, count in counts.items()
        )
        lines.append(f"  {words} ({size / 1e9:.2f} GB{cost}): {names}")
    if costs.hosted_bytes:
        seconds = state_seconds(costs, device)
        lines.append(f"  optimizer states on the host: {costs.hosted_bytes / 1e9:.2f} GB, {seconds:.2f} s a step")
    if costs.transposed_codes:
        words = (
            f"{costs.codes_bytes / 1e9:.2f} GB, {plan.micro_batches * codes_seconds(costs, device):.3f} s a step less"
        )
        lines.append(f"  codes of FP8 weights are kept transposed, too ({words})")
    if costs.devices > 1:
        seconds, exposed_seconds = forecast.collective_seconds, forecast.exposed_seconds
        lines.append(
            f"  between {costs.devices} devices: {seconds:.3f} s a step, of which {exposed_seconds:.3f} s are lost"
        )
    peak = f"  predicted peak {forecast.peak_bytes / 1e9:.2f} GB"
    peak += "" if budget_bytes is None else f" of {budget_bytes / 1e9:.2f} GB"
    speed = f"{forecast.tokens_per_second:,.0f} tokens/s, {forecast.step_seconds:.3f} s a step"
    lines.append(f"{peak}; {speed} ({device.name}: {device.note})")
    if budget_bytes is not None and forecast.peak_bytes > budget_bytes:
        lines.append(
            "  it is the smallest plan, over what is left when the allocator loses as much as it may: it may fit"
        )
    if costs.has_experts:
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
