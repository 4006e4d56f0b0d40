"""The command `jaxtune sensitivity`, which prints YAML."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtune.commands import common
from jaxtune.commands.options import parse
from jaxtune.pallas.format_names import LOADED
from jaxtune.system.terminal import counted, say

_SHOWN = 12  # matrices that are listed


# arguments: the words after `jaxtune sensitivity`: a recipe, overrides (key=value), and options such as --format. For
# users who choose a precision map: without --memory-gb only the figures are printed. ValueError: the config has faults,
# another objective than sft, or a precision map already; its rows are streamed or mixed without data.eval; the model
# has quantised weights, or nothing to measure; or all matrices quantised take more than --memory-gb.
def run(arguments: Sequence[str]) -> None:
    """Measure which matrices a format harms; print a precision map.

    Each matrix alone is quantised, and the divergence of the answers' next-token distributions from the unquantised
    model's is measured, on the held-out rows if the recipe has some, otherwise on those that it trains on. What is
    printed is YAML: the figures as comments, and with --memory-gb the keys of a recipe that keeps those matrices in 16
    bits, or in the format --keep, which lose most for each byte. The model must fit on the device in 16 bits.
    """
    parser = common.parser("sensitivity", run.__doc__)
    parser.add_argument("recipe", help="a recipe, whose model and rows are used")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example model.path=FOLDER")
    parser.add_argument("--format", choices=LOADED, default="nf4", help="the format to measure (default: nf4)")
    parser.add_argument(
        "--by",
        choices=("matrices", "kinds"),
        default="matrices",
        help="kinds: all matrices of a kind, such as v_proj, as one, which takes a pass for each kind",
    )
    parser.add_argument("--keep", choices=LOADED, help="the format of what stays, such as int8 (default: 16 bits)")
    parser.add_argument("--memory-gb", type=float, metavar="N", help="GB (1e9 bytes) that the model's weights may take")
    parser.add_argument("--rows", type=int, default=32, metavar="N", help="packed rows to measure on (default: 32)")
    options = parse(parser, arguments)
    if options.rows < 1:
        parser.error(f"--rows {options.rows}: must be 1 or more")
    import yaml

    from jaxtune.system.program_cache import use_program_cache
    from jaxtune.train import sensitivity
    from jaxtune.train.config.file import load_config

    config = load_config(options.recipe, options.overrides)
    use_program_cache()
    model, batches = sensitivity.model_and_batches(config, options.rows)
    probe = sensitivity.Sensitivity(model, batches, options.format, options.by == "kinds", options.keep)
    with counted(options.by, probe.count) as advance:
        matrices = probe.measure(advance)
    worst = sorted(matrices, key=lambda matrix: -matrix.loss)[:_SHOWN]
    say(f"# Mean divergence, nats a token over {probe.tokens:,.0f} tokens, of single {options.by} in {options.format}:")
    for matrix in worst:
        say(f"# {matrix.loss:.2e}  {matrix.name} ({matrix.extra_bytes / 1e6:,.1f} MB more if it stays)")
    say(f"# {probe.divergence([]):.2e}  none: what two programs of the same numbers differ by")
    size = probe.weight_bytes - sum(matrix.saved_bytes for matrix in matrices)
    say(f"# {probe.divergence():.2e}  all {len(matrices)}: the weights take {size / 1e9:.3f} GB")
    if options.memory_gb is None:
        return
    kept = sensitivity.choose(matrices, probe.weight_bytes, options.memory_gb * 1e9)
    size += sum(matrix.extra_bytes for matrix in matrices if matrix.name in kept)
    divergence = probe.divergence([matrix.name for matrix in matrices if matrix.name not in kept], kept)
    say(f"# {divergence:.2e}  all but {len(kept)}, as follows: the weights take {size / 1e9:.3f} GB")
    modules = [module for name in kept for module in probe.modules[name]]
    words = sensitivity.patterns(model, modules, options.keep or config.computes_in)
    keys = sensitivity.as_recipe(options.format, config.computes_in, words)
    say(yaml.safe_dump(keys, sort_keys=False, allow_unicode=True).rstrip())
