"""The sections `model` and `adapter`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import ConfigDict

from jaxtune.pallas.format_names import LOAD_IN
from jaxtune.train.config.checks import ConfigError, fraction, positive, require

_STRICT = ConfigDict(extra="forbid")
if TYPE_CHECKING:
    LoadIn = str
else:
    LoadIn = Literal[LOAD_IN]


@dataclass(frozen=True)
class ModelConfig:
    """Where the model comes from (`path` or `from_config`), its tokenizer, and the format of its frozen weights.

    A model from `from_config` has random weights: it needs `tokenizer` and cannot have `load_in`. Without `load_in`
    weights that the files store quantised stay so (MXFP4 is decoded), others are stored as `precision` says.
    """

    __pydantic_config__ = _STRICT

    path: Annotated[str | None, "Folder of a Hugging Face checkpoint, its hub name, or a GGUF file."] = None
    from_config: Annotated[str | None, "A config.json: random weights, for pretraining from scratch."] = None
    tokenizer: Annotated[str | None, "Folder of the tokenizer; default: the one beside the model."] = None
    load_in: Annotated[
        LoadIn | None,
        "The format of the layers' frozen weights, such as nf4 (four bits) or fp8 (eight); mxfp4: gpt-oss's experts as "
        "they are published, the rest in 16 bits; null: 16 bits (fp32: 32).",
    ] = None
    compute: Annotated[
        Literal["fp8"] | None,
        "fp8: weights in FP8 multiply as they are stored; null: in the precision of the run.",
    ] = None

    rope_scaling: Annotated[
        dict[str, int | float | str | bool | list[float]] | None,
        "In place of config.json's, for documents longer than the model's positions: {rope_type: yarn, factor: 4.0}; "
        "saved with the model.",
    ] = None
    max_position_embeddings: Annotated[
        int | None, "Positions in place of config.json's; null: what rope_scaling makes of them."
    ] = None
    pictures: Annotated[
        bool | None, "Load the tower too, so that rows may have pictures; null: if data.train or data.eval has any."
    ] = None
    tower: Annotated[
        Literal["frozen", "merger", "layers", "all"] | None,
        "What of the tower trains, by the adapter if there is one; layers: all but the merger; null: nothing, of "
        "random weights all.",
    ] = None

    @property
    def positions(self) -> dict[str, Any]:
        """The keys that replace config.json's, where they are set."""
        values = {"rope_scaling": self.rope_scaling, "max_position_embeddings": self.max_position_embeddings}
        return {key: value for key, value in values.items() if value is not None}

    def __post_init__(self) -> None:
        require(
            self.from_config is None or not self.positions,
            "model.rope_scaling",
            self.rope_scaling,
            "with model.from_config, write it and max_position_embeddings into that config.json",
        )
        if self.max_position_embeddings is not None:
            positive("model.max_position_embeddings", self.max_position_embeddings)
        require(
            self.tower is None or self.pictures is not False,
            "model.tower",
            self.tower,
            "model.pictures = false loads no tower: leave one of them out",
        )
        if self.path is not None and self.from_config is not None:
            raise ConfigError("model.path and model.from_config are both set: keep one")
        if self.path is None and self.from_config is None:
            raise ConfigError("model.path is missing: set it to a model folder or hub name (or model.from_config)")
        if self.from_config is not None:
            require(self.tokenizer is not None, "model.tokenizer", None, "model.from_config needs a tokenizer folder")
            require(
                self.load_in is None, "model.load_in", self.load_in, "a model from scratch is not quantised; remove it"
            )


@dataclass(frozen=True)
class AdapterConfig:
    """A LoRA adapter, with the names and meanings of PEFT's LoraConfig. With `path` training starts from a saved
    adapter, and no other key may differ from its default.
    """

    __pydantic_config__ = _STRICT

    r: Annotated[int, "Rank."] = 16
    lora_alpha: Annotated[float, "Scale: the update is multiplied by lora_alpha / r."] = 16
    target_modules: Annotated[
        str | tuple[str, ...], "'all-linear', a list of module names, or a regular expression on full names."
    ] = "all-linear"
    target_parameters: Annotated[
        tuple[str, ...] | None, "Experts' matrices with an adapter each, e.g. [mlp.experts.gate_up_proj]."
    ] = None
    lora_dropout: Annotated[float, "Dropout on the adapter's input."] = 0.0
    use_rslora: Annotated[bool, "Scale by lora_alpha / sqrt(r) instead."] = False
    use_dora: Annotated[bool, "Train a magnitude per output beside the direction (DoRA)."] = False
    modules_to_save: Annotated[tuple[str, ...] | None, "Modules trained in full and saved, e.g. [lm_head]."] = None
    rank_pattern: Annotated[dict[str, int] | None, "Ranks of single modules: name or pattern to r."] = None
    alpha_pattern: Annotated[dict[str, float] | None, "Alphas of single modules: name or pattern to alpha."] = None
    path: Annotated[str | None, "Start from this PEFT adapter folder, with the settings it holds."] = None

    def __post_init__(self) -> None:
        positive("adapter.r", self.r)
        positive("adapter.lora_alpha", self.lora_alpha)
        fraction("adapter.lora_dropout", self.lora_dropout, below_one=True)
        require(
            len(self.target_modules) > 0 or bool(self.target_parameters),
            "adapter.target_modules",
            self.target_modules,
            "name at least one module",
        )
        for name, rank in (self.rank_pattern or {}).items():
            positive(f"adapter.rank_pattern.{name}", rank)
        for name, alpha in (self.alpha_pattern or {}).items():
            positive(f"adapter.alpha_pattern.{name}", alpha)
        if self.path is not None:
            for setting in dataclasses.fields(self):
                value = getattr(self, setting.name)
                changed = setting.name != "path" and value != setting.default
                require(
                    not changed, f"adapter.{setting.name}", value, "adapter.path brings its own settings; remove it"
                )

    @property
    def settings(self) -> dict[str, Any]:
        """Keyword arguments of `get_peft_model`: every key but `path`, with which they are only defaults."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "path"}
