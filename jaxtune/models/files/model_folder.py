"""The files of a model's folder other than the data of tensors; a GGUF file stands for a folder. A damaged file is
refused with its name."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxtune.models import values
from jaxtune.models.files import headers
from jaxtune.models.files.published import PUBLISHED
from jaxtune.system.files import atomic_write, writing

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# Not *.safetensors: some repositories contain the weights a second time under another name.
_HUB_PATTERNS = ("model*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.model", "*.txt")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.bin.index.json")
# Buffers that older versions of transformers saved with the weights; they are computed from the config.
_IGNORED = re.compile(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "spiece.model")


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file, parsed. Config files of models, adapters and tokenizers are read by it, so that the
    error about a damaged one names the file.

    Raises:
      ValueError: a file that cannot be read, is not JSON, or contains something other than an object.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file}: cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file}: contains a {type(value).__name__}, not a JSON object")
    return value


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    """Writes a JSON object (`value`) to a file, which always has its old content or the new one, never a part of it. It
    does not wait until the disk has the file, which a power failure may still damage; `new_folder`, in which models are
    written, waits for the whole folder. config.json and the index of shards are written by it. Raises OSError if the
    file cannot be written."""
    atomic_write(file, json.dumps(value, indent=2, ensure_ascii=False) + "\n", durable=False)


def save_companions(folder: Path, files: Iterable[tuple[str, bytes]], tokenizer: Any) -> None:
    """Writes the files of a model's or adapter's folder that are neither weights nor config. Files of the same names
    are replaced. Saving and exporting models and adapters calls it after the weights are written.

    Args:
      folder: the folder, which exists.
      files: (name, content) of each file, such as generation_config.json.
      tokenizer: a Hugging Face tokenizer, whose files are written; None: none is written.
    Raises:
      OSError: a file cannot be written, such as on a full disk; the error names the file.
    """
    for name, content in files:
        atomic_write(folder / name, content, durable=False)
    if tokenizer is None:
        return
    size = len(tokenizer.backend_tokenizer.to_str()) if hasattr(tokenizer, "backend_tokenizer") else 0
    with writing(folder / "tokenizer.json", size):
        try:
            tokenizer.save_pretrained(folder)
        except OSError:
            raise
        except Exception as error:  # the tokenizers library writes in Rust and raises its own exceptions
            if (number := re.search(r"\(os error (\d+)\)", str(error))) is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error


# ---- finding the files


def _complete(folder: Path) -> bool:
    """Whether a folder, a snapshot in the hub's cache, has config.json and either model.safetensors or the index with
    every shard that it names, so that resolve_folder need not download them. Raises ValueError if the index is
    damaged."""
    if not (folder / "config.json").exists():
        return False
    if (folder / WEIGHTS).exists():
        return True
    index = folder / INDEX
    return index.exists() and all((folder / name).exists() for name in set(_weight_map(index).values()))


def _has_tokenizer(folder: Path) -> bool:
    """Whether a folder has any file from which transformers can load a tokenizer, such as tokenizer.json
    (_TOKENIZER_FILES). resolve_folder, require_tokenizer and load_tokenizer ask it."""
    return any((folder / name).exists() for name in _TOKENIZER_FILES)


def _weight_map(index: Path) -> dict[str, str]:
    """{tensor's name: name of its file} of an index file (`index`, the path of a model.safetensors.index.json), by
    which the shards of a checkpoint are found and checked.

    Raises:
      ValueError: it cannot be read, has no such map, or names a file by a path rather than a name in its own folder;
        whether the file is there is not checked.
    """
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: has no weight_map, which says where each tensor is; fetch it again")
    for name in weight_map.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError(f"{index}: {name!r} is not the name of a file in the same folder")
    return weight_map


def is_gguf(path: Path) -> bool:
    """Whether a path is a GGUF file, by its first bytes."""
    if not path.is_file():
        return False
    with open(path, "rb") as stream:
        return stream.read(4) == b"GGUF"


def _in_folder(folder: Path) -> Path:
    """A folder, or the GGUF file in it where that is all of the model that it has."""
    if (folder / "config.json").exists() or not (files := sorted(folder.glob("*.gguf"))):
        return folder
    if len(files) > 1:
        raise ValueError(f"{folder}: several GGUF files; give one of {', '.join(file.name for file in files)}")
    return files[0]


def resolve_folder(path: str | os.PathLike) -> Path:
    """The local folder of a model: `path` itself if it is a folder, or else the snapshot of a model on the Hugging Face
    hub, downloaded if need be; or a GGUF file, named itself or alone in its folder.

    A snapshot in the local cache is used without asking the hub if it is complete and has a tokenizer. Otherwise the
    files that are missing are downloaded: config, safetensors and tokenizer, but no pickles. If that fails, a snapshot
    that lacks only the tokenizer is used.

    Args:
      path: a folder, a GGUF file, or a hub name such as "org/model".
    Raises:
      ValueError: there is none of them, or `path` is another file; one line says what was tried.
    """
    name = os.fspath(path)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _in_folder(folder)
    if is_gguf(folder):
        return folder
    if folder.is_file():
        raise ValueError(f"{name} is a file, and not GGUF; give the folder that holds config.json and the weights")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+|[\w-]+", name) or name.startswith("."):
        raise ValueError(f"{name}: there is no such folder (and it is not a hub name like org/model)")
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalEntryNotFoundError, XetDownloadError

    whole = None
    with contextlib.suppress(LocalEntryNotFoundError):
        cached = Path(snapshot_download(name, local_files_only=True))
        whole = cached if _complete(cached) else None
    if whole is not None and _has_tokenizer(whole):
        return whole
    try:  # also for a complete model without a tokenizer: transformers caches the model's files alone
        snapshot = Path(snapshot_download(name, allow_patterns=list(_HUB_PATTERNS)))
        if _complete(snapshot) or not constants.HF_HUB_OFFLINE:  # offline it returns an incomplete snapshot
            return snapshot
    except LocalEntryNotFoundError:
        pass
    except HfHubHTTPError as error:
        if whole is None:
            status = getattr(error.response, "status_code", "nothing")
            raise ValueError(
                f"{name}: the hub answered {status}; check the name; of a gated model, accept "
                "the licence on its page and log in (hf auth login)"
            ) from None
    except (HTTPError, XetDownloadError, ConnectionError, TimeoutError) as error:
        if whole is None:
            raise ValueError(
                f"{name}: the hub cannot be reached, or the download broke off ({type(error).__name__}: {error}); try "
                "again: what has arrived is kept"
            ) from None
    if whole is not None:
        return whole
    raise ValueError(
        f"{name}: no folder of that name, not complete in the local Hugging Face cache, and the hub cannot be reached; "
        "download it once while online, or give a folder"
    )


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed config.json of a model's folder, or the one that a GGUF file amounts to.

    Raises:
      ValueError: there is none, or it is not a JSON object. Of a run's folder the error names the subfolders "merged"
        and "adapter" that are there, and of an adapter's folder it says that this is an adapter.
    """
    if is_gguf(folder):
        from jaxtune.models.files.gguf_reading import read_gguf_config

        return read_gguf_config(folder)
    file = folder / "config.json"
    if not file.exists():
        if (folder / "adapter_config.json").exists():
            raise ValueError(f"{folder} contains an adapter, not a model: load its base model, then load_adapter")
        inner = [str(folder / name) for name in ("merged", "adapter") if (folder / name).is_dir()]  # of a run folder
        raise ValueError(f"{folder}: there is no config.json in it" + f"; give {' or '.join(inner)}" * bool(inner))
    return read_json(file)


def find_config(path: str | os.PathLike) -> dict[str, Any]:
    """The parsed config.json of a model whose weights are not needed, for a plan.

    `path` is a folder, a GGUF or JSON file, the name of a published model whose config this package contains
    (PUBLISHED), or another name on the Hugging Face hub, from which this one file is then fetched. The caller may
    change what is returned.

    Raises:
      ValueError: there is none of them, a folder has no config.json, or the file is not a JSON object.
    """
    name = os.fspath(path)
    local = Path(name).expanduser()
    if local.exists():
        return read_config(_in_folder(local)) if local.is_dir() or is_gguf(local) else read_json(local)
    if name in PUBLISHED:
        return copy.deepcopy(PUBLISHED[name])
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return read_json(Path(hf_hub_download(name, "config.json", etag_timeout=5)))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, ConnectionError) as error:
        raise ValueError(
            f"{name}: no such folder, and its config.json cannot be had from the hub ({type(error).__name__}); give a "
            f"folder with a config.json, or one of {', '.join(PUBLISHED)}"
        ) from None


