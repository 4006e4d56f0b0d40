"""Adapters that are served over a base, read from their folders."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from jaxtune.models.adapters.adapter_files import adapter_on_host
from jaxtune.models.ends import with_end_tokens
from jaxtune.models.files.model_folder import load_tokenizer
from jaxtune.models.generation.adapters import Adapter
from jaxtune.serve.errors import ApiError
from jaxtune.serve.served import ServedModel

_MOST_FILES = 1000  # of an adapter's folder


def read_served(base: ServedModel, name: str, folder: Path) -> ServedModel:
    """The model of an adapter's folder over a base, with the folder's tokenizer if it has one. ValueError: as
    load_adapter.
    """
    tokenizer: Any = load_tokenizer(folder) or base.tokenizer
    model = with_end_tokens(adapter_on_host(base.model, folder), tokenizer)
    return ServedModel(name, model, tokenizer, base.name, base.pictures, base.why_no_pictures)


class AdapterFolder:
    """A folder below which clients may name adapters. ValueError: it is none."""

    def __init__(self, folder: Path):
        if not folder.is_dir():
            raise ValueError(f"--adapters-below {folder}: is no folder")
        self._root = folder.resolve(strict=True)

    def load(self, base: ServedModel, name: str, path: str) -> tuple[ServedModel, Adapter]:
        """The adapter of a folder, by its path from here. ApiError: 403: it or one of its files is elsewhere; 404:
        there is none; 400: it cannot be read, or rows of one batch cannot have it.
        """
        folder = self._folder(path)
        try:
            served = read_served(base, name, folder)
            return served, Adapter.of(served.model, name)
        except (ValueError, OSError) as error:
            words = str(error).replace(f"{self._root}{os.sep}", "")
            raise ApiError(400, f"lora_path = {path!r}: {words}", "lora_path", "invalid_value") from None

    def _folder(self, path: str) -> Path:
        outside = ApiError(
            403, f"lora_path = {path!r}: is not below the folder of --adapters-below", "lora_path", "forbidden"
        )
        try:
            folder = Path(os.path.realpath(self._root / path))
            if folder == self._root or not folder.is_relative_to(self._root):
                raise outside
            if not folder.is_dir():
                raise ApiError(404, f"lora_path = {path!r}: there is no such folder", "lora_path", "not_found")
            count = 0
            for parent, folders, files in os.walk(folder):
                for entry in (*folders, *files):
                    if not Path(os.path.realpath(os.path.join(parent, entry))).is_relative_to(self._root):
                        raise outside
                    count += 1
                if count > _MOST_FILES:
                    message = f"lora_path = {path!r}: has more than {_MOST_FILES:,} files: name the adapter's folder"
                    raise ApiError(400, message, "lora_path", "invalid_value")
        except (ValueError, OSError, RecursionError):  # a zero byte, too long a name, a loop of links
            raise ApiError(400, f"lora_path = {path[:80]!r}: is no path", "lora_path", "invalid_value") from None
        return folder
