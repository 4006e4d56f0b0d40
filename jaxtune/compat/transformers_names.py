"""AutoModelForCausalLM, AutoTokenizer and BitsAndBytesConfig of transformers, for scripts that import them; and
`load_plain`, which loads a model as transformers' from_pretrained does, with `plain_arguments`, which translates its
arguments, and `quantised`, which reads its quantization_config. `loaded` loads a trainer's model by its name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtune.compat.arguments import settle, tell
from jaxtune.compat.model import CompatModel, FastLanguageModel
from jaxtune.compat.settings import DEFAULT_LENGTH, SFTConfig
from jaxtune.compat.tables import AUTO, BITS_AND_BYTES
from jaxtune.compat.texts import without_torch
from jaxtune.models.adapters.adapter_config import base_of
from jaxtune.models.adapters.named import local_adapter
from jaxtune.models.files.model_folder import load_tokenizer, resolve_folder

# The arguments of transformers' BitsAndBytesConfig that are followed here.
_FOLLOWED = ("load_in_8bit", "load_in_4bit", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant")
_FOLLOWED += ("bnb_4bit_compute_dtype",)


class BitsAndBytesConfig:
    """transformers' description of how a model's weights are quantised, to eight or four bits, which from_pretrained
    takes as quantization_config (`quantised` reads it). bitsandbytes is not needed, and transformers' own class is
    accepted too.

    Args:
      load_in_8bit, load_in_4bit: which of the two formats; both False: the weights are not quantised. Four bits are
        always NF4 with double quantisation here.
      bnb_4bit_compute_dtype: the dtype in which a model in four bits computes, unless from_pretrained gets a dtype too.
        None: bfloat16, or for an adapter's folder the dtype that it records.
      bnb_4bit_quant_type: with four bits "nf4" or None. None, which means FP4 in transformers, is NF4 here too, and a
        printed line says so. Without four bits it is not used.
      bnb_4bit_use_double_quant: has no effect. If it is not True, with four bits, a printed line says that there is
        double quantisation.
      others: transformers' other arguments. A printed line reports each one that has no effect here.

    Raises:
      ValueError: both formats are asked for, four bits are asked for in another bnb_4bit_quant_type, such as "fp4", or
        an argument is unknown or not supported.
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
            tell(
                where,
                "bnb_4bit_quant_type",
                "fp4, which bitsandbytes takes without it, is not here; NF4 is",
            )
        if load_in_4bit and not bnb_4bit_use_double_quant:
            tell(where, "bnb_4bit_use_double_quant", "NF4 always has double quantisation")
        self.load_in_8bit, self.load_in_4bit = load_in_8bit, load_in_4bit
        self.bnb_4bit_compute_dtype = bnb_4bit_compute_dtype


