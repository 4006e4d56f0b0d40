"""transformers' names for scripts that import them, and models that are loaded as its from_pretrained does."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtune.compat.arguments import report_idle, settle
from jaxtune.compat.model import CompatModel, FastLanguageModel
from jaxtune.compat.settings import SFTConfig
from jaxtune.compat.tables import AUTO, BITS_AND_BYTES
from jaxtune.compat.texts import without_torch
from jaxtune.models.adapters.adapter_config import base_of
from jaxtune.models.adapters.named import local_adapter
from jaxtune.models.files.model_folder import is_gguf, load_tokenizer, read_config, resolve_folder
from jaxtune.models.heads import SCORE
from jaxtune.models.registry import text_config
from jaxtune.models.reward import with_head

# The arguments of transformers' BitsAndBytesConfig that are followed here.
_FOLLOWED = ("load_in_8bit", "load_in_4bit", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant")
_FOLLOWED += ("bnb_4bit_compute_dtype",)


class BitsAndBytesConfig:
    """transformers' quantization_config, for eight or four bits; its own class is accepted too.

    Args:
      load_in_4bit: always NF4 with double quantisation.
      bnb_4bit_compute_dtype: unless from_pretrained gets a dtype; None: bfloat16, or an adapter folder's.
      bnb_4bit_quant_type: "nf4" or None, which is NF4 here and FP4 in transformers.
      bnb_4bit_use_double_quant: has no effect.
    """

    def __init__(
        self,
        load_in_8bit: bool = False,
        load_in_4bit: bool = False,
        bnb_4bit_compute_dtype: object = None,
        bnb_4bit_quant_type: str | None = None,
        bnb_4bit_use_double_quant: bool | None = None,
        **others: object,
    ):
        where = "BitsAndBytesConfig"
        settle(where, others, BITS_AND_BYTES, BitsAndBytesConfig.__init__)
        if load_in_8bit and load_in_4bit:
            raise ValueError(f"{where}: load_in_8bit = True and load_in_4bit = True contradict each other: drop one")
        if load_in_4bit and bnb_4bit_quant_type not in (None, "nf4"):
            raise ValueError(
                f"{where}: bnb_4bit_quant_type = {bnb_4bit_quant_type!r} is not supported. Instead: 'nf4', which is "
                "closer to the 16-bit weights"
            )
        if load_in_4bit and bnb_4bit_quant_type is None:
            report_idle(
                where,
                "bnb_4bit_quant_type",
                "fp4, which bitsandbytes takes without it, is not here; NF4 is",
            )
        if load_in_4bit and not bnb_4bit_use_double_quant:
            report_idle(where, "bnb_4bit_use_double_quant", "NF4 always has double quantisation")
        self.load_in_8bit, self.load_in_4bit = load_in_8bit, load_in_4bit
        self.bnb_4bit_compute_dtype = bnb_4bit_compute_dtype


def quantization_arguments(config: object) -> dict[str, Any]:
    """A quantization_config (None, either class or a dict) as arguments of FastLanguageModel.from_pretrained;
    ValueError for FP4, the default of transformers' class.
    """
    if config is None:
        return {"load_in_4bit": False}
    if not isinstance(config, BitsAndBytesConfig):
        if not isinstance(config, Mapping):
            if type(config).__name__ != "BitsAndBytesConfig":
                raise ValueError(
                    f"quantization_config is a {type(config).__name__}; only BitsAndBytesConfig is supported"
                )
            config = {name.lstrip("_"): value for name, value in vars(config).items()}
        config = BitsAndBytesConfig(**{name: config[name] for name in _FOLLOWED if name in config})
    if config.load_in_8bit:
        return {"load_in_4bit": False, "load_in_8bit": True}
    if not config.load_in_4bit:
        return {"load_in_4bit": False}
    return {"load_in_4bit": True, "dtype": config.bnb_4bit_compute_dtype}


def plain_arguments(
    where: str,
    quantization_config: object = None,
    dtype: object = None,
    torch_dtype: object = None,
    num_labels: int | None = None,
    load_in_8bit: bool = False,
    load_in_4bit: bool = False,
    load_in_fp8: bool | str = False,
    rope_scaling: Mapping[str, object] | None = None,
    pictures: bool = False,
    **others: Any,
) -> dict[str, Any]:
    """Arguments of transformers' from_pretrained as those of FastLanguageModel.from_pretrained.

    where: the called function, for messages.
    dtype: replaces quantization_config's compute dtype; "auto" is None.
    torch_dtype: the older name of dtype.
    num_labels, load_in_fp8, rope_scaling: as in FastLanguageModel.from_pretrained.
    pictures: load the tower, too.
    load_in_8bit, load_in_4bit: as in transformers 4, instead of quantization_config; `others` may then have
      BitsAndBytesConfig's arguments.
    """
    if load_in_8bit or load_in_4bit:
        flag = "load_in_8bit" if load_in_8bit else "load_in_4bit"
        if quantization_config is not None:
            raise ValueError(f"{where}: {flag} = True and quantization_config are both given: drop {flag}")
        quantization_config = {"load_in_8bit": load_in_8bit, "load_in_4bit": load_in_4bit}
        quantization_config |= {name: others.pop(name) for name in _FOLLOWED if name in others}
    settle(where, others, AUTO, plain_arguments)
    loading = quantization_arguments(quantization_config)
    dtype = torch_dtype if dtype is None else dtype
    loading["dtype"] = loading.get("dtype") if dtype in (None, "auto") else dtype
    return loading | {
        "num_labels": num_labels,
        "load_in_fp8": load_in_fp8,
        "rope_scaling": rope_scaling,
        "pictures": pictures,
    }


def load_plain(
    where: str,
    name: str | os.PathLike,
    random_state: int,
    full: bool,
    arguments: Mapping[str, Any],
) -> CompatModel:
    """Loads a model as transformers' from_pretrained does: in the given dtype, else that of its files (an adapter's
    base: the recorded one), quantised only if `arguments` says so. Positions stay those of its config.

      where: the called function, for messages.
      name: a folder or hub name, or the local folder of an adapter.
      full: whether all weights train, unless they are quantised; False for an adapter's folder.
      arguments: as in plain_arguments.
    """
    loading = plain_arguments(where, **arguments)
    full = full and not any(loading.get(flag) for flag in ("load_in_4bit", "load_in_8bit", "load_in_fp8"))
    if loading["dtype"] is None and base_of(name) is None:
        loading["dtype"] = _dtype_of_files(name)
    model, _ = FastLanguageModel.from_pretrained(
        os.fspath(name), None, full_finetuning=full, random_state=random_state, **loading
    )
    model.fast = False
    return model


def _quantised(folder: Path) -> bool:
    """Whether a model's weights are stored in few bits, or in a GGUF file."""
    return is_gguf(folder) or read_config(folder).get("quantization_config") is not None


