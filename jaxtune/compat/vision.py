"""Unsloth's FastVisionModel and UnslothVisionDataCollator, and transformers' names of models that read pictures."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from jaxtune.compat.arguments import choose, report_idle, settle
from jaxtune.compat.model import CompatModel, FastLanguageModel
from jaxtune.compat.tables import COLLATOR
from jaxtune.compat.texts import NumpyTensor
from jaxtune.compat.transformers_names import AutoModelForCausalLM, AutoTokenizer
from jaxtune.compat.wording import worded
from jaxtune.conversations.messages import Message, pictures_of, read_messages, shows_pictures
from jaxtune.conversations.picture_processors import PictureProcessor, placed_pictures, spaced
from jaxtune.conversations.pictures import PICTURE, PictureAccess, read_picture
from jaxtune.models.files.model_folder import resolve_folder
from jaxtune.models.generation.pictures import processor_of
from jaxtune.models.lora import experts, linears


class Inputs(dict[str, NumpyTensor]):
    """What a processor returns: arrays by name, which are attributes, too."""

    def __getattr__(self, name: str) -> NumpyTensor:
        if name in self:
            return self[name]
        raise AttributeError(name)

    def to(self, *_: object, **__: object) -> Inputs:
        return self


class Processor:
    """transformers' processor of a model that reads pictures; what it lacks is the tokenizer's.

    Attributes:
      tokenizer: of the model.
      max_pixels: of a picture, beyond which it is made smaller; None: as the model's files say.
    """

    def __init__(self, tokenizer, pictures: PictureProcessor, max_pixels: int | None = None):
        self.tokenizer, self.pictures, self.max_pixels = tokenizer, pictures, max_pixels

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") or name == "tokenizer":
            raise AttributeError(name)
        return getattr(self.tokenizer, name)

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, object]],
        add_generation_prompt: bool = False,
        tokenize: bool = False,
        return_dict: bool = False,
        return_tensors: str | None = None,
        tools: Sequence[dict[str, object]] | None = None,
        **variables: object,
    ) -> str | Inputs:
        """The text of a conversation; with `tokenize` also its pictures' arrays, as `__call__`. return_dict,
        return_tensors: have no effect.
        """
        del return_dict, return_tensors
        options = {"tools": tools, "add_generation_prompt": add_generation_prompt, **variables}
        text = self.tokenizer.apply_chat_template(conversation, tokenize=False, **options)
        if not tokenize:
            return text
        messages = read_messages(conversation, "conversation", PictureAccess())
        return self([picture.decoded() for message in messages for picture in pictures_of(message)], text)

    def __call__(
        self,
        images: object = None,
        text: str | Sequence[str] | None = None,
        add_special_tokens: bool = False,
        padding: bool | str = True,
        return_tensors: str | None = None,
        **others: object,
    ) -> Inputs:
        """{"input_ids", "attention_mask"}: int[B, T], padded on the left; of pictures also {"pixel_values":
        float32[patches, F], "image_grid_thw": int[pictures, 3]}, in order.

        images: one, a list, or a list for each text, in any form that rows have.
        text: with one mark for each picture, as the chat template writes. padding, return_tensors: have no effect.
        """
        del padding, return_tensors, others
        texts = [text] if isinstance(text, str) else list(text or ())
        if not texts:
            raise ValueError("processor: text is missing: give the text of apply_chat_template")
        pictures = [read_picture(image, PictureAccess()) for image in _flat(images)]
        written, waiting = str(self.tokenizer.convert_ids_to_tokens(self.pictures.written)), iter(pictures)
        if (marks := sum(one_text.count(written) for one_text in texts)) != len(pictures):
            raise ValueError(f"processor: {len(pictures)} images for texts with {marks} marks {written}")
        rows, placed = [], []
        for one_text in texts:
            of_text = list(itertools.islice(waiting, one_text.count(written)))
            whole = spaced(one_text, written, self.pictures)[0] if of_text else one_text
            ids = self.tokenizer(whole, add_special_tokens=add_special_tokens)["input_ids"]
            message: Message = {"role": "user", "content": PICTURE * len(of_text), "pictures": of_text}
            row, _, shown = placed_pictures([message], np.asarray(ids, np.int32), self.pictures)
            rows.append(row)
            placed += shown
        width = max(map(len, rows))
        pad = self.tokenizer.pad_token_id or 0
        arrays = {
            "input_ids": np.array([[pad] * (width - len(row)) + row.tolist() for row in rows]),
            "attention_mask": np.array([[0] * (width - len(row)) + [1] * len(row) for row in rows]),
        }
        if placed:
            patches = [self.pictures.patches(each.picture.decoded()) for each in placed]
            arrays["pixel_values"] = np.concatenate(patches)
            arrays["image_grid_thw"] = np.array([(1, *each.grid) for each in placed])
        return Inputs({name: array.view(NumpyTensor) for name, array in arrays.items()})

    def save_pretrained(self, save_directory: str | os.PathLike, **_: object) -> None:
        """Saves the tokenizer; the image processor's file is saved with whole models."""
        self.tokenizer.save_pretrained(save_directory)


