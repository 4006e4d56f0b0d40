"""Every family against transformers itself, both directions of every file included."""

from __future__ import annotations

import dataclasses
import json

import checks
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import reference
import regenerate
import torch
import transformers
from flax import nnx
from tiny import CONFIGS, golden_tokens

import jaxtune
from jaxtune.models.families.common import tensor_name
from jaxtune.models.hf import from_pretrained, model_from_config, save_pretrained
from jaxtune.models.norm import norm_of
from jaxtune.models.registry import config_from_hf, family, names_of
from jaxtune.models.rope import rotary_table
from jaxtune.train.data.batches import Batch
from jaxtune.train.objectives.loss import declared_losses, loss_sums

# scope: the tests of a family follow one another, so that one worker loads and compiles it.
families = pytest.mark.parametrize("name", CONFIGS, scope="module")


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """name -> (folder, transformers' model, ours), fp32; made once."""
    made = {}

    def get(name):
        if name not in made:
            folder = reference.make_checkpoint(tmp_path_factory.mktemp(name), CONFIGS[name])
            made[name] = folder, reference.load(folder), checks.load(folder)
        return made[name]

    return get


@families
def test_loss_and_gradient_of_every_tensor(name, both):
    _, theirs, ours = both(name)
    tokens = golden_tokens()
    loss, want = reference.loss_and_gradients(theirs, tokens)
    got = checks.gradients(ours, tokens)
    assert abs(float(checks.mean_loss(ours, jnp.asarray(tokens))) - loss) < 1e-5
    assert set(got) == set(want)
    for key in want:
        np.testing.assert_allclose(got[key], want[key], atol=1e-5, rtol=1e-3, err_msg=key)


@pytest.mark.full
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss", "qwen3_next"], scope="module")
def test_load_balancing_and_z_loss(name, both):
    """output_router_logits: loss and every gradient, with padding, which counts in neither; and the z-loss."""
    from transformers.models.switch_transformers.modeling_switch_transformers import router_z_loss_func

    _, theirs, ours = both(name)
    tokens = golden_tokens()
    real = np.arange(tokens.shape[1]) < np.array([[tokens.shape[1]], [tokens.shape[1] - 7]])
    ids, mask = torch.from_numpy(tokens).long(), torch.from_numpy(real)
    theirs.zero_grad()
    out = theirs(ids, attention_mask=mask.long(), labels=ids.masked_fill(~mask, -100), output_router_logits=True)
    out.loss.backward()
    want = {key: p.grad.numpy().copy() for key, p in theirs.named_parameters() if p.grad is not None}
    seen = torch.cat([logits.reshape(-1, logits.shape[-1])[mask.reshape(-1)] for logits in out.router_logits])
    z_loss = router_z_loss_func(seen[None].detach().float())

    targets, after = np.roll(tokens, -1, 1), np.roll(real, -1, 1)
    after[:, -1] = False
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    fields = (tokens, targets, after.astype(np.float32), real.astype(np.int32), positions)
    batch = Batch(*map(jnp.asarray, fields))
    coefficient = ours.config.moe.router_aux_loss_coef
    assert coefficient == theirs.config.router_aux_loss_coef

    def loss(model):
        total, count, values = loss_sums(model, batch, aux_losses=declared_losses(model))
        return total / count + coefficient * values[0], values

    (value, values), grads = nnx.value_and_grad(loss, has_aux=True)(ours)
    assert abs(float(value) - out.loss.item()) < 1e-5
    np.testing.assert_allclose(values, [out.aux_loss.item(), z_loss.item()], rtol=1e-5)
    norms, layers = names_of(ours.config), ours.config.layers
    got = {tensor_name(path, norms, layers): np.asarray(v.get_value()) for path, v in nnx.to_flat_state(grads)}
    assert set(got) == set(want)
    for key in want:
        np.testing.assert_allclose(got[key], want[key], atol=1e-5, rtol=1e-3, err_msg=key)


