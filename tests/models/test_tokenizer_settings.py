"""A saved tokenizer has its base's own settings, in which only what changed is written, so that versions of
transformers that load the base load it too."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path

import pytest

from jaxtune.models.files.model_folder import load_tokenizer, save_companions
from jaxtune.models.files.tokenizer_settings import merged

TOKENIZERS = ("gpt-oss", "llama-2", "llama-3.2", "mistral-7b-v0.3", "phi-4", "qwen2.5", "qwen3")


@pytest.fixture(scope="module", params=TOKENIZERS)
def base(request):
    """(its folder, the tokenizer)"""
    folder = Path(os.environ.get("JAXTUNE_TEST_DATA", "/nowhere")) / "tokenizers" / request.param
    if not folder.is_dir():
        pytest.skip("JAXTUNE_TEST_DATA has no tokenizers")
    return folder, load_tokenizer(folder)


def saved(tokenizer, folder: Path) -> dict:
    folder.mkdir()
    save_companions(folder, (), tokenizer)
    return json.loads((folder / "tokenizer_config.json").read_text())


def test_nothing_changes_without_a_change(base, tmp_path):
    folder, tokenizer = base
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert saved(tokenizer, tmp_path / "once") == settings
    again = load_tokenizer(tmp_path / "once")
    assert saved(again, tmp_path / "twice") == settings
    assert again.get_vocab() == tokenizer.get_vocab() and again.chat_template == tokenizer.chat_template


def test_only_what_changed_is_written(base, tmp_path):
    folder, tokenizer = base
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    changed = copy.deepcopy(tokenizer)
    changed.add_special_tokens({"eos_token": "<|of a run|>"})
    changed.add_tokens(["<think of>"])
    changed.padding_side, changed.chat_template = "left", "{{ messages }}"
    found = saved(changed, tmp_path / "out")
    known = {"eos_token", "chat_template", "added_tokens_decoder", "padding_side"}
    assert {key: value for key, value in found.items() if key not in known} == {
        key: value for key, value in settings.items() if key not in known
    }
    assert found["eos_token"] == "<|of a run|>" and found.get("chat_template", "{{ messages }}") == "{{ messages }}"
    more = {entry["content"] for key, entry in found["added_tokens_decoder"].items()}
    more -= {entry["content"] for entry in settings["added_tokens_decoder"].values()}
    assert (
        more == {"<|of a run|>", "<think of>"}
        and settings["added_tokens_decoder"].items() <= found["added_tokens_decoder"].items()
    )
    again = load_tokenizer(tmp_path / "out")
    assert again.eos_token == "<|of a run|>" and again.chat_template == "{{ messages }}"
    assert (
        again.get_vocab() == changed.get_vocab() and again("<think of>a").input_ids == changed("<think of>a").input_ids
    )


def test_one_without_a_base_names_no_class_of_transformers_5_alone(tmp_path):
    from tests.export.conftest import byte_tokenizer

    found = saved(byte_tokenizer(), tmp_path / "out")
    assert found["tokenizer_class"] == "PreTrainedTokenizerFast" and found["eos_token"] == "<|end|>"
    assert not {"is_local", "backend", "local_files_only"} & found.keys()
    again = load_tokenizer(tmp_path / "out")
    assert again.eos_token == "<|end|>" and again.get_vocab() == byte_tokenizer().get_vocab()


@pytest.mark.parametrize(
    ("settings", "now", "wanted"),
    [
        ({}, [], {}),
        ({}, ["<a>"], {"additional_special_tokens": ["<a>"]}),
        ({"additional_special_tokens": ["<a>"]}, ["<a>"], {"additional_special_tokens": ["<a>"]}),
        ({"additional_special_tokens": ["<a>"]}, ["<a>", "<b>"], {"additional_special_tokens": ["<a>", "<b>"]}),
        ({"extra_special_tokens": ["<a>"]}, ["<a>", "<b>"], {"additional_special_tokens": ["<a>", "<b>"]}),
        ({"tokenizer_class": "TokenizersBackend"}, [], {}),
        ({"extra_special_tokens": {}}, ["<a>"], {"extra_special_tokens": {}, "additional_special_tokens": ["<a>"]}),
        ({"extra_special_tokens": {"image_token": "<a>"}}, ["<a>"], {"extra_special_tokens": {"image_token": "<a>"}}),
    ],
)
def test_special_tokens_without_a_role_keep_the_form_of_their_version(settings, now, wanted):
    class Given:
        chat_template = None

    given = Given()
    given.jaxtune_base_settings = settings
    found = merged(given, {"extra_special_tokens": now, "tokenizer_class": "TokenizersBackend"})
    assert found == wanted | {"tokenizer_class": "PreTrainedTokenizerFast"}
