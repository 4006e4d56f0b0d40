"""The commands that a run names at its end."""

from __future__ import annotations

import contextlib
import shlex
from pathlib import Path

from jaxtune.system.files import PACKAGE
from jaxtune.system.invocation import spelled
from jaxtune.train.config import TrainConfig
from jaxtune.train.data.rendering.formats import normalize
from jaxtune.train.data.rows.reading import open_sources, read_rows
from jaxtune.train.evaluation.held_out_answers import answered
from jaxtune.train.folder.run_folder import ADAPTER, MERGED


def next_commands(config: TrainConfig, output: Path) -> list[tuple[str, str]]:
    """[(purpose, command)] after a run: ask the model, show the profile, and after a first run on the packaged model
    two more. They hold in the folder where the run was started.
    """
    commands = []
    trained = [output / name for name in (MERGED, ADAPTER) if (output / name).exists()]
    if trained:
        question, raw = "...", ""
        with contextlib.suppress(OSError, ValueError, StopIteration):  # the example question may be missing
            scored = config.evaluation.exact_match_rows
            if scored:
                example = answered(config, 1)[0][0]
            else:
                sources = open_sources(config.data.train, columns=config.data.columns)
                row = next(read_rows(sources, config.data.format))
                example = normalize(row.value or {}, row.format)
            if config.data.template is None and (example.prompt is not None or example.text is not None):
                raw = " --raw"  # without a template, as in training
            if scored:
                question = str(example.prompt) if raw else (example.messages or [])[-2]["content"]
        ask = f"generate {shlex.quote(str(trained[0]))}{raw} --prompt {shlex.quote(question)}"
        commands.append(("ask the trained model", spelled(ask)))
    if (profile := output / "profile").is_dir():
        show_command = spelled(f"profile show {shlex.quote(str(profile))}")
        commands.append(("where the time of the profiled steps went", show_command))
    if Path(config.model.path or "").is_relative_to(PACKAGE):  # the packaged model: a first run
        train = spelled("train lora-0.5b data.train=rows.jsonl")
        commands.append(("train a model of the hub on rows of your own", train))
        plan = spelled("train qlora-8b --plan plan.device='RTX 4090'")
        commands.append(("what an 8B model needs on a GPU, and how fast it would be", plan))
    return commands
