"""An adapter's files as other programs read them, by their arithmetic; PEFT itself is in tests/parity."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny import CONFIGS
from tiny_models import shaken

import jaxtune
from jaxtune import cli
from jaxtune.commands import expert_order
from jaxtune.export import proof
from jaxtune.export.adapters import servers
from jaxtune.models.hf import model_from_config

BOTH = ["experts.gate_up_proj", "experts.down_proj"]
# {case: (config, adapter, what vLLM, llama.cpp's converter, and --to gguf-adapter make of it)}
CASES = {
    "plain": ("llama", dict(r=4, lora_alpha=6), ("equal", "equal", "equal")),
    "rslora": ("mistral", dict(r=4, use_rslora=True), ("equal", "different", "equal")),
    "a rank of its own": ("llama", dict(r=4, rank_pattern={"q_proj": 2}), ("different", "equal", "equal")),
    "an alpha of its own": ("llama", dict(r=4, alpha_pattern={"q_proj": 2}), ("different", "different", "equal")),
    "dora": ("llama", dict(r=4, use_dora=True), ("refuses", "refuses", "refuses")),
    "saved": ("llama", dict(r=4, modules_to_save=["lm_head"]), ("refuses", "refuses", "refuses")),
    "experts": ("mixtral", dict(r=3, target_parameters=BOTH), ("equal", "refuses", "equal")),
    "experts turned": ("gpt_oss", dict(r=3, target_parameters=BOTH), ("equal", "refuses", "refuses")),
    "one of two": ("mixtral", dict(r=2, target_parameters=BOTH[1:]), ("refuses", "refuses", "equal")),
}


def adapted(tmp_path, config: str, settings: dict, tokenizer=None):
    """An adapter's folder over a random base's."""
    plain = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None} if tokenizer is not None else {}
    base = model_from_config(CONFIGS[config] | plain, jax.random.key(0), "float32")
    jaxtune.save_pretrained(base, tmp_path / "base", tokenizer=tokenizer)
    model, _ = jaxtune.from_pretrained(tmp_path / "base", dtype="float32")
    model = shaken(jaxtune.get_peft_model(model, **settings))
    jaxtune.save_adapter(model, tmp_path / "adapter", tokenizer)
    return model


def proven(tmp_path) -> dict[str, proof.Answer]:
    model, _ = jaxtune.from_pretrained(tmp_path / "adapter", dtype="float32")
    answers = proof.prove(model, tmp_path / "adapter")
    written = json.loads((tmp_path / "adapter" / proof.NAME).read_text())["answers"]
    assert [each["answers"] for each in written] == [answer.answers for answer in answers]
    return {answer.program: answer for answer in answers}


@pytest.mark.parametrize(("config", "settings", "expected"), CASES.values(), ids=CASES)
def test_what_each_program_computes(tmp_path, monkeypatch, config, settings, expected):
    monkeypatch.setattr(proof.importlib.util, "find_spec", lambda name: None)
    model = adapted(tmp_path, config, settings)
    peft, *answers = proven(tmp_path).values()
    assert peft.answers == "not tried" and "torch and transformers and peft not installed" in peft.why
    assert tuple(answer.answers for answer in answers) == expected, list(map(str, answers))
    vllm = answers[0]
    assert ("vLLM" not in servers(model)[0] or "merged model there" in servers(model)[0]) or vllm.answers == "equal"


@pytest.mark.parametrize("side", ["A", "B"])
def test_experts_in_another_order_are_found(tmp_path, monkeypatch, side):
    """The files are changed after they were read here."""
    monkeypatch.setattr(proof.importlib.util, "find_spec", lambda name: None)
    adapted(tmp_path, "qwen3_moe", dict(r=3, target_parameters=BOTH))
    model, _ = jaxtune.from_pretrained(tmp_path / "adapter", dtype="float32")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors, count = load_file(file), model.config.moe.num_experts
    [key, *_] = [key for key in tensors if key.endswith(f"experts.lora_{side}.weight")]
    value = tensors[key] if side == "B" else tensors[key].T
    other = np.ascontiguousarray(value.reshape(-1, 3, count).swapaxes(1, 2).reshape(value.shape))
    save_file(tensors | {key: other if side == "B" else np.ascontiguousarray(other.T)}, file)
    vllm = proof.prove(model, tmp_path / "adapter")[1]
    assert vllm.answers == "different" and "1 of " in vllm.why and vllm.difference > 0.1


def test_rows_decide_the_order_of_experts(tmp_path, tokenizer, capsys, monkeypatch):
    """Rows are what the adapter writes when it is read in the order in which it was made."""
    monkeypatch.setattr(proof.importlib.util, "find_spec", lambda name: None)
    model = adapted(tmp_path, "qwen3_moe", dict(r=3, target_parameters=BOTH), tokenizer)
    folder = tmp_path / "adapter"
    tensors, count = load_file(folder / "adapter_model.safetensors"), model.config.moe.num_experts
    for key in (key for key in tensors if "experts" in key and "lora_B" in key):
        tensors[key] = tensors[key].reshape(-1, 3, count).swapaxes(1, 2).reshape(tensors[key].shape)
    save_file(tensors, folder / "adapter_model.safetensors")  # without jaxtune's record
    config = json.loads((folder / "adapter_config.json").read_text())
    config["auto_mapping"] = {"unsloth_fixed": True}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tokens = np.random.default_rng(0).integers(5, 100, (8, 1), dtype=np.int32)
    for _ in range(24):
        likely = np.asarray(model(jnp.asarray(tokens)))[:, -1:, :120].argmax(-1)
        tokens = np.concatenate([tokens, likely.astype(np.int32)], 1)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": tokenizer.decode(each)}) + "\n" for each in tokens.tolist()))
    command = ["export", str(folder), str(tmp_path / "out"), "--to", "adapter", "--prove"]
    assert cli.main(command) == 2
    assert "order of lora_B's columns is not known" in capsys.readouterr().err
    assert cli.main([*command, "--rows", str(rows)]) == 0
    shown = capsys.readouterr().out
    assert "the order of experts is grouped_by_expert" in shown and "vLLM: equal" in shown
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    jaxtune.save_adapter(model, tmp_path / "again")
    wanted = load_file(tmp_path / "again" / "adapter_model.safetensors")
    assert all(np.array_equal(found[key], value) for key, value in wanted.items())
    with pytest.raises(ValueError, match="losses in both orders"):
        expert_order.decided({"rank_major": 1.0, "grouped_by_expert": 1.0004}, folder)


@pytest.mark.parametrize(("words", "message"), [(["--prove"], "goes with --to adapter"), (["--rows", "a"], "--prove")])
def test_options_that_do_not_go_together(tmp_path, capsys, words, message):
    with pytest.raises(SystemExit):
        cli.main(["export", str(tmp_path), str(tmp_path / "out"), *words])
    assert message in capsys.readouterr().err
