"""What notebooks ask for: sampling by vLLM's settings, uploads, adapters of the hub, more positions."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_config

from jaxtune import compat
from jaxtune.compat import trainer as trainers
from jaxtune.compat.model import _linear_positions
from jaxtune.models.adapters.named import local_adapter
from jaxtune.train.config.file import config_keys
from scripts.notebooks_once import CELLS, as_the_page_says

CHOSEN = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1, "max_tokens": 77}


@given(st.sets(st.sampled_from(sorted(CHOSEN))))
def test_what_sampling_params_set_comes_first(names):
    own: dict[str, Any] = dict(
        temperature=0.3, top_p=0.5, top_k=7, min_p=0.2, repetition_penalty=1.3, max_completion_length=50
    )
    params = compat.SamplingParams(**{name: CHOSEN[name] for name in names}, seed=3407, stop=["</s>"])
    config = compat.GRPOConfig(**own, vllm_sampling_params=params)
    for name, value in CHOSEN.items():
        ours = "max_completion_length" if name == "max_tokens" else name
        assert getattr(config, ours) == (value if name in names else own[ours])


def test_other_sampling_params_are_refused():
    with pytest.raises(ValueError, match="vllm_sampling_params is a dict; from jaxtune.compat import SamplingParams"):
        compat.GRPOConfig(vllm_sampling_params={"top_p": 0.5})
    with pytest.raises(ValueError, match="n, ignore_eos and stop_token_ids are not supported"):
        compat.RLOOConfig(vllm_sampling_params=compat.SamplingParams(n=2))


def test_rows_without_conversations_stay(capsys):
    rows = [{"messages": [{"role": "user", "content": "a"}]}]
    assert compat.standardize_sharegpt(rows) is rows
    assert "no column conversations among messages" in capsys.readouterr().out


def test_a_misspelt_reward_is_named_before_it_is_missing():
    with pytest.raises(ValueError, match="reward_function = .*did you mean reward_funcs"):
        compat.GRPOTrainer("none", train_dataset=[{"prompt": "a"}], reward_function=len)


def write_config(folder: Path, **changes) -> str:
    from tiny import CONFIGS

    folder.mkdir()
    config = {key: value for key, value in CONFIGS["qwen2"].items() if key != "rope_scaling"}
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 64} | changes))
    return str(folder)


def test_positions_that_a_model_lacks_are_scaled_as_in_unsloth(tmp_path, capsys):
    plain = write_config(tmp_path / "plain")
    assert _linear_positions(plain, None, 64) is None and _linear_positions(plain, None, None) is None
    assert _linear_positions(plain, None, 256) == {"rope_type": "linear", "factor": 4.0}
    assert "max_seq_length = 256: the model has 64 positions, which are scaled linearly" in capsys.readouterr().out
    scaled = write_config(tmp_path / "scaled", rope_scaling={"rope_type": "linear", "factor": 2.0})
    assert _linear_positions(scaled, None, 256) is None


def test_an_adapter_is_found_by_its_name_on_the_hub(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for name, file in (("adapter", "adapter_config.json"), ("model", "config.json")):
        place = tmp_path / f"models--me--{name}"
        (place / "snapshots" / ("0" * 40)).mkdir(parents=True)
        (place / "refs").mkdir()
        (place / "refs/main").write_text("0" * 40)
        (place / "snapshots" / ("0" * 40) / file).write_text("{}")
    assert Path(local_adapter("me/adapter")).name == "0" * 40
    for other in ("me/model", "me/unknown", "a", "./a/b", str(tmp_path)):
        assert local_adapter(other) == other


def test_an_upload_needs_a_login_before_the_run(monkeypatch):
    class Trainer(compat.SFTTrainer):
        def __init__(self):
            self.args = compat.SFTConfig("out", push_to_hub=True)

    def refused(token):
        raise ValueError("push_to_hub = True: nobody is logged in")

    monkeypatch.setattr(trainers, "require_login", refused)
    with pytest.raises(ValueError, match="nobody is logged in"):
        Trainer().train()


def test_errors_of_functions_name_their_arguments():
    from jaxtune.compat.wording import _words, worded

    for key in config_keys():
        if key.name.startswith("adapter."):
            assert _words(None)[key.name] == key.name.removeprefix("adapter.")

    @worded
    def load():
        raise ValueError("adapter.r = 0: must be at least 1; model.rope_scaling: no; data.on_bad_row=skip")

    with pytest.raises(ValueError, match="^r = 0: .*; rope_scaling: no; a recipe's data.on_bad_row=skip$"):
        load()
    tiny = compat.CompatModel(compat_module(), None, 32, None)
    for call in (
        lambda: compat.FastLanguageModel.get_peft_model(tiny, r=0),
        lambda: compat.get_peft_model(tiny, compat.LoraConfig(r=-1, target_modules=["q_proj"])),
        lambda: compat.FastLanguageModel.get_peft_model(tiny, lora_dropout=2.0),
    ):
        with pytest.raises(ValueError, match="r = |rank|lora_dropout") as caught:
            call()
        assert "adapter." not in str(caught.value)


def compat_module():
    import jax

    from jaxtune.models.decoder import Decoder

    return Decoder(tiny_config(), jax.random.key(0))


def test_cells_are_left_out_and_lines_changed_as_the_page_says(tmp_path):
    cells = [
        "%%capture\n!pip install unsloth",
        "from unsloth import FastLanguageModel\nimport torch\nmax_steps = 60,\n",
        "from transformers import TrainingArguments, TextStreamer\nx = tokenizer.apply_chat_template(x)\n",
        "used = torch.cuda.max_memory_reserved()",
    ]
    notebook = {"cells": [{"cell_type": "code", "source": cell} for cell in cells] + [{"cell_type": "markdown"}]}
    (tmp_path / "a.ipynb").write_text(json.dumps(notebook))
    made = as_the_page_says(tmp_path / "a.ipynb")
    assert [cell.reason for cell in made.cells] == ["installs", "", "", "PyTorch's memory"]
    assert made.cells[1].code == "from jaxtune.compat import FastLanguageModel\nmax_steps = 3,\n\n"
    first, second = made.cells[2].code.splitlines()[:2]
    assert first == "from jaxtune.compat import TrainingArguments; from transformers import TextStreamer"
    assert second == "x = tokenizer.apply_chat_template(return_dict = False, conversation = x)"
    page = (Path(__file__).parents[2] / "docs/notebooks.md").read_text(encoding="utf-8")
    assert len(CELLS) > 5 and all(word in page for word in ("safe_open", "from vllm import LLM", "pip install", "%env"))
    shutil.rmtree(tmp_path)