def _flat(images: object) -> list[object]:
    if images is None:
        return []
    return [image for each in images for image in _flat(each)] if isinstance(images, list | tuple) else [images]


class FastVisionModel(FastLanguageModel):
    """Unsloth's class: FastLanguageModel with the tower of models that read pictures."""

    @staticmethod
    @worded
    def from_pretrained(model_name: str, *arguments, **options) -> tuple[CompatModel, Processor]:
        """(model, processor); arguments as in FastLanguageModel.from_pretrained. ValueError for a model whose pictures
        are not supported, or without its image processor's file.
        """
        model, tokenizer = FastLanguageModel.from_pretrained(model_name, *arguments, pictures=True, **options)
        return model, Processor(tokenizer, processor_of(model.module.source, tokenizer))

    @staticmethod
    @worded
    def get_peft_model(
        model: CompatModel,
        r: int = 16,
        target_modules: str | Sequence[str] | None = None,
        *arguments,
        finetune_vision_layers: bool = True,
        finetune_language_layers: bool = True,
        finetune_attention_modules: bool = True,
        finetune_mlp_modules: bool = True,
        **options,
    ) -> CompatModel:
        """FastLanguageModel.get_peft_model, over the linears of tower and text for which the finetune arguments are
        True; those of a tower's merger count as MLPs. target_modules: of its own, which goes without them.
        """
        where = "FastVisionModel.get_peft_model"
        chosen = {
            "finetune_vision_layers": finetune_vision_layers,
            "finetune_language_layers": finetune_language_layers,
            "finetune_attention_modules": finetune_attention_modules,
            "finetune_mlp_modules": finetune_mlp_modules,
        }
        off = [name for name, is_on in chosen.items() if not is_on]
        if target_modules not in (None, "all-linear"):
            if off:
                raise ValueError(f"{where}: {off[0]} = False and target_modules = {target_modules!r}: drop one")
        elif not off:
            target_modules = "all-linear"
        else:
            target_modules = _targets(where, model, *chosen.values())
            if finetune_language_layers and finetune_mlp_modules:
                options.setdefault("target_parameters", [name for name, _ in experts(model.module)] or None)
        return FastLanguageModel.get_peft_model(model, r, target_modules, *arguments, **options)


def _targets(where: str, model: CompatModel, vision: bool, language: bool, attention: bool, mlp: bool) -> list[str]:
    """The names of the linears that train."""
    if not (vision or language) or not (attention or mlp):
        raise ValueError(f"{where}: the finetune arguments leave nothing to train: set one of each pair to True")
    tower = model.module.vision
    if tower is None:
        raise ValueError(f"{where}: the model was loaded without its tower: use FastVisionModel.from_pretrained")
    prefix = f"(?:{'|'.join(map(re.escape, tower.config.prefixes))})"
    modules = ".*" if attention and mlp else ".*attn.*" if attention else "(?!.*attn).*"
    sides = [rf"{prefix}{modules}"] * vision
    sides += [rf"(?!{prefix}).*\.layers\.\d+\.{modules}"] * language
    pattern = "|".join(f"(?:{side})" for side in sides)
    return [name for name, _ in linears(model.module) if re.fullmatch(pattern, name)]


