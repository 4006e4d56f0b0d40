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
        beside = [str(Path(file).parent)] if Path(file).is_file() else []
        return PictureAccess((self.folder,) if self.folder else (*beside, "."), remote=self.remote)