def weight_entries(folder: Path) -> dict[str, headers.TensorEntry]:
    """{name: entry} of every tensor in a folder's safetensors files: of model.safetensors if there is one, otherwise of
    the shards that the index names, checked against the index. The loader matches them with what the model needs, and
    an export compares them with what it wrote. Only the headers are read. Tensors of these shards that the index does
    not name are included. Buffers of rotary embeddings, which older versions of transformers saved, are left out.

    Raises:
      ValueError: missing or damaged files, an index that contradicts them, or weights in pickles, which can run code.
    """
    single, index = folder / WEIGHTS, folder / INDEX
    if single.exists():
        entries = headers.read_header(single)
    elif index.exists():
        weight_map = _weight_map(index)
        entries = {}
        for name in sorted(set(weight_map.values())):
            if not (folder / name).exists():
                raise ValueError(f"{folder / name}: missing, though {INDEX} names it; fetch it again")
            found = headers.read_header(folder / name)
            twice = sorted(set(found) & set(entries))
            if twice:
                raise ValueError(f"{twice[0]} is in two shards: {entries[twice[0]].file.name} and {name}")
            entries |= found
        for tensor, name in weight_map.items():
            if tensor not in entries or entries[tensor].file.name != name:
                raise ValueError(f"{index}: says that {tensor} is in {name}, but it is not")
    else:
        pickles = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
        if pickles:
            raise ValueError(
                f"{folder}: its weights are a pickle ({pickles[0]}), which can run code when opened and is refused; "
                "convert it to safetensors (save_pretrained of transformers does)"
            )
        raise ValueError(f"{folder}: there is no {WEIGHTS} or {INDEX} in it")
    return {name: entry for name, entry in entries.items() if not _IGNORED.search(name)}


