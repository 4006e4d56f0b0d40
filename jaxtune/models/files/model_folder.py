"""The files of a model's folder other than the data of tensors; a GGUF file stands for a folder."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxtune.models import values
from jaxtune.models.files import headers, tokenizer_settings, transformers_import
from jaxtune.models.files.published import PUBLISHED
from jaxtune.system import timing
from jaxtune.system.files import atomic_write, read_plain, require_plain, writing

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# Not *.safetensors: some repositories contain the weights a second time under another name.
_HUB_PATTERNS = ("model*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.model", "*.txt")
# What is read of a folder, by us or by transformers.
_WEIGHT_SUFFIXES = (".safetensors", ".gguf")
_READ_PATTERNS = (
    *(f"*{suffix}" for suffix in (*_WEIGHT_SUFFIXES, ".json", ".jinja", ".model", ".txt", ".tiktoken")),
    "additional_chat_templates/*.jinja",
)
_MOST_BYTES = 2**29  # of a file that has no weights
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.bin.index.json")
# Buffers that older versions of transformers saved with the weights; they are computed from the config.
_IGNORED = re.compile(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "spiece.model")


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ValueError, which names the file, for anything else."""
    try:
        value = json.loads(read_plain(file))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{file}: cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file}: contains a {type(value).__name__}, not a JSON object")
    return value


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    """Writes a JSON object; the file never has a part of it. Not durable: new_folder flushes."""
    atomic_write(file, json.dumps(value, indent=2, ensure_ascii=False) + "\n", durable=False)


def save_companions(folder: Path, files: Iterable[tuple[str, bytes]], tokenizer: Any) -> None:
    """Writes the files of a model's folder that are no weights. Raises OSError, which names the file.

    folder: exists.
    files: pairs (name, content).
    tokenizer: a Hugging Face tokenizer, whose files are written; None: none are.
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
    settings = folder / tokenizer_settings.NAME
    if settings.exists():
        write_json(settings, tokenizer_settings.merged(tokenizer, read_json(settings)))


# ---- finding the files


def _complete(folder: Path) -> bool:
    if not (folder / "config.json").exists():
        return False
    if (folder / WEIGHTS).exists():
        return True
    index = folder / INDEX
    return index.exists() and all((folder / name).exists() for name in set(_weight_map(index).values()))


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).exists() for name in _TOKENIZER_FILES)


def _weight_map(index: Path) -> dict[str, str]:
    """{tensor: file name} of an index. ValueError if it has none, or names a file outside its folder."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: has no weight_map, which says where each tensor is; fetch it again")
    for name in weight_map.values():
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".."):
            raise ValueError(f"{index}: {name!r} is not the name of a file in the same folder")
    return weight_map


def is_gguf(path: Path) -> bool:
    if not path.is_file():
        return False
    with open(path, "rb") as stream:
        return stream.read(4) == b"GGUF"


def _in_folder(folder: Path) -> Path:
    """The folder, or its one GGUF file without config.json; ValueError for several, or a pipe or device."""
    for file in (file for pattern in _READ_PATTERNS for file in folder.glob(pattern)):
        if file.is_dir() or not file.exists():
            continue
        try:
            require_plain(file, None if file.suffix in _WEIGHT_SUFFIXES else _MOST_BYTES)
        except OSError as error:
            raise ValueError(f"{folder}: {error}: replace it with the model's own file") from None
    if (folder / "config.json").exists() or not (files := sorted(folder.glob("*.gguf"))):
        return folder
    if len(files) > 1:
        raise ValueError(f"{folder}: several GGUF files; give one of {', '.join(file.name for file in files)}")
    return files[0]


