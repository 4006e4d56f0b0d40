"""torch stays out of a process that does not use it, and is whole in one that does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxtune.models.files import model_folder
from jaxtune.models.files.model_folder import load_tokenizer, read_json, write_json

ROOT = Path(__file__).resolve().parent.parent
BASE = ROOT / "jaxtune" / "quickstart" / "base"
TORCH = """
import sys
class Tensor: pass
class nn:
    class Module: pass
__version__ = "2.11.0"
import torch.cuda
print("torch was imported")
"""
ONCE = "import sys; assert not hasattr(sys, 'cuda_ran'); sys.cuda_ran = True\navailable = False"


@pytest.fixture
def run(tmp_path):
    """Runs Python code beside a torch that says when it is imported; returns the lines that it prints."""
    package, metadata = tmp_path / "torch", tmp_path / "torch-2.11.0.dist-info"
    package.mkdir()
    (package / "__init__.py").write_text(TORCH)
    (package / "cuda.py").write_text(ONCE)
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.11.0\n")

    def lines(code: str) -> list[str]:
        path = os.pathsep.join([str(tmp_path), str(ROOT)])
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=600,
            env=os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return lines


LOADED = (
    "import sys; from pathlib import Path; from jaxtune.models.files import transformers_import\n"
    "from jaxtune.models.files.model_folder import load_tokenizer\n"
    "{begun}\n"
    f"tokenizer = load_tokenizer(Path({str(BASE)!r}))\n"
    "assert 'torch' not in sys.modules\n"
    "assert tokenizer.decode(tokenizer('a word')['input_ids']) == 'a word'\n"
    "import transformers; assert transformers.is_torch_available()\n"
)


@pytest.mark.parametrize("begun", ["transformers_import.begin(runs_code=True)", ""])
def test_a_tokenizer_imports_no_torch_and_transformers_has_it_afterwards(run, begun):
    used = (
        "from transformers import modeling_rope_utils as user; print('loaded')\n"
        "assert user.torch.Tensor.__name__ == 'Tensor'\n"
        "import torch; assert torch is sys.modules['torch'] and user.torch.Tensor is torch.Tensor\n"
    )
    assert run(LOADED.format(begun=begun) + used) == ["loaded", "torch was imported"]


def test_a_command_without_code_of_the_users_hides_torch_from_transformers(run):
    code = LOADED.format(begun="transformers_import.begin(runs_code=False)").replace(
        "assert transformers", "assert not transformers"
    )
    assert run(code + "import torch") == ["torch was imported"]


@pytest.mark.parametrize(
    "use",
    [
        "import torch; print('named'); torch.Tensor",
        "import torch; print('named'); torch.added = 1; assert sys.modules['torch'].added == 1",
        "print('named'); import torch.cuda as cuda; assert sys.modules['torch'].cuda is cuda and not cuda.available",
        "print('named'); import torch.cuda; assert torch.cuda.__spec__.origin.endswith('cuda.py')",
        "print('named'); from torch import nn; assert nn.Module",
        "from importlib.util import find_spec; assert find_spec('torch'); import torch; print('named'); torch.nn",
    ],
)
def test_a_torch_that_is_used_is_imported_then(run, use):
    begun = "import sys; from jaxtune.system.no_torch import torch_on_use\nwith torch_on_use():\n    "
    after = "\nimport torch; assert torch is sys.modules['torch'] and type(torch).__name__ == 'module'"
    assert run(begun + use + after) == ["named", "torch was imported"]


@pytest.mark.parametrize("context", ["torch_on_use", "torch_hidden"])
def test_an_imported_torch_stays(run, context):
    code = (
        "import sys, torch; from jaxtune.system import no_torch\n"
        f"with no_torch.{context}():\n    assert sys.modules['torch'] is torch\n"
        "assert sys.modules['torch'] is torch"
    )
    assert run(code) == ["torch was imported"]


def test_a_hidden_torch_is_not_imported_and_is_there_afterwards(run):
    code = (
        "from jaxtune.system.no_torch import torch_hidden\n"
        "with torch_hidden():\n    try: import torch\n    except ImportError: print('hidden')\n"
        "import torch"
    )
    assert run(code) == ["hidden", "torch was imported"]


MODEL_TYPES = ["llama", "qwen2", "qwen3", "mistral", "gemma3_text", "phi3", "gpt_oss", "bert", "unknown", ""]
CLASSES = ["TokenizersBackend", "PreTrainedTokenizerFast", "Qwen2Tokenizer", "LlamaTokenizerFast", "Unknown"]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    model_type=st.sampled_from([None, *MODEL_TYPES]),
    kind=st.sampled_from([None, *CLASSES]),
    of_config=st.sampled_from([None, "Qwen2Tokenizer", "PreTrainedTokenizerFast"]),
    layered=st.booleans(),
)
def test_a_tokenizer_is_the_one_that_transformers_makes(model_type, kind, of_config, layered, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "tokenizer.json").write_bytes((BASE / "tokenizer.json").read_bytes())
    of_file = read_json(BASE / "tokenizer_config.json") | {"tokenizer_class": kind}
    write_json(folder / "tokenizer_config.json", {name: value for name, value in of_file.items() if value is not None})
    config = {"model_type": model_type, "tokenizer_class": of_config, "num_hidden_layers": 1}
    config |= {"layer_types": ["full_attention"] * layered}
    write_json(folder / "config.json", {name: value for name, value in config.items() if value})
    from transformers import AutoTokenizer

    try:
        expected = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception:
        with pytest.raises(ValueError, match="make no tokenizer"):
            load_tokenizer(folder)
        return
    same(load_tokenizer(folder), expected)


def same(tokenizer, expected) -> None:
    assert type(tokenizer) is type(expected)
    assert tokenizer.backend_tokenizer.to_str() == expected.backend_tokenizer.to_str()
    for name in ("special_tokens_map", "chat_template", "init_kwargs", "model_max_length", "padding_side"):
        assert getattr(tokenizer, name) == getattr(expected, name), name


def test_tokenizers_of_the_test_data_are_those_that_transformers_makes(test_data):
    from transformers import AutoTokenizer

    folders = sorted((test_data / "tokenizers").iterdir())
    assert folders
    for folder in folders:
        same(load_tokenizer(folder), AutoTokenizer.from_pretrained(folder, trust_remote_code=False))


def test_a_class_that_is_not_named_is_left_to_transformers(tmp_path):
    write_json(tmp_path / "tokenizer_config.json", {"auto_map": {}, "tokenizer_class": "Qwen2Tokenizer"})
    assert model_folder._class_config(tmp_path) is None
    write_json(tmp_path / "tokenizer_config.json", {})
    assert model_folder._class_config(tmp_path) is None
