"""Damaged, impossible and hostile model and adapter files: each is refused in a sentence, before it costs anything."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from checks import shapes_of
from random_weights import write_checkpoint
from tiny import CONFIGS
from tiny_models import adapted_model, tiny_model

from jaxtune.models import expressions, values
from jaxtune.models.adapters.adapter_files import load_adapter, save_adapter
from jaxtune.models.files.model_folder import load_tokenizer
from jaxtune.models.hf import from_pretrained
from jaxtune.models.lora import adapter_settings, get_peft_model, linears
from jaxtune.models.registry import config_from_hf

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("faults") / "model"
    write_checkpoint(folder, CONFIGS["mistral"], shapes_of(CONFIGS["mistral"]))
    return folder


@pytest.fixture
def folder(checkpoint, tmp_path) -> Path:
    return shutil.copytree(checkpoint, tmp_path / "model")


@pytest.fixture(scope="module")
def trained():
    return adapted_model(tiny_model(), r=2, rank_pattern={"q_proj": 3})


@pytest.fixture
def adapter(trained, tmp_path) -> Path:
    save_adapter(trained, tmp_path / "adapter")
    return tmp_path / "adapter"


def change_json(file: Path, **changes) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


# ---- values


@pytest.mark.parametrize(
    ("bounds", "words"),
    [({}, ""), (dict(above=0), " above 0"), (dict(least=1), " of at least 1")]
    + [(dict(above=0, least=-2), " above 0 and of at least -2")],
)
def test_an_error_of_a_number_names_every_bound(bounds, words):
    with pytest.raises(ValueError, match=f"factor = nan: must be a finite number{words}$"):
        values.number("factor", NAN, **bounds)


# ---- weights


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("load_in", [None, "nf4"])
def test_weights_that_are_not_finite_are_refused_by_name(folder, value, load_in):
    content = safetensors.numpy.load_file(folder / "model.safetensors")
    content[UP].reshape(-1)[-1] = value
    safetensors.numpy.save_file(content, folder / "model.safetensors")
    with pytest.raises(ValueError, match=rf"values that are not finite in .*: {UP} \(in model.safetensors\)"):
        from_pretrained(folder, load_in=load_in)


def test_a_value_that_float16_does_not_hold_is_refused(folder):
    content = safetensors.numpy.load_file(folder / "model.safetensors")
    content["model.norm.weight"][3] = 1e5
    safetensors.numpy.save_file(content, folder / "model.safetensors")
    from_pretrained(folder)
    with pytest.raises(ValueError, match=r"not finite in float16: model.norm.weight .* or load in bfloat16 or float32"):
        from_pretrained(folder, dtype="float16")


def change_header(file: Path, change) -> None:
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def _alias(header):
    header["model.layers.0.mlp.up_proj.weight"]["data_offsets"] = header[UP]["data_offsets"]


def _overlap(header):
    first = header["model.layers.0.mlp.up_proj.weight"]["data_offsets"]
    header[UP]["data_offsets"] = [first[0] + 64, first[1] + 64]


def _set(**values):
    return lambda header: header[UP].update(values)


HEADERS = {
    "aliased": _alias,
    "overlapping": _overlap,
    "negative": _set(data_offsets=[-8, 100]),
    "backwards": _set(data_offsets=[100, 0]),
    "float shape": _set(shape=[96.0, 64.0]),
    "true in a shape": _set(shape=[True, 6144]),
    "list as dtype": _set(dtype=["F32"]),
    "null dtype": _set(dtype=None),
    "another dtype": _set(dtype="F33"),
    "shape is text": _set(shape="96,64"),
    "huge shape": _set(shape=[2**62, 2**62]),
    "three offsets": _set(data_offsets=[0, 1, 2]),
    "float offsets": _set(data_offsets=[0.0, 24576.0]),
    "no object": lambda header: header.update({UP: 7}),
}


@pytest.mark.parametrize("case", HEADERS)
def test_headers_that_the_safetensors_library_refuses(folder, case):
    change_header(folder / "model.safetensors", HEADERS[case])
    with pytest.raises(safetensors.SafetensorError):
        safetensors.numpy.load_file(folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors: "):
        from_pretrained(folder)


def test_an_index_of_something_else(folder):
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    for weight_map in (7, {UP: ["part.safetensors"]}, {UP: "../part.safetensors"}):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ValueError, match=r"index\.json: (has no weight_map|.* is not the name of a file)"):
            from_pretrained(folder)


# ---- config.json

NAN, INF = float("nan"), float("inf")
CONFIG_VALUES = [
    ("llama", "rms_norm_eps", NAN, "rms_norm_eps = nan: must be a finite number above 0"),
    ("llama", "rms_norm_eps", "1e-5", "rms_norm_eps = '1e-5'"),
    ("llama", "rope_theta", 0, "rope_theta = 0: must be a finite number above 1"),
    ("llama", "rope_theta", -1e4, "rope_theta = -10000.0"),
    ("llama", "rope_theta", NAN, "rope_theta = nan"),
    ("llama", "rope_scaling", [1], r"rope_scaling = \[1\]: must be an object"),
    ("llama", "hidden_size", 64.0, r"hidden_size = 64\.0: must be an integer of at least 1"),
    ("llama", "num_hidden_layers", 10**9, "num_hidden_layers = 1000000000: must be an integer from 1 to 4096"),
    ("llama", "num_hidden_layers", True, "num_hidden_layers = True"),
    ("llama", "vocab_size", 10**30, "vocab_size = 1000"),
    ("llama", "tie_word_embeddings", "false", "tie_word_embeddings = 'false': must be true or false"),
    ("llama", "eos_token_id", ["</s>"], r"eos_token_id\[0\] = '</s>': must be an integer"),
    ("llama", "model_type", ["llama"], r"model_type = \['llama'\]: must be a string"),
    ("llama", "initializer_range", INF, "initializer_range = inf"),
    ("gemma2", "query_pre_attn_scalar", -4, "query_pre_attn_scalar = -4"),
    ("gemma2", "final_logit_softcapping", 0.0, r"final_logit_softcapping = 0\.0"),
    ("gemma2", "layer_types", "full_attention", "layer_types = 'full_attention': must be a list"),
    ("gemma3", "sliding_window_pattern", 0, "sliding_window_pattern = 0"),
    ("gpt_oss", "swiglu_limit", NAN, "swiglu_limit = nan"),
    ("mixtral", "num_experts_per_tok", 2.0, r"num_experts_per_tok = 2\.0"),
    ("mixtral", "router_aux_loss_coef", NAN, "router_aux_loss_coef = nan"),
]


@pytest.mark.parametrize(("family", "key", "value", "message"), CONFIG_VALUES)
def test_impossible_values_of_config_json(family, key, value, message):
    with pytest.raises(ValueError, match=f"config.json: {message}"):
        config_from_hf({**CONFIGS[family], key: value})


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("llama", "factor", 0),
        ("llama", "factor", -2.0),
        ("llama", "factor", NAN),
        ("llama", "factor", "4"),
        ("llama", "low_freq_factor", 4.0),
        ("llama_yarn", "beta_fast", NAN),
        ("llama_yarn", "factor", INF),
        ("llama_yarn", "rope_theta", 1.0),
        ("phi3", "long_factor", [1.0, 2.0, 3.0, 0, 7.0, 9.0]),
        ("phi3", "short_factor", ["1"] * 6),
        ("llama", "original_max_position_embeddings", 16.5),
    ],
)
def test_impossible_values_of_rope(kind, key, value):
    hf = CONFIGS[kind]
    name = "rope_parameters" if "rope_parameters" in hf else "rope_scaling"
    with pytest.raises(ValueError, match=f"{key}.*: must be|high_freq_factor = 4.0: must be above low_freq_factor"):
        config_from_hf({**hf, name: {**hf[name], key: value}})


def test_the_folder_of_an_impossible_config_is_named(folder):
    change_json(folder / "config.json", rms_norm_eps=NAN)
    with pytest.raises(ValueError, match=rf"{folder}: config.json: rms_norm_eps = nan"):
        from_pretrained(folder)


def test_more_layers_than_the_weights_can_hold(folder):
    change_json(folder / "config.json", num_hidden_layers=4096)
    with pytest.raises(ValueError, match=r"num_hidden_layers = 4096: the weights are \d+ tensors"):
        from_pretrained(folder)


def test_more_experts_than_the_weights_can_hold(tmp_path):
    hf = CONFIGS["mixtral"]
    write_checkpoint(tmp_path / "model", hf, shapes_of(hf))
    change_json(tmp_path / "model" / "config.json", num_local_experts=10**9)
    with pytest.raises(ValueError, match="1000000000"):
        from_pretrained(tmp_path / "model")


def test_generation_config_of_another_type(folder):
    (folder / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(ValueError, match=r"generation_config\.json: eos_token_id = '</s>': must be an integer"):
        from_pretrained(folder)


# ---- tokenizers

TOKENIZER_FILES = {
    "chat_template": 7,
    "model_max_length": "2048",
    "tokenizer_class": ["LlamaTokenizer"],
    "eos_token": 2,
    "added_tokens_decoder": [],
    "add_bos_token": "yes",
    "padding_side": 1,
}


@pytest.mark.parametrize("key", TOKENIZER_FILES)
def test_tokenizer_settings_of_another_type(test_data, tmp_path, key):
    folder = shutil.copytree(test_data / "models" / "stories260K", tmp_path / "model")
    change_json(folder / "tokenizer_config.json", **{key: TOKENIZER_FILES[key]})
    with pytest.raises(ValueError, match=rf"tokenizer_config\.json: {key} = .*: must be"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"model": 7}', '{"version": "1.0", "model": {"type": "BPE"}}', "[" * 10**5]
)
def test_a_tokenizer_json_that_is_none(test_data, tmp_path, text):
    folder = shutil.copytree(test_data / "models" / "stories260K", tmp_path / "model")
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        load_tokenizer(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.json", "added_tokens.json"])
def test_a_table_of_tokens_that_is_a_pipe(tmp_path, name):
    (tmp_path / "tokenizer_config.json").write_text("{}")
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=rf"{name} is not a regular file"):
        load_tokenizer(tmp_path)


# ---- adapters

ADAPTER_VALUES = [
    ("r", 10**9, r"q_proj\.lora_A\.weight \(3, 16\) instead of|lora_A"),
    ("r", 10**30, "r = 1000"),
    ("r", 2.0, r"r = 2\.0: must be an integer"),
    ("r", "2", "r = '2'"),
    ("lora_alpha", NAN, "lora_alpha = nan: must be a finite number above 0"),
    ("lora_alpha", -1, "lora_alpha = -1"),
    ("lora_dropout", NAN, "lora_dropout = nan"),
    ("lora_dropout", 1, "lora_dropout = 1: must be below 1"),
    ("target_modules", 7, "target_modules = 7: must be a list"),
    ("target_modules", [7], r"target_modules\[0\] = 7: must be a string"),
    ("exclude_modules", 7, "exclude_modules = 7"),
    ("modules_to_save", "lm_head", "modules_to_save = 'lm_head': must be a list"),
    ("layers_to_transform", "1", "layers_to_transform = '1'"),
    ("rank_pattern", [1], r"rank_pattern = \[1\]"),
    ("alpha_pattern", {"q_proj": NAN}, "alpha_pattern: 'q_proj' = nan"),
    ("use_dora", "no", "use_dora = 'no': must be true or false"),
    ("base_model_name_or_path", 7, "base_model_name_or_path = 7"),
]


@pytest.mark.parametrize(("key", "value", "message"), ADAPTER_VALUES)
def test_impossible_values_of_an_adapter(adapter, key, value, message):
    change_json(adapter / "adapter_config.json", **{key: value})
    with pytest.raises(ValueError, match=message):
        load_adapter(tiny_model(), adapter)


CATASTROPHES = [r"(.*)*(.*)*(.*)*Z", r"(\w+\.?)+Z", r"(a|.|\w)*Z", "((((.{1000}){1000}){1000}){1000}){1000}"]


@pytest.mark.parametrize("pattern", CATASTROPHES)
def test_an_expression_that_backtracks_without_end(adapter, pattern, monkeypatch):
    monkeypatch.setattr(expressions, "LIMIT_SECONDS", 0.3)
    change_json(adapter / "adapter_config.json", target_modules=pattern)
    with pytest.raises(ValueError, match=r"(backtracks without end|match no linear|is not a regular expression)"):
        load_adapter(tiny_model(), adapter)
    change_json(adapter / "adapter_config.json", target_modules="all-linear", rank_pattern={pattern: 4})
    with pytest.raises(ValueError, match=r"(backtracks without end|do not fit|is not a regular expression)"):
        load_adapter(tiny_model(), adapter)


def test_an_expression_as_unsloth_writes_them():
    """Many groups and repeats: matched in a process of its own, as Python's re does."""
    pattern = (
        r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward).*?(?:k_proj|v_proj|q_proj).*?)|"
        r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:k_proj|v_proj)))"
    )
    names = [name for name, _ in linears(tiny_model())]
    want = [name for name in names if name.endswith(("k_proj", "v_proj"))]
    assert expressions.matching("target_modules", pattern, names) == want
    assert adapter_settings(get_peft_model(tiny_model(), r=2, target_modules=pattern))["target_modules"] == [
        "k_proj",
        "v_proj",
    ]


def test_an_adapter_s_weights_of_another_dtype(adapter):
    file = adapter / "adapter_model.safetensors"
    content = safetensors.numpy.load_file(file)
    safetensors.numpy.save_file({k: v.astype(np.int64) for k, v in content.items()}, file)
    with pytest.raises(ValueError, match="is stored as I64; supported: BF16, F16, F32"):
        load_adapter(tiny_model(), adapter)
    safetensors.numpy.save_file({k: v.astype(ml_dtypes.bfloat16) for k, v in content.items()}, file)
    load_adapter(tiny_model(), adapter)
