"""The names of a Decoder's tensors in checkpoints, those of transformers 5, where one tensor has a matrix of all
experts of a layer. Weights have the same layout in file and model ([out, in] for a linear), except experts in gpt-oss's
MXFP4 files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtune.models.config import LayerSpec

# {a Block's norm, "router" for that of its experts, or "norm" for the decoder's: its name in the checkpoint}, for
# Family.norms
LLAMA_NORMS = {"mixer_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
POST_NORMS = {"mixer_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"}
GEMMA_NORMS = {
    "mixer_norm": "input_layernorm",
    "mixer_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
ROUTED_NORMS = LLAMA_NORMS | {"router": "gate"}


@dataclasses.dataclass(frozen=True)
class ExpertFiles:
    """Experts' names where checkpoints have a linear for each expert and matrix:
    model.layers.N.<module>.experts.<expert>.<matrix>.weight.
    """

    # the name of the mixture of experts within a layer, or "mlp": as in the model; "": its experts are named under the
    # layer itself
    module: str
    gate: str  # the gate projection of an expert
    up: str  # the up projection of an expert
    down: str  # the down projection of an expert
    # whether only quantised experts are saved so, and others as all experts of a layer in one tensor
    quantised_only: bool = False


QWEN_EXPERTS = ExpertFiles("mlp", "gate_proj", "up_proj", "down_proj")


def tensor_name(
    path: Sequence[Any], norms: Mapping[str, str], layers: Sequence[LayerSpec] = (), head: str = "lm_head"
) -> str:
    """A tensor's name in the text model of transformers 5, such as model.layers.0.mlp.up_proj.weight.

      path: attributes and indices from the Decoder, such as ("layers", 0, "mlp", "up_proj", "weight").
      norms: Family.norms.
      layers: LayerSpecs; needed if parts have configs of their own.
      head: the name of the output head's module.

    Raises KeyError for a module that neither `norms` nor the layer's spec names.
    """
    if path[0] == "layers":
        _, index, part, *tail = map(str, path)
        spec = layers[int(index)] if layers else LayerSpec()
        if tail[:1] == ["experts"]:  # all experts' matrices are tensors of one module, not modules
            tail = ["experts", tail[1] + ("_bias" if tail[2] == "bias" else "")]
        else:
            tail = [norms.get(name, name) for name in tail]
        part = {**spec.hf_names, "layer_scalar": "layer_scalar", **norms}[part]
        return ".".join(name for name in ("model.layers", index, part, *tail) if name)
    if path[0] == "per_layer":
        names = {"projection": "per_layer_model_projection", "norm": "per_layer_projection_norm"}
        module, last = ("embed_tokens_per_layer", path[1]) if path[1] == "weight" else (names[str(path[1])], path[2])
        return f"model.{module}.{last}"
    norm = f"model.{norms.get('norm', 'norm')}"
    return {"embedding": "model.embed_tokens", "norm": norm, "head": head}[str(path[0])] + f".{path[1]}"
