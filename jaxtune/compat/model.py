"""Unsloth's FastLanguageModel (FastModel), and the model that it loads for a script, a CompatModel."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, Self

import jax
import numpy as np
from flax import nnx

import jaxtune
from jaxtune.compat.adapters import ALL_LINEAR, add_lora, last_layers
from jaxtune.compat.arguments import choose, report_idle, settle
from jaxtune.compat.kept import keep_programs
from jaxtune.compat.parameters import Parameter, named_parameters
from jaxtune.compat.saves import MARK, require_free, save, saved_into
from jaxtune.compat.seeds import begin_at, next_seed
from jaxtune.compat.tables import DTYPES, GENERATE, GGUF, LLAMA_CPPS, LOAD, PEFT, RESIDUALS, SAVE
from jaxtune.compat.texts import NumpyTensor, without_torch
from jaxtune.compat.vllm_names import LoraRequest, RequestOutput, SamplingParams, fast_generate, load_lora
from jaxtune.compat.wording import worded
from jaxtune.conversations.picture_processors import PlacedPicture, picture_arrays
from jaxtune.conversations.pictures import Picture
from jaxtune.conversations.templates import asking_templates
from jaxtune.conversations.tokenizing import with_beginning
from jaxtune.export.api import export_model
from jaxtune.export.hub import push
from jaxtune.export.modelfile import create_command
from jaxtune.models.adapters import trained_over
from jaxtune.models.adapters.adapter_config import base_of
from jaxtune.models.adapters.merge import merged_weights
from jaxtune.models.adapters.named import local_adapter
from jaxtune.models.decoder import Decoder
from jaxtune.models.ends import with_end_tokens
from jaxtune.models.files.model_folder import is_gguf, read_config, resolve_folder
from jaxtune.models.files.quant import compute_in_fp8, parameter_counts
from jaxtune.models.files.weights import Weights
from jaxtune.models.generation.pictures import processor_of
from jaxtune.models.generation.requests import PromptPictures
from jaxtune.models.hf import hf_config_of, load_base, save_weights
from jaxtune.models.lora import has_adapter
from jaxtune.models.registry import config_from_hf, text_config
from jaxtune.pallas.formats import FORMATS
from jaxtune.system.progress import heartbeat
from jaxtune.system.terminal import say
from jaxtune.train.config import AdapterConfig

_MERGED = {"merged_16bit": None, "merged_4bit": "nf4", "merged_4bit_forced": "nf4", "lora": None}


def is_bfloat16_supported() -> bool:
    """True: XLA computes in bfloat16 on every device."""
    return True


class ModelSettings(SimpleNamespace):
    """The values of config.json as attributes; setting one has no effect."""

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


class CompatModel:
    """The model of a script: a reference to the current module, its settings, and the methods that scripts call. Moving
    it and switching its mode have no effect: XLA places the weights, and dropout belongs to the train step.

    Attributes:
      max_seq_length: the most tokens of a row, unless the trainer's max_length is less.
      residuals: of the backward pass: "keep" keeps all on the device; None: the planner decides.
      adapter: the AdapterConfig that made the adapter.
      full_finetuning: whether all weights train.
      random_state: the seed of PEFT's get_peft_model.
      packing: the default of SFTConfig's packing.
      fast: whether a Fast class made it: defaults are Unsloth's.
      cache: in what fast_generate and training from rewards store keys and values; None: the model's dtype.
    """

    def __init__(
        self,
        module: Decoder,
        tokenizer: Any,
        max_seq_length: int | None,
        residuals: str | None,
        *,
        adapter: AdapterConfig | None = None,
        full_finetuning: bool = False,
        random_state: int = 3407,
        packing: bool = False,
        fast: bool = False,
        cache: str | None = None,
    ):
        self.module = module
        self.tokenizer = tokenizer
        self.max_seq_length = max_seq_length
        self.residuals = residuals
        self.adapter = adapter
        self.full_finetuning = full_finetuning
        self.random_state = random_state
        self.packing = packing
        self.fast = fast
        self.cache = cache
        self.config = ModelSettings(**hf_config_of(module, tokenizer))
        self.model_tags: list[str] = []

    def __call__(self, tokens, segment_ids=None, positions=None) -> jax.Array:
        """Logits float32[B, T, vocab] (a reward model's scores [B, T, 1]) of tokens int32[B, T].

        segment_ids: int32[B, T], 0 at padding; None: a row is one document.
        """
        return self.module(tokens, segment_ids, positions)

    @property
    def module(self) -> Decoder:
        """The current module. In a run it is made on access, and the next step donates its arrays."""
        if not isinstance(self._module, Decoder):
            self._module = self._module()
        return self._module

    @module.setter
    def module(self, module: Decoder | Callable[[], Decoder]) -> None:
        """Sets the module, or a function that returns it, called at the next access."""
        self._module = module

    @property
    def has_adapter(self) -> bool:
        return has_adapter(self.module)

    @property
    def peft_config(self) -> dict[str, AdapterConfig | None]:
        """PEFT's: {"default": the adapter's settings}; {} without an adapter."""
        return {"default": self.adapter} if self.has_adapter else {}

    @property
    def device(self) -> object:
        """The device of the model's first array; of several, the one with the lowest id."""
        leaf = jax.tree.leaves(nnx.state(self.module))[0]
        return min(leaf.devices(), key=lambda device: device.id)

    @property
    def dtype(self) -> np.dtype:
        """The NumPy dtype in which the model computes; weights may be stored quantised."""
        return jax.numpy.dtype(self.module.dtype)

    def eval(self) -> Self:
        """Returns the model unchanged: there is no mode to switch."""
        return self

    def train(self, mode: bool = True) -> Self:
        """Returns the model unchanged; SFTTrainer.train trains it."""
        del mode
        return self

    def to(self, *_: object, **others: object) -> Self:
        """Returns the model unchanged."""
        del others
        return self

    cuda = cpu = to

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: object = None) -> None:
        """Lets the planner recompute or offload residuals, the default, unless SFTConfig says otherwise."""
        del gradient_checkpointing_kwargs
        self.residuals = None

    def gradient_checkpointing_disable(self) -> None:
        """Keeps every residual on the device, unless SFTConfig sets gradient_checkpointing."""
        self.residuals = "keep"

    def enable_input_require_grads(self) -> None:
        """Does nothing: gradients reach the adapters without this call, which PEFT needs."""

    def named_parameters(self, *_: object, **__: object) -> Iterator[tuple[str, Parameter]]:
        """(name in transformers, or in PEFT if there is an adapter, weight as it is now); arguments have no effect."""
        return named_parameters(self.module)

    def parameters(self, *_: object, **__: object) -> Iterator[Parameter]:
        """The weights as they are now; arguments have no effect."""
        return (parameter for _, parameter in named_parameters(self.module))

    def get_parameter(self, target: str) -> Parameter:
        """The weight of that name as it is now; AttributeError without one."""
        for name, parameter in named_parameters(self.module):
            if name == target:
                return parameter
        raise AttributeError(f"get_parameter: {target!r} is no parameter; named_parameters() has the names")

    def add_model_tags(self, tags: str | Sequence[str]) -> None:
        """Adds to model_tags."""
        new = [tags] if isinstance(tags, str) else tags
        self.model_tags += [tag for tag in new if tag not in self.model_tags]

    def num_parameters(self, only_trainable: bool = False) -> int:
        """The number of (trainable) parameters; each element of a quantised matrix counts as one."""
        trainable, everything = parameter_counts(self.module)
        return trainable if only_trainable else everything

    def get_nb_trainable_parameters(self) -> tuple[int, int]:
        """(trainable parameters, all parameters); each element of a quantised matrix counts as one."""
        return parameter_counts(self.module)

    def print_trainable_parameters(self) -> None:
        """Prints the trainable and all parameters in PEFT's words, on stdout."""
        trainable, everything = parameter_counts(self.module)
        say(
            f"trainable params: {trainable:,} || all params: {everything:,} || trainable%: "
            f"{100 * trainable / everything:.4f}"
        )

    def resize_token_embeddings(self, new_num_tokens: int | None = None, **_: object) -> None:
        """Raises ValueError if the model has fewer than `new_num_tokens` embeddings; it never adds any."""
        size = self.module.config.vocab_size
        if new_num_tokens is not None and new_num_tokens > size:
            raise ValueError(
                f"resize_token_embeddings: new_num_tokens = {new_num_tokens:,}, and the model has {size:,} embeddings; "
                "embeddings are not added here. Instead: a tokenizer without added tokens, or a model whose vocabulary "
                "has them"
            )

    @heartbeat()
    def merge_and_unload(self, *_: object, **__: object) -> CompatModel:
        """PEFT's: a new model with the adapter merged, whose weights all train, in the base's dtype.

        Needs memory for both. ValueError: no adapter; ArithmeticError: the merge fails a check. Arguments are ignored.
        """
        return CompatModel(
            jaxtune.merge_adapter(self.module),
            self.tokenizer,
            self.max_seq_length,
            self.residuals,
            full_finetuning=True,
            random_state=self.random_state,
            packing=self.packing,
            fast=self.fast,
            cache=self.cache,
        )

    @heartbeat()
    def generate(
        self,
        input_ids: Any,
        attention_mask: Any = None,
        max_new_tokens: int = 64,
        do_sample: bool | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        streamer: Any = None,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        pixel_values: object = None,
        image_grid_thw: object = None,
        **others: Any,
    ) -> NumpyTensor:
        """transformers' generate: int32[B, T + new], input_ids and the new tokens, padded on the right.

        It samples with do_sample=True, with a temperature, top_k, top_p or min_p that has an effect, or if
        generation_config.json says so; else it takes the likeliest token. Options that are None come from that file,
        else transformers (top_k 50). Each call draws anew. ValueError: contradictions, or a streamer with several rows.
          input_ids: int[B, T], padded on either side, or a tokenizer's mapping.
          attention_mask: 0 at padding.
          streamer: `put` gets the prompt and each new token.
          pixel_values, image_grid_thw: of a processor, the pictures of all rows in order.
          max_new_tokens: at most. eos_token_id: one or several ids that end a row; pad_token_id: fills shorter rows.
        """
        others.pop("mm_token_type_ids", None)  # which tokens are pictures' is seen
        if isinstance(input_ids, Mapping):  # apply_chat_template returns a mapping since transformers 5
            pixel_values, image_grid_thw = (
                input_ids.get(name, value)
                for name, value in (("pixel_values", pixel_values), ("image_grid_thw", image_grid_thw))
            )
            attention_mask, input_ids = input_ids.get("attention_mask", attention_mask), input_ids["input_ids"]
        settle("generate", others, GENERATE, CompatModel.generate)
        ids = np.atleast_2d(np.asarray(input_ids))
        mask = np.ones_like(ids) if attention_mask is None else np.atleast_2d(np.asarray(attention_mask))
        options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        settings = self._drawing_settings(do_sample, options, repetition_penalty)
        if streamer is not None and len(ids) > 1:
            raise ValueError(f"generate: a streamer shows one row, and there are {len(ids)}: give them one by one")
        # A rendered text that begins with BOS gets a second one where a script tokenises it.
        prompts = [
            with_beginning(self.tokenizer, row[kept_mask != 0].tolist(), ())
            for row, kept_mask in zip(ids, mask, strict=True)
        ]
        if streamer is not None:
            streamer.put(ids[0])
        new = jaxtune.generate(
            self.module,
            prompts,
            max_new_tokens,
            seed=next_seed(),
            eos_token_ids=eos_token_id,
            streamer=None if streamer is None else lambda _, t: streamer.put(np.array(t)),
            pictures=self._pictures(prompts, pixel_values, image_grid_thw),
            **settings,
        )
        if streamer is not None:
            streamer.end()
        pads = (pad_token_id, self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0)
        pad = next(token for token in pads if token is not None)
        width = max(map(len, new))
        tail = np.array([row + [pad] * (width - len(row)) for row in new], np.int32)
        return np.concatenate([ids.astype(np.int32), tail], axis=1).view(NumpyTensor)

    def _drawing_settings(
        self, do_sample: bool | None, options: Mapping[str, float | None], repetition_penalty: float | None
    ) -> dict[str, Any]:
        """jaxtune.generate's, of a call's options, generation_config.json and transformers' defaults. ValueError for
        options without effect.
        """
        off = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}  # values without effect
        temperature = options["temperature"]
        greedy = "do_sample=False" if do_sample is False else "temperature=0" if temperature == 0 else ""
        for name, value in options.items():
            if greedy and value not in (None, off[name]) and name not in greedy:
                raise ValueError(f"generate: {name} = {value} has no effect with {greedy}; drop one")
        source = self.module.source
        recorded = json.loads(source.generation_config) if source is not None and source.generation_config else {}
        asks = temperature is not None or any(options[name] not in (None, off[name]) for name in off)
        samples = not greedy and (do_sample or asks or (do_sample is None and recorded.get("do_sample")))
        values, defaults = {**options, "repetition_penalty": repetition_penalty}, {"repetition_penalty": 1.0}
        defaults |= off | {"top_k": 50} if samples else {}
        return {
            name: next(choice for choice in (values[name], recorded.get(name), default) if choice is not None)
            for name, default in defaults.items()
        }

    def _pictures(
        self, prompts: Sequence[Sequence[int]], pixel_values: object, grids: object
    ) -> list[PromptPictures | None] | None:
        """Of each prompt. Raises ValueError for pictures that do not fit the prompts' tokens, or a model without its
        tower.
        """
        if pixel_values is None:
            return None
        if self.module.vision is None:
            raise ValueError("generate: pixel_values, and the model has no tower: use FastVisionModel.from_pretrained")
        patches, waiting = np.asarray(pixel_values, np.float32), np.asarray(grids).reshape(-1, 3)[:, 1:].tolist()
        processor, begin, pictures = processor_of(self.module.source, self.tokenizer), 0, []
        for ids in prompts:
            places = np.flatnonzero(np.asarray(ids) == processor.token)
            placed: list[PlacedPicture] = []
            while len(places) and waiting:
                height, width = waiting.pop(0)
                grid, number = (height, width), len(placed)
                before = int(np.argmax(np.asarray(processor.tokens(grid)) == processor.token))  # tokens that begin it
                placed.append(PlacedPicture(int(places[0]) - before, grid, Picture(), number.to_bytes(16)))
                places = places[processor.features(grid) :]
            size = sum(height * width for height, width in (each.grid for each in placed))
            arrays = picture_arrays(len(ids), placed, processor)
            if arrays is not None:
                arrays["patches"] = patches[None, begin : begin + size]
            pictures.append(PromptPictures.of(arrays))
            begin += size
            if len(places):
                raise ValueError(f"generate: input_ids have {len(places)} tokens of pictures more than image_grid_thw")
        if waiting or begin != len(patches):
            raise ValueError(f"generate: pixel_values of {len(patches)} patches, and input_ids have {begin}")
        return pictures

    def save_pretrained(self, save_directory: str | os.PathLike, **others: Any) -> None:
        """Saves the adapter as a PEFT folder, or without one the whole model for transformers; no tokenizer.

        A script's earlier save is replaced; ValueError if the folder has another model.
        """
        settle("save_pretrained", others, SAVE)
        saved_into(save_directory, "save_pretrained", lambda folder: save(self.module, folder))

    def save_lora(self, save_directory: str | os.PathLike) -> None:
        self.save_pretrained(save_directory)

    def load_lora(self, path: str | os.PathLike, *_: object, **__: object) -> LoraRequest:
        """Unsloth's: the adapter of a folder, for fast_generate's lora_request; ValueError if there is none."""
        return load_lora(path)

    @heartbeat()
    def fast_generate(
        self,
        prompts: str | Mapping | Iterable[str | Mapping],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: LoraRequest | None = None,
        **_: object,
    ) -> list[RequestOutput]:
        """Unsloth's generation by vLLM, here by jaxtune's sampler: each prompt's answers, `.outputs[0].text`.

        As there, the model answers without its adapter, unless lora_request names one.
          prompts: texts or {"prompt_token_ids": ids}.
          sampling_params: for all prompts, or one for each.
        """
        return fast_generate(self.module, self.tokenizer, prompts, sampling_params, lora_request, self.cache)

    def save_pretrained_merged(
        self, save_directory: str | os.PathLike, tokenizer: Any = None, save_method: str = "merged_16bit", **others: Any
    ) -> None:
        """Saves a whole model for transformers, with its adapter merged; the folder as in save_pretrained.

        tokenizer: saved too.
        save_method: "merged_16bit" (quantised weights are decoded), "merged_4bit" (NF4), or "lora": save_pretrained.
        """
        where = "save_pretrained_merged"
        settle(where, others, SAVE)
        load_in = choose(where, "save_method", save_method, _MERGED)
        if save_method == "lora":
            saved_into(save_directory, where, lambda folder: save(self.module, folder, tokenizer))
            return
        require_free(save_directory, where)
        merged = merged_weights(self.module) if self.has_adapter else Weights(self.module).dequantized()
        merged.model.dtype = "bfloat16" if merged.model.dtype == "float32" else merged.model.dtype
        stored = merged if load_in is None else merged.quantized(load_in)
        saved_into(save_directory, where, lambda folder: save_weights(stored, folder, tokenizer))

    def save_pretrained_gguf(
        self,
        save_directory: str | os.PathLike,
        tokenizer: Any = None,
        quantization_method: str | Sequence[str] = "fast_quantized",
        **others: Any,
    ) -> None:
        """Saves a GGUF file and an Ollama Modelfile for each method, in a folder of its name below save_directory.

        tokenizer: None: the model's.
        quantization_method: f32, f16, bf16, q8_0, q6_k, q4_k_m or q4_0; "fast_quantized" is q8_0, "quantized" q4_k_m,
          "not_quantized" f16.
        """
        where = "save_pretrained_gguf"
        settle(where, others, SAVE)
        methods = [quantization_method] if isinstance(quantization_method, str) else list(quantization_method)
        for method in methods:
            if isinstance(method, str) and method not in GGUF and LLAMA_CPPS.fullmatch(method):
                raise ValueError(
                    f"{where}: quantization_method = {method!r} is not supported: it is llama.cpp's to make. Instead: "
                    f"quantization_method='f16', then llama-quantize {Path(save_directory) / 'f16'}/*.gguf OUT.gguf "
                    f"{method.upper()}; 'q8_0', 'q6_k', 'q4_k_m' and 'q4_0' are written here"
                )
        outtypes = dict.fromkeys(choose(where, "quantization_method", method, GGUF) for method in methods)
        for outtype in outtypes:
            require_free(Path(save_directory) / outtype, where)
        for outtype in outtypes:
            folder = Path(save_directory) / outtype
            write = functools.partial(
                export_model, self.module, to="gguf", tokenizer=tokenizer or self.tokenizer, outtype=outtype
            )
            saved_into(folder, where, write)
            say(f"wrote {folder}; next: {create_command(folder, Path(save_directory).resolve().name)}")

    def push_to_hub(self, repository: str, token: str | None = None, private: bool | None = None, **others) -> None:
        """Uploads what save_pretrained saves to the hub's `repository` ("owner/name"), which is made if missing.

        token: None: this machine's login.
        private: whether a new repository is private; None: no.
        """
        settle("push_to_hub", others, SAVE)
        self._push(repository, token, private, lambda folder: self.save_pretrained(folder))

    def push_to_hub_merged(
        self,
        repository: str,
        tokenizer: Any = None,
        save_method: str = "merged_16bit",
        token: str | None = None,
        private: bool | None = None,
        **others: Any,
    ) -> None:
        """Uploads what save_pretrained_merged saves, as push_to_hub does. private, token: as for push_to_hub."""
        settle("push_to_hub_merged", others, SAVE)
        self._push(
            repository, token, private, lambda folder: self.save_pretrained_merged(folder, tokenizer, save_method)
        )

    def push_to_hub_gguf(
        self,
        repository: str,
        tokenizer: Any = None,
        quantization_method: str | Sequence[str] = "fast_quantized",
        token: str | None = None,
        private: bool | None = None,
        **others: Any,
    ) -> None:
        """Uploads what save_pretrained_gguf saves, to a public repository unless `private`; as push_to_hub does."""
        settle("push_to_hub_gguf", others, SAVE)
        self._push(
            repository, token, private, lambda folder: self.save_pretrained_gguf(folder, tokenizer, quantization_method)
        )

    @staticmethod
    def _push(repository: str, token: str | None, private: bool | None, write: Callable[[str], None]) -> None:
        from huggingface_hub import HfApi

        with TemporaryDirectory() as folder:
            write(folder)
            for mark in Path(folder).rglob(MARK):
                mark.unlink()
            push(Path(folder), repository, private=bool(private), api=HfApi(token=token))


