"""How the pictures of rows are read."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from jaxtune.conversations.picture_processors import PictureProcessor
from jaxtune.conversations.pictures import PictureAccess
from jaxtune.conversations.tokenizing import Tokenizer

if TYPE_CHECKING:
    from jaxtune.models.decoder import Decoder
    from jaxtune.train.config import DataConfig


@dataclasses.dataclass(frozen=True)
class PictureOptions:
    """Values only, as they are a part of the token cache's key."""

    processor: PictureProcessor
    remote: bool = False
    """Whether http and https addresses are fetched."""
    folder: str | None = None
    """Of relative paths; None: that of the rows' file, then the working directory."""

    def access(self, file: str) -> PictureAccess:
        """Where a row of `file` may have its pictures."""
        return picture_access(file, self.folder, self.remote)


def picture_options(model: Decoder, tokenizer: Tokenizer | None, data: DataConfig) -> PictureOptions | None:
    """How pictures of rows are read for a model; None for one without its tower. Raises ValueError for a model without
    its image processor's file, or with one that is not supported.
    """
    if model.vision is None or tokenizer is None:
        return None
    from jaxtune.models.generation.pictures import (
        processor_of,  # which imports JAX, and processes that read rows do not
    )

    return PictureOptions(processor_of(model.source, tokenizer, data.max_pixels), data.remote_images, data.images)


def picture_access(file: str, folder: str | None, remote: bool) -> PictureAccess:
    """Where a row of `file` may have its pictures. folder, remote: as in PictureOptions."""
    beside = [str(Path(file).parent)] if Path(file).is_file() else []
    return PictureAccess((folder,) if folder else (*beside, "."), remote=remote)
