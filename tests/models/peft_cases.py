"""Adapters that PEFT makes for golden files and live parity: (config in tiny.py, settings of LoraConfig)."""

from __future__ import annotations

from tiny import CONFIGS

GOLDEN_CASES = {
    "patterns_dora": (
        "llama",
        dict(
            r=2,
            lora_alpha=6,
            target_modules=["q_proj", "v_proj", "gate_proj", "down_proj"],
            use_dora=True,
            rank_pattern={"q_proj": 4, r"layers\.1\.mlp\.down_proj": 3},
            alpha_pattern={"layers.2.*": 3},
            exclude_modules=["layers.0.mlp.gate_proj"],
        ),
    ),
    "fused_rslora": (
        "phi3",
        dict(r=3, lora_alpha=5, use_rslora=True, target_modules=["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]),
    ),
    "regex_layers": ("mistral", dict(r=2, lora_alpha=8, target_modules=r".*layers\.[02]\..*(q|k|down)_proj")),
    "layers_to_transform": ("qwen3", dict(r=2, target_modules=["o_proj", "up_proj"], layers_to_transform=[1])),
    "saved_tied": (
        "qwen2",
        dict(r=2, target_modules=["k_proj"], modules_to_save=["embed_tokens"], ensure_weight_tying=True),
    ),
    "saved_untied": ("olmo2", dict(r=2, target_modules=["k_proj"], modules_to_save=["embed_tokens", "lm_head"])),
    # Both matrices, nested one in the other, [in, out] and square; one alone, [out, in], with a rank of its own.
    "experts_both": (
        "gpt_oss",
        dict(
            r=2,
            lora_alpha=6,
            target_modules=["q_proj"],
            target_parameters=["mlp.experts.down_proj", "mlp.experts.gate_up_proj"],
            rank_pattern={"experts.down_proj": 3},
        ),
    ),
    "experts_one": (
        "qwen3_moe",
        dict(r=3, use_rslora=True, target_modules=["o_proj"], target_parameters=["mlp.experts.gate_up_proj"]),
    ),
    "saved_head": ("llama_yarn", dict(r=2, target_modules="all-linear", modules_to_save=["lm_head"])),
}

# Live, also: every family with every linear adapted.
_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
_EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
_BESIDE_MLP = ["experts.gate_up_proj", "experts.down_proj"]


# Of Qwen3-Next, PEFT takes the shared expert's up_proj for one of the experts', which are one matrix for it.
_SHARED = [*_ATTENTION, "out_proj", "shared_expert_gate"]
_BESIDE_ROUTER = {
    "qwen2_moe": [*_ATTENTION, "shared_expert_gate"],
    "qwen3_next": [*_SHARED, "in_proj_qkvz", "in_proj_ba"],
    "qwen3_5_moe": [*_SHARED, "shared_expert.up_proj", "in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b"],
}


def _linears(name):
    """For PEFT "all-linear" includes a router that is a linear; only Gemma 4's has an adapter here."""
    if name == "gemma4_experts":
        return "all-linear"
    if name in _BESIDE_ROUTER:
        return _BESIDE_ROUTER[name]
    experts = {"num_experts", "num_local_experts", "n_routed_experts"} & set(CONFIGS[name])
    return _ATTENTION if experts else "all-linear"


# Linears that are adapted as parameters: PEFT takes their names among target_modules for those of experts.
_AS_PARAMETERS = {
    "linears_as_parameters": (
        "qwen3_next",
        dict(
            r=4,
            target_modules=["q_proj"],
            target_parameters=["shared_expert.up_proj.weight", "mlp.down_proj.weight"],
            rank_pattern={"up_proj": 2, "up_proj.weight": 3},
        ),
    )
}

LIVE_CASES = (
    GOLDEN_CASES
    | _AS_PARAMETERS
    | {
        f"{name}_experts": (name, dict(r=4, lora_alpha=8, target_modules=_ATTENTION, target_parameters=_EXPERTS))
        for name in ("mixtral", "qwen3_moe", "gpt_oss", "qwen3_next")
    }
    | {
        f"{name}_experts": (name, dict(r=4, target_modules=["q_proj", linear], target_parameters=_BESIDE_MLP))
        for name, linear in (("glm4_moe", "shared_experts.down_proj"), ("lfm2_moe", "in_proj"))
    }
    | {
        "gemma4_router_and_experts": (
            "gemma4_experts",
            dict(r=4, target_modules=["q_proj", "router.proj"], target_parameters=_BESIDE_MLP),
        )
    }
    | {f"{name}_lora": (name, dict(r=4, lora_alpha=8, target_modules=_linears(name))) for name in CONFIGS}
    | {f"{name}_dora": (name, dict(r=4, target_modules="all-linear", use_dora=True)) for name in ("phi3", "gemma2")}
)
