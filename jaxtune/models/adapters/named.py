"""Adapters by their names on the hub."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from jaxtune.models.adapters.adapter_config import CONFIG_NAME
from jaxtune.models.files.model_folder import is_hub_name

_FILES = [CONFIG_NAME, "*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.model", "*.txt"]


def local_adapter(name: str | os.PathLike) -> str:
    """The folder of an adapter's snapshot, which is fetched if need be, where `name` is a hub name of one; else `name`
    itself, also where the hub cannot be asked."""
    text = os.fspath(name)
    if Path(text).expanduser().exists() or "/" not in text or not is_hub_name(text):
        return text
    from huggingface_hub import constants, file_exists, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalEntryNotFoundError

    with contextlib.suppress(LocalEntryNotFoundError):
        cached = Path(snapshot_download(text, local_files_only=True))
        if (cached / CONFIG_NAME).is_file():
            return str(cached)
        if (cached / "config.json").is_file():
            return text
    if constants.HF_HUB_OFFLINE:
        return text
    with contextlib.suppress(HfHubHTTPError, HTTPError, ConnectionError, TimeoutError):
        if file_exists(text, CONFIG_NAME):
            return str(snapshot_download(text, allow_patterns=_FILES))
    return text