def is_hub_name(text: str) -> bool:
    """Whether the hub can have a repository of this name."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+|[\w-]+", text):
        return False
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(text)
    except HFValidationError:
        return False
    return True


def resolve_folder(path: str | os.PathLike) -> Path:
    """The absolute folder or GGUF file of a model: a folder, a GGUF file itself or alone in its folder, or a hub name
    such as "org/model".

    A complete snapshot with a tokenizer in the cache is used without asking the hub; otherwise missing files are
    downloaded, but no pickles. If that fails, a snapshot that lacks only the tokenizer is used. Raises ValueError if
    there is none.
    """
    name = os.fspath(path)
    folder = Path(name).expanduser().absolute()  # it is read again after the user's functions, which may change folders
    if folder.is_dir():
        return _in_folder(folder)
    if is_gguf(folder):
        return folder
    if folder.is_file():
        raise ValueError(f"{name} is a file, and not GGUF; give the folder that holds config.json and the weights")
    if not is_hub_name(name):
        raise ValueError(f"{name}: there is no such folder (and it is not a hub name like org/model)")
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalEntryNotFoundError, XetDownloadError

    complete = None
    with contextlib.suppress(LocalEntryNotFoundError):
        cached = Path(snapshot_download(name, local_files_only=True))
        complete = cached if _complete(cached) else None
    if complete is not None and _has_tokenizer(complete):
        return complete
    try:  # also for a complete model without a tokenizer: transformers caches the model's files alone
        snapshot = Path(snapshot_download(name, allow_patterns=list(_HUB_PATTERNS)))
        if _complete(snapshot) or not constants.HF_HUB_OFFLINE:  # offline it returns an incomplete snapshot
            return snapshot
    except LocalEntryNotFoundError:
        pass
    except HfHubHTTPError as error:
        if complete is None:
            status = getattr(error.response, "status_code", "nothing")
            raise ValueError(
                f"{name}: the hub answered {status}; check the name; of a gated model, accept "
                "the licence on its page and log in (hf auth login)"
            ) from None
    except (HTTPError, XetDownloadError, ConnectionError, TimeoutError) as error:
        if complete is None:
            raise ValueError(
                f"{name}: the hub cannot be reached, or the download broke off ({type(error).__name__}: {error}); try "
                "again: what has arrived is kept"
            ) from None
    if complete is not None:
        return complete
    raise ValueError(
        f"{name}: no folder of that name, not complete in the local Hugging Face cache, and the hub cannot be reached; "
        "download it once while online, or give a folder"
    )


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model's folder, or the one that a GGUF file amounts to. Raises ValueError with a hint for a
    run's or adapter's folder.
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


def find_config(path: str | os.PathLike, published: bool = True) -> dict[str, Any]:
    """config.json of a model whose weights are not needed: of a folder, a GGUF or JSON file, a name in PUBLISHED, or a
    hub name, of which this one file is fetched. Raises ValueError if there is none.

    published: False: of a name in PUBLISHED, which has the text model alone, the file is fetched, too.
    """
    name = os.fspath(path)
    local = Path(name).expanduser()
    if local.exists():
        return read_config(_in_folder(local)) if local.is_dir() or is_gguf(local) else read_json(local)
    if published and name in PUBLISHED:
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
    """{name: entry} of every tensor in model.safetensors, or in the shards of the index. Rotary buffers of older
    transformers are left out. Raises ValueError for missing or damaged files, an index that contradicts them, or
    pickles, which can run code.
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
            shard_entries = headers.read_header(folder / name)
            twice = sorted(set(shard_entries) & set(entries))
            if twice:
                raise ValueError(
                    f"{twice[0]} is in two shards: {entries[twice[0]].file.name} and {name}; fetch them again"
                )
            entries |= shard_entries
        for tensor, name in weight_map.items():
            if tensor not in entries or entries[tensor].file.name != name:
                raise ValueError(f"{index}: says that {tensor} is in {name}, but it is not; fetch them again")
    else:
        pickles = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
        if pickles:
            raise ValueError(
                f"{folder}: its weights are a pickle ({pickles[0]}), which can run code when opened and is refused; "
                "convert it to safetensors (save_pretrained of transformers does)"
            )
        raise ValueError(f"{folder}: there is no {WEIGHTS} or {INDEX} in it; fetch its weights again")
    return {name: entry for name, entry in entries.items() if not _IGNORED.search(name)}


# ---- what comes with the weights


def read_generation_config(folder: Path) -> str | None:
    """The text of generation_config.json, unchanged, or None. Raises ValueError for bad JSON or eos_token_id."""
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
    return read_plain(file).decode()


def _token(key: str, value: Any) -> None:
    if not isinstance(value, str | dict):
        raise ValueError(f"{key} = {value!r}: must be a token's text, or an object with its content")


def _templates(key: str, value: Any) -> None:
    if isinstance(value, str):
        return
    values.items(key, value, values.mapping)
    for index, named in enumerate(value):
        for field in ("name", "template"):
            values.text(f"{key}[{index}].{field}", named.get(field))


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
    """Raises ValueError if a folder has no config.json or no tokenizer file; the files are not opened."""
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
    """The Hugging Face tokenizer of a folder, or None without its files. Code in the folder is never run. Raises
    ValueError for files that make no tokenizer.

    The first call imports transformers (seconds), and torch only if transformers uses it.
    """
    if (folder := _in_folder(folder)).is_file():
        return _of_gguf(folder)
    if not _has_tokenizer(folder):
        return None
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        file = folder / name
        settings = read_json(file) if file.exists() else {}
        for key, check in _TOKENIZER_CHECKS.items():
            if settings.get(key) is not None:
                check(f"{file}: {key}", settings[key])
    try:
        with transformers_import.without_torch() as transformers, timing.phase("files", "tokenizer"):
            config = _class_config(folder)
            with transformers_import.uncopied():
                tokenizer = transformers.AutoTokenizer.from_pretrained(folder, config=config, trust_remote_code=False)
            tokenizer("a")  # some faults appear only in use
            settings = folder / tokenizer_settings.NAME
            tokenizer_settings.remember(tokenizer, read_json(settings) if settings.exists() else {})
    except Exception as error:  # the tokenizers library raises bare Exceptions
        for name in ("tokenizer.json", "vocab.json", "added_tokens.json"):
            if (folder / name).exists():
                read_json(folder / name)  # says more; at each start the largest would take a fifth of a second
        message = " ".join(str(error).split())[:300]
        files = ", ".join(name for name in _TOKENIZER_FILES if (folder / name).exists())
        raise ValueError(
            f"{folder}: its tokenizer files ({files}) make no tokenizer: {type(error).__name__}: {message}; "
            "fetch them again, or name another folder (model.tokenizer)"
        ) from error
    return tokenizer


def _class_config(folder: Path) -> object:
    """What AutoTokenizer reads of config.json where tokenizer_config.json names the class; else None: the whole."""
    from transformers import PreTrainedConfig

    files = folder / "tokenizer_config.json", folder / "config.json"
    settings, config = (read_json(file) if file.exists() else {} for file in files)
    if not isinstance(settings.get("tokenizer_class"), str) or "auto_map" in {*settings, *config}:
        return None
    names = ("model_type", "model_name", "tokenizer_class")
    known = {name: config[name] for name in names if name in config}
    return PreTrainedConfig.from_dict({"name_or_path": str(folder), **known})


def _of_gguf(file: Path):
    from jaxtune.models.files import gguf_reading, gguf_tokens

    with transformers_import.without_torch(), transformers_import.uncopied():
        return gguf_tokens.tokenizer_of(str(file), gguf_reading.opened(file).fields)
