"""The dataclasses and functions of TRL's own scripts."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtune.compat.adapters import LoraConfig
from jaxtune.compat.model import CompatModel
from jaxtune.compat.transformers_names import AutoTokenizer, BitsAndBytesConfig
from jaxtune.conversations.tokenizing import Tokenizer
from jaxtune.models.ends import with_end_tokens
from jaxtune.system.terminal import say

Rows = Any  # a datasets.Dataset or IterableDataset


@dataclasses.dataclass
class ModelConfig:
    """TRL's: the model of a script and its adapter. dtype is that of the weights; "auto": the files' own."""

    model_name_or_path: str | None = None
    model_revision: str = "main"
    dtype: str | None = "float32"
    attn_implementation: str | None = None
    use_peft: bool = False
    lora_r: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.05
    lora_target_modules: str | list[str] | None = None
    lora_target_parameters: str | list[str] | None = None
    lora_modules_to_save: list[str] | None = None
    lora_task_type: str = "CAUSAL_LM"
    use_rslora: bool = False
    use_dora: bool = False
    load_in_8bit: bool = False
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = "nf4"
    use_bnb_nested_quant: bool = False
    bnb_4bit_quant_storage: str | None = None

    def __post_init__(self) -> None:
        if self.load_in_8bit and self.load_in_4bit:
            raise ValueError("ModelConfig: load_in_8bit and load_in_4bit are both True: keep one")
        if isinstance(self.lora_target_modules, list) and len(self.lora_target_modules) == 1:
            self.lora_target_modules = self.lora_target_modules[0]


@dataclasses.dataclass
class ScriptArguments:
    """TRL's: the data set of a script, by a path or a hub name."""

    dataset_name: str | None = None
    dataset_config: str | None = None
    dataset_train_split: str = "train"
    dataset_test_split: str = "test"
    dataset_streaming: bool = False
    ignore_bias_buffers: bool = False


@dataclasses.dataclass
class DatasetConfig:
    """TRL's: a data set of a mixture, as datasets.load_dataset takes it, and its share of the mixture."""

    path: str
    name: str | None = None
    data_dir: str | None = None
    data_files: str | list[str] | dict[str, str] | None = None
    split: str = "train"
    columns: list[str] | None = None
    fraction: float | None = None


@dataclasses.dataclass
class DatasetMixtureConfig:
    """TRL's: data sets that make one set of rows. test_split_size: held-out rows, or their share."""

    datasets: list[DatasetConfig] = dataclasses.field(default_factory=list)
    streaming: bool = False
    test_split_size: float | None = None

    def __post_init__(self) -> None:
        self.datasets = [DatasetConfig(**entry) if isinstance(entry, Mapping) else entry for entry in self.datasets]


def get_dataset(mixture_config: DatasetMixtureConfig) -> Rows:
    """A mixture as a datasets.DatasetDict (streamed: IterableDatasetDict) with "train" and perhaps "test".

    With fractions it is the largest mixture in which no row is twice. ValueError: no data set, a fraction for only
    some, or a stream that is to be split or shared out.
    """
    import datasets

    entries, streaming = mixture_config.datasets, mixture_config.streaming
    if not entries:
        raise ValueError("get_dataset: datasets = []: name at least one")
    loaded = []
    for entry in entries:
        rows: Rows = datasets.load_dataset(
            entry.path,
            entry.name,
            data_dir=entry.data_dir,
            data_files=entry.data_files,
            split=entry.split,
            streaming=streaming,
        )
        loaded.append(rows if entry.columns is None else rows.select_columns(entry.columns))
    fractions = [entry.fraction for entry in entries]
    if any(share is not None for share in fractions):
        loaded = _shared_out(loaded, fractions, streaming)
    mixed: Rows = datasets.concatenate_datasets(loaded)
    if mixture_config.test_split_size is not None:
        if streaming:
            raise ValueError("get_dataset: test_split_size: a stream cannot be split; set streaming to false")
        size = mixture_config.test_split_size
        return mixed.train_test_split(test_size=int(size) if size >= 1 else size)
    return (datasets.IterableDatasetDict if streaming else datasets.DatasetDict)({"train": mixed})