def _dtype_of_files(name: str | os.PathLike) -> str | None:
    """The dtype that config.json names, as transformers takes it; None without one, or for quantised weights."""
    folder = resolve_folder(os.fspath(name))
    if _quantised(folder):
        return None
    config = read_config(folder)
    names = [fields.get(key) for fields in (config, text_config(config)) for key in ("dtype", "torch_dtype")]
    return next((name for name in names if name in ("bfloat16", "float16", "float32")), None)


def with_dtype(name: str | os.PathLike, arguments: Mapping[str, object] | None) -> dict[str, object]:
    """from_pretrained's arguments for a model that a trainer loads by name: float32 without a dtype, as in TRL, unless
    its weights are quantised.
    """
    loading = dict(arguments or {})
    asked = ("dtype", "torch_dtype", "quantization_config", "load_in_4bit", "load_in_8bit", "load_in_fp8")
    if base_of(name) is not None or any(loading.get(key) not in (None, False) for key in asked):
        return loading
    return loading if _quantised(resolve_folder(os.fspath(name))) else loading | {"dtype": "float32"}


def load_named(name: str, args: SFTConfig, full: bool, pictures: bool = False) -> CompatModel:
    """Loads a model that a trainer got by name, in float32 unless its config says otherwise; ValueError for an
    adapter's folder.

    full: whether all weights train, unless they are quantised.
    args: the trainer's, with seed and what concerns loading.
    """
    if base_of(name) is not None:
        raise ValueError(
            f"model = {name!r} is an adapter's folder, and a trainer loads no adapter by its name. Instead: "
            f"model=AutoPeftModelForCausalLM.from_pretrained({name!r}), without peft_config, which trains it further"
        )
    arguments = {**with_dtype(name, args.model_init_kwargs), **({"pictures": True} if pictures else {})}
    return load_plain("SFTConfig.model_init_kwargs", name, args.seed, full, arguments)


class AutoModelForCausalLM:
    """transformers' class."""

    @staticmethod
    def from_pretrained(pretrained_model_name_or_path: str | os.PathLike, **arguments: object) -> CompatModel:
        """The model of a folder or hub name, in the given dtype, else that of its files. All weights train;
        quantised ones need an adapter. For an adapter's folder its base is loaded, in the recorded dtype, and the
        adapter alone trains.

          arguments: as in plain_arguments.
        """
        where = "AutoModelForCausalLM.from_pretrained"
        path = local_adapter(pretrained_model_name_or_path)
        full = not (Path(path).expanduser() / "adapter_config.json").exists()
        return load_plain(where, path, 3407, full, arguments)


class AutoModelForSequenceClassification:
    """transformers' class for a reward model."""

    @staticmethod
    def from_pretrained(
        pretrained_model_name_or_path: str | os.PathLike, num_labels: int | None = None, **arguments: object
    ) -> CompatModel:
        """AutoModelForCausalLM.from_pretrained with a head of num_labels numbers for a text; None: as many as
        config.json has labels, else 2, as in transformers. With 1 it is a reward model, which RewardTrainer trains.
        """
        path = pretrained_model_name_or_path
        if num_labels is None:
            base = base_of(path)
            labels = read_config(resolve_folder(os.fspath(base or path))).get("id2label")
            num_labels = 2 if labels is None else len(labels)
        if num_labels == 1:
            return AutoModelForCausalLM.from_pretrained(path, num_labels=1, **arguments)
        if num_labels < 1:
            raise ValueError(
                f"AutoModelForSequenceClassification.from_pretrained: num_labels = {num_labels}: must be positive"
            )
        model = AutoModelForCausalLM.from_pretrained(path, **arguments)
        model.module = with_head(model.module, dataclasses.replace(SCORE, outputs=num_labels))
        return model


class AutoTokenizer:
    """transformers' class."""

    @staticmethod
    def from_pretrained(pretrained_model_name_or_path: str | os.PathLike, **arguments: object) -> Any:
        """The tokenizer of a folder or hub name, with NumPy arrays for return_tensors="pt"; ValueError if it has none.

        arguments: padding_side and truncation_side are set on the tokenizer.
        """
        where, name = "AutoTokenizer.from_pretrained", os.fspath(pretrained_model_name_or_path)
        sides = {key: arguments.pop(key) for key in ("padding_side", "truncation_side") if key in arguments}
        settle(where, arguments, AUTO)
        tokenizer = load_tokenizer(resolve_folder(name))
        if tokenizer is None:
            raise ValueError(f"{where}: {name} has no tokenizer files: name the folder or the model that has them")
        for key, value in sides.items():
            setattr(tokenizer, key, value)
        return without_torch(tokenizer)
