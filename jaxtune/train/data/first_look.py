"""A first look at what a config names, which `jaxtune train` takes before anything is loaded: `require_readable` opens
the rows and the model's folder, so that a wrong name or format is reported at once."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from jaxtune.models.files.model_folder import require_tokenizer
from jaxtune.train.config import ConfigError, TrainConfig
from jaxtune.train.data.formats import PREFERENCE, normalize
from jaxtune.train.data.reading import open_sources, read_rows
from jaxtune.train.data.row_errors import RowError, attempt

_MOST_FILES = 32  # the most files of a folder that are opened


def require_readable(config: TrainConfig) -> None:
    """Opens the rows that a config names (data.train and data.eval), and reads the first row of each file: of each
    folder 32 files at most, and with data.streaming only the first file or shard of each training source. A data set
    that is given by name is downloaded for it; with data.streaming only data.eval is. For sft the row is also
    converted, which checks its columns, unless data.on_bad_row is "skip"; the columns of other objectives are checked
    later. If the model is a local folder and model.tokenizer is not set, the folder must have a tokenizer. Only the
    command `jaxtune train` calls it, before the model is loaded, so that a wrong name or format is reported at once. It
    returns nothing: the run opens and reads the rows again.

    Raises:
      ConfigError: a file or data set is not there, or is empty (of several files of a folder, some may be empty); or a
        first row cannot be read, or for sft not converted, and data.on_bad_row is "error". The message names the key.
      ValueError: the folder of the model has no tokenizer or no usable config.json, data.format is not known (sft
        only), or a file cannot be read at all.
      OSError: a file cannot be opened.
    """
    data = config.data
    mixed = [rows for rows, _ in data.mixed]
    train = [data.train] if isinstance(data.train, str) else mixed or list(data.train)
    held_out = [] if data.eval is None else [data.eval]
    for key, names in (("data.train", train), ("data.eval", held_out)):
        for rows in names:
            _look(key, rows, config)
    model = config.model
    if model.path is not None and model.tokenizer is None and (folder := Path(model.path).expanduser()).exists():
        require_tokenizer(folder)


def _look(key: str, rows: Any, config: TrainConfig) -> None:
    """Opens one of the names that a config key has, for `require_readable`, and reads its first row; of a folder, the
    first row of each file (of `_MOST_FILES`, 32, at most), and of training rows with data.streaming, that of the first
    file or shard. For the objective sft the row is also converted to an example. A bad row is no error if
    data.on_bad_row is "skip".

    Args:
      key: "data.train" or "data.eval".
      rows: one of its names, in any form that `open_sources` takes.
      config: the run's.
    Raises:
      ConfigError: it is not found, or is a file or data set without rows (of several files of a folder, some may be
        empty); or a first row cannot be read, or for sft not converted, and data.on_bad_row is "error".
      ValueError: data.format is not known (sft only), or a file cannot be read at all.
      OSError: a file cannot be opened.
    """
    data, objective = config.data, config.objective.name
    streaming = data.streaming and key == "data.train"
    try:
        sources = open_sources(rows, streaming, data.columns)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from None
    # Other objectives have columns of their own, which they check.
    form = data.format if objective == "sft" else PREFERENCE
    for source in itertools.islice(sources, 1 if streaming else _MOST_FILES):
        row = next(read_rows([source], form, 1), None)
        if row is None and not source.part and len(sources) == 1:
            raise ConfigError(f"{key} = {rows!r}: there are no rows in it")
        if row is None or data.on_bad_row == "skip":
            continue
        used = RowError(row.error) if row.value is None else None
        if used is None and form != PREFERENCE:
            used = attempt(normalize, row.value, row.format)
        if isinstance(used, RowError):
            raise ConfigError(
                f"{key}: {row.place}: {used} (data.on_bad_row: skip leaves such rows out and counts them)"
            )
