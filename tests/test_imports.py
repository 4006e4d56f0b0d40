"""A command imports nothing that only others need: every start would pay for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import jaxtune

ROOT = Path(jaxtune.__file__).parents[1]
BASE = Path(jaxtune.__file__).parent / "quickstart" / "base"
# Modules and what is in them.
OF_OTHERS = (
    *("torch", "datasets", "pandas", "pyarrow", "scipy", "sklearn", "tensorflow", "orbax", "tensorstore", "accelerate"),
    *("llguidance", "gguf", "starlette", "uvicorn", "prometheus_client", "openai", "wandb", "tensorboardX", "requests"),
    *("jax.experimental.mosaic.gpu", "jax.experimental.pallas.mosaic_gpu", "jaxlib.mlir.dialects.llvm"),
    *("transformers.modeling_utils", "transformers.trainer", "transformers.generation.utils"),
    *("jaxtune.compat", "jaxtune.convert", "jaxtune.serve", "jaxtune.profile.report"),
)
OF_TRAINING = (
    "pydantic",
    "matplotlib",
    "jaxtune.train.config",
    "jaxtune.train.planning",
    "jaxtune.train.trainer",
    "jaxtune.export.api",
)
CASES = {
    "generate": (["generate", str(BASE), "--prompt", "What is 2 + 3?", "--max-new-tokens", "2"], OF_TRAINING),
    "chat": (["chat", str(BASE)], OF_TRAINING),
    "export": (["export", "ADAPTER", "OUTPUT"], ("matplotlib", "jaxtune.train.trainer")),
    "train": (["train", "quickstart", "steps=1", "export.merged=false", "output=OUTPUT"], ()),
    "evaluate": (["evaluate", "quickstart", "adapter=null", "data.max_rows=20"], ("matplotlib",)),
}
_SHOW = """
import sys
from jaxtune import cli
code = cli.console(sys.argv[1:])
print("MODULES", *sys.modules)
sys.exit(code)
"""


@pytest.mark.parametrize("name", CASES)
def test_a_command_imports_what_it_needs(name, tmp_path):
    words, others = CASES[name]
    adapter = tmp_path / "adapter"
    if name == "export":
        model, tokenizer = jaxtune.from_pretrained(BASE)
        jaxtune.save_adapter(jaxtune.get_peft_model(model, r=2), adapter, tokenizer)
    words = [word.replace("ADAPTER", str(adapter)).replace("OUTPUT", str(tmp_path / "output")) for word in words]
    # It compiles its programs, whatever other tests have cached: that imports most.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs")}
    environment["JAXTUNE_CACHE"] = str(tmp_path / "cache")
    command = [sys.executable, "-c", _SHOW, *words]
    done = subprocess.run(command, capture_output=True, text=True, input="/exit\n", env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    modules = done.stdout.rpartition("MODULES ")[2].split()
    assert "jax" in modules and "jaxtune.models.hf" in modules
    unneeded = (*OF_OTHERS, *others)
    assert [found for found in modules if any(found == each or found.startswith(f"{each}.") for each in unneeded)] == []
