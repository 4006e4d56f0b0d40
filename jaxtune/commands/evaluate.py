"""The command `jaxtune evaluate`, which prints a model's scores on held-out rows as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence

from jaxtune.commands import common
from jaxtune.commands.options import parse
from jaxtune.system import joining, progress
from jaxtune.system.terminal import say


# arguments: the words after `jaxtune evaluate`: config.yaml in a run's folder or a recipe, overrides (key=value), and
# options. The numbers are one JSON object on stdout, and notes are on stderr. If an override sets a key of model or
# adapter, the weights are those that the config names, not the run's. ValueError: the config has faults, there are no
# held-out rows, a run has no trained weights yet, or several processes are to sample answers.
def run(arguments: Sequence[str]) -> None:
    """Print the loss (and exact match) of a run's result, or of a recipe's model, on the held-out rows.

    Several processes share the rows, and the first one prints the numbers, as in `jaxtune train`.
    """
    parser = common.parser("evaluate", run.__doc__)
    parser.add_argument(
        "recipe", help="config.yaml in a run's folder, to evaluate the run's result; or a recipe, to evaluate its model"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example model.path=FOLDER adapter=null")
    common.add_load_in(parser, otherwise="as the recipe says")
    common.add_processes(parser)
    common.add_timing(parser)
    options = parse(parser, arguments)

    from jaxtune.train.config.file import config_to_dict, load_to_evaluate, names_code

    config, checkpoint = load_to_evaluate(options.recipe, options.overrides)
    common.begin_import(names_code(config_to_dict(config)))
    joining.join(options.coordinator, options.processes, options.process)
    common.begin_devices(options.recipe, config.model.path or "")
    from jaxtune.train.scoring import evaluate as evaluate_config

    scores = evaluate_config(config, options.recipe, options.overrides, checkpoint, options.load_in)
    say(json.dumps(scores, indent=2))
    if options.timing:
        progress.show_timing()