@families
def test_goldens_are_current(name):
    """The stored results, which our logits and greedy tokens equal in tests/models/test_families.py, are today's."""
    stored, fresh = np.load(regenerate.GOLDENS / f"{name}.npz"), regenerate.golden(name)
    assert set(stored.files) == set(fresh)
    for key in stored.files:
        if stored[key].dtype.kind == "f":
            np.testing.assert_allclose(stored[key], fresh[key], atol=2e-5, rtol=1e-4, err_msg=key)
        else:
            np.testing.assert_array_equal(stored[key], fresh[key], err_msg=key)


@families
def test_our_folder_loads_in_transformers(name, both, tmp_path):
    """In many files; in one, below, is what a model has that was made here."""
    _, theirs, ours = both(name)
    save_pretrained(ours, tmp_path / "out", max_shard_bytes=100_000)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    again, tokens = reference.load(tmp_path / "out"), golden_tokens()
    np.testing.assert_array_equal(reference.logits(again, tokens), reference.logits(theirs, tokens))


@families
def test_their_folder_loads_in_ours(name, both, tmp_path):
    """In many files; the one of `both` is loaded by every test here."""
    _, theirs, ours = both(name)
    theirs.save_pretrained(tmp_path / "out", max_shard_size="100KB")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    again = checks.load(tmp_path / "out")
    assert again.config == ours.config  # their spelling of the config is transformers 5's, ours was 4's
    assert again.base_fingerprint == ours.base_fingerprint
    tokens = jnp.asarray(golden_tokens())
    np.testing.assert_array_equal(again(tokens), ours(tokens))


@families
def test_model_made_here_loads_in_transformers(name, tmp_path):
    """No config to reuse: to_hf alone must say everything."""
    model = model_from_config(CONFIGS[name], jax.random.key(1), "float32")
    model.source = None
    save_pretrained(model, tmp_path / "out")
    theirs, tokens = reference.load(tmp_path / "out"), golden_tokens()
    np.testing.assert_allclose(model(jnp.asarray(tokens)), reference.logits(theirs, tokens), atol=1e-4, rtol=0)


@families
def test_model_of_full_attention_loads_in_transformers(name):
    """Some classes take no window where no layer has one, and some need one all the same."""
    config = config_from_hf(CONFIGS[name])
    config = dataclasses.replace(
        config, layers=tuple(dataclasses.replace(layer, window=None) for layer in config.layers)
    )
    hf = family(config.family).to_hf(config)
    theirs = transformers.AutoConfig.for_model(**hf)
    transformers.AutoModelForCausalLM.from_config(theirs)(torch.from_numpy(golden_tokens()).long())
    assert config_from_hf(theirs.to_dict()) == config == config_from_hf(hf)


# Without them, transformers takes those of the model that a class was first made for.
SIZES = {
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
}


@families
def test_key_that_is_left_out(name):
    """It means what it means to transformers; but sizes are refused, and what its default does not go with. 64 heads:
    every class's default divides them."""
    whole = CONFIGS[name] | {"num_attention_heads": 64, "hidden_size": 16 * CONFIGS[name]["hidden_size"]}
    if name == "exaone4":
        whole["sliding_window_pattern"] = 4  # letters without layer_types raise a TypeError in transformers
    for key in sorted(whole.keys() - {"model_type", "architectures"}):
        hf = json.loads(json.dumps({k: v for k, v in whole.items() if k != key}))
        try:
            ours = config_from_hf(hf)
        except ValueError as error:
            assert key in SIZES or "lack" not in str(error), error
            continue
        theirs = transformers.AutoConfig.for_model(**hf)
        assert config_from_hf(theirs.to_dict()) == ours, key


