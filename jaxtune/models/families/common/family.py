"""A family of models as one declaration: its config.json, and the parts of layers and names of tensors where they
differ from Llama's.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping

from jaxtune.models.config import PRE_NORM, DecoderConfig, Stage
from jaxtune.models.families.common.key import Config, Entry, Fields, Key, completed, require_allowed
from jaxtune.models.families.common.names import LLAMA_NORMS, ExpertFiles
from jaxtune.models.families.common.rope import PARTIAL_ROTARY
from jaxtune.models.families.common.table import COMMON, REFUSED, REFUSED_WITHOUT_EXPERTS, WRITTEN
from jaxtune.models.vision.tower import TowerConfig


@dataclasses.dataclass(frozen=True, eq=False)
class Family:
    """A family of models: its keys of config.json beside those that all have (table.COMMON), and what differs from
    Llama.
    """

    model_type: str
    architecture: str
    """transformers' class for the language model, such as "LlamaForCausalLM"."""
    keys: tuple[Entry, ...] = ()
    """Entries beside the common ones; one with a common entry's field or name replaces it."""
    defaults: Config = dataclasses.field(default_factory=dict)
    """{key: default} where it differs from the declared one."""
    fields: Config = dataclasses.field(default_factory=dict)
    """{field of DecoderConfig: its value in all models, or a function of the prepared config.json}; replaces a common
    entry.
    """
    written: Config = dataclasses.field(default_factory=dict)
    """{key: value} that is written and never read."""
    refused: tuple[str, ...] = ()
    """Keys that are refused unless they are null, false, zero or empty."""
    prepare: Callable[[Config], Config] = dict
    """Rewrites a checked and completed config.json whose keys have another sense than Llama's."""
    stages: tuple[Stage, ...] = PRE_NORM
    """The stages of every layer that no later entry changes."""
    norms: Mapping[str, str] = dataclasses.field(default_factory=lambda: LLAMA_NORMS)
    """{attribute of a Block that is a norm: its name in checkpoints}; "router" names the router within the experts, and
    "norm" the decoder's, if it is not that.
    """
    expert_files: ExpertFiles | None = None
    """Experts' names in checkpoints with one linear for each expert and matrix; None: one tensor has all experts of a
    layer.
    """
    text_of: tuple[str, ...] = ()
    """model_types of multimodal models with a text part of this family; of two families the registry's first is the
    default.
    """
    passthrough_tensors: tuple[str, ...] = ()
    """Prefixes of tensors that are not loaded, but saved again."""
    unused_tensors: Callable[[DecoderConfig], tuple[str, ...]] = lambda config: ()
    """Prefixes of tensors that published checkpoints have although the model does not use them."""
    tower: Callable[[Config], TowerConfig] | None = None
    """Reads the tower of a whole model's config.json; None: pictures are not supported."""
    text_alone: bool = False
    """Whether AutoModelForCausalLM builds the text model alone for a multimodal folder; adapters'
    names follow from it.
    """

    @functools.cached_property
    def entries(self) -> tuple[Entry, ...]:
        """The common entries that the family does not replace, then its own; they read and write in this order."""
        own_fields = {field for entry in self.keys for field in entry.gives} | {*self.fields}
        names = {entry.name for entry in self.keys if isinstance(entry, Key)}

        def stays(entry: Entry) -> bool:
            return not own_fields & {*entry.gives} and not (isinstance(entry, Key) and entry.name in names)

        return (*filter(stays, COMMON), *self.keys)

    @functools.cached_property
    def declared(self) -> tuple[Key, ...]:
        return tuple(key for entry in self.entries for key in entry.keys)

    def from_hf(self, hf: Config) -> DecoderConfig:
        """The DecoderConfig, with a language model's head, of a config.json as transformers 4 or 5 writes it. Raises
        ValueError for a value or feature that is not supported, or a missing key without a default.
        """
        require_allowed(hf, self.declared)
        experts = any("moe" in entry.gives for entry in self.entries)
        declared_names = {key.name for key in self.declared}
        for key in (*REFUSED, *(() if experts else REFUSED_WITHOUT_EXPERTS), *self.refused):
            if hf.get(key) and key not in declared_names:
                raise ValueError(f"config.json: {key} = {hf[key]!r} is not supported (model_type {self.model_type!r})")
        hf = self.prepare(completed(hf, self.declared, self.defaults))
        fields: Fields = {}
        for name, value in self.fields.items():
            fields[name] = value(hf) if callable(value) else value
        for entry in self.entries:
            fields |= entry.read(hf, fields)
            if "layers" in entry.gives:
                fields["layers"] = tuple(dataclasses.replace(layer, stages=self.stages) for layer in fields["layers"])
        fields.setdefault("attention_scale", fields["head_dim"] ** -0.5)
        config = DecoderConfig(**fields)
        self._require_whole_heads(config)
        return config

    def to_hf(self, config: DecoderConfig) -> Fields:
        """The config.json with which transformers 4 and 5 load a model of this config, without dtype and quantisation,
        and with null for special tokens. Raises ValueError for what an entry cannot write; fields that no entry writes
        are not checked.
        """
        self._require_whole_heads(config)
        hf: Fields = {"architectures": [config.head.architecture_of(self.architecture)]}
        for entry in self.entries:
            hf |= entry.write(config)
        return hf | WRITTEN | dict(self.written) | config.head.hf_config()

    def _require_whole_heads(self, config: DecoderConfig) -> None:
        """ValueError for a partly rotated head where transformers' class ignores the factor."""
        if PARTIAL_ROTARY in self.entries:
            return
        for rope in config.rotary:
            if rope.partial_rotary_factor != 1 and rope.kind != "proportional":
                raise ValueError(
                    f"config.json: partial_rotary_factor = {rope.partial_rotary_factor} is not supported (model_type "
                    f"{self.model_type!r}): transformers rotates whole heads in such a model; set 1, or take it out"
                )
