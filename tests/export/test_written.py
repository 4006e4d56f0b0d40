"""Files of the same model are the same bytes as they always were."""

from __future__ import annotations

import json

import pytest

from tests.export.written import CASES, RECORD, digests


@pytest.mark.parametrize("case", CASES)
def test_files_are_the_bytes_that_they_were(case, tmp_path, tokenizer):
    if case.startswith("gguf"):
        pytest.importorskip("gguf")
    assert digests(case, tmp_path / "out", tokenizer) == json.loads(RECORD.read_text())[case]
