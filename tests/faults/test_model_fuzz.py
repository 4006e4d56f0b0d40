"""Any bytes as a model's or adapter's files: what comes back is a model, or an error of jaxtune's own."""

from __future__ import annotations

import json
import traceback
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import CONFIGS
from tiny_models import adapted_model, tiny_model

import jaxtune
from jaxtune.models import expressions
from jaxtune.models.adapters.adapter_files import load_adapter, save_adapter
from jaxtune.models.files import headers, shards
from jaxtune.models.files.model_folder import load_tokenizer, read_generation_config
from jaxtune.models.registry import config_from_hf
from jaxtune.models.rope import rotary_frequencies

PACKAGE = Path(jaxtune.__file__).parent


def only_our_errors(work, *arguments):
    """work's result, or None where it raised a ValueError of jaxtune's own."""
    try:
        return work(*arguments)
    except ValueError as error:
        raised_in = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
        assert Path(raised_in).is_relative_to(PACKAGE), error
        assert str(error).strip()
        return None


numbers = st.one_of(
    st.integers(-3, 70), st.integers(), st.sampled_from([2**31, 2**63, 10**30]), st.floats(), st.booleans()
)
scalars = st.one_of(st.none(), numbers, st.text(max_size=8), st.sampled_from(["q_proj", "all-linear", "yarn", "2"]))
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def changed(draw, original: dict, keys: list[str]) -> dict:
    """The dictionary with up to three of its values replaced, taken out or set in a dictionary inside."""
    result = json.loads(json.dumps(original))
    for key in draw(st.lists(st.sampled_from(keys), min_size=1, max_size=3)):
        inner = result.get(key)
        if isinstance(inner, dict) and inner and draw(st.booleans()):
            inner[draw(st.sampled_from(sorted(inner)))] = draw(values)
        elif draw(st.integers(0, 9)) == 0:
            result.pop(key, None)
        else:
            result[key] = draw(values)
    return result


@st.composite
def configs(draw) -> dict:
    original = CONFIGS[draw(st.sampled_from(sorted(CONFIGS)))]
    more = ["rope_scaling", "rope_parameters", "layer_types", "quantization_config", "text_config", "num_local_experts"]
    return changed(draw, original, [*original, *more])


@settings(max_examples=100)
@given(configs())
def test_any_config_json(hf):
    config = only_our_errors(config_from_hf, hf)
    for rope in () if config is None or config.head_dim > 10**4 else config.rotary:
        short, long, scale = rotary_frequencies(rope, config.head_dim, config.max_position_embeddings)
        assert np.isfinite(short).all() and np.isfinite(scale) and (long is None or np.isfinite(long).all())


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    model = tiny_model()
    folder = tmp_path_factory.mktemp("fuzz") / "adapter"
    save_adapter(adapted_model(model, r=2, target_modules=["q_proj", "up_proj"], rank_pattern={"q_proj": 3}), folder)
    return model, folder, json.loads((folder / "adapter_config.json").read_text())


@pytest.mark.full
@settings(max_examples=60)
@given(st.data())
def test_any_adapter_config(adapter, data):
    model, folder, original = adapter
    expressions.LIMIT_SECONDS = 5.0
    more = ["unsloth_fused_expert_lora", "layer_replication", "corda_config"]
    (folder / "adapter_config.json").write_text(json.dumps(changed(data.draw, original, [*original, *more])))
    only_our_errors(load_adapter, model, folder)


header_values = st.one_of(
    values,
    st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["F32", "BF16", "U8", "F8_E4M3", "x"]) | values,
            "shape": st.lists(st.integers(-1, 5), max_size=3) | values,
            "data_offsets": st.lists(st.integers(-8, 64), max_size=3) | values,
        }
    ),
)
header_texts = st.one_of(
    st.dictionaries(st.text(max_size=4), header_values, max_size=4).map(lambda h: json.dumps(h).encode()),
    values.map(lambda value: json.dumps(value).encode()),
    st.binary(max_size=60),
    st.sampled_from([b"[" * 200_000, b'{"a":' * 100_000, b""]),
)


@settings(max_examples=100)
@given(header_texts, st.integers(-4, 4), st.binary(max_size=48))
def test_any_safetensors_bytes(tmp_path_factory, header, off, rest):
    file = tmp_path_factory.getbasetemp() / "any.safetensors"
    file.write_bytes(max(0, len(header) + off).to_bytes(8, "little") + header + rest)

    def read(file):
        for entry in headers.read_header(file).values():
            headers.check_entry(entry)
            assert shards.read_tensor(entry).shape == entry.shape

    only_our_errors(read, file)


@settings(max_examples=60)
@given(st.dictionaries(st.sampled_from(["eos_token_id", "bos_token_id"]), values) | values)
def test_any_generation_config(tmp_path_factory, value):
    folder = tmp_path_factory.getbasetemp()
    (folder / "generation_config.json").write_text(json.dumps(value))
    only_our_errors(read_generation_config, folder)


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory) -> tuple[Path, dict]:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tokenizer")
    words = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2}, unk_token="<s>"))
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    return folder, json.loads((folder / "tokenizer_config.json").read_text())


@settings(max_examples=60)
@given(st.data())
def test_any_tokenizer_config(tokenizer_folder, data):
    folder, original = tokenizer_folder
    more = [
        "chat_template",
        "unk_token",
        "added_tokens_decoder",
        "extra_special_tokens",
        "clean_up_tokenization_spaces",
    ]
    (folder / "tokenizer_config.json").write_text(json.dumps(changed(data.draw, original, [*original, *more])))
    only_our_errors(load_tokenizer, folder)
