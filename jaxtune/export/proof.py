"""Proves an exported adapter: its files are read by PEFT itself, where that is installed, and by the arithmetic of vLLM
and llama.cpp, and compared with what is computed of them here.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from jaxtune.export import gguf_tensors
from jaxtune.export.architectures import architecture
from jaxtune.models.adapters.adapter_config import WEIGHTS_NAME, is_nested, peft_name, read_adapter_config
from jaxtune.models.decoder import Decoder
from jaxtune.models.layers.expert_linear import ExpertLora
from jaxtune.models.linear import Lora
from jaxtune.models.lora import experts, linears
from jaxtune.system.files import atomic_write

NAME = "jaxtune_proof.json"
_PREFIX = "base_model.model."
_CLOSE = 1e-3  # of the largest number of what is compared: all is in float32, and a wrong order is off by about 1
_COLUMNS = 8  # random ones, by which matrices are multiplied to be compared
_TOKENS = 2, 16  # rows and columns of random ones for logits

# Its arguments: the base, the adapter, a file of tokens, a file for (logits, the base's logits), the class of the base.
_PEFT_PROGRAM = """import sys
import numpy, peft, torch, transformers
base, adapter, tokens, answer, kind = sys.argv[1:]
model = getattr(transformers, kind).from_pretrained(base, dtype=torch.float32)
model = peft.PeftModel.from_pretrained(model, adapter).eval()
tokens = torch.from_numpy(numpy.load(tokens))
with torch.no_grad():
    adapted = model(input_ids=tokens).logits
    with model.disable_adapter():
        plain = model(input_ids=tokens).logits
numpy.save(answer, numpy.stack([adapted.numpy(), plain.numpy()]))
"""


@dataclasses.dataclass(frozen=True)
class Answer:
    """What one program makes of an adapter's files.

    answers: "not tried": it is not installed; "refuses": it does not load them.
    why: it does not, or what was compared.
    difference: the largest one / the largest number that was compared.
    """

    program: str
    answers: Literal["equal", "different", "refuses", "not tried"]
    why: str
    difference: float | None = None

    def __str__(self) -> str:
        size = "" if self.difference is None else f", largest difference {self.difference:.1e}"
        return f"{self.program}: {self.answers} ({self.why}{size})"


class _Refusal(Exception):
    """A program does not load the files; why."""


class _Factors(NamedTuple):
    """Of one matrix, or of all experts'."""

    a: np.ndarray  # [.., r, in]
    b: np.ndarray  # [.., out, r]
    scale: float


@dataclasses.dataclass(frozen=True)
class _Files:
    """An adapter's, as every program reads them."""

    config: Mapping[str, object]
    tensors: Mapping[str, np.ndarray]
    experts: int  # of each layer

    @property
    def alpha_by_rank(self) -> float:
        """lora_alpha / r of the config, by use_rslora; no patterns."""
        rank = float(str(self.config["r"]))
        return float(str(self.config.get("lora_alpha", 8))) / (
            math.sqrt(rank) if self.config.get("use_rslora") else rank
        )

    def pairs(self) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        """(module, lora_A, lora_B)."""
        for key, a in self.tensors.items():
            if key.endswith(".lora_A.weight"):
                yield key.removeprefix(_PREFIX).removesuffix(".lora_A.weight"), a, self.tensors[key.replace("_A", "_B")]

    def require_plain(self, program: str) -> None:
        """Raises _Refusal for tensors other than lora_A and lora_B."""
        for key in self.tensors:
            if not key.endswith((".lora_A.weight", ".lora_B.weight")):
                raise _Refusal(f"{program} does not load {key.removeprefix(_PREFIX)}")


def prove(model: Decoder, folder: Path) -> list[Answer]:
    """What each program makes of an adapter that was exported to `folder`, which gets the answers as NAME.

    model: what from_pretrained makes of the folder, in float32. ArithmeticError: PEFT computes something else.
    """
    moe = model.config.moe
    files = _Files(read_adapter_config(folder), load_file(folder / WEIGHTS_NAME), 0 if moe is None else moe.num_experts)
    answers = [_peft(model, folder), _by_products("vLLM", _vllm, model, files)]
    answers.append(_by_products("llama.cpp after its convert_lora_to_gguf.py", _converted, model, files))
    answers.append(_gguf(model))
    content = {"answers": [dataclasses.asdict(answer) for answer in answers], "largest_allowed": _CLOSE}
    atomic_write(folder / NAME, json.dumps(content, indent=2) + "\n")
    if answers[0].answers == "different":
        raise ArithmeticError(f"{folder}: {answers[0]}")
    return answers


def _ours(model: Decoder) -> dict[str, _Factors]:
    """{PEFT's name of a matrix: factors}."""
    matrices = ((name, matrix.lora) for name, matrix in (*linears(model), *experts(model)))
    return {peft_name(model, name): _factors(lora) for name, lora in matrices if lora is not None}


def _factors(lora: Lora | ExpertLora) -> _Factors:
    return _Factors(np.asarray(lora.a[...], np.float32), np.asarray(lora.b[...], np.float32), float(lora.scale))


