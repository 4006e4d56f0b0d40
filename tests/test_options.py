"""Options of other programs' commands: the error names the key of a recipe."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtune import cli
from jaxtune.commands.options import _NAMES, as_override
from jaxtune.train.config.file import config_keys

KEYS = [key.name for key in config_keys()]


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--lr", "1e-4"], "write optim.learning_rate=1e-4"),
        (["--lr=1e-4"], "write optim.learning_rate=1e-4"),
        (["--learning-rate", "3e-4"], "write optim.learning_rate=3e-4"),
        (["--learning_rat", "3e-4"], "write optim.learning_rate=3e-4"),
        (["--data.length", "512"], "write data.length=512"),
        (["--load-in-4bit"], "write model.load_in=nf4"),
        (["--num-train-epochs", "2"], "write epochs=2"),
        (["--resume"], "the same command continues"),
        (["--lr", "steps=3"], "write optim.learning_rate=..."),
        (["--qqqqqq", "1"], "train --help' lists them"),
    ],
)
@pytest.mark.parametrize("before", [True, False])
def test_the_error_says_what_to_write(words, hint, before, capsys):
    arguments = [*words, "quickstart"] if before and len(words) == 1 else ["quickstart", *words]
    assert cli.main(["train", *arguments]) == cli.USER_ERROR
    said = capsys.readouterr().err.replace("\n", " ")
    assert f"unknown option {words[0]}: " in said and hint in said


def test_every_name_is_of_a_key():
    assert {key.partition("=")[0] for key in _NAMES.values()} - {""} <= set(KEYS)


@pytest.mark.full
@settings(max_examples=60, deadline=None)
@given(st.sampled_from(KEYS), st.sampled_from("-_"), st.text(alphabet="abc123.-", min_size=1, max_size=6))
def test_every_key_is_named_by_its_last_word_or_whole(key, sign, value):
    for name in (key, key.rpartition(".")[2]):
        hint = as_override(f"--{name.replace('_', sign)}", value)
        written = hint.removeprefix("write ").partition("=")[0]
        assert written == key or (written.endswith(name) and written in KEYS) or name in _NAMES