@pytest.mark.parametrize("name", ["llama", "phi3", "gemma3", "olmo3"])
def test_rope_scaling_beside_rope_parameters(name):
    """Somebody adds rope_scaling, as model cards advise for long texts, to a config.json that transformers 5 wrote."""
    saved = transformers.AutoConfig.for_model(**CONFIGS[name]).to_dict()
    scaling = {"rope_type": "linear", "factor": 3.0, "rope_theta": 5e4}
    if name == "phi3":
        scaling = {"type": "longrope", "short_factor": [1.5] * 6, "long_factor": [4.5] * 6}
    both = saved | {"rope_scaling": scaling}
    theirs = transformers.AutoConfig.for_model(**json.loads(json.dumps(both))).to_dict()
    ours = config_from_hf(both)
    assert ours == config_from_hf(theirs) != config_from_hf(saved)
    assert ours.rotary[0].kind == scaling.get("rope_type", "longrope")
    # What we write beside each other means the same to both.
    written = family(ours.family).to_hf(ours)
    assert config_from_hf(transformers.AutoConfig.for_model(**written).to_dict()) == ours == config_from_hf(written)


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_cast_while_loading_rounds_as_torch(stored, dtype, tmp_path):
    numpy_dtype = ml_dtypes.bfloat16 if stored == "bfloat16" else stored
    folder = reference.make_checkpoint(tmp_path / "in", CONFIGS["qwen3"], numpy_dtype)
    ours = checks.tensors(from_pretrained(folder, dtype=dtype)[0])
    theirs = reference.load(folder, getattr(torch, dtype)).state_dict()
    assert set(ours) == set(theirs)
    for key, value in theirs.items():
        assert ours[key].dtype.name == dtype
        np.testing.assert_array_equal(ours[key].astype(np.float32), value.float().numpy(), err_msg=key)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "phi3"], scope="module")
def test_bfloat16_forward_is_close(name, both):
    """bf16 compute: as near to the fp32 logits as transformers' own bf16."""
    folder, theirs, _ = both(name)
    tokens = golden_tokens()
    exact = reference.logits(theirs, tokens)
    their_error = np.abs(reference.logits(reference.load(folder, torch.bfloat16), tokens) - exact)
    our_error = np.abs(np.asarray(from_pretrained(folder)[0](jnp.asarray(tokens))) - exact)
    assert np.sqrt((our_error**2).mean()) <= 1.25 * np.sqrt((their_error**2).mean())


@families
def test_norms_round_as_transformers(name):
    """In bf16, bit for bit: some classes round before they multiply by the weight, and others once, after it."""
    config = config_from_hf(CONFIGS[name])
    with torch.device("meta"):
        made = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**CONFIGS[name]))
    last_norm = getattr(made.model, names_of(config).get("norm", "norm"))
    theirs, ours = last_norm.to_empty(device="cpu").bfloat16(), norm_of(config, config.hidden_size, "bfloat16")
    weight, x = np.random.default_rng(0).standard_normal((2, 512, config.hidden_size), np.float32)
    weight = torch.from_numpy(1 - config.norm_offset + 0.3 * weight[0]).bfloat16()
    x = torch.from_numpy(x).bfloat16()
    theirs.weight.data = weight
    ours.weight.set_value(jnp.asarray(weight.float().numpy(), "bfloat16"))
    got = jax.jit(ours.__call__)(jnp.asarray(x.float().numpy(), "bfloat16"))
    np.testing.assert_array_equal(np.float32(got), theirs(x).detach().float().numpy())


