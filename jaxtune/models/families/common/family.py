"""A family of models as one declaration (`Family`), by which its config.json is checked, read and written, with the
parts of its layers and the names of its tensors where they differ from Llama's."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping

from jaxtune.models.config import PRE_NORM, DecoderConfig, Stage
from jaxtune.models.families.common.key import Config, Entry, Fields, Key, checked, completed
from jaxtune.models.families.common.names import LLAMA_NORMS, ExpertFiles
from jaxtune.models.families.common.rope import PARTIAL_ROTARY
from jaxtune.models.families.common.table import COMMON, REFUSED, REFUSED_WITHOUT_EXPERTS, WRITTEN


@dataclasses.dataclass(frozen=True, eq=False)
class Family:
    """A family of models, declared by its keys of config.json beside those that all families have (table.COMMON), and
    by its parts of layers and names of tensors where they differ from Llama's. Each file of models/families makes one,
    its FAMILY, which is never changed. `from_hf` reads a config.json, and `to_hf` writes one."""

    model_type: str
    """The value of model_type in config.json."""
    architecture: str
    """The class of transformers for the family's language model, such as "LlamaForCausalLM". to_hf writes it to
    config.json, or for a model with another head the name that Head.architecture_of makes of it."""
    keys: tuple[Entry, ...] = ()
    """Entries in addition to the common ones. One with the field or the name of a common entry replaces it."""
    defaults: Config = dataclasses.field(default_factory=dict)
    """{key: its default in this family} for keys whose default differs from the declared one."""
    fields: Config = dataclasses.field(default_factory=dict)
    """{field of DecoderConfig: its value in all models of the family, or a function of the config.json that `prepare`
    returned}. A common entry that sets such a field is left out."""
    written: Config = dataclasses.field(default_factory=dict)
    """{key: value} that is written to config.json and never read."""
    refused: tuple[str, ...] = ()
    """Keys of unsupported features that no entry reads. A config.json in which one of them is not null, false, zero or
    empty is refused."""
    prepare: Callable[[Config], Config] = dict
    """Rewrites a config.json for families whose files use keys in another sense than Llama's; by default it changes
    nothing. from_hf calls it after the checks, when all keys have values, and before the entries read them."""
    stages: tuple[Stage, ...] = PRE_NORM
    """The parts of a layer and their norms, in every layer that no later entry changes."""
    norms: Mapping[str, str] = dataclasses.field(default_factory=lambda: LLAMA_NORMS)
    """{attribute of a Block that is a norm: its name in the family's checkpoints}. The key "router", if it is there,
    gives the name of the router within the experts' module, which is otherwise "router"."""
    expert_files: ExpertFiles | None = None
    """The names of experts in the family's checkpoints if these have one linear for each expert and matrix, at least of
    quantised experts (quantised_only); None: they store the matrices of all experts of a layer in one tensor, or the
    family has no experts."""
    text_of: tuple[str, ...] = ()
    """The model_types of multimodal models whose text part (`text_config`) is a model of this family. If two families
    have the same one, a text_config without model_type stands for the first of them in the registry."""
    passthrough_tensors: tuple[str, ...] = ()
    """Prefixes of the names of passthrough tensors, which are not loaded but saved again with the model."""
    unused_tensors: Callable[[DecoderConfig], tuple[str, ...]] = lambda config: ()
    """Prefixes of the names of tensors that published checkpoints of such a model have although it does not use them;
    they are neither loaded nor saved."""
    text_alone: bool = False
    """What AutoModelForCausalLM of transformers builds for a folder of a multimodal model (`text_of`): True: only its
    text model; False: the whole model. registry.is_nested reads it, because the names in an adapter's files are those
    of that model."""

    @functools.cached_property
    def entries(self) -> tuple[Entry, ...]:
        """All entries of the family, each an object (key.Entry) that translates some keys of config.json to fields of
        DecoderConfig and back: the common ones that it does not replace, by an entry with the same field or name or by
        a value in `fields`, and then its own. They read and write in this order."""
        given = {field for entry in self.keys for field in entry.gives} | {*self.fields}
        names = {entry.name for entry in self.keys if isinstance(entry, Key)}

        def stays(entry: Entry) -> bool:
            """Whether a common entry stays: the family sets none of its fields, and has no Key of its name."""
            return not given & {*entry.gives} and not (isinstance(entry, Key) and entry.name in names)

        return (*filter(stays, COMMON), *self.keys)

    @functools.cached_property
    def declared(self) -> tuple[Key, ...]:
        """All keys that the family's entries read. `from_hf` checks them and fills in their defaults before any entry
        reads the config.json."""
        return tuple(key for entry in self.entries for key in entry.keys)

    def from_hf(self, hf: Config) -> DecoderConfig:
        """The DecoderConfig of a parsed config.json, as transformers 4 or 5 writes it. registry.config_from_hf calls
        it, and sets the head afterwards. hf: the config.json of a text model of the family, which is not changed; keys
        that it lacks get the family's defaults.

        Raises:
          ValueError: a value that its key does not allow; a missing key without a default; values that do not fit each
            other; or an unsupported feature, such as a key in `refused` or table.REFUSED (in a family without experts
            also in REFUSED_WITHOUT_EXPERTS) that no entry of the family reads and whose value is not null, false, zero
            or empty.
        """
        checked(hf, self.declared)
        experts = any("moe" in entry.gives for entry in self.entries)
        own = {key.name for key in self.declared}
        for key in (*REFUSED, *(() if experts else REFUSED_WITHOUT_EXPERTS), *self.refused):
            if hf.get(key) and key not in own:
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
        config = DecoderConfig(**fields)
        self._require_whole_heads(config)
        return config

    def to_hf(self, config: DecoderConfig) -> Fields:
        """The config.json, {key: value}, with which transformers 4 and 5, where they have the family, load a model with
        this DecoderConfig. models/hf.py calls it for every model that is saved. If the config.json that the model came
        from still describes it, that is written instead, with the architectures of this one. What belongs to the
        weights (dtype, quantisation) is not in it, and the ids of special tokens are None; models/hf.py adds these.

        Raises:
          ValueError: a value that an entry of the family cannot write, such as a layer of no type that the family has.
            Fields that no entry writes, because all models of the family have the same value, are not checked.
        """
        self._require_whole_heads(config)
        hf: Fields = {"architectures": [config.head.architecture_of(self.architecture)]}
        for entry in self.entries:
            hf |= entry.write(config)
        return hf | WRITTEN | dict(self.written) | config.head.hf_config()

    def _require_whole_heads(self, config: DecoderConfig) -> None:
        """Raises ValueError if a rotary base of `config` rotates only a part of each head, and transformers' class of
        the family cannot do that (PARTIAL_ROTARY is not among `entries`): it would ignore the factor and compute
        something else. from_hf and to_hf call it. Bases of the kind "proportional" are not checked, because every class
        reads their factor among the rotary parameters."""
        if PARTIAL_ROTARY in self.entries:
            return
        for rope in config.rotary:
            if rope.partial_rotary_factor != 1 and rope.kind != "proportional":
                raise ValueError(
                    f"config.json: partial_rotary_factor = {rope.partial_rotary_factor} is not supported (model_type "
                    f"{self.model_type!r}): transformers rotates whole heads in such a model; set 1, or take it out"
                )