# ---- what comes with the weights


def read_generation_config(folder: Path) -> str | None:
    """The text of a folder's generation_config.json, unchanged, which is kept to be saved again with the model and to
    generate by; None if there is no such file.

    Raises:
      ValueError: it is not a JSON object, or its eos_token_id is neither a token id nor a list of them.
    """
    if is_gguf(folder):
        from jaxtune.models.files.gguf_reading import end_tokens

        ends = end_tokens(folder)
        return json.dumps({"eos_token_id": ends}) if ends else None
    file = folder / "generation_config.json"
    if not file.exists():
        return None
    ends = read_json(file).get("eos_token_id")
    if ends is not None:
        values.token_ids(f"{file}: eos_token_id", ends)
    return file.read_text(encoding="utf-8")


def _token(key: str, value: Any) -> None:
    """Raises ValueError unless `value`, a special token in a tokenizer's config, is a string or an object; the content
    of an object is not checked. load_tokenizer calls it. key: the file and setting, for the error."""
    if not isinstance(value, str | dict):
        raise ValueError(f"{key} = {value!r}: must be a token's text, or an object with its content")


def _templates(key: str, value: Any) -> None:
    """Raises ValueError unless `value`, the chat_template in a tokenizer's config, is a string or a list of objects
    with strings as name and template. load_tokenizer calls it. key: the file and setting, for the error."""
    if isinstance(value, str):
        return
    values.items(key, value, values.mapping)
    for index, named in enumerate(value):
        for part in ("name", "template"):
            values.text(f"{key}[{index}].{part}", named.get(part))


