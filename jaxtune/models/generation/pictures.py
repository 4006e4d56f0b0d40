"""Whether and how a loaded model reads pictures."""

from __future__ import annotations

import os

from jaxtune.conversations.picture_processors import PictureProcessor
from jaxtune.conversations.tokenizing import Tokenizer
from jaxtune.models.adapters.adapter_config import base_of
from jaxtune.models.config import Source
from jaxtune.models.files.model_folder import find_config
from jaxtune.models.registry import tower_config


def why_no_pictures(path: str | os.PathLike) -> str:
    """Why a model's folder, hub name, or adapter's folder cannot be loaded with its tower; "" if it can."""
    try:
        tower_config(find_config(base_of(path) or path, published=False))
    except ValueError as error:
        return f"{path}: {error}"
    return ""


def processor_of(source: Source | None, tokenizer: Tokenizer, max_pixels: int | None = None) -> PictureProcessor:
    """How pictures are read for a model that was loaded from `source` with its tower. Raises ValueError for a model
    without its image processor's file, or with one that is not supported.

      max_pixels: of a picture, beyond which it is made smaller; None: as the file says.
    """
    published = None if source is None else source.passthrough
    if source is None or published is None or published.config is None:
        raise ValueError("pictures: this model was made without a folder, whose image processor says how to read them")
    files = dict(published.processors)
    return PictureProcessor.of_files(published.config, files, tokenizer, max_pixels, source.path)
