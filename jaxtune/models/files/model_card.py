"""A model's card, README.md with the fields by which the hub lists it, and the record of what made its folder. A card
that a user wrote, or changed, stays.
"""

from __future__ import annotations

import datetime
import json
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

from jaxtune.models.files.model_folder import is_hub_name, read_json
from jaxtune.system.files import atomic_write
from jaxtune.system.sealed import crc32
from jaxtune.system.version import __version__

NAME = "README.md"
RECORD = "jaxtune_run.json"
_OURS = re.compile(r"\n<!-- jaxtune ([0-9a-f]{8}) -->\n$")
# {the word of an export: (library, how it comes from its base)}; of all others transformers and "quantized".
_KINDS = {
    "adapter": ("peft", "adapter"),
    "gguf-adapter": ("gguf", "adapter"),
    "gguf": ("gguf", "quantized"),
    "merged": ("transformers", "finetune"),
}


class Facts(TypedDict):
    """What a card says of a training."""

    base: str  # a folder or hub name; "": not known
    tags: list[str]
    datasets: list[str]  # as the config names them
    figures: dict[str, str | int | float]


def made() -> dict[str, str]:
    """What made a folder: version, devices, command and date."""
    import jax

    devices = jax.devices()
    return {
        "jaxtune": __version__,
        "jax": jax.__version__,
        "devices": f"{len(devices)} x {devices[0].device_kind}",
        "command": shlex.join(sys.argv),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def of_folder(folder: Path) -> Facts:
    """What is known of a folder's training, by the record that a run or an export left in it, or its adapter's base."""
    facts = Facts(base="", tags=[], datasets=[], figures={})
    if (folder / "adapter_config.json").is_file():
        facts["base"] = str(read_json(folder / "adapter_config.json").get("base_model_name_or_path") or "")
    said = read_json(folder / RECORD).get("card") if (folder / RECORD).is_file() else None
    if isinstance(said, Mapping) and Facts.__required_keys__ <= said.keys():
        return Facts(**{key: said[key] for key in Facts.__required_keys__})
    return facts


def is_ours(text: str) -> bool:
    """Whether a card is as it was written here."""
    mark = _OURS.search(text)
    return mark is not None and mark[1] == _digest(text[: mark.start()])


def write(folder: Path, facts: Facts, kind: str, title: str = "") -> None:
    """Writes the card of a folder unless it has one of a user. kind: the word of the export. title: "": the folder's
    name.
    """
    file = folder / NAME
    if not file.exists() or is_ours(file.read_text(encoding="utf-8", errors="replace")):
        text = _text(title or folder.name, facts, kind)
        atomic_write(file, f"{text}\n<!-- jaxtune {_digest(text)} -->\n", durable=False)


def _digest(text: str) -> str:
    return f"{crc32([text.encode()]):08x}"


def _text(title: str, facts: Facts, kind: str) -> str:
    library, relation = _KINDS.get(kind, ("transformers", "quantized"))
    fields: dict[str, object] = {"library_name": library, "tags": ["jaxtune", *facts["tags"]]}
    if _on_hub(facts["base"]):
        fields = {"base_model": facts["base"], "base_model_relation": relation} | fields
    if datasets := [name for name in map(_dataset, facts["datasets"]) if name]:
        fields["datasets"] = datasets
    lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in fields.items()), "---", f"# {title}", ""]
    base = facts["base"] if _on_hub(facts["base"]) else Path(facts["base"]).name  # other machines have no such folder
    base = f" of {base}" if base else ""
    lines += [f"{kind.capitalize()}{base}, made with jaxtune {__version__}.", ""]
    if figures := facts["figures"]:
        lines += ["| | |", "|---|---|", *(f"| {_cell(name)} | {_cell(value)} |" for name, value in figures.items())]
    return "\n".join(lines).rstrip() + "\n"


def _cell(value: str | int | float) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value).replace("|", "\\|").replace("\n", " ")


def _on_hub(name: str) -> bool:
    return "/" in name and not Path(name).expanduser().exists() and is_hub_name(name)


def _dataset(name: str) -> str:
    """A data set's name on the hub, without configuration and split; "" for a file."""
    name = name.partition(":")[0]
    return name if _on_hub(name) else ""
