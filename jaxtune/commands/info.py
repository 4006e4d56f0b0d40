"""The command `jaxtune info`."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtune.commands import common
from jaxtune.system.terminal import say


def run(arguments: Sequence[str]) -> None:
    """Show versions, devices and packaged recipes, which recipes fit a card, or which kernels would run here."""
    parser = common.parser("info", run.__doc__)
    parser.add_argument(
        "--kernels", action="store_true", help="which implementation of each op is chosen here, and why"
    )
    parser.add_argument(
        "--device", metavar="CARD", help="the recipes that fit a card, such as 'RTX 4090', with their memory and speed"
    )
    options = parser.parse_args(arguments)
    if options.device is not None:
        _print_card(options.device)
        return
    if options.kernels:
        from jaxtune.pallas.report import kernel_choices

        say("\n\n".join(choice.to_text() for choice in kernel_choices()))
        return
    import platform
    from importlib import metadata

    import jax

    from jaxtune import __version__
    from jaxtune.train.config.file import packaged_recipes, recipe_summary

    versions = [("jaxtune", __version__), ("python", platform.python_version())]
    for name in ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "transformers", "jax-triton"):
        try:
            versions.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            versions.append((name, "not installed"))
    say("versions")
    common.print_columns(versions)
    say("\ndevices")
    for device in jax.devices():
        memory_bytes = (device.memory_stats() or {}).get("bytes_limit")
        say(f"  {device.device_kind}" + (f", {memory_bytes / 1e9:.1f} GB" if memory_bytes else ""))
    say("\nrecipes")
    common.print_columns([(name, recipe_summary(path)) for name, path in packaged_recipes().items()])


def _print_card(card: str) -> None:
    """Prints the stored plans of the packaged recipes for a card, the largest model first, and which one to take."""
    from jaxtune.system.invocation import spelled
    from jaxtune.train.planning import recipe_plans

    like = recipe_plans.nearest(card)
    fitting, too_large = recipe_plans.on_card(like)
    say(f"recipes on {card}" + ("" if like == card else f", as planned for {like}, which is like it") + ":")
    rows = [
        (
            ("* " if plan.best else "  ") + plan.recipe,
            f"{plan.gb:6.1f} GB  {plan.tokens_per_second:>9,.0f} tokens/s  {plan.model}"
            + (", all parameters" if plan.trains == "all" else ""),
        )
        for plan in fitting
    ]
    common.print_columns(rows or [("none", "not even the smallest recipe fits")])
    if too_large:
        say(f"too large: {', '.join(too_large)}")
    if unplanned := recipe_plans.unplanned():
        say(f"without a stored plan, so that --plan alone says it: {', '.join(unplanned)}")
    if fitting:
        say(
            "* the fastest recipe of a model. Forecasts, for the recipe's rows; what was measured was on H200 and H100."
        )
        best = recipe_plans.choice(fitting)
        say(
            f"take {best.recipe}: the largest model at {recipe_plans.FAST:,} tokens/s or more"
            if best.tokens_per_second >= recipe_plans.FAST
            else f"take {best.recipe}, the fastest"
        )
        say(f"for rows of another length: {spelled(f'train {best.recipe} --plan plan.device={card!r}')} data.length=N")
