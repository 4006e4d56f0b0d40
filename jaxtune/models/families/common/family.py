"""A family of models: one declaration, from which its config.json is checked, read and written."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping

from jaxtune.models.config import PRE_NORM, DecoderConfig, Stage
from jaxtune.models.families.common.key import Config, Entry, Fields, Key, checked, completed
from jaxtune.models.families.common.names import LLAMA_NORMS, ExpertFiles
from jaxtune.models.families.common.table import COMMON, REFUSED, REFUSED_WITHOUT_EXPERTS, WRITTEN


@dataclasses.dataclass(frozen=True, eq=False)
class Family:
    """What a family's models have that Llama's have not. Keys that all families have are in table.py."""

    model_type: str
    architecture: str
    """The class of transformers that loads the model."""
    keys: tuple[Entry, ...] = ()
    """Keys beside the common ones. One that gives the same field as a common one, or has its name, replaces it."""
    defaults: Config = dataclasses.field(default_factory=dict)
    """{key: its default in this family}, where that is not the declared one."""
    fields: Config = dataclasses.field(default_factory=dict)
    """{field of DecoderConfig: its value in all models of the family, or a function of the config.json}"""
    written: Config = dataclasses.field(default_factory=dict)
    """{key that is only written: its value}"""
    refused: tuple[str, ...] = ()
    """Keys of features that are not supported: a file in which one is set is refused."""
    prepare: Callable[[Config], Config] = dict
    """Rewrites a config.json whose keys all have values, where files of the family mean something else by them."""
    stages: tuple[Stage, ...] = PRE_NORM
    """What a layer is made of."""
    norms: Mapping[str, str] = dataclasses.field(default_factory=lambda: LLAMA_NORMS)
    """{a Block's norm, or router: its name in the checkpoint}"""
    expert_files: ExpertFiles | None = None
    """How checkpoints name the experts, where they hold a linear for each expert and matrix."""
    text_of: tuple[str, ...] = ()
    """model_type of models with more than text, of which this family is the text part (`text_config`). Where two
    families have the same one, the first in the registry is meant by a text_config without model_type."""
    passthrough_tensors: tuple[str, ...] = ()
    """Prefixes of the names of tensors that are not loaded but saved again with the model."""

    @functools.cached_property
    def entries(self) -> tuple[Entry, ...]:
        """The whole table: the common entries that the family does not replace, and its own."""
        given = {field for entry in self.keys for field in entry.gives} | {*self.fields}
        names = {entry.name for entry in self.keys if isinstance(entry, Key)}

        def stays(entry: Entry) -> bool:
            return not given & {*entry.gives} and not (isinstance(entry, Key) and entry.name in names)

        return (*filter(stays, COMMON), *self.keys)

    @functools.cached_property
    def declared(self) -> tuple[Key, ...]:
        return tuple(key for entry in self.entries for key in entry.keys)

    def from_hf(self, hf: Config) -> DecoderConfig:
        """The DecoderConfig of a parsed config.json, in the spelling of transformers 4 or 5.

        Raises:
          ValueError: a value that its key cannot hold, a key that is missing, or a feature that is not supported.
        """
        checked(hf, self.declared)
        experts = any("moe" in entry.gives for entry in self.entries)
        for key in (*REFUSED, *(() if experts else REFUSED_WITHOUT_EXPERTS), *self.refused):
            if hf.get(key):
                raise ValueError(f"config.json: {key} = {hf[key]!r} is not supported (model_type {self.model_type!r})")
        hf = self.prepare(completed(hf, self.declared, self.defaults))
        fields: Fields = {}
        for name, value in self.fields.items():
            fields[name] = value(hf) if callable(value) else value
        for entry in self.entries:
            fields |= entry.read(hf, fields)
            if "layers" in entry.gives:
                fields["layers"] = tuple(dataclasses.replace(one, stages=self.stages) for one in fields["layers"])
        fields.setdefault("attention_scale", fields["head_dim"] ** -0.5)
        return DecoderConfig(**fields)

    def to_hf(self, config: DecoderConfig) -> Fields:
        """The config.json that transformers 4 and 5 need to load the model.

        Raises:
          ValueError: a feature of the DecoderConfig that no config.json of this family can say.
        """
        hf: Fields = {"architectures": [config.head.architecture_of(self.architecture)]}
        for entry in self.entries:
            hf |= entry.write(config)
        return hf | WRITTEN | dict(self.written) | config.head.hf_config()