def _linear_positions(name: str, adapter: str | None, length: int | None) -> dict[str, object] | None:
    """Unsloth's rope_scaling of a model with fewer positions than `length`; None of any other."""
    over = None if adapter is None else trained_over.read(Path(adapter).expanduser())
    if length is None or (over is not None and any(over.positions.values())):
        return None
    folder = resolve_folder(name)
    if is_gguf(folder):
        return None
    config = config_from_hf(text_config(read_config(folder)))
    most = config.context_length
    if length <= most or {rope.kind for rope in config.rotary} != {"default"}:
        return None
    say(
        f"max_seq_length = {length:,}: the model has {most:,} positions, which are scaled linearly (as in Unsloth); "
        "rope_scaling={'rope_type': 'yarn', 'factor': ...} scales them in another way"
    )
    return {"rope_type": "linear", "factor": length / most}


class FastLanguageModel:
    """Unsloth's class: functions that load a model and add adapters; it has no objects."""

    @staticmethod
    @worded
    def from_pretrained(
        model_name: str,
        max_seq_length: int | None = 2048,
        dtype: Any = None,
        load_in_4bit: bool | None = None,
        load_in_16bit: bool = False,
        load_in_fp8: bool = False,
        full_finetuning: bool = False,
        use_gradient_checkpointing: bool | str = "unsloth",
        random_state: int = 3407,
        packing: bool = False,
        num_labels: int | None = None,
        rope_scaling: Mapping[str, object] | None = None,
        float8_kv_cache: bool = False,
        **others: Any,
    ) -> tuple[CompatModel, Any]:
        """(model, tokenizer) of a model or an adapter: a folder or a hub name. ValueError: contradictions.

        max_seq_length: the most tokens of a row; None: the trainer's max_length. More than the model's positions scale
          them linearly, as in Unsloth, unless rope_scaling (as in config.json) is given.
        dtype: None: bfloat16, or what an adapter's folder records, as for the format.
        load_in_4bit: NF4 with double quantisation; None: unless another format or full_finetuning is asked for. False
          keeps weights as stored.
        load_in_16bit: needs load_in_4bit=False, and adds nothing.
        load_in_fp8: stores the layers' weights in FP8 and multiplies in it.
        use_gradient_checkpointing: False keeps all residuals on the device.
        random_state: the seed of sampling, of the scoring head, and of PEFT's get_peft_model.
        packing: of an SFTConfig that leaves it unset.
        num_labels: 1 adds a scoring head, for a reward model.
        float8_kv_cache: with fast_inference=True, fast_generate and runs that sample store keys and values in FP8
          (e4m3).
        others: load_in_8bit=True (int8), or arguments without effect.
        """
        where = "FastLanguageModel.from_pretrained"
        flags = {"load_in_fp8": load_in_fp8}
        flags |= {fmt.flag: others.pop(fmt.flag) for fmt in FORMATS.values() if fmt.flag in others}
        pictures = bool(others.pop("pictures", False))  # of FastVisionModel
        if float8_kv_cache and not others.get("fast_inference"):
            report_idle(where, "float8_kv_cache", "it is vLLM's, of fast_inference=True")
            float8_kv_cache = False
        settle(where, others, LOAD, FastLanguageModel.from_pretrained)
        keep_programs()
        load_in: str | None = _format(where, load_in_4bit, load_in_16bit, flags, full_finetuning)
        model_name = local_adapter(model_name)
        base, adapter = base_of(model_name), None
        recorded = None if base is None else trained_over.read(Path(model_name).expanduser())
        if recorded is not None and load_in_4bit is None and not any(flags.values()):
            load_in = None
        name = None if dtype is None else _dtype_name(where, dtype)
        if load_in_16bit and name == "float32":
            raise ValueError(f"{where}: load_in_16bit = True and dtype = {dtype!r} contradict each other: drop one")
        residuals = choose(where, "use_gradient_checkpointing", use_gradient_checkpointing, RESIDUALS)
        load = jaxtune.from_pretrained if base is None else load_base
        positions = rope_scaling or _linear_positions(base or model_name, base and model_name, max_seq_length)
        module, tokenizer = load(
            model_name,
            dtype=name,
            load_in=load_in,
            max_length=max_seq_length,
            rope_scaling=positions,
            pictures=pictures,
        )
        if any(flags.values()) and load_in is not None and FORMATS[load_in].kinds[0].compute is not None:
            module = compute_in_fp8(module)
        if num_labels is not None:
            if num_labels != 1:
                raise ValueError(f"{where}: num_labels = {num_labels!r}: it can be 1, a reward model; leave it out")
            module = jaxtune.reward_model(module, random_state)
        if base is not None and full_finetuning:
            raise ValueError(f"{where}: full_finetuning = True, but {model_name} is an adapter: give its base model")
        if base is not None:
            module, adapter = jaxtune.load_adapter(module, model_name), AdapterConfig(path=os.fspath(model_name))
            module = with_end_tokens(module, tokenizer)
        if tokenizer is None:
            raise ValueError(f"{where}: {model_name} has no tokenizer files: copy them into the model's folder")
        tokenizer.chat_template = asking_templates(tokenizer)
        begin_at(random_state)
        model = CompatModel(
            module,
            without_torch(tokenizer),
            max_seq_length,
            residuals,
            adapter=adapter,
            full_finetuning=full_finetuning,
            random_state=random_state,
            packing=packing,
            fast=True,
            cache="fp8" if float8_kv_cache else None,
        )
        return model, tokenizer

    @staticmethod
    @worded
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
        target_parameters: Sequence[str] | None = None,
        layers_to_transform: int | Sequence[int] | None = None,
        finetune_last_n_layers: int | None = None,
        init_lora_weights: bool | str = True,
        bias: str = "none",
        **others: Any,
    ) -> CompatModel:
        """A new model with new LoRA adapters, which shares the arrays of `model`. Other arguments as in LoraConfig.

        target_modules: by default all linears, and the experts' matrices.
        use_gradient_checkpointing: replaces from_pretrained's, even by its default.
        max_seq_length: must be from_pretrained's.
        finetune_last_n_layers: restricts linears, not experts.
        random_state: seed of the matrices A.
        """
        where = "FastLanguageModel.get_peft_model"
        settle(where, others, PEFT, FastLanguageModel.get_peft_model)
        if model.full_finetuning:
            raise ValueError(
                f"{where}: the model was loaded with full_finetuning=True: load it without, or skip this call"
            )
        if max_seq_length not in (None, model.max_seq_length):
            raise ValueError(f"{where}: max_seq_length = {max_seq_length} belongs to from_pretrained; set it there")
        residuals = choose(where, "use_gradient_checkpointing", use_gradient_checkpointing, RESIDUALS)
        begin_at(random_state)
        module, adapter = add_lora(
            model.module,
            where,
            random_state,
            r=r,
            lora_alpha=lora_alpha,
            lora_dropout=lora_dropout,
            use_rslora=use_rslora,
            use_dora=use_dora,
            target_modules=target_modules,
            target_parameters=target_parameters,
            modules_to_save=modules_to_save,
            rank_pattern=rank_pattern,
            alpha_pattern=alpha_pattern,
            init_lora_weights=init_lora_weights,
            bias=bias,
            experts_too=True,
            layers_to_transform=last_layers(where, finetune_last_n_layers, layers_to_transform, model.module),
        )
        return CompatModel(
            module,
            model.tokenizer,
            model.max_seq_length,
            residuals,
            adapter=adapter,
            random_state=random_state,
            packing=model.packing,
            fast=model.fast,
            cache=model.cache,
        )

    @staticmethod
    def for_inference(model: CompatModel) -> CompatModel:
        """Returns the model unchanged: generation needs no switch here."""
        return model

    @staticmethod
    def for_training(model: CompatModel, use_gradient_checkpointing: bool | str = True) -> CompatModel:
        """Sets the model's residuals: True or "unsloth" lets the planner recompute or offload them, False keeps all."""
        where = "FastLanguageModel.for_training"
        model.residuals = choose(where, "use_gradient_checkpointing", use_gradient_checkpointing, RESIDUALS)
        return model


