"""Rows of converted configs have the tokens and masks that the programs themselves made of them, which are recorded in
rendered.json (scripts/convert_once.py compares them with configs of the programs' repositories)."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import yaml

from jaxtune.conversations.templates import render
from jaxtune.convert import recipe_of
from jaxtune.convert.factory_templates import forms, jinja
from jaxtune.train.config.file import config_from_dict
from jaxtune.train.objectives.named import objective_of

ROOT = Path(__file__).resolve().parents[2]
_RECORDED = json.loads((Path(__file__).parent / "rendered.json").read_text(encoding="utf-8"))
spec = importlib.util.spec_from_file_location("convert_once", ROOT / "scripts" / "convert_once.py")
assert spec is not None and spec.loader is not None
once = importlib.util.module_from_spec(spec)
spec.loader.exec_module(once)

_PAIRS = {"type": "chat_template.default", "field_messages": "conversation"}
_TURNS = {"type": "chat_template"}
_ULTRA = {"rl": "kto", "datasets": [{"type": "llama3.ultra"}]}
# {name: the config without model and rows}
CONFIGS = {
    "examples/llama-3/lora-1b.yml": {"datasets": [{"type": "alpaca"}], "sequence_len": 512, "adapter": "lora"},
    "examples/llama-3/instruct-lora-8b.yml": {"chat_template": "llama3", "datasets": [_TURNS]},
    "examples/llama-3/qlora-1b-kto.yaml": _ULTRA,
    "examples/qwen2/dpo.yaml": {"chat_template": "qwen_25", "rl": "dpo", "datasets": [_PAIRS]},
    "examples/qwen3/32b-qlora.yaml": {
        "chat_template": "qwen3",
        "datasets": [{**_TURNS, "field_messages": "conversations"}],
    },
    "examples/train_lora/llama3_lora_sft.yaml": {"stage": "sft", "template": "llama3"},
    "examples/train_lora/llama3_lora_kto.yaml": {"stage": "kto", "template": "llama3"},
    "examples/train_lora/qwen3_lora_sft.yaml": {"stage": "sft", "template": "qwen3_nothink"},
    "examples/train_full/qwen2_5_full_sft.yaml": {"stage": "sft", "template": "qwen"},
    "examples/train_lora/mistral3_lora_sft.yaml": {"stage": "sft", "template": "mistral"},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_are_the_programs_own(name, tmp_path, test_data):
    from transformers import AutoTokenizer

    case = next(case for case in once.CASES if case[1] == name)
    config = {"learning_rate": 1e-4, **json.loads(json.dumps(CONFIGS[name]))}
    path = tmp_path / case[0] / name.replace("/", "__")
    path.parent.mkdir()
    path.write_text(yaml.safe_dump(config | {"base_model" if case[0] == "axolotl" else "model_name_or_path": "m"}))
    translation = recipe_of(once.config_of(case, tmp_path, test_data / "tokenizers"), tmp_path)
    recipe = config_from_dict(translation.values)
    tokenizer = AutoTokenizer.from_pretrained(recipe.model.path)
    names = [recipe.data.train] if isinstance(recipe.data.train, str) else list(recipe.data.train)
    objective, ours = objective_of(recipe.objective), []
    for rows in names:
        prepared = objective.prepare(rows, tokenizer, recipe.data, vocab_size=10**9, max_rows=None)
        ours += [prepared.documents[index] for index in range(len(prepared.documents))]
    ours = ours[::2] if recipe.objective.name == "kto" else ours
    units = [once._unit(one.tokens.tolist(), one.mask.tolist(), recipe.objective.name) for one in ours]
    theirs = [once._unit(ids, trained, recipe.objective.name) for ids, trained in _RECORDED[name]]
    assert sorted(units) == sorted(theirs)


@pytest.mark.parametrize("thinking", [True, False, None])
@pytest.mark.parametrize("last_only", [True, False])
def test_every_template_of_llama_factory_renders(thinking, last_only, shared_tokenizer):
    """Its form holds each message once, in order."""
    turns = [("user", "first?"), ("assistant", "one."), ("user", "second?"), ("assistant", "two.")]
    messages = [{"role": role, "content": said} for role, said in turns]
    for name, form in forms().items():
        text = render(shared_tokenizer, jinja(form, "told", thinking, last_only), messages, None)
        places = [text.find(part) for part in ("told", "first?", "one.", "second?", "two.")]
        assert -1 not in places and places == sorted(places), name
        assert all(text.count(said) == 1 for _, said in turns), name


@pytest.fixture(scope="module")
def shared_tokenizer():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE()), bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
