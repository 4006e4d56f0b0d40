"""The pictures of a row among its tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxtune.conversations.messages import Message, pictures_of
from jaxtune.conversations.picture_processors import Grid, PictureProcessor
from jaxtune.conversations.pictures import Picture, PictureAccess, PictureError
from jaxtune.train.data.rows.row_errors import RowError


@dataclasses.dataclass(frozen=True)
class PictureOptions:
    """How the pictures of rows are read. Values only, as it is part of the token cache's key."""

    processor: PictureProcessor
    remote: bool = False
    """Whether http and https addresses are fetched."""
    folder: str | None = None
    """Of relative paths; None: that of the rows' file, then the working directory."""

    def access(self, file: str) -> PictureAccess:
        """Where a row of `file` may have its pictures."""
        return picture_access(file, self.folder, self.remote)


def picture_access(file: str, folder: str | None, remote: bool) -> PictureAccess:
    """Where a row of `file` may have its pictures. folder, remote: as in PictureOptions."""
    beside = [str(Path(file).parent)] if Path(file).is_file() else []
    return PictureAccess((folder,) if folder else (*beside, "."), remote=remote)


@dataclasses.dataclass(frozen=True)
class PlacedPicture:
    """A picture of a document."""

    start: int
    """Index of its first token."""
    grid: Grid
    picture: Picture
    digest: bytes
    """16 bytes, of its file or pixels."""


def placed_pictures(
    messages: Sequence[Message], ids: np.ndarray, mask: np.ndarray, is_cut: bool, processor: PictureProcessor
) -> tuple[np.ndarray, np.ndarray, tuple[PlacedPicture, ...]]:
    """(Tokens, mask, pictures): what the image processor writes in place of the chat template's token of each picture,
    never trained on. Raises RowError for a template or a text with another number of such tokens, and for pictures that
    cannot be read.

      ids, mask: of the rendered messages; is_cut: whether the end of their text is missing.
    """
    pictures = [picture for message in messages for picture in pictures_of(message)]
    if not pictures:
        return ids, mask, ()
    places = np.flatnonzero(ids == processor.token)
    pictures = pictures[: len(places)] if is_cut else pictures
    if len(places) != len(pictures):
        raise RowError(
            f"the chat template writes {len(places)} tokens of pictures for {len(pictures)} pictures: it may be for "
            "text alone (set data.template to one with pictures), or the text itself has such a token"
        )
    pieces, masks, placed, count, low = [], [], [], 0, 0
    for number, (picture, place) in enumerate(zip(pictures, places.tolist(), strict=True), start=1):
        try:
            whole = picture.fetched()
            grid, digest = processor.grid(whole.decoded()), whole.digest()
        except PictureError as error:
            raise RowError(f"picture {number}: {error}") from None
        tokens = processor.tokens(grid)
        pieces += [ids[low:place], tokens]
        masks += [mask[low:place], np.zeros(len(tokens), bool)]
        placed.append(PlacedPicture(count + place - low, grid, whole, digest))
        count, low = count + place - low + len(tokens), place + 1
    ids, mask = np.concatenate([*pieces, ids[low:]]), np.concatenate([*masks, mask[low:]])
    return ids.astype(np.int32), mask, tuple(placed)
