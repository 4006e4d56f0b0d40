"""Whether a run reads pictures, and how."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from jaxtune.conversations.messages import shows_pictures
from jaxtune.conversations.pictures import PictureAccess
from jaxtune.models.files.model_folder import find_config
from jaxtune.models.qat.fake_quant import ROUNDINGS
from jaxtune.models.registry import tower_config
from jaxtune.train.config import ConfigError, DataConfig, ModelConfig, QatConfig
from jaxtune.train.data.rendering.formats import refuse_media
from jaxtune.train.data.rows.reading import open_sources
from jaxtune.train.data.rows.row_errors import RowError
from jaxtune.train.objectives.objective import Objective

_LOOKED_AT = 1000  # rows of each set
_STREAMED = 100  # of a stream, whose rows are fetched


def reads_pictures(model: ModelConfig, data: DataConfig, refused: str | None) -> bool:
    """Whether the model is loaded with its tower: as model.pictures says, else if one of the first rows has a picture
    and the model a tower that is supported.

    Raises ConfigError if it cannot be though it was asked for, or with `refused` (of `refusal`); ValueError for rows
    that cannot be opened.
    """
    if model.pictures is False:
        return False
    trained = model.tower not in (None, "frozen")
    try:
        tower_config(find_config(model.from_config or model.path or "", published=False))
    except (ValueError, OSError) as error:  # whoever loads the model says what is wrong with its folder
        if model.pictures or trained:
            asked = "model.pictures = true" if model.pictures else f"model.tower = {model.tower!r}"
            raise ConfigError(f"{asked}: {error}") from None
        return False
    if model.pictures is None and not _rows_have_pictures(data):
        if trained:
            raise ConfigError(
                f"model.tower = {model.tower!r}: none of the first {_LOOKED_AT:,} rows has a picture: leave it out, or "
                "set model.pictures=true if later ones have"
            )
        return False
    if refused is not None:
        raise ConfigError(refused)
    return True


def refusal(objective: Objective, qat: QatConfig | None) -> str | None:
    """Why this run cannot have pictures, with what to change; None: it can."""
    if not objective.reads_pictures:
        key, instead = f"objective = {objective.label}", "leave it out"
    elif objective.without_pictures is not None:
        key, instead = objective.without_pictures
    elif qat is not None and ROUNDINGS[qat.format].observed is not None:
        key, instead = f"qat.format = {qat.format}", "leave it out"
    else:
        return None
    alone = "train on text alone (model.pictures=false, and rows without pictures)"
    return f"{key}: not supported yet in a run with pictures; {instead}, or {alone}"


def _rows_have_pictures(data: DataConfig) -> bool:
    trained = [data.train] if isinstance(data.train, str) else data.train
    sets = [entry if isinstance(entry, str) else entry[0] for entry in trained]
    sets += [data.eval] if data.eval is not None else []
    return any(_has_picture(value) for rows in sets if rows for value in _first_rows(rows, data))


def _first_rows(rows: str, data: DataConfig) -> Iterator[object]:
    for source in open_sources(rows, data.streaming, data.columns):
        yield from (row.value for row in itertools.islice(source.read(0), _STREAMED if data.streaming else _LOOKED_AT))


def _has_picture(value: object) -> bool:
    """Whether a row has a picture: in a column that is refused without a tower, or in a message."""
    if not isinstance(value, Mapping):
        return False
    try:
        refuse_media(value)
    except RowError:
        try:
            refuse_media(value, PictureAccess())
        except RowError:
            return False  # a video, say
        return True
    return any(map(shows_pictures, value.values()))
