"""Fine-tune open-weight language models in JAX.

`from_pretrained` loads a model (`Decoder`), `get_peft_model` gives it a LoRA adapter, `Trainer` trains it, `generate`
and `Sampler` answer prompts, `save_adapter`, `save_pretrained` and `export_model` write it. Names are imported on first
use (PEP 562): importing jaxtune takes milliseconds and touches neither jax nor an accelerator.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if sys.version_info < (3, 12):  # noqa: UP036 (of a clone: pip looks by itself); before what older ones cannot read
    raise ImportError(
        f"jaxtune needs Python 3.12 or newer, and this is {sys.version.split()[0]}: make an environment with "
        "python3.12 -m venv .env"
    )

if TYPE_CHECKING:
    from jaxtune.export.api import export_model
    from jaxtune.models.adapters.adapter_files import load_adapter, save_adapter
    from jaxtune.models.adapters.merge import merge_adapter
    from jaxtune.models.config import DecoderConfig
    from jaxtune.models.decoder import Decoder
    from jaxtune.models.generation.generate import generate
    from jaxtune.models.generation.sampler import Sampler
    from jaxtune.models.hf import from_pretrained, save_pretrained
    from jaxtune.models.lora import get_peft_model, without_adapter
    from jaxtune.models.reward import reward_model
    from jaxtune.system.program_cache import use_program_cache
    from jaxtune.train.config import TrainConfig
    from jaxtune.train.trainer import Trainer

from jaxtune.system.version import __version__

__all__ = [
    "Decoder",
    "DecoderConfig",
    "Sampler",
    "TrainConfig",
    "Trainer",
    "__version__",
    "export_model",
    "from_pretrained",
    "generate",
    "get_peft_model",
    "load_adapter",
    "merge_adapter",
    "reward_model",
    "save_adapter",
    "save_pretrained",
    "use_program_cache",
    "without_adapter",
]

_MODULE_OF = {
    "Decoder": "jaxtune.models.decoder",
    "DecoderConfig": "jaxtune.models.config",
    "Sampler": "jaxtune.models.generation.sampler",
    "TrainConfig": "jaxtune.train.config",
    "Trainer": "jaxtune.train.trainer",
    "export_model": "jaxtune.export.api",
    "from_pretrained": "jaxtune.models.hf",
    "generate": "jaxtune.models.generation.generate",
    "get_peft_model": "jaxtune.models.lora",
    "load_adapter": "jaxtune.models.adapters.adapter_files",
    "merge_adapter": "jaxtune.models.adapters.merge",
    "reward_model": "jaxtune.models.reward",
    "save_adapter": "jaxtune.models.adapters.adapter_files",
    "save_pretrained": "jaxtune.models.hf",
    "use_program_cache": "jaxtune.system.program_cache",
    "without_adapter": "jaxtune.models.lora",
}
_SUBMODULES = ("compat", "export", "models", "pallas", "profile", "train")


def __getattr__(name: str) -> Any:
    """Imports a public name or subpackage on first use."""
    if name in _MODULE_OF:
        value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    elif name in _SUBMODULES:
        value = importlib.import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_SUBMODULES})