def _format(where: str, in_4bit: bool | None, in_16bit: bool, flags: Mapping[str, Any], full_finetuning: bool) -> str:
    """load_in of from_pretrained for Unsloth's arguments. ValueError: two contradict."""
    for flag, value in flags.items():
        if not value:
            continue
        if value is not True:
            raise ValueError(
                f"{where}: {flag} = {value!r} is not supported. Instead: True, which makes a scale for each row; a "
                "checkpoint that is published with other scales keeps them"
            )
        choices = {"load_in_4bit": in_4bit, "load_in_16bit": in_16bit, "full_finetuning": full_finetuning, **flags}
        if contradicting := [name for name, is_set in choices.items() if is_set and name != flag]:
            raise ValueError(f"{where}: {flag} = True and {contradicting[0]} = True contradict each other: drop one")
        return next(fmt.name for fmt in FORMATS.values() if fmt.flag == flag)
    four = in_4bit is None or in_4bit
    if four and in_16bit:
        raise ValueError(
            f"{where}: load_in_4bit = True, its default, and load_in_16bit = True contradict each other: pass "
            "load_in_4bit=False for 16-bit weights"
        )
    if in_4bit and full_finetuning:  # Unsloth turns four bits off too, and prints it
        report_idle(where, "load_in_4bit", "full_finetuning=True trains all weights, which are kept as stored")
    return "nf4" if four and not full_finetuning else "stored"


def _dtype_name(where: str, dtype: Any) -> str:
    """The name of a dtype that is given as a name, a NumPy or a torch dtype; ValueError if it is not supported."""
    name = str(dtype).removeprefix("torch.") if "torch" in type(dtype).__module__ else None
    try:
        name = name or jax.numpy.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    if name not in DTYPES:
        raise ValueError(f"{where}: dtype = {dtype!r} is not supported; supported: {', '.join(DTYPES)}")
    return name


FastModel = FastLanguageModel