def quantised(config: object) -> dict[str, Any]:
    """For plain_arguments, translates what transformers calls quantization_config to arguments of
    FastLanguageModel.from_pretrained: returns {"load_in_4bit": True, "dtype": the compute dtype or None} for four bits,
    {"load_in_4bit": False, "load_in_8bit": True} for eight, and {"load_in_4bit": False} for neither.

    Args:
      config: this module's BitsAndBytesConfig; transformers' own, or a dict of its arguments, of which only those are
        read that this module's class names; or None, with which weights are not quantised.
    Raises:
      ValueError: `config` is another object, or has a setting that is not supported. One is bnb_4bit_quant_type="fp4"
        with four bits, the default of transformers' class; this module's class, or a dict without it, means NF4.
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
    **others: Any,
) -> dict[str, Any]:
    """Translates arguments of transformers' from_pretrained to those of FastLanguageModel.from_pretrained, which it
    returns, {name: value}; load_plain calls it.

    Args:
      where: the called function, for messages.
      quantization_config: as in `quantised`.
      dtype: precedes the compute dtype of quantization_config; None or "auto": that one is taken.
      torch_dtype: the older name of dtype.
      num_labels, load_in_fp8, rope_scaling: those of FastLanguageModel.from_pretrained.
      load_in_8bit, load_in_4bit: the format, without quantization_config, as in transformers 4; the other arguments of
        BitsAndBytesConfig may then be among `others`.
      others: transformers' other arguments. A printed line reports each one that has no effect here.
    Raises:
      ValueError: an argument would change the result, or is unknown; or there are both load_in_8bit or load_in_4bit and
        a quantization_config.
    """
    if load_in_8bit or load_in_4bit:
        flag = "load_in_8bit" if load_in_8bit else "load_in_4bit"
        if quantization_config is not None:
            raise ValueError(f"{where}: {flag} = True and quantization_config are both given: drop {flag}")
        quantization_config = {"load_in_8bit": load_in_8bit, "load_in_4bit": load_in_4bit}
        quantization_config |= {name: others.pop(name) for name in _FOLLOWED if name in others}
    settle(where, others, AUTO, plain_arguments)
    asked = quantised(quantization_config)
    dtype = torch_dtype if dtype is None else dtype
    asked["dtype"] = asked.get("dtype") if dtype in (None, "auto") else dtype
    return asked | {"num_labels": num_labels, "load_in_fp8": load_in_fp8, "rope_scaling": rope_scaling}


def load_plain(
    where: str,
    name: str | os.PathLike,
    max_length: int | None,
    random_state: int,
    full: bool,
    given: Mapping[str, Any],
) -> CompatModel:
    """Loads a model as transformers' from_pretrained does: in the dtype that is given, else in bfloat16 (the base of an
    adapter: in the dtype that its folder records). It is quantised on loading only if `given` says so, whatever format
    an adapter's folder records. It is for AutoModelForCausalLM, AutoPeftModelForCausalLM, and the models (by `loaded`)
    and teachers that trainers are given by name.

    Args:
      where: the called function, for messages.
      name: a model's folder or hub name, or the local folder of an adapter, which is loaded over its base.
      max_length: the most tokens of a row; None: the trainer's max_length decides. The model must have a position for
        each.
      random_state: the seed of sampling, of the head that num_labels adds, and of an adapter from PEFT's
        get_peft_model.
      full: True: all weights train; if `given` quantises them, it is taken as False. False: only an adapter trains.
        Callers pass False for an adapter's folder.
      given: {name: value} of the script's arguments of from_pretrained; see plain_arguments.
    Raises:
      ValueError: an argument that would change the result, or that is unknown; or full is True for an adapter's folder,
        and nothing in `given` quantises its base.
    """
    asked = plain_arguments(where, **given)
    full = full and not any(asked.get(flag) for flag in ("load_in_4bit", "load_in_8bit", "load_in_fp8"))
    model, _ = FastLanguageModel.from_pretrained(
        os.fspath(name), max_length, full_finetuning=full, random_state=random_state, **asked
    )
    model.fast = False
    return model


def loaded(name: str, args: SFTConfig, full: bool) -> CompatModel:
    """Loads a model that a trainer is given by its name; the trainers' constructors call it. Its rows have at most
    max_length tokens of `args` (else max_seq_length, else 1,024). It is in bfloat16, or as dtype and
    quantization_config in args.model_init_kwargs say, and args.seed is its random_state. name: a hub name or a folder.
    full: True trains all weights, unless quantised; False freezes them, for an adapter. Raises ValueError for an
    argument in model_init_kwargs that is unknown, or would change the result and is not supported, and for an adapter's
    folder, which TRL does not take either."""
    if base_of(name) is not None:
        raise ValueError(
            f"model = {name!r} is an adapter's folder, and a trainer loads no adapter by its name. Instead: "
            f"model=AutoPeftModelForCausalLM.from_pretrained({name!r}), without peft_config, which trains it further"
        )
    length = args.max_length or args.max_seq_length or DEFAULT_LENGTH
    return load_plain("SFTConfig.model_init_kwargs", name, length, args.seed, full, args.model_init_kwargs or {})


class AutoModelForCausalLM:
    """transformers' class, of which scripts use one function: from_pretrained loads a model, here as a CompatModel. The
    most tokens of its rows are the trainer's max_length. All weights train; of a model with quantised weights none does
    before an adapter is added, and if the name is the local folder of an adapter, the adapter alone trains."""

    @staticmethod
    def from_pretrained(pretrained_model_name_or_path: str | os.PathLike, **arguments: object) -> CompatModel:
        """Returns the model of a folder or of a hub name, in the dtype that is given, else in bfloat16, or quantised as
        quantization_config says. For the local folder of an adapter it loads the base model, in the dtype that the
        folder records unless one is given, with the adapter, which then trains alone. Otherwise all weights train,
        unless they are quantised: such a model trains nothing until it gets an adapter, for example by the trainer's
        peft_config.

        Args:
          pretrained_model_name_or_path: the folder or the hub name.
          arguments: transformers' other arguments, such as quantization_config and dtype (bfloat16, float16 or float32;
            "auto" is as if none were given), or num_labels=1 for a head that scores texts; load_in_8bit and
            load_in_4bit are taken too, as in transformers 4. A printed line reports each one that has no effect here.
        Raises:
          ValueError: one of `arguments` would change the result, or is unknown.
        """
        where = "AutoModelForCausalLM.from_pretrained"
        path = local_adapter(pretrained_model_name_or_path)
        full = not (Path(path).expanduser() / "adapter_config.json").exists()
        return load_plain(where, path, None, 3407, full, arguments)


class AutoModelForSequenceClassification:
    """transformers' class, of which scripts use one function: from_pretrained loads a reward model."""

    @staticmethod
    def from_pretrained(
        pretrained_model_name_or_path: str | os.PathLike, num_labels: int = 2, **arguments: object
    ) -> CompatModel:
        """AutoModelForCausalLM.from_pretrained with a head that scores texts. ValueError unless num_labels is 1."""
        if num_labels != 1:
            raise ValueError(
                f"AutoModelForSequenceClassification.from_pretrained: num_labels = {num_labels}: what trains here is a "
                "reward model, num_labels=1"
            )
        return AutoModelForCausalLM.from_pretrained(pretrained_model_name_or_path, num_labels=1, **arguments)


class AutoTokenizer:
    """transformers' class, of which scripts use one function: from_pretrained loads a tokenizer, which returns NumPy
    arrays in place of torch's tensors."""

    @staticmethod
    def from_pretrained(pretrained_model_name_or_path: str | os.PathLike, **arguments: object) -> Any:
        """Returns the tokenizer of a folder or of a hub name. It answers return_tensors="pt" with NumPy arrays.

        Args:
          pretrained_model_name_or_path: the folder or the hub name.
          arguments: padding_side and truncation_side are set on the tokenizer. A printed line reports each other
            argument that has no effect here.

        Raises:
          ValueError: there is no such folder or hub model, or it has no tokenizer files; one of `arguments` would
            change the result, or is unknown.
        """
        where, name = "AutoTokenizer.from_pretrained", os.fspath(pretrained_model_name_or_path)
        side = {one: arguments.pop(one) for one in ("padding_side", "truncation_side") if one in arguments}
        settle(where, arguments, AUTO)
        tokenizer = load_tokenizer(resolve_folder(name))
        if tokenizer is None:
            raise ValueError(f"{where}: {name} has no tokenizer files: name the folder or the model that has them")
        for one, value in side.items():
            setattr(tokenizer, one, value)
        return without_torch(tokenizer)
