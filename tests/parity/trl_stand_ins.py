"""What TRL's tests name and ask of the hub, made here: jaxtune.compat's names, tiny models and small data sets."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import re
import tempfile
from pathlib import Path

import datasets
import numpy as np
import peft
import torch
import transformers
import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxtune import compat
from jaxtune.compat.model import CompatModel

_CHAT = Path(trl.__file__).with_name("chat_templates")
_WORDS = "One is better than two two is better than three three is better than four four is better than many"
_NUMBERS = _WORDS.split(" ")
_SENTENCES = [" ".join(_NUMBERS[start : start + 4 + start % 3]) + "." for start in range(19)]
_TEMPLATES = {"GptOss": "gptoss", "Qwen3": "qwen3", "Llama": "llama3", "Cohere2": "cohere2", "Gemma3": "gemma3"}
_TOOL = {
    "type": "function",
    "function": {
        "name": "count",
        "description": "Counts.",
        "parameters": {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]},
    },
}


class NotHere:
    """A name that compat refuses: every use raises what compat said."""

    def __init__(self, error: ImportError):
        self._error = error

    def __call__(self, *_: object, **__: object):
        raise self._error

    def __getattr__(self, name: str):
        raise self._error


def name_of(module: str, name: str) -> object:
    """What `from MODULE import NAME` of a test gets."""
    if hasattr(Hub, name):
        return getattr(Hub, name)
    try:
        return getattr(compat, name)
    except ImportError as error:
        if module.partition(".")[0] == "trl":
            return NotHere(error)
    return getattr(importlib.import_module(module), name)


@functools.cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="jaxtune-trl-"))


@functools.cache
def _tokens() -> Tokenizer:
    """A byte-level tokenizer of the data sets' words, with the marks of the templates."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    marks = [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<think>",
        "</think>",
        "<|start|>",
        "<|end|>",
        "<|message|>",
    ]
    marks += ["<|channel|>", "<|return|>", "<|call|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    marks += ["<|begin_of_text|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
    trainer = trainers.BpeTrainer(
        vocab_size=1000, special_tokens=marks, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    texts = [(_CHAT / f"{kind}.jinja").read_text(encoding="utf-8") for kind in ("qwen2_5", "qwen3")]
    tokenizer.train_from_iterator([*_SENTENCES * 3, *texts, json.dumps(_TOOL)], trainer)
    return tokenizer


def tokenizer_of(name: str):
    """With TRL's chat template of the model's family; without one for a family that has none."""
    end = next(
        (mark for family, mark in {"GptOss": "<|return|>", "Llama": "<|eot_id|>"}.items() if family in name), None
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=_tokens(), eos_token=end or "<|im_end|>", pad_token="<|endoftext|>"
    )
    if "Llama" in name:
        tokenizer.bos_token = "<|begin_of_text|>"
    if "GPTNeoX" not in name:
        kind = next((file for family, file in _TEMPLATES.items() if family in name), "qwen2_5")
        tokenizer.chat_template = (_CHAT / f"{kind}.jinja").read_text(encoding="utf-8")
    return tokenizer


_SIZES = dict(vocab_size=1024, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4)
_SIZES |= dict(num_key_value_heads=2, max_position_embeddings=2048, head_dim=4, pad_token_id=0, bos_token_id=None)
_MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, num_local_experts=4)


def model_folder(name: str) -> str:
    """The folder of a tiny model of that name, with random weights."""
    short = name.rpartition("/")[2]
    if "trl-internal-testing" not in name:
        return name
    folder = _folder() / short
    if "Remote" in name:
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text('{"model_type": "remote", "auto_map": {"AutoConfig": "remote.Config"}}')
    if not folder.exists():
        kind = short.partition("-")[2].partition("For")[0]
        model_type = "gpt_neox" if kind == "GPTNeoX" else re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kind).lower()
        sizes = _SIZES | (_MOE if "Moe" in kind or "Oss" in kind or "Deepseek" in kind else {})
        if "ForSequence" in short:
            sizes["num_labels"] = 1
        tokenizer = tokenizer_of(short)
        torch.manual_seed(0 if short.startswith("tiny-") else 1)
        built = transformers.AutoConfig.for_model(model_type, **sizes, eos_token_id=tokenizer.eos_token_id)
        auto = "AutoModelForSequenceClassification" if "ForSequence" in short else "AutoModelForCausalLM"
        model = getattr(transformers, auto).from_config(built).float()
        for parameter in model.parameters():  # biases that are 0 would hide what trains
            parameter.data += 0.02 * torch.randn_like(parameter)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return str(folder)


def _texts(kind: str, index: int) -> dict[str, object]:
    words = _SENTENCES[index].rstrip(".").split()
    start, good, bad = " ".join(words[:2]), f" {' '.join(words[2:])}.", " ugly." if index % 2 else " worse than all."
    return {
        "language_modeling": {"text": start + good},
        "prompt_only": {"prompt": start},
        "prompt_completion": {"prompt": start, "completion": good},
        "preference": {"prompt": start, "chosen": good, "rejected": bad},
        "implicit_prompt_preference": {"chosen": start + good, "rejected": start + bad},
        "unpaired_preference": {"prompt": start, "completion": bad if index % 2 else good, "label": not index % 2},
    }[kind]


