"""Live against stock PEFT: its adapters here, ours there, merged weights."""

from __future__ import annotations

import warnings

import checks
import jax.numpy as jnp
import numpy as np
import peft
import peft_reference
import pytest
import reference
import torch
import transformers
from peft_cases import GOLDEN_CASES, LIVE_CASES
from safetensors.numpy import load_file, save_file
from tiny import CONFIGS, golden_tokens
from tiny_models import shaken

import jaxtune
from jaxtune.export import proof
from jaxtune.models.hf import from_pretrained, save_pretrained
from jaxtune.models.lora import linears

TOLERANCE = 1e-4


@pytest.mark.parametrize(("config", "settings"), LIVE_CASES.values(), ids=LIVE_CASES)
def test_adapter_made_by_peft(tmp_path, config, settings):
    base = reference.make_checkpoint(tmp_path / "base", CONFIGS[config])
    peft_reference.make_adapter(base, tmp_path / "theirs", settings)
    theirs = peft_reference.load(base, tmp_path / "theirs")
    tokens = golden_tokens()
    expected = reference.logits(theirs, tokens)
    plain, _ = from_pretrained(base, dtype="float32")
    model = jaxtune.load_adapter(plain, tmp_path / "theirs")
    np.testing.assert_allclose(model(jnp.asarray(tokens)), expected, atol=TOLERANCE, rtol=0)
    assert np.abs(np.asarray(plain(jnp.asarray(tokens))) - expected).max() > 100 * TOLERANCE

    # Back to PEFT.
    jaxtune.save_adapter(model, tmp_path / "ours")
    first, second = (load_file(tmp_path / which / "adapter_model.safetensors") for which in ("theirs", "ours"))
    assert first.keys() == second.keys()
    assert all(np.array_equal(first[key], second[key]) for key in first)
    again = peft_reference.load(base, tmp_path / "ours")
    np.testing.assert_allclose(reference.logits(again, tokens), expected, atol=1e-6, rtol=0)

    # Merged: weight by weight, and as a model that transformers loads.
    save_pretrained(jaxtune.merge_adapter(model), tmp_path / "merged")
    ours = checks.tensors(checks.load(tmp_path / "merged"))
    weights = peft_reference.merged_weights(theirs)
    for name, value in ours.items():
        np.testing.assert_allclose(value, weights[name], atol=1e-5, rtol=0, err_msg=name)
    np.testing.assert_allclose(
        reference.logits(reference.load(tmp_path / "merged"), tokens), expected, atol=TOLERANCE, rtol=0
    )


OURS = {
    "lora": ("llama", dict(r=4)),
    "rslora": ("mistral", dict(r=4, use_rslora=True, lora_dropout=0.1, target_modules=["q_proj", "down_proj"])),
    "dora": ("qwen3", dict(r=4, use_dora=True)),
    "fused": ("phi3", dict(r=4, use_dora=True)),
    "patterns": (
        "qwen2",
        dict(r=4, rank_pattern={"q_proj": 2, "layers.1.mlp.*": 3}, alpha_pattern={"layers.0.*": 5, "up_proj": 2.5}),
    ),
    "part": ("gemma2", dict(r=2, target_modules=r".*layers\.1\..*|.*\.2\.mlp\.up_proj")),
    "experts": ("gpt_oss", dict(r=4, lora_alpha=6, target_parameters=["experts.gate_up_proj", "experts.down_proj"])),
    "experts_alone": (
        "mixtral",
        dict(r=2, use_rslora=True, target_modules=(), target_parameters=["mlp.experts.down_proj"]),
    ),
    "experts_of_one_layer": (
        "qwen3_moe",
        dict(r=2, target_modules=["q_proj"], target_parameters=["layers.1.mlp.experts.gate_up_proj"]),
    ),
    # PEFT takes linears of these names for experts of such a family's, which here have other ranks and scales.
    "called_like_experts": (
        "qwen3_next",
        dict(
            r=4,
            use_rslora=True,
            target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
            rank_pattern={"down_proj": 3, "layers.0.mlp.up_proj": 2},
            alpha_pattern={"shared_expert.gate_proj": 9, "experts.down_proj": 5},
        ),
    ),
    "values_are_keys": ("gemma4", dict(r=4)),
    # The last layers have no k_proj and v_proj; the linears of each layer's embeddings are adapted.
    "shared_keys": ("gemma4_shared", dict(r=4)),
    # Every linear, which is PEFT's answer: the router's is one.
    "router": ("gemma4_experts", dict(r=4, target_parameters=["experts.gate_up_proj", "experts.down_proj"])),
    "saved_tied": ("gemma3", dict(r=2, modules_to_save=["lm_head"])),
    "saved_untied": ("olmo2", dict(r=2, modules_to_save=["embed_tokens", "lm_head"])),
}


