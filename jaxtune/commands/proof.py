"""Tries a converted recipe before it is said to be right: it loads, and the first rows of local files render."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path

from jaxtune.conversations.messages import shows_pictures
from jaxtune.convert import common
from jaxtune.convert.translation import Translation
from jaxtune.train.config import ConfigError, DataConfig, ModelConfig
from jaxtune.train.config.file import config_from_dict
from jaxtune.train.data.rendering.formats import Example, asked
from jaxtune.train.data.rendering.packaged import PACKAGED
from jaxtune.train.data.rendering.pictures import picture_access
from jaxtune.train.data.rendering.templates import RowEncoder, Tokenizer
from jaxtune.train.data.rows.reading import SUFFIXES, open_sources, read_rows
from jaxtune.train.data.tokens.chunks import examples_of
from jaxtune.train.objectives.objective import Objective
from jaxtune.train.spec.run_spec import decided_objective

_FEW = 3


def prove(recipe: Translation) -> None:
    """Lists each local set of rows whose first ones the recipe does not read and render, and notes those that it does.
    ConfigError for a recipe that cannot be run.
    """
    if recipe.get("data.train") is None:
        recipe.set("data.train", "rows.jsonl")
        recipe.lack("data.train", None, "the config names no rows: put a file or data set there")
    try:
        config = config_from_dict(recipe.values, {ours: place for ours, place in recipe.origins.items() if place})
        objective = decided_objective(config)
    except ValueError as error:
        raise ConfigError(f"the recipe that it would be: {error}") from None
    tokenizer = _tokenizer(config.model)
    _ask(recipe, config.data, tokenizer)
    for name in _names(config.data):
        path = Path(common.FIRST_ROWS.sub("", name)).expanduser()
        if not path.exists():
            if common.is_local(str(path)) and path.suffix and path.suffix.lower() not in SUFFIXES:
                recipe.lack(f"rows of {name}", path.suffix, f"a file in one of the forms {', '.join(SUFFIXES)}")
            continue
        tokenizer = tokenizer or _substitute()
        try:
            count = _render(name, config.data, objective, tokenizer)
        except (ValueError, OSError) as error:
            recipe.lacking.append(f"rows of {name}: {error}")
        else:
            how = "" if tokenizer.name_or_path else ", with another tokenizer, as the model's is not here"
            recipe.proved.append(f"the first {count} of {name}{how}")


_WRITTEN = "data.template: what it writes before an answer is trained on; there only the row's words"
_JOINED = "data.train: a prompt and its answer are tokenised together; there apart, which SentencePiece shows"


def _ask(recipe: Translation, data: DataConfig, tokenizer: Tokenizer | None) -> None:
    """Lists what the model's tokenizer shows to be otherwise in the program; notes it if there is none to ask."""
    doubts = [_WRITTEN] * (recipe.only_rows and data.template == "tokenizer") + [_JOINED] * recipe.apart
    if tokenizer is None:
        recipe.notes += doubts
        return
    if _WRITTEN in doubts:
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        try:
            written = RowEncoder(tokenizer, template="tokenizer").before_answer(Example(messages=turns))
        except ValueError as error:
            recipe.lacking.append(f"data.template: {error}")
        else:
            recipe.lacking += [_WRITTEN] * bool(written.strip())
    if _JOINED in doubts:
        together, prompt, answer = (
            tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("a:\nb", "a:\n", "b")
        )
        recipe.lacking += [_JOINED] * (together != prompt + answer)


def _names(data: DataConfig) -> list[str]:
    """The sets of rows in data.train and data.eval."""
    mixed = [str(rows) for rows, _ in data.mixed]
    train = [data.train] if isinstance(data.train, str) else mixed or [str(rows) for rows in data.train]
    return list(dict.fromkeys(train if data.eval is None else [*train, data.eval]))


def _render(name: str, data: DataConfig, objective: Objective, tokenizer: Tokenizer) -> int:
    """Renders the first rows of a file or folder, and returns their number. ValueError or OSError for what cannot be
    trained on.
    """
    form = objective.row_format or data.format
    options = ("template", "train_on", "instruction_part", "response_part", "last_response_only", "mask_spans")
    encoder = RowEncoder(tokenizer, **{key: getattr(data, key) for key in options})
    count = 0
    for row in itertools.islice(read_rows(open_sources(name, columns=data.columns), form), _FEW):
        access = picture_access(row.file, data.images, data.remote_images)
        try:
            if objective.samples:
                if row.value is None:
                    raise ValueError(row.error)
                encoder.encode_prompt(asked(row.value, access)[0])
            else:
                for example in examples_of(row, access):
                    if example is not None and not shows_pictures(example.messages or []):
                        encoder.render(example)
        except ValueError as error:
            raise ValueError(f"{row.place}: {error}") from None
        count += 1
    if not count:
        raise ValueError("there are no rows in it")
    return count


def _tokenizer(model: ModelConfig) -> Tokenizer | None:
    """The model's tokenizer, of its folder or the hub's cache; None if it is not here."""
    from huggingface_hub import try_to_load_from_cache

    from jaxtune.models.files.model_folder import load_tokenizer

    name = model.tokenizer or model.path or ""
    cached = None
    with contextlib.suppress(ValueError):  # a path that is no name of the hub
        cached = try_to_load_from_cache(name, "tokenizer_config.json")
    folder = Path(cached).parent if isinstance(cached, str) else Path(name).expanduser()
    return load_tokenizer(folder) if folder.is_dir() else None


def _substitute() -> Tokenizer:
    """A tokenizer of bytes and of the tokens that packaged templates need; its own template is ChatML."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    from jaxtune.models.files import transformers_import

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    marks = sorted({mark for template in PACKAGED.values() for mark in template.marks or ()})
    options = {"bos_token": "<s>", "eos_token": "</s>", "additional_special_tokens": marks}
    with transformers_import.without_torch() as transformers:
        made = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)
    made.chat_template = PACKAGED["chatml"].text
    return made
