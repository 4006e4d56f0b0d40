"""llama.cpp itself runs what export writes: the same greedy text, and logits, of a tiny model of each architecture.

`make llama-cpp` builds llama-cpp-python from its source package into .venv-llama-cpp, once; `.ci/run` does not.
"""

from __future__ import annotations

import llama_cpp
import numpy as np
import pytest
from llama_cpp_models import CHANGES, config_of, made

from jaxtune.export import gguf_file, gguf_tensors
from jaxtune.export.architectures import architecture, hyperparameters
from jaxtune.export.gguf_tokenizer import tokenizer_fields
from jaxtune.models.generate import generate
from tests.export.conftest import tokenizer  # noqa: F401, a fixture

PROMPT, NEW = [5, 17, 3, 42, 9, 77, 30], 12
CONTEXT = 256  # llama.cpp rounds a smaller one up to this
FLOAT32 = 0  # GGML's number of the type; by default keys and values are kept in 16 bits
# What the export's notes say that llama.cpp computes otherwise: long factors by its own context, a rounded ramp.
NOTED = {
    "phi3": {"original_max_position_embeddings": 2 * CONTEXT, "max_position_embeddings": 8 * CONTEXT},
    "gpt_oss": {"rope_scaling": config_of("gpt_oss")["rope_scaling"] | {"truncate": True}},
}
# llama.cpp looks GELU up in a table of 16 bits.
TOLERANCE = {"gemma": 2e-2, "gemma2": 2e-2, "gemma3": 2e-2}


@pytest.mark.parametrize("name", CHANGES)
def test_greedy_text(name, tmp_path, tokenizer):  # noqa: F811
    changes = NOTED.get(name, {})
    arch = architecture(made(name, **changes).config)
    if arch.period is None and config_of(name).get("sliding_window"):
        # llama.cpp has no windows here. The file says a context of one window: within it, the text is the same.
        changes = changes | {"sliding_window": CONTEXT}
    model = made(name, **changes)
    keys, _ = hyperparameters(model.config, arch)
    fields = {f"{arch.name}.{key}": value for key, value in keys.items()}
    fields |= tokenizer_fields(tokenizer, model.config.vocab_size)
    path = tmp_path / "model.gguf"
    gguf_file.write(path, arch.name, fields, gguf_tensors.of_model(model, arch), "f32")
    theirs = llama_cpp.Llama(
        str(path), n_ctx=CONTEXT, n_threads=2, verbose=False, logits_all=True, type_k=FLOAT32, type_v=FLOAT32
    )
    greedy = theirs.generate(PROMPT, top_k=1, temp=0.0, repeat_penalty=1.0)
    found = [token for token, _ in zip(greedy, range(NEW), strict=False)]
    assert found == generate(model, [PROMPT], NEW, eos_token_ids=[])[0]
    logits = np.asarray(model(np.asarray([PROMPT + found[:-1]])))[0]
    np.testing.assert_allclose(theirs.scores[: len(logits)], logits, atol=TOLERANCE.get(name, 1e-4), rtol=0)