@pytest.mark.parametrize(("config", "settings"), OURS.values(), ids=OURS)
def test_adapter_made_here(tmp_path, config, settings):
    base = reference.make_checkpoint(tmp_path / "base", CONFIGS[config])
    plain, _ = from_pretrained(base, dtype="float32")
    model = shaken(jaxtune.get_peft_model(plain, **settings))
    jaxtune.save_adapter(model, tmp_path / "ours")
    tokens = golden_tokens()
    theirs = peft_reference.load(base, tmp_path / "ours")
    expected = np.asarray(model(jnp.asarray(tokens)))
    np.testing.assert_allclose(reference.logits(theirs, tokens), expected, atol=TOLERANCE, rtol=0)
    assert np.abs(np.asarray(plain(jnp.asarray(tokens))) - expected).max() > 100 * TOLERANCE
    read = theirs.peft_config["default"]
    assert (read.use_rslora, read.use_dora) == (settings.get("use_rslora", False), settings.get("use_dora", False))
    assert read.lora_dropout == settings.get("lora_dropout", 0.0)
    # PEFT keeps a tied head tied: one tensor after merging.
    merged = theirs.merge_and_unload()
    tied = merged.get_input_embeddings().weight is merged.get_output_embeddings().weight
    assert tied == CONFIGS[config]["tie_word_embeddings"]


@pytest.mark.parametrize("case", ["experts", pytest.param("saved_tied", marks=pytest.mark.full)])
def test_an_export_is_proven_by_peft(tmp_path, case):
    config, settings = OURS[case]
    base = reference.make_checkpoint(tmp_path / "base", CONFIGS[config])
    plain, _ = from_pretrained(base, dtype="float32")
    model = shaken(jaxtune.get_peft_model(plain, **settings))
    jaxtune.save_adapter(model, tmp_path / "ours")
    peft_answer = proof.prove(model, tmp_path / "ours")[0]
    assert peft_answer.program == f"PEFT {peft.__version__}" and peft_answer.answers == "equal"
    file = tmp_path / "ours" / "adapter_model.safetensors"
    changed = {key: value * 1.1 if "lora_B" in key else value for key, value in load_file(file).items()}
    save_file(changed, file)
    with pytest.raises(ArithmeticError, match="PEFT .*different"):
        proof.prove(model, tmp_path / "ours")


_TOWER = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
)


