"""Folders of saved models: a save replaces a script's earlier save, as transformers does, and never anybody else's."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import jaxtune
from jaxtune.models.decoder import Decoder
from jaxtune.models.lora import has_adapter
from jaxtune.system import timing
from jaxtune.system.files import atomic_write, put, temporary_folder
from jaxtune.system.progress import heartbeat
from jaxtune.system.terminal import say
from jaxtune.train.folder.run_folder import next_name

MARK = ".jaxtune_saved.json"  # in a folder of a saved model: its weights, as a script's save wrote them
_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".npz", ".onnx")
_MODEL = ("config.json", "adapter_config.json")


def require_free(folder: str | os.PathLike, where: str) -> Path:
    """The resolved `folder` if it is new, or has no model but one that a script saved there; else ValueError.

    where: the function that saves, for messages.
    """
    path = Path(folder).expanduser().resolve()
    if path.is_mount():
        raise ValueError(f"{where}: {path} is where a disk is mounted, which is no folder of a model; name one in it")
    new = f"name another folder, such as {str(next_name(path))!r}, or move it away"
    if path.exists() and not path.is_dir():
        raise ValueError(f"{where}: {path} is a file; {new}")
    for file in _model_files(path):
        if _stamp(file) not in _mark(path).get(file.name, ()):
            raise ValueError(f"{where}: {path} has {file.name}, which no script saved there; {new}")
    return path


def saved_into(folder: str | os.PathLike, where: str, write: Callable[[Path], object]) -> None:
    """Has `write` fill a temporary folder, and moves its files into `folder`, if require_free allows it. where: the
    called function, for messages.
    """
    path = require_free(folder, where)
    before = _mark(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(path) as temporary, heartbeat(), timing.phase("export"):
        write(temporary)
        new = {file.name: _stamp(file) for file in _model_files(temporary)}
        atomic_write(temporary / MARK, json.dumps({name: [stamp] for name, stamp in new.items()}))
        if not path.exists() or not any(path.iterdir()):
            put(temporary, path)
            return
        # Killed in between, the folder is still known as a script's.
        stamps = {name: [*before.get(name, ()), *([new[name]] if name in new else ())] for name in before.keys() | new}
        atomic_write(path / MARK, json.dumps(stamps))
        for name in before.keys() - new.keys():
            (path / name).unlink(missing_ok=True)
        for file in sorted(temporary.iterdir(), key=lambda file: (file.name == MARK, file.name)):
            put(file, path / file.name, durable=False)
    if before:
        say(f"{where}: {folder}: the model that was saved there before is replaced")


def _model_files(folder: Path) -> list[Path]:
    """Weights and configs in `folder`; [] without such a folder."""
    if not folder.is_dir():
        return []
    return sorted(file for file in folder.iterdir() if file.name.endswith(_WEIGHTS) or file.name in _MODEL)


def _stamp(file: Path) -> list[int]:
    """[size in bytes, seconds of its last change]."""
    status = file.stat()
    return [status.st_size, int(status.st_mtime)]


def _mark(folder: Path) -> dict[str, list[list[int]]]:
    """{name of a model's file that a script saved in `folder`: its stamps}."""
    try:
        return dict(json.loads((folder / MARK).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def save(module: Decoder, folder: str | os.PathLike, tokenizer: object = None) -> None:
    """Saves an adapter for PEFT, or else the whole model for transformers, into an empty or new folder. tokenizer:
    saved too; None: none.
    """
    (jaxtune.save_adapter if has_adapter(module) else jaxtune.save_pretrained)(module, folder, tokenizer=tokenizer)
