"""The command `jaxtune train`. The share of device memory and pinned memory are set, and the processes of a run joined,
before JAX starts its devices; unreadable rows are refused before a model is loaded.
"""

from __future__ import annotations

import argparse
import os
import textwrap
from collections.abc import Sequence
from pathlib import Path

from jaxtune.commands import common
from jaxtune.commands.options import parse
from jaxtune.system import host_memory, joining, progress, timing
from jaxtune.system.invocation import spelled
from jaxtune.system.terminal import say


def run(arguments: Sequence[str]) -> int | None:
    """Fine-tune a model, or train one from scratch, as a recipe says.

    --plan only shows the memory and speed of the run, --check only what would be trained. JAX may use 95 % of the
    device's memory, unless XLA_PYTHON_CLIENT_MEM_FRACTION is set. Returns 0, or 75 if a signal ended the run and the
    same command continues it. ValueError: the recipe is missing, or the config or the rows are wrong.
    """
    parser = argparse.ArgumentParser(prog="jaxtune train", allow_abbrev=False, add_help=False)
    parser.add_argument("recipe", nargs="?")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--plan", action="store_true")
    common.add_timing(parser)
    parser.add_argument("--coordinator")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process", type=int)
    parser.add_argument("-h", "--help", action="store_true")
    options = parse(parser, arguments)
    if options.help:
        _print_help()
        return 0
    if options.recipe is None or "=" in options.recipe:
        from jaxtune.train.config.file import packaged_recipes

        raise ValueError(
            f"the first argument is a recipe: a YAML file or one of {', '.join(packaged_recipes())}; "
            f"'{spelled('train --help')}' says what each is for"
        )
    from jaxtune.train.config.file import config_to_dict, load_config, names_code

    config = load_config(options.recipe, options.overrides, rows_needed=not options.plan)
    common.begin_import(names_code(config_to_dict(config)))
    # By default JAX uses three quarters of the device; the planner counts on everything after the CUDA context.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
    host_memory.allow_pinned()
    trains, places = not (options.plan or options.check), (options.coordinator, options.processes, options.process)
    if trains and not joining.is_one_of_several(*places):
        common.begin_devices(options.recipe, config.model.path or "")
    from jaxtune.train.spec.run_spec import decided_objective

    objective = decided_objective(config)  # refuses keys before others are waited for
    timing.imported()
    if not options.plan:
        joining.join(*places)
    if config.data.train and not (options.plan and config.plan.device is not None):
        from jaxtune.train.data.rows.first_look import require_readable
        from jaxtune.train.spec.pictures import reads_pictures, refusal

        converts = objective.row_format is None and not objective.samples
        with timing.phase("rows", "first look"):
            refused = refusal(objective, config.qat)
            pictures = reads_pictures(config.model, config.data, refused)
            require_readable(config.data, config.model, converts, pictures)
    from jaxtune.train.app import run as train

    code = train(config, check=options.check, plan=options.plan)
    if options.timing:
        progress.show_timing(None if options.check or options.plan else Path(config.output))
    return code


def _print_help() -> None:
    from jaxtune.train.config.file import config_keys, packaged_recipes, recipe_summary

    console = common.wide_console()
    console.print(
        "usage: jaxtune train RECIPE [key.sub=value ...] [--check | --plan] [--timing]\n\n"
        "RECIPE is a YAML file or the name of a packaged recipe. Overrides win over it; their values are YAML.\n"
    )
    common.print_columns(
        [
            ("--check", "read config, tokenizer and data, show what would be trained and one packed row, then stop"),
            ("--plan", "show the plan: memory and speed, here or on the device plan.device names, then stop"),
            ("--timing", "at the end print where the seconds went, and write them to timing.json in the output folder"),
            (
                "--coordinator=HOST:PORT --processes=N --process=I",
                "one of several processes that SLURM and Open MPI did not start; 'jaxtune launch' gives them itself",
            ),
            ("--help", "show this"),
        ]
    )
    say("\npackaged recipes\n")
    common.print_columns([(name, recipe_summary(path)) for name, path in packaged_recipes().items()])
    say("\nkeys (type, default)\n")
    section = "model"
    for key in config_keys():
        if section != (section := key.name.partition(".")[0] if "." in key.name or key.type == "section" else ""):
            say()
        # Names are never cut, however narrow the terminal, because users type them.
        say(f"  {key.name} ({key.type}, {key.default})")
        say(textwrap.fill(key.help, console.width, initial_indent=" " * 6, subsequent_indent=" " * 6))