_TOKENIZER_CHECKS: dict[str, Callable[[str, Any], None]] = {
    "tokenizer_class": values.text,
    "chat_template": _templates,
    "model_max_length": values.positive,
    "added_tokens_decoder": values.mapping,
    **dict.fromkeys(("padding_side", "truncation_side"), values.text),
    **dict.fromkeys(("add_bos_token", "add_eos_token", "clean_up_tokenization_spaces"), values.boolean),
    **dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token"), _token),
}


def require_tokenizer(folder: Path) -> None:
    """Raises ValueError if a model's folder has no usable config.json, or none of the files from which a tokenizer is
    loaded; the error says which file is missing. Only the names of tokenizer files are looked at. By it a run whose
    model is a local folder, and whose config names no other tokenizer, is refused before anything is loaded."""
    folder = _in_folder(folder)
    read_config(folder)
    if is_gguf(folder):
        from jaxtune.models.files import gguf_reading, gguf_tokens

        gguf_tokens.require_known(str(folder), gguf_reading.opened(folder).fields)
    elif not _has_tokenizer(folder):
        raise ValueError(
            f"model.path = {str(folder)!r}: the folder has no {_TOKENIZER_FILES[0]} and no other tokenizer file: copy "
            "them from the model's repository, or set model.tokenizer to a folder that has them"
        )


def load_tokenizer(folder: Path):
    """The Hugging Face tokenizer of a folder, or None where it has no tokenizer files; loading a model, runs, the
    server's adapters and the compat package call it. Code that comes with the folder is never run. The first call
    imports transformers, which takes seconds, and sets the environment variable TRANSFORMERS_NO_ADVISORY_WARNINGS
    unless it is set. If sys.modules has None for torch, by which the command hides torch from transformers, that entry
    is removed: transformers does not look again, and other libraries would take torch for imported.

    Raises:
      ValueError: files from which no tokenizer can be built; a value of the wrong type, with file and key.
    """
    if (folder := _in_folder(folder)).is_file():
        return _of_gguf(folder)
    if not _has_tokenizer(folder):
        return None
    for name in ("tokenizer.json", "vocab.json", "added_tokens.json"):
        if (folder / name).exists():
            read_json(folder / name)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        file = folder / name
        settings = read_json(file) if file.exists() else {}
        for key, check in _TOKENIZER_CHECKS.items():
            if settings.get(key) is not None:
                check(f"{file}: {key}", settings[key])
    _import_transformers()
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        tokenizer("a")  # some faults appear only in use
    except Exception as error:  # the tokenizers library raises bare Exceptions
        said = " ".join(str(error).split())[:300]
        files = ", ".join(name for name in _TOKENIZER_FILES if (folder / name).exists())
        raise ValueError(
            f"{folder}: its tokenizer files ({files}) make no tokenizer: {type(error).__name__}: {said}; "
            "fetch them again, or name another folder (model.tokenizer)"
        ) from error
    return tokenizer


def _import_transformers() -> None:
    """Imports transformers, which else warns that torch is missing, and which looks for torch only once: a hidden torch
    (cli.console) is then shown again, because other libraries take a hidden module for an imported one."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import is_torch_available

    if not is_torch_available() and sys.modules.get("torch", ...) is None:
        del sys.modules["torch"]


def _of_gguf(file: Path):
    """The tokenizer in a GGUF file."""
    from jaxtune.models.files import gguf_reading, gguf_tokens

    _import_transformers()
    return gguf_tokens.tokenizer_of(str(file), gguf_reading.opened(file).fields)