ROPES = {
    "llama-3.1-8b": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
    | {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    "linear": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn mscale": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 4096}
    | {"mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 20.0, "beta_slow": 2.0, "truncate": False},
    "yarn attention_factor": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "attention_factor": 1.5}
    | {"original_max_position_embeddings": 8192},
    "longrope short": {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 70_000}
    | {"short_factor": [1 + i / 64 for i in range(64)], "long_factor": [1.0 + i for i in range(64)]},
    "longrope long": {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 4096}
    | {"short_factor": [1 + i / 64 for i in range(64)], "long_factor": [1.0 + i for i in range(64)]},
    "longrope factor": {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 4096}
    | {"short_factor": [1.0] * 64, "long_factor": [1.0 + i for i in range(64)], "factor": 16.0},
}


@pytest.mark.parametrize("case", ROPES)
def test_rotary_tables_of_every_kind(case):
    """Head dim and bases of real models, positions up to 65,535, against transformers' LlamaRotaryEmbedding."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    hf = {
        "model_type": "llama",
        "vocab_size": 128,
        "hidden_size": 512,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rope_parameters": ROPES[case],
    }
    positions = np.unique(np.geomspace(1, 65_535, 300).astype(np.int32))[None]
    config = config_from_hf(hf)
    cos, sin = rotary_table(config.rotary[0], config.head_dim, config.max_position_embeddings, jnp.asarray(positions))
    theirs = LlamaRotaryEmbedding(transformers.LlamaConfig(**json.loads(json.dumps(hf))))
    want_cos, want_sin = theirs(torch.zeros(1, dtype=torch.float32), torch.from_numpy(positions).long())
    # One ulp of an inverse frequency is 65,535 times that in the angle.
    np.testing.assert_allclose(cos, want_cos.numpy()[..., :64], atol=8e-3)
    np.testing.assert_allclose(sin, want_sin.numpy()[..., :64], atol=8e-3)
    near = positions[0] < 1024
    np.testing.assert_allclose(cos[0, near], want_cos.numpy()[0, near, :64], atol=2e-4)


def _with_vision(name: str):
    """What the hub holds of Gemma 3 from 4B on and of Ministral 3: a text model beside a vision tower."""
    outside = ("architectures", "bos_token_id", "eos_token_id", "torch_dtype", "use_cache", "attention_dropout")
    text = {key: value for key, value in CONFIGS[name].items() if key not in outside}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    if name == "gemma3":
        text["final_logit_softcapping"] = None  # the class with vision ignores it; no published model has one
        config = transformers.Gemma3Config(
            text_config=text,
            vision_config=vision | {"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14},
            mm_tokens_per_image=4,
            boi_token_index=125,
            eoi_token_index=126,
            image_token_index=127,
        )
        return transformers.Gemma3ForConditionalGeneration(config)
    config = transformers.Mistral3Config(
        text_config=text,
        vision_config=vision | {"model_type": "pixtral", "image_size": 28, "patch_size": 14, "head_dim": 8},
        image_token_index=127,
        tie_word_embeddings=False,
    )
    return transformers.Mistral3ForConditionalGeneration(config)


@pytest.mark.parametrize("name", ["gemma3", "ministral3"])
def test_text_part_of_a_model_with_vision(name, tmp_path):
    """Our text model gives the whole model's logits for text."""
    torch.manual_seed(0)
    theirs = _with_vision(name).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    theirs.save_pretrained(tmp_path / "whole")
    ours = checks.load(tmp_path / "whole")
    tokens = np.minimum(golden_tokens(), 120)
    np.testing.assert_allclose(ours(jnp.asarray(tokens)), reference.logits(theirs, tokens), atol=1e-4, rtol=0)
    save_pretrained(ours, tmp_path / "text")
    again = reference.load(tmp_path / "text")
    np.testing.assert_allclose(reference.logits(again, tokens), reference.logits(theirs, tokens), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_whole_qwen3_5_goes_through_our_hands(name, tmp_path):
    """What the hub holds: a model with a vision tower. Our text model gives its logits for text, and the folder that
    we save has all of it again."""
    text = {key: value for key, value in CONFIGS[name].items() if key not in ("architectures", "torch_dtype")}
    kinds = {"qwen3_5": transformers.Qwen3_5Config, "qwen3_5_moe": transformers.Qwen3_5MoeConfig}
    vision = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=64)
    config = kinds[name](
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=text["tie_word_embeddings"],
        image_token_id=125,
        video_token_id=126,
        vision_start_token_id=123,
        vision_end_token_id=124,
    )
    torch.manual_seed(0)
    theirs = transformers.AutoModelForImageTextToText.from_config(config).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    theirs.save_pretrained(tmp_path / "whole")
    ours = checks.load(tmp_path / "whole")
    tokens = np.minimum(golden_tokens(), 120)
    np.testing.assert_allclose(ours(jnp.asarray(tokens)), reference.logits(theirs, tokens), atol=1e-4, rtol=0)
    save_pretrained(ours, tmp_path / "again")
    again, info = transformers.AutoModelForImageTextToText.from_pretrained(
        tmp_path / "again", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for (key, value), (other, want) in zip(again.state_dict().items(), theirs.state_dict().items(), strict=True):
        assert key == other
        np.testing.assert_array_equal(value.numpy(), want.numpy(), err_msg=key)


_RECURRENT = {
    # As many value heads as key heads; no layer_types, and no rope_parameters.
    "derived": ("qwen3_5", dict(linear_num_value_heads=2, num_hidden_layers=5, full_attention_interval=2)),
    "yarn": (
        "qwen3_5_moe",
        dict(
            mamba_ssm_dtype="float32",
            mlp_only_layers=[0],  # which this family does not know
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 4.0,
                "partial_rotary_factor": 0.25,
                "original_max_position_embeddings": 32,
            },
        ),
    ),
    "long taps": ("lfm2", dict(conv_L_cache=7, layer_types=["full_attention", "conv", "conv"])),
    # The keys of early files.
    "early": (
        "lfm2",
        dict(full_attn_idxs=[1, 2], block_ff_dim=90, tie_embedding=False, layer_types=None, conv_L_cache=1),
    ),
    "sparse": (
        "qwen3_next",
        dict(
            num_hidden_layers=4,
            layer_types=["linear_attention", "full_attention"] * 2,
            decoder_sparse_step=2,
            mlp_only_layers=[],
        ),
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("variant", _RECURRENT)
def test_layers_with_a_state_by_other_configs(variant, tmp_path):
    """Logits; and of one, greedy tokens of prompts that end beside the borders of chunks, all in one batch of ours."""
    name, changes = _RECURRENT[variant]
    config = CONFIGS[name] | {"max_position_embeddings": 256} | changes
    for key in ("layer_types", "rope_parameters") if variant == "derived" else ():
        del config[key]
    theirs, ours = reference.load(reference.make_checkpoint(tmp_path, config)), checks.load(tmp_path)
    tokens = np.random.default_rng(0).integers(3, 128, (2, 70), np.int32)
    np.testing.assert_allclose(ours(jnp.asarray(tokens)), reference.logits(theirs, tokens), atol=3e-4, rtol=0)
    if variant not in ("derived", "long taps"):
        return
    prompts = [tokens.reshape(-1)[:length].tolist() for length in (1, 3, 63, 64, 65)]
    answers = jaxtune.generate(ours, prompts, max_new_tokens=12, eos_token_ids=[])
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer == reference.greedy(theirs, np.asarray([prompt], np.int32), 12)[0].tolist(), len(prompt)


@pytest.mark.full
def test_real_model(test_data):
    """stories260K: logits, loss and greedy text."""
    folder = test_data / "models" / "stories260K"
    theirs, ours = reference.load(folder), checks.load(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = (test_data / "datasets/text/tinystories_first60.jsonl").read_text(encoding="utf-8")
    for line in text.splitlines()[:4]:
        ids = np.asarray([tokenizer(json.loads(line)["text"])["input_ids"][:512]], np.int32)
        np.testing.assert_allclose(ours(jnp.asarray(ids)), reference.logits(theirs, ids), atol=1e-4, rtol=0)
    prompt = np.asarray([tokenizer("Once upon a time")["input_ids"]], np.int32)
    np.testing.assert_array_equal(checks.greedy(ours, prompt, 40), reference.greedy(theirs, prompt, 40))
