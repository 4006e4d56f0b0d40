"""Messages of jaxtune.train that reach a script name its own arguments."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxtune
from jaxtune import compat
from jaxtune.compat.settings import SFTConfig
from jaxtune.compat.wording import _candidates, _words, arguments_of, in_script_words
from jaxtune.train.config import ConfigError
from jaxtune.train.config.file import config_keys
from jaxtune.train.user_code.errors import UserCodeError

KINDS = [
    getattr(compat, f"{name}Config")
    for name in ("SFT", "DPO", "ORPO", "KTO", "Reward", "GRPO", "RLOO", "Distillation", "GKD")
]
KEYS = [key.name for key in config_keys()]
DOTTED = re.compile("|".join(rf"(?<![\w./']){re.escape(key)}(?![\w/]|\.\w)" for key in KEYS if "." in key))
# Arguments of functions and trainers that scripts have beside their config.
ELSEWHERE = {"max_seq_length"}


@pytest.fixture(scope="module")
def templates() -> list[str]:
    """The texts of jaxtune.train and jaxtune.models that have a recipe's key, their values as X."""
    found = set()
    for path in sorted(Path(jaxtune.__file__).parent.glob("*/**/*.py")):
        if path.parts[-2] in ("compat",) or not {"train", "models", "conversations"} & set(path.parts):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        plain = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        inner = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                inner |= {id(part) for part in node.values}
                parts = [part.value if isinstance(part, ast.Constant) else "X" for part in node.values]
                text = "".join(str(part) for part in parts)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in plain | inner:
                text = node.value
            else:
                continue
            if " " in text and DOTTED.search(text):
                found.add(text)
    return sorted(found)


def strangers(text: str, kind: type[SFTConfig]) -> list[str]:
    """The recipe's keys in a text that are not called so."""
    return [m[0] for m in DOTTED.finditer(text) if not text[: m.start()].endswith("a recipe's ")]


@pytest.mark.parametrize("kind", KINDS)
def test_no_message_names_a_key_that_the_config_lacks(kind, templates):
    assert len(templates) > 100
    for text in templates:
        found = in_script_words(text, kind)
        assert strangers(found, kind) == [], text
        assert in_script_words(found, kind) == found  # said twice, by nested calls


@pytest.mark.parametrize("kind", KINDS)
def test_the_arguments_that_keys_become_are_the_configs_own(kind):
    every = set().union(*map(arguments_of, KINDS))
    for key, words in _words(kind).items():
        if words != f"a recipe's {key}":
            named = set(re.findall(r"\w+", words)) & every
            assert named <= arguments_of(kind) | ELSEWHERE, key
    assert set(_words(kind)) == set(_candidates()) >= set(KEYS)


@given(st.sampled_from(KEYS), st.sampled_from(KINDS), st.sampled_from(["{}=3", "{} = 'x': no", "{} = null", "{}=true"]))
@settings(max_examples=150, deadline=None)
def test_a_key_anywhere_in_a_message(key, kind, form):
    text = f"3 rows are wrong: {form.format(key)}; of /a/{key}/b and 'x/{key}' nothing is said"
    found = in_script_words(text, kind)
    word = _words(kind)[key]
    assert f": {word}" in found and f"/a/{key}/b and 'x/{key}'" in found
    assert found.count(word) == 1 or word in text
    if form == "{}=true":
        assert f"{word}=True" in found


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("DPO", "raise data.length", "raise max_length"),
        ("GRPO", "raise data.length", "raise max_prompt_length"),
        ("Distillation", "raise data.length", "raise the model's max_seq_length"),
        ("SFT", "output = 'x' belongs to another run", "output_dir = 'x' belongs to another run"),
        ("GKD", "reach objective.max_completion_length", "reach max_new_tokens"),
        ("SFT", "set data.on_bad_row=skip", "set a recipe's data.on_bad_row=skip"),
        (
            "SFT",
            "would fit: model.load_in=nf4; adapter={r: 16}",
            "would fit: from_pretrained's load_in_4bit=True; an adapter of rank 16",
        ),
        ("GRPO", "leave objective.cache out", "leave from_pretrained's float8_kv_cache out"),
        ("GKD", "slots, or objective.cache=fp8", "slots, or from_pretrained's float8_kv_cache=True"),
        ("SFT", "the steps of an epoch, its output and seed", "the steps of an epoch, its output and seed"),
        ("SFT", "if steps == 3", "if steps == 3"),
    ],
)
def test_named_messages(kind, text, expected):
    assert in_script_words(text, getattr(compat, f"{kind}Config")) == expected


def test_errors_and_lines_of_a_trainer_are_translated_and_the_scripts_own_are_not(capsys):
    class Trainer(compat.SFTTrainer):
        config_type = compat.DPOConfig

        def __init__(self, error):
            jaxtune.system.terminal.say("warning: data.length = 3")
            raise error

        @property
        def train_dataset(self):
            raise ConfigError("data.length = 3: too short")

    with pytest.raises(ConfigError, match="^max_length = 3: raise max_length$"):
        Trainer(ConfigError("data.length = 3: raise data.length"))
    assert capsys.readouterr().out == "warning: max_length = 3\n"
    with pytest.raises(UserCodeError, match="seed = 3, a recipe's objective.reward_errors=skip"):
        Trainer(UserCodeError("seed = 3, objective.reward_errors=skip"))
    with pytest.raises(KeyError, match="data.length = 3"):
        Trainer(KeyError("data.length = 3"))
    with pytest.raises(ConfigError, match="^max_length = 3: too short$"):
        object.__new__(Trainer).train_dataset  # noqa: B018
