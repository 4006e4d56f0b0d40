"""Tokenizers that were saved here give the ids of their bases in this version of transformers, and in those of the
interpreters that JAXTUNE_PYTHONS names, with colons between: 4.57.1 and 5.24 were tried.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import jaxtune
from jaxtune.models.files.model_folder import load_tokenizer, save_companions

DATA, PACKAGE = Path(os.environ.get("JAXTUNE_TEST_DATA", "/nowhere")), Path(jaxtune.__file__).parent / "quickstart"
REAL = ("gpt-oss", "llama-2", "llama-3.2", "mistral-7b-v0.3", "phi-4", "qwen2.5", "qwen3")
BASES = {
    **{name: DATA / "tokenizers" / name for name in REAL},
    "stories260K": DATA / "models" / "stories260K",
    "packaged": PACKAGE / "base",
    "packaged, with pictures": PACKAGE / "pictures" / "base",
}
CHANGES = {  # further bases: (of, how it is changed)
    "with a token": ("qwen2.5", lambda tokenizer: tokenizer.add_tokens(["<mine>"])),
    "padded by another": ("llama-3.2", lambda tokenizer: setattr(tokenizer, "pad_token", tokenizer.eos_token)),
}
TEXTS = [
    "Hello, world!",
    " It's 12+30 = 42.\n\n\ttabs  and   spaces ",
    "naïve café 日本語 🙂 Ω≈ç√",
    "<|endoftext|></s><s>[INST] x [/INST]<|im_start|>user\nhi<|im_end|><think>a</think>",
    "",
]
PROGRAM = """import json, sys, transformers
texts = json.loads(sys.argv[1])
found = {}
for folder in sys.argv[2:]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer(text)["input_ids"] for text in texts]
    ends = tokenizer.eos_token, tokenizer.bos_token
    found[folder] = [ids, [tokenizer.decode(each) for each in ids], *ends, tokenizer.chat_template]
print(json.dumps(found))
"""


@pytest.mark.full
def test_saved_tokenizers_have_their_bases_ids_in_each_version(tmp_path):
    pairs = {}
    for name, base in [(name, BASES[name]) for name in BASES] + [
        (name, BASES[of]) for name, (of, _) in CHANGES.items()
    ]:
        if not base.is_dir():
            pytest.skip("JAXTUNE_TEST_DATA has no tokenizers")
        tokenizer, saved = load_tokenizer(base), tmp_path / name
        if name in CHANGES:
            CHANGES[name][1](tokenizer)
        saved.mkdir()
        save_companions(saved, (), tokenizer)
        pairs[name] = str(base), str(saved)
    assert len(pairs) == 12
    folders = sorted({folder for pair in pairs.values() for folder in pair})
    first = None
    for python in [sys.executable, *filter(None, os.environ.get("JAXTUNE_PYTHONS", "").split(":"))]:
        command = [python, "-c", PROGRAM, json.dumps(TEXTS), *folders]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": ""})
        assert not done.returncode, done.stderr
        found = json.loads(done.stdout.splitlines()[-1])
        for name, (base, saved) in pairs.items():
            assert found[base] == found[saved], (python, name)
        ids = {name: found[saved][0] for name, (_, saved) in pairs.items()}
        assert ids == (first or ids), python
        first = ids


@pytest.mark.parametrize("name", ["packaged", "llama-3.2"])
def test_a_saved_tokenizer_has_its_bases_ids_here(tmp_path, name):
    import transformers

    if not BASES[name].is_dir():
        pytest.skip("JAXTUNE_TEST_DATA has no tokenizers")
    save_companions(tmp_path, (), load_tokenizer(BASES[name]))
    base, saved = (transformers.AutoTokenizer.from_pretrained(folder) for folder in (BASES[name], tmp_path))
    assert [base(text).input_ids for text in TEXTS] == [saved(text).input_ids for text in TEXTS]