@dataclasses.dataclass(frozen=True)
class UnslothVisionDataCollator:
    """Unsloth's class. Rows are tokenised and packed before a run, so it only says how; pictures are never in the loss.

    Args:
      model, processor: of FastVisionModel.from_pretrained; their own are used.
      max_seq_length: the most tokens of a row; None: the trainer's.
      formatting_func: makes the messages of a row.
      resize: "min": pictures have at most 512 x 512 pixels, or a tower's image_size; a number: its square;
        (width, height): their product; "max": as the model's files say.
      train_on_responses_only, instruction_part, response_part, last_response_only: as the function of the first name.
    """

    model: CompatModel
    processor: object
    max_seq_length: int | None
    formatting_func: Callable[[object], object] | None
    max_pixels: int | None
    responses: tuple[str | None, str | None, bool] | None
    """instruction_part, response_part and last_response_only; None: all tokens are trained on."""

    def __init__(
        self,
        model: CompatModel,
        processor: object,
        max_seq_length: int | None = None,
        formatting_func: Callable[[object], object] | None = None,
        resize: str | int | Sequence[int] = "min",
        train_on_responses_only: bool = False,
        instruction_part: str | None = None,
        response_part: str | None = None,
        last_response_only: bool = False,
        **others: object,
    ):
        settle("UnslothVisionDataCollator", others, COLLATOR, UnslothVisionDataCollator)
        responses = instruction_part, response_part, last_response_only
        for name, value in (
            ("model", model),
            ("processor", processor),
            ("max_seq_length", max_seq_length),
            ("formatting_func", formatting_func),
            ("max_pixels", _pixels(resize, model)),
            ("responses", responses if train_on_responses_only else None),
        ):
            object.__setattr__(self, name, value)


def _pixels(resize: str | int | Sequence[int], model: CompatModel) -> int | None:
    where = "UnslothVisionDataCollator"
    if isinstance(resize, str):
        size = getattr(model.config, "vision_config", None)
        size = size.get("image_size") if isinstance(size, Mapping) else None
        smallest = None if isinstance(size, int) else 512 * 512  # a tower of one size needs no limit
        pixels = choose(where, "resize", resize, {"min": smallest, "max": None})
    else:
        width, height = (resize, resize) if isinstance(resize, int) else resize
        pixels = width * height
    if pixels is not None:
        report_idle(where, f"resize = {resize!r} by width", f"pictures have at most {pixels:,} pixels, of any sides")
    return pixels


class AutoModelForImageTextToText:
    """transformers' class."""

    @staticmethod
    def from_pretrained(pretrained_model_name_or_path: str | os.PathLike, **arguments: object) -> CompatModel:
        """AutoModelForCausalLM.from_pretrained with the model's tower."""
        return AutoModelForCausalLM.from_pretrained(pretrained_model_name_or_path, pictures=True, **arguments)


class AutoProcessor:
    """transformers' class."""

    @staticmethod
    def from_pretrained(
        pretrained_model_name_or_path: str | os.PathLike, max_pixels: int | None = None, **arguments: object
    ) -> Processor:
        """The processor of a folder or hub name; arguments as in AutoTokenizer.from_pretrained, and max_pixels."""
        tokenizer = AutoTokenizer.from_pretrained(pretrained_model_name_or_path, **arguments)
        folder = Path(resolve_folder(os.fspath(pretrained_model_name_or_path)))
        return Processor(tokenizer, PictureProcessor.of_folder(folder, tokenizer, max_pixels), max_pixels)


def plain_tokenizer(processor):
    """The tokenizer of a processor, also of transformers' own; a tokenizer itself."""
    return (
        processor.tokenizer if isinstance(processor, Processor) or hasattr(processor, "image_processor") else processor
    )


def has_pictures(row: Mapping[str, object]) -> bool:
    """Whether a row has pictures in a column or in a conversation."""
    return any(row.get(name) for name in ("images", "image")) or any(map(shows_pictures, row.values()))
