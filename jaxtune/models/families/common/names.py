"""The names that a Decoder's tensors have in checkpoints. `tensor_name` gives a tensor's name in the text model of
transformers 5, with the family's names of norms and the router (LLAMA_NORMS and so on). There one matrix of all experts
of a layer is one tensor, such as mlp.experts.gate_up_proj. `ExpertFiles` has the names in checkpoints that store one
linear for each expert and matrix instead; files/expert_files.py translates between the two. A weight has the same
layout in the file and in the model ([out, in] for a linear), so none is transposed, except experts in gpt-oss's MXFP4
files, whose format (pallas/formats/mxfp4.py) transposes them when it decodes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtune.models.config import LayerSpec

# {a Block's norm, or "router" for that of its experts: its name in the checkpoint}, for Family.norms
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
    """The parts of experts' tensor names in a checkpoint that has one linear for each expert and matrix:
    model.layers.N.<module>.experts.<expert>.<matrix>.weight. A Family has one (expert_files) if its checkpoints are so,
    at least with quantised experts. models/hf.py and files/expert_files.py combine such tensors on loading, and divide
    the model's on saving."""

    module: str  # the name of the mixture of experts within a layer; "": its experts are named under the layer itself
    gate: str  # the gate projection of an expert
    up: str  # the up projection of an expert
    down: str  # the down projection of an expert
    # whether only quantised experts are saved so, and others as all experts of a layer in one tensor
    quantised_only: bool = False


QWEN_EXPERTS = ExpertFiles("mlp", "gate_proj", "up_proj", "down_proj")


def tensor_name(
    path: Sequence[Any], norms: Mapping[str, str], layers: Sequence[LayerSpec] = (), head: str = "lm_head"
) -> str:
    """The name that a Decoder's tensor has in the text model of transformers 5, such as
    model.layers.0.mlp.up_proj.weight; loading, saving and precision maps name tensors by it. In files, experts may have
    other names (ExpertFiles), and a text model within a multimodal one has a longer prefix
    (registry.whole_tensor_name).

    Args:
      path: the attributes and indices that lead from the Decoder to the tensor, such as ("layers", 0, "mlp", "up_proj",
        "weight").
      norms: the family's names of norms and the router (Family.norms).
      layers: the spec of each layer, by which tensors of parts with their own configs (Part.config) are named, such as
        those of delta nets, per-layer embeddings and Gemma 4's experts; it may be left out if no layer has such parts.
      head: the name of the decoder's head in the checkpoint (Head.name).
    Raises:
      KeyError: a module that neither `norms` nor the layer's spec names.
    """
    if path[0] == "layers":
        _, index, part, *rest = map(str, path)
        spec = layers[int(index)] if layers else LayerSpec()
        part = {**spec.hf_names, "layer_scalar": "layer_scalar", **norms}[part]
        if rest[:1] == ["experts"]:  # all experts' matrices are tensors of one module, not modules
            rest = ["experts", rest[1] + ("_bias" if rest[2] == "bias" else "")]
        if rest[:1] == ["router"]:
            rest[0] = norms.get("router", "router")
        return ".".join(name for name in ("model.layers", index, part, *rest) if name)
    if path[0] == "per_layer":
        names = {"projection": "per_layer_model_projection", "norm": "per_layer_projection_norm"}
        module, last = ("embed_tokens_per_layer", path[1]) if path[1] == "weight" else (names[str(path[1])], path[2])
        return f"model.{module}.{last}"
    return {"embedding": "model.embed_tokens", "norm": "model.norm", "head": head}[str(path[0])] + f".{path[1]}"
