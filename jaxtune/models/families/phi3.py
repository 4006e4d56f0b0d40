"""Phi-3, Phi-3.5 and Phi-4: fused q/k/v and gate/up, longrope, and optionally a part of each head unrotated."""

from __future__ import annotations

from jaxtune.models.config import DecoderConfig
from jaxtune.models.families.common import Config, Family, Fields, OneWindow, Rotary
from jaxtune.models.families.common.rope import ORIGINAL_POSITIONS, PARTIAL_ROTARY


class _Rotary(Rotary):
    """Rotary, with Phi-3's names for longrope, and the keys that transformers 4 requires."""

    def given(self, hf: Config) -> Fields:
        parameters = super().given(hf)
        if parameters["rope_type"] in ("su", "yarn"):  # the names of longrope in early files
            parameters["rope_type"] = "longrope"
        return parameters

    def write(self, config: DecoderConfig) -> Fields:
        """Raises ValueError for a kind that transformers' Phi-3 does not have."""
        rope = config.rotary[0]
        original = rope.original_max_position_embeddings or config.max_position_embeddings
        scaling = None
        if rope.kind == "longrope":
            # Exactly these keys: transformers 4 refuses others.
            factors = {"short_factor": list(rope.short_factor), "long_factor": list(rope.long_factor)}
            scaling = {"type": "longrope", **factors}
            if rope.attention_factor is not None or rope.factor != config.max_position_embeddings / original:
                scaling |= {"factor": rope.factor, "attention_factor": rope.attention_factor}
        elif rope.kind != "default":
            raise ValueError(f"Phi-3: rotary kind {rope.kind!r} cannot be saved; only default and longrope can")
        return {"rope_theta": rope.theta, "rope_scaling": scaling, ORIGINAL_POSITIONS: original}


FAMILY = Family(
    "phi3",
    "Phi3ForCausalLM",
    (_Rotary(), OneWindow(), PARTIAL_ROTARY),
    defaults={ORIGINAL_POSITIONS: 4096, "rms_norm_eps": 1e-5},
    fields={"fused_qkv": True, "fused_gate_up": True},
    written={"embd_pdrop": 0.0, "resid_pdrop": 0.0},
)