def _columns(size: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((size, _COLUMNS)).astype(np.float32)


def _product(factors: _Factors) -> np.ndarray:
    """[.., out, _COLUMNS]"""
    return factors.scale * (factors.b @ (factors.a @ _columns(factors.a.shape[-1])))


def _compared(program: str, ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]) -> Answer:
    """Of products by the names of matrices."""
    if left := sorted(ours.keys() - theirs.keys()):
        why = f"{left[0]} and {len(left) - 1} more are left out" if len(left) > 1 else f"{left[0]} is left out"
        return Answer(program, "different", why)
    relative = {
        name: float(np.abs(theirs[name] - product).max() / max(np.abs(product).max(), 1e-30))
        for name, product in ours.items()
    }
    worst = max(relative, key=relative.__getitem__)
    if relative[worst] > _CLOSE:
        wrong = sum(value > _CLOSE for value in relative.values())
        return Answer(program, "different", f"{wrong} of {len(relative)} matrices, most {worst}", relative[worst])
    return Answer(program, "equal", f"products of {len(relative)} matrices", relative[worst])


def _by_products(program: str, read: Callable[[_Files], dict[str, _Factors]], model: Decoder, files: _Files) -> Answer:
    try:
        theirs = read(files)
    except _Refusal as refusal:
        return Answer(program, "refuses", str(refusal))
    products = ({name: _product(each) for name, each in factors.items()} for factors in (_ours(model), theirs))
    return _compared(program, *products)


def _vllm(files: _Files) -> dict[str, _Factors]:
    """vLLM's: one scale for all modules; experts of a parameter's pair are stacked rank after rank, where the model is
    one whose experts it keeps stacked, or --enable-mixed-moe-lora-format and is_3d_lora_weight say so.
    """
    if files.config.get("use_dora"):
        raise _Refusal("vLLM does not load DoRA")
    files.require_plain("vLLM")
    found, scale = {}, files.alpha_by_rank
    stacked = {module: (a, b) for module, a, b in files.pairs() if module.endswith((".experts", ".experts.base_layer"))}
    for module, a, b in files.pairs():
        if module not in stacked:
            found[module] = _Factors(a, b, scale)
    for module in [module for module in stacked if module.endswith(".experts")]:
        if f"{module}.base_layer" not in stacked:
            raise _Refusal(f"vLLM needs adapters of both gate_up_proj and down_proj in {module}")
        for name, key in (("gate_up_proj", f"{module}.base_layer"), ("down_proj", module)):
            a, b = stacked[key]
            a, b = a.reshape(files.experts, -1, a.shape[-1]), b.reshape(len(b), -1, files.experts)
            found[f"{module}.{name}"] = _Factors(a, b.transpose(2, 0, 1), scale)
    return found


def _converted(files: _Files) -> dict[str, _Factors]:
    """llama.cpp's converter: lora_alpha by the rank of each tensor; neither use_rslora nor patterns."""
    files.require_plain("convert_lora_to_gguf.py")
    found, alpha = {}, float(str(files.config.get("lora_alpha", 8)))
    for module, a, b in files.pairs():
        if module.endswith((".experts", ".experts.base_layer")):
            raise _Refusal(f"convert_lora_to_gguf.py has no tensor for {module}: use --to gguf-adapter")
        found[module] = _Factors(a, b, alpha / b.shape[-1])
    return found


def _gguf(model: Decoder) -> Answer:
    """llama.cpp with the file of --to gguf-adapter: products of its tensors, beside the rows of the base's."""
    program = "llama.cpp with --to gguf-adapter"
    try:
        arch = architecture(model.config)
        sources, alpha = gguf_tensors.of_adapter(model, arch)
    except ValueError as error:
        return Answer(program, "refuses", str(error))
    theirs = {}
    for source in sources:
        lora = source.make()
        a, b = (np.asarray(tensor.of(lora), np.float32) for tensor in source.tensors)
        theirs[source.tensors[0].name.removesuffix(".lora_a")] = _product(_Factors(a, b, alpha / b.shape[-1]))
    ours = {}
    for name, matrix in (*linears(model), *experts(model)):
        if matrix.lora is None:
            continue
        ours |= gguf_tensors.of_change(name, _product(_factors(matrix.lora)), model.config, arch)
    return _compared(program, ours, theirs)


def _peft(model: Decoder, folder: Path) -> Answer:
    """PEFT's logits, in a process of its own."""
    missing = [name for name in ("torch", "transformers", "peft") if importlib.util.find_spec(name) is None]
    if missing:
        return Answer("PEFT", "not tried", f"{' and '.join(missing)} not installed: pip install torch peft")
    program = f"PEFT {importlib.metadata.version('peft')}"
    if not model.config.head.is_text or model.source is None:
        return Answer(program, "not tried", "only models that write text are compared")
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, _TOKENS)
    ours = np.asarray(model(jnp.asarray(tokens, jnp.int32)), np.float32)
    with tempfile.TemporaryDirectory() as place:
        asked, answer = Path(place, "tokens.npy"), Path(place, "logits.npy")
        np.save(asked, tokens)
        kind = "AutoModelForImageTextToText" if is_nested(model) else "AutoModelForCausalLM"
        command = [sys.executable, "-P", "-c", _PEFT_PROGRAM, model.source.path, folder, asked, answer, kind]
        done = subprocess.run(
            list(map(str, command)), env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True
        )
        if done.returncode:
            return Answer(program, "refuses", (done.stderr.strip().splitlines() or ["it ended"])[-1][:300])
        theirs, plain = np.load(answer)
    changed = float(np.abs(theirs - plain).max())
    return dataclasses.replace(
        _compared(program, {"logits": ours}, {"logits": theirs}),
        why=f"logits of {tokens.size} tokens, of which the adapter changes the largest by {changed:.3g}",
    )
