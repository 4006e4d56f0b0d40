"""The commands that a run names at its end."""

from __future__ import annotations

import contextlib
import shlex
from pathlib import Path

from jaxtune.system.files import PACKAGE
from jaxtune.system.invocation import spelled
from jaxtune.train.config import DataConfig
from jaxtune.train.data.rendering.formats import normalize
from jaxtune.train.data.rows.reading import open_sources, read_rows
from jaxtune.train.evaluation.held_out_answers import answered
from jaxtune.train.folder.run_folder import ADAPTER, MERGED


def next_commands(output: Path, data: DataConfig, base: str | None, asked: bool) -> list[tuple[str, str]]:
    """[(purpose, command)] after a run: ask the model, show the profile, and after a first run on the packaged model
    two more. They hold in the folder where the run was started.

      output: of the run.
      base: folder or name of the model from which it began; None: random weights.
      asked: whether the run has answered held-out questions.
    """
    commands = []
    trained = [output / name for name in (MERGED, ADAPTER) if (output / name).exists()]
    if trained:
        question, raw = "...", ""
        with contextlib.suppress(OSError, ValueError, StopIteration):  # the example question may be missing
            if asked:
                example = answered(data, 1)[0][0]
            else:
                sources = open_sources(data.train, columns=data.columns)
                row = next(read_rows(sources, data.format))
                example = normalize(row.value or {}, row.format)
            if data.template is None and (example.prompt is not None or example.text is not None):
                raw = " --raw"  # without a template, as in training
            if asked:
                question = str(example.prompt) if raw else (example.messages or [])[-2]["content"]
        ask = f"generate {shlex.quote(str(trained[0]))}{raw} --prompt {shlex.quote(question)}"
        commands.append(("ask the trained model", spelled(ask)))
    if (profile := output / "profile").is_dir():
        show_command = spelled(f"profile show {shlex.quote(str(profile))}")
        commands.append(("where the time of the profiled steps went", show_command))
    if Path(base or "").is_relative_to(PACKAGE):  # the packaged model: a first run
        train = spelled("train lora-0.5b data.train=rows.jsonl")
        commands.append(("train a model of the hub on rows of your own", train))
        plan = spelled("train qlora-8b --plan plan.device='RTX 4090'")
        commands.append(("what an 8B model needs on a GPU, and how fast it would be", plan))
    return commands