def _shared_out(loaded: Sequence[Rows], fractions: Sequence[float | None], streaming: bool) -> list[Rows]:
    if streaming:
        raise ValueError("get_dataset: fraction: the length of a stream is not known; set streaming to false")
    stated = [share for share in fractions if share is not None]
    if len(stated) < len(fractions) or min(stated) <= 0:
        raise ValueError(f"get_dataset: fraction = {fractions}: give every data set one that is greater than 0")
    shares = [share / sum(stated) for share in stated]
    size = min(len(rows) / share for rows, share in zip(loaded, shares, strict=True))
    counts = [min(len(rows), round(size * share)) for rows, share in zip(loaded, shares, strict=True)]
    return [rows.select(range(count)) for rows, count in zip(loaded, counts, strict=True)]


def get_peft_config(model_args: ModelConfig) -> LoraConfig | None:
    """TRL's: the adapter of ModelConfig; None without use_peft."""
    if not model_args.use_peft:
        return None
    parameters = model_args.lora_target_parameters
    return LoraConfig(
        task_type=model_args.lora_task_type,
        r=model_args.lora_r,
        lora_alpha=model_args.lora_alpha,
        lora_dropout=model_args.lora_dropout,
        target_modules=model_args.lora_target_modules,
        target_parameters=[parameters] if isinstance(parameters, str) else parameters,
        modules_to_save=model_args.lora_modules_to_save,
        use_rslora=model_args.use_rslora,
        use_dora=model_args.use_dora,
    )


def get_quantization_config(model_args: ModelConfig) -> BitsAndBytesConfig | None:
    """TRL's: how the model's weights are quantised; None: they are not."""
    if model_args.load_in_4bit:
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_compute_dtype=model_args.dtype,
            bnb_4bit_quant_type=model_args.bnb_4bit_quant_type,
            bnb_4bit_use_double_quant=model_args.use_bnb_nested_quant,
            bnb_4bit_quant_storage=model_args.bnb_4bit_quant_storage,
        )
    return BitsAndBytesConfig(load_in_8bit=True) if model_args.load_in_8bit else None


def get_kbit_device_map() -> None:
    """TRL's: None, as the model is on the one device that trains."""


def clone_chat_template(
    model: CompatModel,
    tokenizer: Tokenizer,
    source_tokenizer_path: str | os.PathLike,
    resize_to_multiple_of: int | None = 64,
) -> tuple[CompatModel, Tokenizer, list[int]]:
    """TRL's: copies another tokenizer's chat template, EOS and missing added tokens, in place: (model, tokenizer, ids).

    ValueError: the source has no template, or the embeddings, which keep their size, have no rows left for new tokens.
    resize_to_multiple_of: has no effect.
    """
    del resize_to_multiple_of
    source = AutoTokenizer.from_pretrained(source_tokenizer_path)
    if not source.chat_template:
        raise ValueError(f"clone_chat_template: {os.fspath(source_tokenizer_path)} has no chat template")
    vocab = tokenizer.get_vocab()
    new = [token for token in source.added_tokens_decoder.values() if token.content not in vocab]
    rows = model.module.config.vocab_size
    if len(vocab) + len(new) > rows:
        raise ValueError(
            f"clone_chat_template: {len(new)} tokens of {os.fspath(source_tokenizer_path)} are new, such as "
            f"{new[0].content!r}, and the model's embeddings have {rows - len(vocab)} rows left; they are not made "
            "larger. Instead: get_chat_template(tokenizer, NAME) with a template that fits the tokenizer"
        )
    tokenizer.add_tokens(new)
    tokenizer.chat_template, tokenizer.eos_token = source.chat_template, source.eos_token
    model.module = with_end_tokens(model.module, tokenizer)
    if new:
        say(f"clone_chat_template: {len(new)} new tokens: their rows train with modules_to_save=['embed_tokens', ...]")
    return model, tokenizer, tokenizer.convert_tokens_to_ids([token.content for token in new])
