"""Which checkpoint folders jaxtune takes for its own."""

from __future__ import annotations

import pytest

from jaxtune.compat import folders


@pytest.mark.parametrize("text", ["3", "null", "true", '"jaxtune"', "[]", "{}", "{", ""])
def test_a_folder_that_another_program_wrote_is_not_our_own(text, tmp_path):
    assert not folders.is_own(tmp_path)
    (tmp_path / folders.STATE).write_text(text)
    assert not folders.is_own(tmp_path)


@pytest.mark.parametrize("text", ['["WRITER"]', '"WRITER"'])
def test_only_an_object_says_who_wrote_it(text, tmp_path):
    (tmp_path / folders.STATE).write_text(text.replace("WRITER", folders._WRITER))
    assert not folders.is_own(tmp_path)
    (tmp_path / folders.STATE).write_text(f'{{"{folders._WRITER}": 1}}')
    assert folders.is_own(tmp_path)
