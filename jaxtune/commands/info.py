"""The command `jaxtune info`, which prints versions, devices and recipes, or the kernels that would run here.

`run` takes the words of the command line after `info`; its docstring is the text that --help prints.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxtune.commands import common
from jaxtune.system.terminal import say


# arguments: the words after `jaxtune info`: none, or --kernels for the kernels in place of all else. Everything is
# printed on stdout: versions and recipes in two columns, a line for each device, and for each kernel's call a line for
# each implementation, with the reason if it is refused.
def run(arguments: Sequence[str]) -> None:
    """Show versions, devices and packaged recipes, or which kernels would run here."""
    parser = common.parser("info", run.__doc__)
    parser.add_argument(
        "--kernels", action="store_true", help="which implementation of each op is chosen here, and why"
    )
    options = parser.parse_args(arguments)
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
