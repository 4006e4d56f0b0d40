"""The defaults of the configs, by the library whose script it is."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import yaml

from jaxtune import convert

Library = Literal["transformers", "TRL", "Unsloth"]
_WHEELS = {"transformers": "transformers", "TRL": "trl", "Unsloth": "unsloth"}


@functools.cache
def _schema(name: str) -> dict[str, dict[str, dict[str, object]]]:
    path = Path(convert.__file__).with_name("schemas") / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))


@functools.cache
def _here() -> dict[str, dict[str, object]]:
    return yaml.safe_load(Path(__file__).with_name("defaults.yaml").read_text(encoding="utf-8"))


@functools.cache
def defaults(library: Library, section: str) -> Mapping[str, object]:
    """{argument: default} of the config `section` ("sft", "dpo", "training_arguments", ...)."""
    keys = {**_schema("trl_scripts")["keys"], **_schema("trl")["keys"]}[section]
    values = {**keys, **{name: value for name, value in _here()["computed"].items() if keys.get(name, 0) is None}}
    values |= {name: value for name, value in _here()["of_the_model"].items() if name in keys}
    if library == "TRL":
        values |= _here()["trl"]
    if library == "Unsloth":
        replaced = _schema("unsloth")["keys"]
        for replacements in (replaced[""], replaced.get(section, {})):
            # None marks an argument that the script does not give.
            values |= {name: value for name, value in replacements.items() if name in keys and value is not None}
        values |= {name: value for name, value in _here()["unsloth"].items() if name in keys}
    return values


def version(library: Library) -> str:
    """The release with these defaults, such as "TRL 1.16.0"."""
    schema = _schema("unsloth" if library == "Unsloth" else "trl")
    return f"{library} {schema['versions'][_WHEELS[library]]}"
