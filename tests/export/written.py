"""Exports of tiny models whose every number is exact in any order of sums, so that their files are the same bytes
on every machine.

`python tests/export/written.py` writes what the code at hand makes of them to written.json.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parents[1] / "models")]  # where pytest finds them by itself

import jax.numpy as jnp
import numpy as np
from llama_cpp_models import made
from tiny_models import named

from jaxtune.export import api
from jaxtune.models.files.quant import prepare_qat, quantize
from jaxtune.models.lora import get_peft_model, matrices
from jaxtune.models.reward import reward_model

RECORD = Path(__file__).parent / "written.json"
WIDE: dict[str, Any] = dict(hidden_size=128, intermediate_size=256, num_attention_heads=4)
EXPERTS: dict[str, Any] = dict(r=2, target_modules=["q_proj"], target_parameters=["gate_up_proj", "down_proj"])


def _steps(variable: Any, draw: np.random.Generator, step: float, most: int) -> None:
    """Sets a variable to whole numbers of steps."""
    value = variable.get_value()
    numbers = draw.integers(-most, most + 1, value.shape) * np.float32(step)
    variable.set_value(jnp.asarray(numbers, value.dtype))


def exact(name: str, dtype: str = "bfloat16", base: Callable = lambda model: model, **changes) -> Callable:
    """A function that gives the model with an adapter of these settings (r and what begins with "lora" and so on are
    get_peft_model's, in `adapter`; the rest changes the config)."""
    settings = dict(changes.pop("adapter", {"r": 4, "lora_alpha": 4}))

    def model():
        draw = np.random.default_rng(0)
        found = made(name, dtype, **changes)
        for _, variable in sorted(named(found).items()):
            if len(variable.shape) > 1:
                _steps(variable, draw, 2.0**-7, 64)
        found = get_peft_model(base(found), **settings)
        for _, matrix in matrices(found):
            if matrix.lora is None:
                continue
            _steps(matrix.lora.a, draw, 2.0**-3, 3)
            _steps(matrix.lora.b, draw, 2.0**-5, 3)
            if matrix.lora.magnitude is not None:
                _steps(matrix.lora.magnitude, draw, 2.0**-3, 15)
                matrix.lora.magnitude.set_value(matrix.lora.magnitude[...] + 2.0)
        for holder in (found.embedding, found.head):
            if holder is not None and holder.original is not None:
                _steps(holder.weight, draw, 2.0**-11, 1024)
        return found

    return model


# {name: (the model, export_model's `to`, its other arguments)}
CASES: dict[str, tuple[Callable, str, dict[str, Any]]] = {
    "adapter": (exact("llama"), "merged", {}),
    "dora": (exact("llama", adapter=dict(r=2, lora_alpha=2, use_dora=True)), "merged", {}),
    "modules_to_save": (
        exact("qwen3", adapter=dict(r=2, lora_alpha=2, modules_to_save=["embed_tokens", "lm_head"])),
        "merged",
        {},
    ),
    "tied": (
        exact("olmo2", adapter=dict(r=2, lora_alpha=2, modules_to_save=["embed_tokens"])),
        "merged",
        {},
    ),
    "over nf4": (exact("llama", base=quantize), "merged", dict(max_shard_bytes=30_000)),
    "experts in pieces": (exact("qwen3_moe", adapter=EXPERTS), "merged", dict(max_shard_bytes=20_000)),
    "experts over nf4": (exact("mixtral", base=quantize, adapter=EXPERTS), "merged", {}),
    "experts in one": (exact("gpt_oss", adapter=EXPERTS), "merged", {}),
    "reward": (exact("llama", base=reward_model), "merged", {}),
    "qat": (lambda: prepare_qat(exact("llama", **WIDE)(), "int4", 32), "merged", {}),
    "bnb-4bit": (exact("llama"), "bnb-4bit", {}),
    "fp8": (exact("qwen2"), "fp8", {}),
    "fp8 of experts": (exact("qwen3_moe", adapter=EXPERTS), "fp8", {}),
    "w4a16": (exact("qwen2", **WIDE), "w4a16", {}),
    "w4a16 of experts": (
        exact("qwen3_moe", adapter=EXPERTS, hidden_size=128, moe_intermediate_size=64),
        "w4a16",
        {},
    ),
    "mxfp4": (exact("gpt_oss", adapter=EXPERTS, hidden_size=64, intermediate_size=64), "mxfp4", {}),
    **{f"gguf {kind}": (exact("llama"), "gguf", dict(outtype=kind)) for kind in ("f32", "bf16", "q8_0", "q4_0")},
    "gguf q8_0 over nf4": (exact("llama", base=quantize), "gguf", dict(outtype="q8_0")),
    "gguf of experts": (exact("qwen3_moe", adapter=EXPERTS), "gguf", dict(outtype="q8_0")),
    "gguf of gpt_oss": (exact("gpt_oss", adapter=EXPERTS), "gguf", dict(outtype="f16")),
}


def _content(file: Path) -> Iterator[bytes]:
    if file.suffix != ".gguf":
        yield file.read_bytes()
        return
    from gguf import GGUFReader

    for tensor in GGUFReader(file).tensors:  # what stands before them, the tokenizer, is not of this
        yield f"{tensor.name} {tensor.tensor_type.name} {tensor.shape.tolist()}".encode()
        yield tensor.data.tobytes()


def digests(case: str, folder: Path, tokenizer: Any) -> dict[str, str]:
    """{file: digest of its content} of what a case writes, without tokenizer, card and record."""
    model, to, arguments = CASES[case]
    done = api.export_model(model(), folder, to, tokenizer=tokenizer if to == "gguf" else None, name="m", **arguments)
    return {
        name: hashlib.sha256(b"".join(_content(done.folder / name))).hexdigest()[:16]
        for name in sorted({*done.files} - {"README.md", "jaxtune_run.json"})
    }


if __name__ == "__main__":
    sys.path += [str(Path(__file__).parent)]
    from conftest import byte_tokenizer

    found = {}
    for case in CASES:
        with tempfile.TemporaryDirectory() as temporary:
            found[case] = digests(case, Path(temporary) / "out", byte_tokenizer())
        print(case, found[case], flush=True)
    RECORD.write_text(json.dumps(found, indent=1) + "\n")