@pytest.mark.parametrize(
    ("whole", "text", "settings"),
    [
        ("gemma3", "gemma3", dict(rank_pattern={"layers.1.mlp.down_proj": 3}, modules_to_save=["lm_head"])),
        ("mistral3", "mistral", dict(alpha_pattern={"layers.0.self_attn.q_proj": 5})),
        ("gemma4", "gemma4", {}),
        ("gemma4_unified", "gemma4_unified", {}),
    ],
)
def test_base_with_a_vision_tower(tmp_path, whole, text, settings):
    """PEFT is given the whole model, whose tower has linears of the same names; files in both directions."""
    inner = {key: value for key, value in CONFIGS[text].items() if key not in ("architectures", "torch_dtype")}
    inner["final_logit_softcapping"] = None  # the whole model of Gemma 3 has none
    towers = {
        "gemma3": _TOWER | {"model_type": "siglip_vision_model"},
        "mistral3": _TOWER | {"model_type": "pixtral"},
        "gemma4": _TOWER
        | {"model_type": "gemma4_vision", "head_dim": 16, "num_key_value_heads": 2, "use_clipped_linears": True},
        "gemma4_unified": {"model_type": "gemma4_unified_vision", "mm_embed_dim": 16, "mm_posemb_size": 8},
    }
    tower = towers[whole]
    parts = dict(text_config=inner, vision_config=tower, tie_word_embeddings=inner["tie_word_embeddings"])
    if whole == "gemma4":  # whose linears clip, with bounds that are tensors of the file
        parts["audio_config"] = dict(
            model_type="gemma4_audio", hidden_size=32, num_hidden_layers=1, num_attention_heads=2, output_proj_dims=24
        ) | dict(subsampling_conv_channels=[8, 8])
    hf = transformers.AutoConfig.for_model(whole, image_token_index=100, **parts)
    torch.manual_seed(0)
    transformers.AutoModelForImageTextToText.from_config(hf).save_pretrained(tmp_path / "base")

    def base():
        return transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "base", dtype=torch.float32).eval()

    plain, _ = from_pretrained(tmp_path / "base", dtype="float32")
    targets = ["q_proj", "model.layers.1.mlp.down_proj"]
    model = shaken(jaxtune.get_peft_model(plain, r=2, target_modules=targets, **settings))
    jaxtune.save_adapter(model, tmp_path / "ours")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Found missing adapter keys")
        theirs = peft.PeftModel.from_pretrained(base(), tmp_path / "ours").eval()
    tokens = golden_tokens()
    expected = np.asarray(model(jnp.asarray(tokens)))
    np.testing.assert_allclose(reference.logits(theirs, tokens), expected, atol=TOLERANCE, rtol=0)
    assert np.abs(np.asarray(plain(jnp.asarray(tokens))) - expected).max() > 100 * TOLERANCE
    again = jaxtune.load_adapter(plain, tmp_path / "ours")
    np.testing.assert_array_equal(again(jnp.asarray(tokens)), model(jnp.asarray(tokens)))

    language = r"model\.language_model\..*\.(o|up)_proj"
    made = peft.get_peft_model(base(), peft.LoraConfig(r=2, target_modules=language, init_lora_weights=False)).eval()
    made.save_pretrained(tmp_path / "theirs")
    got = jaxtune.load_adapter(plain, tmp_path / "theirs")(jnp.asarray(tokens))
    np.testing.assert_allclose(got, reference.logits(made, tokens), atol=TOLERANCE, rtol=0)

    if whole.startswith("gemma4"):  # younger than that; its towers are carried through a save
        kept = base().state_dict()
        assert whole != "gemma4" or {"vision", "audio"} <= {
            key.split(".")[1].removesuffix("_tower") for key in kept if key.endswith("q_proj.output_max")
        }
        changed = {f"{name}.weight" for name, linear in linears(model) if linear.lora}
        for one in (plain, jaxtune.merge_adapter(model)):
            folder = tmp_path / ("again" if one is plain else "merged")
            jaxtune.save_pretrained(one, folder)
            again, info = transformers.AutoModelForImageTextToText.from_pretrained(
                folder, dtype=torch.float32, output_loading_info=True
            )
            assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
            for key, value in kept.items():
                if one is plain or key.replace("model.language_model.", "model.") not in changed:
                    assert torch.equal(again.state_dict()[key], value), key
        np.testing.assert_allclose(reference.logits(again, tokens), expected, atol=TOLERANCE, rtol=0)
        return
    file = tmp_path / "theirs" / "adapter_model.safetensors"  # as made with transformers 4.51, which PEFT still loads
    names = {key: key.replace(".model.language_model.", ".language_model.model.") for key in load_file(file)}
    save_file({names[key]: value for key, value in load_file(file).items()}, file)
    theirs = peft.PeftModel.from_pretrained(base(), tmp_path / "theirs").eval()
    np.testing.assert_allclose(reference.logits(theirs, tokens), reference.logits(made, tokens), atol=1e-6, rtol=0)
    np.testing.assert_array_equal(jaxtune.load_adapter(plain, tmp_path / "theirs")(jnp.asarray(tokens)), got)


