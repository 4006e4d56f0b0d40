"""A first look at what a config names, so that a wrong name or format shows before anything is loaded."""

from __future__ import annotations

import itertools
from pathlib import Path

from jaxtune.models.files.model_folder import require_tokenizer
from jaxtune.train.config import ConfigError, DataConfig, ModelConfig
from jaxtune.train.data.rendering.formats import PREFERENCE, normalize
from jaxtune.train.data.rendering.pictures import picture_access
from jaxtune.train.data.rows.reading import open_sources, read_rows
from jaxtune.train.data.rows.row_errors import RowError, attempt

_MOST_FILES = 32  # the most files of a folder that are opened


def require_readable(data: DataConfig, model: ModelConfig, converts: bool, pictures: bool) -> None:
    """Reads the first row of each file of data.train and data.eval (at most 32 of a folder; of a stream the first
    shard), and looks for a local model's tokenizer. A data set named on the hub is downloaded unless streamed.

      converts: whether rows are converted from data.format, which checks their columns.
      pictures: whether they may have any.

    Raises ConfigError for missing or empty sources and, unless data.on_bad_row is "skip", bad rows; ValueError for a
    missing tokenizer, an unusable config.json, an unknown data.format or an unreadable file; OSError.
    """
    mixed = [rows for rows, _ in data.mixed]
    train = [data.train] if isinstance(data.train, str) else mixed or list(data.train)
    held_out = [] if data.eval is None else [data.eval]
    for key, names in (("data.train", train), ("data.eval", held_out)):
        for rows in names:
            _look(key, rows, data, converts, pictures)
    if model.path is not None and model.tokenizer is None and (folder := Path(model.path).expanduser()).exists():
        require_tokenizer(folder)


def _look(key: str, rows: object, data: DataConfig, converts: bool, pictures: bool) -> None:
    """Reads a row of each of the first sources. ConfigError, about `key`, if none can be used."""
    streaming = data.streaming and key == "data.train"
    try:
        sources = open_sources(rows, streaming, data.columns)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from None
    # Other objectives have columns of their own, which they check.
    form = data.format if converts else PREFERENCE
    for source in itertools.islice(sources, 1 if streaming else _MOST_FILES):
        row = next(read_rows([source], form, 1), None)
        if row is None and not source.is_later_window and len(sources) == 1:
            raise ConfigError(f"{key} = {rows!r}: there are no rows in it")
        if row is None or data.on_bad_row == "skip":
            continue
        outcome = RowError(row.error) if row.value is None else None
        if outcome is None and form != PREFERENCE:
            access = picture_access(row.file, data.images, data.remote_images) if pictures else None
            outcome = attempt(normalize, row.value, row.format, access)
        if isinstance(outcome, RowError):
            raise ConfigError(
                f"{key}: {row.place}: {outcome} (data.on_bad_row: skip leaves such rows out and counts them)"
            )
