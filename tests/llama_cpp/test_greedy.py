"""llama.cpp itself runs what export writes: the same greedy text, and logits, of a tiny model of each architecture, the
same tokens, and the same ends.

`make llama-cpp` builds llama-cpp-python from its source package into .venv-llama-cpp, once; `.ci/run` does not.
"""

from __future__ import annotations

import copy

import llama_cpp
import numpy as np
import pytest
from llama_cpp_models import CHANGES, config_of, made

from jaxtune.export import api, gguf_file, gguf_tensors
from jaxtune.export.architectures import architecture, hyperparameters
from jaxtune.export.gguf_tokenizer import tokenizer_fields
from jaxtune.models.files.weights import Weights
from jaxtune.models.generation.generate import generate
from tests.export.conftest import tokenizer  # noqa: F401, a fixture
from tests.export.test_gguf_tokenizer import changed

PROMPT, NEW = [5, 17, 3, 42, 9, 77, 30], 12
CONTEXT = 256  # llama.cpp rounds a smaller one up to this
FLOAT32 = 0  # GGML's number of the type; by default keys and values are kept in 16 bits
# What the export's notes say that llama.cpp computes otherwise: long factors by its own context, a rounded ramp.
NOTED = {
    "phi3": {"original_max_position_embeddings": 2 * CONTEXT, "max_position_embeddings": 8 * CONTEXT},
    "gpt_oss": {"rope_scaling": config_of("gpt_oss")["rope_scaling"] | {"truncate": True}},
}
# llama.cpp looks GELU up in a table of 16 bits.
TOLERANCE = {name: 2e-2 for name in CHANGES if name.startswith("gemma")}


@pytest.mark.parametrize("name", CHANGES)
def test_greedy_text(name, tmp_path, tokenizer):  # noqa: F811
    changes = NOTED.get(name, {})
    arch = architecture(made(name, **changes).config)
    if arch.period is None and not arch.by_layer and config_of(name).get("sliding_window"):
        # llama.cpp has no windows here. The file says a context of one window: within it, the text is the same.
        changes = changes | {"sliding_window": CONTEXT}
    model = made(name, **changes)
    keys, _ = hyperparameters(model.config, arch)
    fields = {f"{arch.name}.{key}": value for key, value in keys.items()}
    fields |= tokenizer_fields(tokenizer, model.config.vocab_size)
    path = tmp_path / "model.gguf"
    gguf_file.write(path, arch.name, fields, gguf_tensors.of_model(Weights(model), arch), "f32")
    theirs = llama_cpp.Llama(
        str(path), n_ctx=CONTEXT, n_threads=2, verbose=False, logits_all=True, type_k=FLOAT32, type_v=FLOAT32
    )
    greedy = theirs.generate(PROMPT, top_k=1, temp=0.0, repeat_penalty=1.0)
    found = [token for token, _ in zip(greedy, range(NEW), strict=False)]
    assert found == generate(model, [PROMPT], NEW, eos_token_ids=[])[0]
    logits = np.asarray(model(np.asarray([PROMPT + found[:-1]])))[0]
    np.testing.assert_allclose(theirs.scores[: len(logits)], logits, atol=TOLERANCE.get(name, 1e-4), rtol=0)


def served(model, folder, tokenizer) -> llama_cpp.Llama:  # noqa: F811
    done = api.export_model(model, folder, "gguf", tokenizer=tokenizer)
    return llama_cpp.Llama(str(done.folder / done.files[0]), n_ctx=CONTEXT, verbose=False, vocab_only=True)


def test_where_a_text_ends(tmp_path, tokenizer):  # noqa: F811
    """At the marks of GLM-4's next turns, which llama.cpp does not know by their text; elsewhere they end nothing."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_tokens(["<|user|>", "<|observation|>"], special_tokens=True)
    marks = tokenizer.convert_tokens_to_ids(["<|user|>", "<|observation|>"])
    for name, ends in (("glm4", True), ("qwen2", False)):
        theirs = served(made(name), tmp_path / name, tokenizer)
        vocab = llama_cpp.llama_model_get_vocab(theirs.model)
        assert [llama_cpp.llama_vocab_is_eog(vocab, mark) for mark in marks] == [ends, ends]
        assert llama_cpp.llama_vocab_is_eog(vocab, tokenizer.eos_token_id)


@pytest.mark.parametrize("name", ["mine", "phi3-mine"])
@pytest.mark.parametrize("strips", [True, False])
def test_line_breaks_after_marks(strips, name, tmp_path, tokenizer):  # noqa: F811
    """Dropped where the tokenizer drops them, as Phi-3's does, whatever the folder's name."""

    def change(parts):
        vocab, added = parts["model"]["vocab"], parts["added_tokens"]
        vocab |= {"Ċ": vocab.pop("}"), "Ġ": vocab.pop("~")}  # a line break and a space, which it has not
        del added[2:]  # the model has room for four more
        for content in ("</s>", "<unk>", "<s>", "<|endoftext|>") if strips else ():
            added.append(added[0] | {"id": len(vocab) + len(added), "content": content})
        for token in added:
            token["rstrip"] = strips and token["content"] not in ("<unk>", "<s>", "<|endoftext|>")

    tokenizer = changed(tokenizer, change)
    text = "".join(f"{mark}\n the" for mark in tokenizer.get_added_vocab())
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert (len(tokenizer("<|end|>\n", add_special_tokens=False)["input_ids"]) == 1) == strips
    theirs = served(made("phi3"), tmp_path / name, tokenizer)
    assert theirs.tokenize(text.encode(), add_bos=False, special=True) == ids
