"""FastLanguageModel, and the model that it hands out."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxtune
from jaxtune.compat.arguments import (
    DTYPES,
    FIXED_GENERATE,
    FIXED_LOAD,
    FIXED_PEFT,
    FIXED_SAVE,
    RESIDUALS,
    choose,
    refuse,
)
from jaxtune.models.decoder import Decoder
from jaxtune.models.lora import experts, has_adapter
from jaxtune.models.quant import dequantize
from jaxtune.terminal import say
from jaxtune.train.config import AdapterConfig
from jaxtune.train.report import parameter_counts

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def is_bfloat16_supported() -> bool:
    """True: XLA computes in bfloat16 on every device."""
    return True


class CompatModel:
    """The model of an Unsloth script: holds the current module, and what the trainer needs to know beside it.

    Attributes: module (jaxtune.Decoder; replaced by training), tokenizer, max_seq_length in tokens, residuals (a
    fixed plan such as "keep", or None: the planner chooses), adapter (how the adapter came to be: an AdapterConfig, or
    None), full_finetuning, random_state.
    """

    def __init__(
        self,
        module: Decoder,
        tokenizer: Any,
        max_seq_length: int,
        residuals: str | None,
        *,
        adapter: AdapterConfig | None = None,
        full_finetuning: bool = False,
        random_state: int = 3407,
    ):
        self.module = module
        self.tokenizer = tokenizer
        self.max_seq_length = max_seq_length
        self.residuals = residuals
        self.adapter = adapter
        self.full_finetuning = full_finetuning
        self.random_state = random_state

    def __call__(self, tokens, segment_ids=None, positions=None) -> jax.Array:
        """As the module: int32[B, T] -> float32[B, T, vocab]."""
        return self.module(tokens, segment_ids, positions)

    @property
    def has_adapter(self) -> bool:
        return has_adapter(self.module)

    def print_trainable_parameters(self) -> None:
        trainable, everything = parameter_counts(self.module)
        say(
            f"trainable params: {trainable:,} || all params: {everything:,} || trainable%: "
            f"{100 * trainable / everything:.4f}"
        )

    def generate(
        self,
        input_ids: Any,
        attention_mask: Any = None,
        max_new_tokens: int = 64,
        do_sample: bool | None = None,
        temperature: float | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        **others: Any,
    ) -> np.ndarray:
        """transformers' generate: int[B, T] padded on either side -> int32[B, T + new], padded on the right.

        Samples if do_sample, or if only a temperature is given; else takes the likeliest token. The module's adapters
        are used as they are.
        """
        refuse("generate", others, FIXED_GENERATE, CompatModel.generate)
        ids = np.atleast_2d(np.asarray(input_ids))
        mask = np.ones_like(ids) if attention_mask is None else np.atleast_2d(np.asarray(attention_mask))
        sample = do_sample if do_sample is not None else temperature is not None
        if do_sample is False and temperature not in (None, 1.0):
            raise ValueError(f"generate: temperature = {temperature} has no effect with do_sample=False; drop one")
        prompts = [row[used != 0].tolist() for row, used in zip(ids, mask, strict=True)]
        new = jaxtune.generate(
            self.module, prompts, max_new_tokens, (1.0 if temperature is None else temperature) if sample else 0.0,
            seed=self.random_state, eos_token_ids=eos_token_id,
        )  # fmt: skip
        pads = (pad_token_id, self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0)
        pad = next(token for token in pads if token is not None)
        width = max(map(len, new))
        tail = np.array([row + [pad] * (width - len(row)) for row in new], np.int32)
        return np.concatenate([ids.astype(np.int32), tail], axis=1)

    def save_pretrained(self, path: str | os.PathLike, **others: Any) -> None:
        """The adapter as a PEFT folder, or the whole model where there is no adapter."""
        refuse("save_pretrained", others, FIXED_SAVE)
        (jaxtune.save_adapter if self.has_adapter else jaxtune.save_pretrained)(self.module, path)

    def save_pretrained_merged(
        self, path: str | os.PathLike, tokenizer: Any = None, save_method: str = "merged_16bit", **others: Any
    ) -> None:
        """save_method "merged_16bit": a whole model for transformers, in 16 bits; "lora": as save_pretrained."""
        refuse("save_pretrained_merged", others, FIXED_SAVE)
        if save_method == "lora":
            self.save_pretrained(path)
            if tokenizer is not None:
                tokenizer.save_pretrained(path)
        elif save_method == "merged_16bit":
            merged = jaxtune.merge_adapter(self.module) if self.has_adapter else dequantize(self.module)
            merged.dtype = "bfloat16" if merged.dtype == "float32" else merged.dtype
            jaxtune.save_pretrained(merged, path, tokenizer=tokenizer)
        else:
            raise ValueError(
                f"save_pretrained_merged: save_method = {save_method!r} is not supported; "
                "supported: 'merged_16bit', 'lora'"
            )


class FastLanguageModel:
    """Unsloth's loader."""

    @staticmethod
    def from_pretrained(
        model_name: str,
        max_seq_length: int = 2048,
        dtype: Any = None,
        load_in_4bit: bool = True,
        load_in_16bit: bool = False,
        full_finetuning: bool = False,
        use_gradient_checkpointing: bool | str = "unsloth",
        random_state: int = 3407,
        **others: Any,
    ) -> tuple[CompatModel, Any]:
        """(model, tokenizer) of a model folder, a hub name, or an adapter folder that names its base.

        dtype None is bfloat16; torch's dtypes are taken by name. load_in_4bit, the default, is NF4 with double
        quantisation; full_finetuning turns it off. Loading draws nothing, so random_state is kept for sampling only.
        """
        where = "FastLanguageModel.from_pretrained"
        refuse(where, others, FIXED_LOAD, FastLanguageModel.from_pretrained)
        if load_in_4bit and load_in_16bit:
            raise ValueError(
                f"{where}: load_in_4bit = True, its default, and load_in_16bit = True contradict each other: pass "
                "load_in_4bit=False for 16-bit weights"
            )
        load_in = "nf4" if load_in_4bit and not full_finetuning else None
        name = "bfloat16" if dtype is None else _dtype_name(where, dtype)
        if load_in_16bit and name == "float32":
            raise ValueError(f"{where}: load_in_16bit = True and dtype = {dtype!r} contradict each other: drop one")
        residuals = choose(where, "use_gradient_checkpointing", use_gradient_checkpointing, RESIDUALS)
        base, adapter = _base_of(model_name), None
        module, tokenizer = jaxtune.from_pretrained(
            base or model_name, dtype=name, load_in=load_in, max_length=max_seq_length
        )
        if base is not None:
            if full_finetuning:
                raise ValueError(
                    f"{where}: full_finetuning = True, but {model_name} is an adapter: give its base model"
                )
            module, adapter = jaxtune.load_adapter(module, model_name), AdapterConfig(path=os.fspath(model_name))
        if tokenizer is None:
            raise ValueError(f"{where}: {model_name} has no tokenizer files: put them into the model's folder")
        model = CompatModel(
            module, tokenizer, max_seq_length, residuals,
            adapter=adapter, full_finetuning=full_finetuning, random_state=random_state,
        )  # fmt: skip
        return model, tokenizer

    @staticmethod
    def get_peft_model(
        model: CompatModel,
        r: int = 16,
        target_modules: str | Sequence[str] = ALL_LINEAR,
        lora_alpha: float = 16,
        lora_dropout: float = 0.0,
        use_gradient_checkpointing: bool | str = "unsloth",
        random_state: int = 3407,
        max_seq_length: int | None = None,
        use_rslora: bool = False,
        modules_to_save: Sequence[str] | None = None,
        use_dora: bool = False,
        rank_pattern: Mapping[str, int] | None = None,
        alpha_pattern: Mapping[str, float] | None = None,
        **others: Any,
    ) -> CompatModel:
        """A new model with LoRA adapters. embed_tokens and lm_head among target_modules are trained whole."""
        where = "FastLanguageModel.get_peft_model"
        refuse(where, others, FIXED_PEFT, FastLanguageModel.get_peft_model)
        if model.full_finetuning:
            raise ValueError(
                f"{where}: the model was loaded with full_finetuning=True: load it without, or skip this call"
            )
        if max_seq_length not in (None, model.max_seq_length):
            raise ValueError(f"{where}: max_seq_length = {max_seq_length} belongs to from_pretrained; set it there")
        residuals = choose(where, "use_gradient_checkpointing", use_gradient_checkpointing, RESIDUALS)
        whole = set(modules_to_save or ())
        if not isinstance(target_modules, str):
            whole |= {name for name in target_modules if name in ("embed_tokens", "lm_head")}
            rest = tuple(name for name in target_modules if name not in whole)
            # The seven names mean every linear, also where a family fuses some of them (Phi-3).
            target_modules = "all-linear" if set(rest) == set(ALL_LINEAR) else rest
        # The seven names mean the experts too.
        parameters = tuple(name for name, _ in experts(model.module)) if target_modules == "all-linear" else ()
        settings: dict[str, Any] = dict(
            r=r, lora_alpha=lora_alpha, target_modules=target_modules, target_parameters=parameters or None,
            lora_dropout=lora_dropout, use_rslora=use_rslora,
            use_dora=use_dora, modules_to_save=tuple(sorted(whole)) or None,
            rank_pattern=dict(rank_pattern) if rank_pattern else None,
            alpha_pattern=dict(alpha_pattern) if alpha_pattern else None,
        )  # fmt: skip
        module = jaxtune.get_peft_model(model.module, **settings, seed=random_state)
        adapter = AdapterConfig(**settings)
        return CompatModel(
            module, model.tokenizer, model.max_seq_length, residuals, adapter=adapter, random_state=random_state
        )

    @staticmethod
    def for_inference(model: CompatModel) -> CompatModel:
        """The model as it is: generation needs no switch here."""
        return model

    @staticmethod
    def for_training(model: CompatModel, use_gradient_checkpointing: bool | str = True) -> CompatModel:
        """The model, with its choice of residuals set."""
        where = "FastLanguageModel.for_training"
        model.residuals = choose(where, "use_gradient_checkpointing", use_gradient_checkpointing, RESIDUALS)
        return model


def _dtype_name(where: str, dtype: Any) -> str:
    name = str(dtype).removeprefix("torch.") if "torch" in type(dtype).__module__ else None
    try:
        name = name or jax.numpy.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    if name not in DTYPES:
        raise ValueError(f"{where}: dtype = {dtype!r} is not supported; supported: {', '.join(DTYPES)}")
    return name


def _base_of(folder: str | os.PathLike) -> str | None:
    """The base that an adapter folder names, or None if it holds no adapter."""
    path = Path(folder) / "adapter_config.json"
    if not path.is_file():
        return None
    base = json.loads(path.read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not base:
        raise ValueError(f"{path} names no base model: set base_model_name_or_path in it")
    return base
