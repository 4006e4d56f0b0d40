"""A checkpoint of random weights in a published shape, with a byte tokenizer, as peers load it.

python -m benchmarks.peers.checkpoint CONFIG.json FOLDER
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

_SHARD_BYTES = 4e9
_ENDS = "<|end|>"
_TEMPLATE = "{% for message in messages %}{{ message['content'] }}<|end|>{% endfor %}"


def shapes(hf: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of every tensor of a Llama or Qwen3 config, as transformers names them."""
    hidden, middle, vocabulary = hf["hidden_size"], hf["intermediate_size"], hf["vocab_size"]
    heads, kv_heads = hf["num_attention_heads"], hf["num_key_value_heads"]
    head = hf.get("head_dim") or hidden // heads
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for layer in range(hf["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for name, rows, columns in (
            ("self_attn.q_proj", heads * head, hidden),
            ("self_attn.k_proj", kv_heads * head, hidden),
            ("self_attn.v_proj", kv_heads * head, hidden),
            ("self_attn.o_proj", hidden, heads * head),
            ("mlp.gate_proj", middle, hidden),
            ("mlp.up_proj", middle, hidden),
            ("mlp.down_proj", hidden, middle),
        ):
            yield f"{at}{name}.weight", (rows, columns)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{at}{name}.weight", (hidden,)
        if hf["model_type"] == "qwen3":
            yield f"{at}self_attn.q_norm.weight", (head,)
            yield f"{at}self_attn.k_norm.weight", (head,)
    yield "model.norm.weight", (hidden,)
    if not hf.get("tie_word_embeddings"):
        yield "lm_head.weight", (vocabulary, hidden)


def write_checkpoint(hf: Mapping[str, Any], folder: Path) -> Path:
    """Writes config, tokenizer and safetensors of bfloat16, of deviation 0.02; a whole folder is left as it is."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return folder
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    draw = torch.Generator(device).manual_seed(0)
    shard: dict[str, torch.Tensor] = {}
    files: dict[str, str] = {}
    size, number = 0, 0

    def flush() -> None:
        nonlocal shard, size, number
        number += 1
        save_file(shard, folder / f"model-{number:05d}.safetensors", metadata={"format": "pt"})
        files.update(dict.fromkeys(shard, f"model-{number:05d}.safetensors"))
        shard, size = {}, 0

    for name, shape in shapes(hf):
        if len(shape) == 1:
            tensor = torch.ones(shape, dtype=torch.bfloat16)
        else:
            tensor = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, 0.02, generator=draw).cpu()
        shard[name] = tensor
        size += tensor.nbytes
        if size >= _SHARD_BYTES:
            flush()
    flush()
    architecture = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[hf["model_type"]]
    config = {**hf, "architectures": [architecture], "dtype": "bfloat16", "bos_token_id": 256, "eos_token_id": 256}
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}), encoding="utf-8")
    return folder


def write_tokenizer(folder: Path, template: str = _TEMPLATE, marks: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """One of bytes, with further special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in (_ENDS, "<|pad|>", *marks)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=_ENDS,
        eos_token=_ENDS,
        pad_token="<|pad|>",
        chat_template=template,
        model_max_length=131072,
    )
    fast.save_pretrained(folder)
    file = folder / "tokenizer_config.json"  # a class that older releases know too
    file.write_text(json.dumps({**json.loads(file.read_text("utf-8")), "tokenizer_class": "PreTrainedTokenizerFast"}))
    return fast


if __name__ == "__main__":
    write_checkpoint(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]))
