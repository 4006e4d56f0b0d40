"""Model folders and hub names: what does not fit, is damaged, or is no model is refused by name."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from pathlib import Path

import numpy as np
import pytest
from random_weights import rewrite
from tiny import CONFIGS

import jaxtune
from jaxtune.models import hf
from jaxtune.models.files.model_folder import find_config, load_tokenizer, read_json
from jaxtune.models.files.published import PUBLISHED
from jaxtune.models.hf import from_pretrained

HEAD, UP = "lm_head.weight", "model.layers.1.mlp.up_proj.weight"


def test_a_published_config_may_be_changed_by_who_asks_for_it():
    name = "meta-llama/Llama-3.1-8B"
    given = find_config(name)
    given["rope_scaling"]["factor"] = given["vocab_size"] = 1
    assert find_config(name)["rope_scaling"]["factor"] == PUBLISHED[name]["rope_scaling"]["factor"] != 1
    assert find_config(name)["vocab_size"] != 1


# ---- files that are none


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(path))


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _endless(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(64 << 30)


NAMES = (
    *("config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("chat_template.jinja", "merges.txt", "vocab.json", "additional_chat_templates/tool_use.jinja"),
)


@pytest.mark.parametrize("make", [_pipe, _socket, _device, _endless])
def test_a_file_that_is_none_or_endless_is_refused(tmp_path, make, monkeypatch):
    """In seconds, whichever of the names it has."""
    monkeypatch.chdir(tmp_path)
    base = Path(jaxtune.__file__).parent / "quickstart" / "base"
    for number, name in enumerate(NAMES):
        if make is _endless and name.endswith(".safetensors"):  # its header says how long it is
            continue
        folder = tmp_path / str(number)
        shutil.copytree(base, folder)
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        make(path)
        for load in (from_pretrained, load_tokenizer, find_config):
            with pytest.raises(ValueError, match=re.escape(name)):
                load(folder)
        with pytest.raises(ValueError, match=re.escape(name)):
            read_json(path)


# ---- weights that do not fit


def test_missing_unexpected_and_misshaped_in_one_list(folder):
    def change(tensors):
        del tensors[HEAD]
        tensors["score.weight"] = np.ones((2, 2), np.float32)
        tensors[UP] = tensors[UP][:-1].copy()

    rewrite(folder, change)
    with pytest.raises(ValueError) as error:
        from_pretrained(folder)
    message = str(error.value)
    assert "missing: lm_head.weight;" in message
    assert "unexpected: score.weight;" in message
    assert f"of another shape: {UP} [95, 64] (expected [96, 64])" in message


def _layers_of(count: int, folder) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": count}))


@pytest.mark.parametrize(
    ("names", "layers", "said"),
    [
        (("foo", "vision.proj.weight"), 3, "no part of the model reads are left out: foo, vision.proj.weight"),
        (("model.layers.7.extra.weight",), 3, "num_hidden_layers = 3, so layers 7 of its files are left out"),
        ((), 1, "num_hidden_layers = 1, so layers 1, 2 of its files are left out"),
    ],
)
def test_tensors_that_the_model_has_no_place_for_are_named_and_left_out(folder, names, layers, said, caplog):
    rewrite(folder, lambda tensors: tensors.update({name: np.ones(2, np.float32) for name in names}))
    _layers_of(layers, folder)
    model, _ = from_pretrained(folder)
    assert len(model.layers) == layers and said in caplog.text


@pytest.mark.parametrize(
    "name", ["model.layers.1.self_attn.q_proj.scale", "model.layers.1.gate.weight", "lm_head.bias"]
)
def test_unexpected_tensors_of_modules_that_compute_are_refused(folder, name):
    rewrite(folder, lambda tensors: tensors.update({name: np.ones(2, np.float32)}))
    with pytest.raises(ValueError, match=f"unexpected: {name}"):
        from_pretrained(folder)


@pytest.mark.parametrize(
    ("renamed", "words"),
    [
        (lambda name: name.removeprefix("model."), "the names lack 'model.', as AutoModel saves them"),
        (lambda name: f"_orig_mod.{name}", "the names begin with '_orig_mod.'"),
        (lambda name: f"module.{name}", "the names begin with 'module.'"),
    ],
)
def test_names_with_another_beginning_say_what_mends_them(folder, renamed, words):
    def change(tensors):
        for name in list(tensors):
            tensors[renamed(name)] = tensors.pop(name)

    rewrite(folder, change)
    with pytest.raises(ValueError, match=words):
        from_pretrained(folder)


def test_long_lists_are_cut(folder):
    rewrite(folder, lambda t: [t.pop(name) for name in list(t) if "layers.1." in name or "layers.2." in name])
    with pytest.raises(ValueError, match=r"missing: .* and 10 more[;:.]?( |$)"):
        from_pretrained(folder)


def test_quantised_tensor_is_refused(folder):
    rewrite(folder, lambda t: t.update({UP: t[UP].astype(np.int8)}))
    with pytest.raises(ValueError, match=rf"{UP} is stored as I8; supported: BF16, F16, F32"):
        from_pretrained(folder)


# ---- damaged files


def _cut(file: Path, keep: int) -> None:
    with open(file, "r+b") as stream:
        stream.truncate(keep)


def test_truncated_shard_is_named_with_its_sizes(sharded):
    shard = sorted(sharded.glob("*.safetensors"))[1]
    size = shard.stat().st_size
    _cut(shard, size - 1000)
    with pytest.raises(ValueError, match=rf"{shard.name}: truncated: expected {size} bytes, found {size - 1000}"):
        from_pretrained(sharded)


@pytest.mark.parametrize("keep", [0, 5, 200])
def test_header_cut_short(folder, keep):
    _cut(folder / "model.safetensors", keep)
    with pytest.raises(ValueError, match=rf"model.safetensors: not a whole safetensors file: .* file of {keep} bytes"):
        from_pretrained(folder)


def test_file_that_grew(folder):
    with open(folder / "model.safetensors", "ab") as stream:
        stream.write(b"0123")
    with pytest.raises(ValueError, match="model.safetensors: too long: expected"):
        from_pretrained(folder)


def test_corrupt_header(folder):
    with open(folder / "model.safetensors", "r+b") as stream:
        stream.seek(12)
        stream.write(b"\xff\xff{{")
    with pytest.raises(ValueError, match="model.safetensors: its safetensors header is corrupt"):
        from_pretrained(folder)


def test_offsets_that_do_not_fit_the_shape(folder):
    file = folder / "model.safetensors"
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header["model.norm.weight"]["shape"] = [64]
    header["model.norm.weight"]["data_offsets"][0] += 4
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    with pytest.raises(ValueError, match=r"model.norm.weight \(64,\) needs 256 bytes, its header gives 252"):
        from_pretrained(folder)


def test_missing_shard(sharded):
    shard = sorted(sharded.glob("*.safetensors"))[0]
    shard.unlink()
    with pytest.raises(ValueError, match=rf"{shard.name}: missing, though model.safetensors.index.json names it"):
        from_pretrained(sharded)


def test_index_and_shards_disagree(sharded):
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    names = sorted(set(content["weight_map"].values()))
    content["weight_map"][UP] = next(name for name in names if name != content["weight_map"][UP])
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"says that {UP} is in .*, but it is not"):
        from_pretrained(sharded)
    content["weight_map"][UP] = "../elsewhere.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"'../elsewhere.safetensors' is not the name of a file in the same folder"):
        from_pretrained(sharded)


def test_config_that_is_no_json(folder):
    (folder / "config.json").write_text("{'single': 1}")
    with pytest.raises(ValueError, match="config.json: cannot be read as JSON"):
        from_pretrained(folder)


# ---- what is not a model folder


def test_pickles_are_refused(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"a pickle \(pytorch_model.bin\), which can run code .* is refused"):
        from_pretrained(folder)


def test_remote_code_is_never_run(folder):
    """A known model_type loads by our own code and auto_map is ignored; an unknown one is refused."""
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_evil.EvilForCausalLM"}
    (folder / "modeling_evil.py").write_text("raise SystemExit('ran')")
    (folder / "config.json").write_text(json.dumps(config))
    model, _ = from_pretrained(folder)
    assert "auto_map" not in hf.hf_config_of(model)
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "evil"}))
    with pytest.raises(ValueError, match=r"model_type 'evil' is not supported \(a checkpoint's custom code is n"):
        from_pretrained(folder)


def test_an_adapter_folder_that_says_nothing(tmp_path):
    """from_pretrained loads an adapter over its base; this one names neither its kind nor its base."""
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="peft_type is None; only LORA adapters are supported"):
        from_pretrained(tmp_path)


def test_folder_without_config_or_weights(tmp_path):
    with pytest.raises(ValueError, match="there is no config.json in it$"):
        from_pretrained(tmp_path)
    for name in ("checkpoints", "merged"):
        (tmp_path / "run" / name).mkdir(parents=True)
    with pytest.raises(ValueError, match=f"no config.json in it; give {tmp_path}/run/merged$"):
        from_pretrained(tmp_path / "run")
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["mistral"]))
    with pytest.raises(ValueError, match=r"there is no model.safetensors or model.safetensors.index.json in it"):
        from_pretrained(tmp_path)


def test_paths_that_lead_nowhere(tmp_path, folder):
    with pytest.raises(ValueError, match="there is no such folder"):
        from_pretrained(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="is a file, and not GGUF; give the folder"):
        from_pretrained(folder / "config.json")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"load_in": "nf9"}, "load_in 'nf9' is not supported"),
        ({"dtype": "int8"}, "dtype 'int8' is not supported; supported: bfloat16, float16, float32"),
        ({"dtype": "auto"}, "dtype 'auto' is not supported"),
        ({"max_length": 65}, "max_length 65 does not fit .* was made for 64 positions"),
        ({"max_length": 0}, "max_length 0 does not fit"),
    ],
)
def test_arguments_are_checked(folder, arguments, message):
    with pytest.raises(ValueError, match=message):
        from_pretrained(folder, **arguments)


def test_max_length_within_the_context(folder):
    assert from_pretrained(folder, max_length=64)[0].config.max_position_embeddings >= 64


# ---- hub names


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty local hub cache, offline."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "cache"


def _put_in_cache(cache: Path, name: str, source: Path) -> Path:
    repo = cache / f"models--{name.replace('/', '--')}"
    snapshot = repo / "snapshots" / "abc123"
    shutil.copytree(source, snapshot)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc123")
    return snapshot


def test_hub_name_loads_from_the_cache(cache, sharded):
    _put_in_cache(cache, "org/model", sharded)
    model, _ = from_pretrained("org/model", dtype="float32")
    assert model.name_or_path == "org/model"
    assert model.base_fingerprint == from_pretrained(sharded)[0].base_fingerprint


def test_hub_name_offline_is_one_clear_line(cache):
    with pytest.raises(ValueError, match="org/model: no folder of that name.* the hub cannot be reached") as error:
        from_pretrained("org/model")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("error", ["HTTPError", "XetDownloadError"])
def test_a_download_that_breaks_off(cache, folder, monkeypatch, error):
    import huggingface_hub

    def breaks_off(name, local_files_only=False, **rest):
        raise (huggingface_hub.errors.LocalEntryNotFoundError if local_files_only else raised)("reset by the peer")

    raised = getattr(huggingface_hub.errors, error)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", breaks_off)
    with pytest.raises(ValueError, match=f"org/model: the hub cannot be reached, or .* .{error}: reset .* try again"):
        from_pretrained("org/model")


def test_a_cached_model_without_a_tokenizer_gets_the_hub_s(cache, folder, test_data, monkeypatch):
    """transformers' AutoModel leaves such a snapshot behind."""
    import huggingface_hub

    snapshot = _put_in_cache(cache, "org/model", folder)
    assert from_pretrained("org/model")[1] is None  # offline
    real = huggingface_hub.snapshot_download

    def unreachable(name, local_files_only=False, **rest):
        if not local_files_only:
            raise ConnectionError
        return real(name, local_files_only=True)

    def download(name, local_files_only=False, **rest):
        if not local_files_only:
            for file in (test_data / "tokenizers" / "qwen2.5").iterdir():
                shutil.copy(file, snapshot)
        return real(name, local_files_only=True)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    assert from_pretrained("org/model")[1] is None
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert from_pretrained("org/model")[1]("one")["input_ids"]


def test_half_a_model_in_the_cache_is_not_used(cache, sharded):
    snapshot = _put_in_cache(cache, "org/model", sharded)
    sorted(snapshot.glob("*.safetensors"))[0].unlink()
    with pytest.raises(ValueError, match="org/model: .* not complete in the local Hugging Face cache"):
        from_pretrained("org/model")