@pytest.mark.full
def test_adapter_of_a_text_model_in_the_whole(tmp_path):
    """Of Qwen3.5's folder AutoModelForCausalLM makes the text model, whose names our files have."""
    text = {key: value for key, value in CONFIGS["qwen3_5"].items() if key not in ("architectures", "torch_dtype")}
    vision = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=64)
    hf = transformers.Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=True)
    torch.manual_seed(0)
    transformers.AutoModelForImageTextToText.from_config(hf).save_pretrained(tmp_path / "base")
    plain, _ = from_pretrained(tmp_path / "base", dtype="float32")
    model = shaken(jaxtune.get_peft_model(plain, r=2))
    jaxtune.save_adapter(model, tmp_path / "ours")
    tokens = golden_tokens()
    expected = np.asarray(model(jnp.asarray(tokens)))
    assert np.abs(np.asarray(plain(jnp.asarray(tokens))) - expected).max() > 100 * TOLERANCE
    # As docs/export.md says.
    settings = {
        transformers.AutoModelForCausalLM: {},
        transformers.AutoModelForImageTextToText: {"key_mapping": {r"model\.layers\.": "model.language_model.layers."}},
    }
    for kind, mapping in settings.items():
        base = kind.from_pretrained(tmp_path / "base", dtype=torch.float32)
        theirs = peft.PeftModel.from_pretrained(base, tmp_path / "ours", **mapping).eval()
        np.testing.assert_allclose(reference.logits(theirs, tokens), expected, atol=TOLERANCE, rtol=0)
    theirs.save_pretrained(tmp_path / "theirs")  # the whole model's names
    assert any(".language_model." in key for key in load_file(tmp_path / "theirs" / "adapter_model.safetensors"))
    again = jaxtune.load_adapter(plain, tmp_path / "theirs")
    np.testing.assert_allclose(again(jnp.asarray(tokens)), expected, atol=TOLERANCE, rtol=0)


def test_peft_adapter_that_unties_is_refused(tmp_path):
    base = reference.make_checkpoint(tmp_path / "base", CONFIGS["qwen2"])
    settings = GOLDEN_CASES["saved_tied"][1] | dict(ensure_weight_tying=False)
    peft_reference.make_adapter(base, tmp_path / "theirs", settings)
    with pytest.raises(ValueError, match="the model ties them"):
        jaxtune.load_adapter(from_pretrained(base, dtype="float32")[0], tmp_path / "theirs")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(lora_bias=True), "lora_bias = True"),
        (dict(bias="lora_only"), "bias = 'lora_only'"),
        (dict(init_lora_weights="pissa"), "changes the base's weights"),
        (dict(init_lora_weights="olora"), "changes the base's weights"),
        (dict(trainable_token_indices=[1, 2]), "trainable_token_indices = "),
        (dict(target_modules=["q_proj", "embed_tokens"]), "unexpected: .*lora_embedding_A"),
        (dict(target_modules=["q_proj", "lm_head"]), "unexpected: .*lm_head.lora_A"),
    ],
    ids=str,
)
def test_peft_features_that_are_not_supported(tmp_path, settings, message):
    base = reference.make_checkpoint(tmp_path / "base", CONFIGS["llama_yarn"])
    peft_reference.make_adapter(base, tmp_path / "theirs", dict(r=2, target_modules=["q_proj"]) | settings)
    with pytest.raises(ValueError, match=message):
        jaxtune.load_adapter(from_pretrained(base, dtype="float32")[0], tmp_path / "theirs")