def _turns(kind: str, index: int) -> dict[str, object]:
    row, user = _texts(kind, index), [{"role": "user", "content": f"What is better than {_NUMBERS[index % 7]}?"}]

    def answer(text: object) -> list[dict[str, object]]:
        return [{"role": "assistant", "content": str(text).strip()}]

    if kind == "language_modeling":
        return {"messages": user + answer(row["text"])}
    before = user if "implicit" in kind else []
    turned = {key: before + answer(value) for key, value in row.items() if key in ("chosen", "rejected", "completion")}
    return {**({"prompt": user} if "prompt" in row else {}), **turned} | (
        {"label": row["label"]} if "label" in row else {}
    )


def _of_name(name: str, config: str) -> datasets.DatasetDict:
    config = config or "language_modeling"
    if name.endswith("/zen"):
        form, _, kind = config.partition("_")
        rows = [{"standard": _texts, "conversational": _turns}[form](kind, index) for index in range(19)]
    elif name.endswith("/harmony"):
        rows = [_turns(config, index) for index in range(19)]
        rows = [row | {"reasoning_effort": "low", "model_identity": "You are Tiny ChatGPT."} for row in rows]
    elif name.endswith("/toolcall"):
        call = [{"type": "function", "function": {"name": "count", "arguments": {"what": "words"}}}]
        use = [{"role": "assistant", "tool_calls": call}, {"role": "tool", "name": "count", "content": "four"}]
        rows = []
        for index in range(19):
            row = _turns(config, index)
            messages = row["messages"] if "messages" in row else row["prompt"]
            messages[1:1] = use
            rows.append(row | {"tools": json.dumps([_TOOL])})
    else:
        raise ValueError(f"{name}: pictures are not among the stand-ins")
    return datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(rows[:17]), "test": datasets.Dataset.from_list(rows[17:])}
    )


class Hub:
    """The names of tests that would ask the hub."""

    @staticmethod
    def load_dataset(name: str, config: str = "", split: str | None = None, streaming: bool = False):
        data = _of_name(name, config)
        if split is None:
            return data
        split, _, limit = split.partition("[:")
        rows = data[split].select(range(int(limit.rstrip("]")))) if limit else data[split]
        return rows.to_iterable_dataset() if streaming else rows

    class AutoTokenizer:
        @staticmethod
        def from_pretrained(name: str, **options):
            return compat.AutoTokenizer.from_pretrained(model_folder(name), **options)

    class AutoModelForCausalLM:
        @staticmethod
        def from_pretrained(name: str, **options):
            return compat.AutoModelForCausalLM.from_pretrained(model_folder(name), **options)

    class AutoModelForSequenceClassification:
        @staticmethod
        def from_pretrained(name: str, **options):
            return compat.AutoModelForSequenceClassification.from_pretrained(model_folder(name), **options)

    PromptTuningConfig, PrefixTuningConfig = peft.PromptTuningConfig, peft.PrefixTuningConfig
    PromptEncoderConfig = peft.PromptEncoderConfig


for _name in ("SFTTrainer", "DPOTrainer", "KTOTrainer", "RewardTrainer", "GRPOTrainer", "RLOOTrainer"):

    class _Trainer(getattr(compat, _name)):
        """jaxtune's, for names of the hub."""

        def __init__(self, model=None, *others, **arguments):
            def local(value):
                if isinstance(value, str):
                    return model_folder(value)
                return [local(each) for each in value] if isinstance(value, list) else value

            for key in ("reward_funcs", "ref_model"):
                if key in arguments:
                    arguments[key] = local(arguments[key])
            args = arguments.get("args")
            if getattr(args, "chat_template_path", None) == "Qwen/Qwen3-4B":
                args.chat_template_path = str(_CHAT / "qwen3.jinja")
            super().__init__(local(model), *others, **arguments)

    _Trainer.__name__ = _Trainer.__qualname__ = _name
    setattr(Hub, _name, _Trainer)


def _tensor(parameter) -> torch.Tensor:
    value = np.asarray(parameter)
    if value.dtype.name == "bfloat16":
        return torch.from_numpy(value.astype(np.float32)).bfloat16()
    return torch.from_numpy(np.array(value))


@contextlib.contextmanager
def as_tensors():
    """Meanwhile, a model's parameters are torch's, which the tests compare by torch's functions."""
    named, get = CompatModel.named_parameters, CompatModel.get_parameter
    CompatModel.named_parameters = lambda self: ((name, _tensor(value)) for name, value in named(self))
    CompatModel.get_parameter = lambda self, name: _tensor(get(self, name))
    try:
        yield
    finally:
        CompatModel.named_parameters, CompatModel.get_parameter = named, get
