"""llama.cpp itself runs what export writes: the same greedy text, of a tiny model of each architecture.

`make llama-cpp` builds llama-cpp-python from its source package, once, into .venv-llama-cpp; no part of `.ci/run`.
"""

from __future__ import annotations

import numpy as np
import pytest
from llama_cpp_models import CHANGES, made

from jaxtune.export import gguf_file, gguf_tensors
from jaxtune.export.architectures import architecture, hyperparameters
from jaxtune.export.gguf_tokenizer import tokenizer_fields
from jaxtune.models.generate import generate
from tests.export.conftest import tokenizer  # noqa: F401, a fixture

llama_cpp = pytest.importorskip("llama_cpp", reason="run these with `make llama-cpp`")

PROMPT, NEW = [5, 17, 3, 42, 9, 77, 30], 12


@pytest.mark.parametrize("name", CHANGES)
def test_greedy_text(name, tmp_path, tokenizer):  # noqa: F811
    model = made(name)
    arch = architecture(model.config)
    keys, _ = hyperparameters(model.config, arch)
    fields = {f"{arch.name}.{key}": value for key, value in keys.items()}
    fields |= tokenizer_fields(tokenizer, model.config.vocab_size)
    path = tmp_path / "model.gguf"
    gguf_file.write(path, arch.name, fields, gguf_tensors.of_model(model, arch), "f32")
    theirs = llama_cpp.Llama(str(path), n_ctx=64, n_threads=2, verbose=False, logits_all=True)
    greedy = theirs.generate(PROMPT, top_k=1, temp=0.0, repeat_penalty=1.0)
    found = [token for token, _ in zip(greedy, range(NEW), strict=False)]
    wanted = generate(model, [PROMPT], NEW, eos_token_ids=[])[0]
    logits = np.asarray(model(np.asarray([PROMPT])))[0, -1]
    np.testing.assert_allclose(theirs.scores[len(PROMPT) - 1], logits, atol=2e-2 * np.abs(logits).max(), rtol=0)
    assert found == wanted
