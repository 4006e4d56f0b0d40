"""How the pictures of rows are read."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from jaxtune.conversations.picture_processors import PictureProcessor
from jaxtune.conversations.pictures import PictureAccess


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


def picture_access(file: str, folder: str | None, remote: bool) -> PictureAccess:
    """Where a row of `file` may have its pictures. folder, remote: as in PictureOptions."""
    beside = [str(Path(file).parent)] if Path(file).is_file() else []
    return PictureAccess((folder,) if folder else (*beside, "."), remote=remote)
