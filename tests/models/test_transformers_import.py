"""Which of transformers' modules has which name is read once."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import threading
from importlib import metadata
from pathlib import Path

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import models

from jaxtune.models.files import transformers_import

ROOT = Path(transformers_import.__file__).parents[3]
COUNTED = """
import sys
opened = set()
sys.addaudithook(lambda event, facts: opened.add(str(facts[0])) if event == "open" else None)
from jaxtune.models.files.transformers_import import without_torch
with without_torch() as transformers:
    from transformers.utils.import_utils import define_import_structure as names_of
    transformers.AutoTokenizer
    folder = transformers.__path__[0] + "/models"
    print(sum(folder in name and "modeling_" in name for name in opened) > 10)
    for prefix in ("models", None):
        for place in (folder, folder + "/__init__.py", folder + "/llama"):
            assert names_of(place, prefix) == names_of.__wrapped__(place, prefix)
    print(transformers.LlamaConfig)
"""
NAMES = st.text("abcXYZ_.", min_size=1, max_size=6)
STRUCTURES = st.dictionaries(
    st.frozensets(NAMES, max_size=3),
    st.dictionaries(NAMES, st.sets(NAMES, max_size=4), max_size=4),
    min_size=1,
    max_size=4,
)


def imported(cache: Path) -> list[str]:
    """What a new process prints: whether it opens the modules of models, and a class."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAXTUNE_CACHE": str(cache), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", COUNTED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, check=True)
    return done.stdout.split("\n")[:2]


def test_a_second_import_reads_no_module_of_a_model(tmp_path):
    known = "<class 'transformers.models.llama.configuration_llama.LlamaConfig'>"
    opened, names = imported(tmp_path)
    assert (opened, names) == ("True", known)
    assert imported(tmp_path) == ["False", known]
    (file,) = (tmp_path / "imports").iterdir()
    file.write_bytes(file.read_bytes()[:-100])
    assert imported(tmp_path) == [opened, known]
    assert imported(tmp_path) == ["False", known]


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(structure=STRUCTURES, at=st.integers(0, 10_000))
def test_names_are_read_back_and_damaged_ones_looked_for_again(structure, at, tmp_path_factory):
    path, looks = tmp_path_factory.mktemp("names") / "imports" / "1.json", []

    def look(folder: str, prefix: str | None = None):
        looks.append((folder, prefix))
        return structure

    names_of = transformers_import._through_cache(look, path)
    prefixed = {needs: {f"x.{name}": each for name, each in structure[needs].items()} for needs in structure}
    assert names_of("a/models", prefix="x") == names_of(Path("a/models/__init__.py"), "x") == prefixed
    assert names_of("a/models") == names_of("models/llama") == structure
    assert looks == [("a/models", None), ("models/llama", None)]
    data = bytearray(path.read_bytes())
    data[at % len(data)] ^= 1
    path.write_bytes(data)
    looks.clear()
    assert names_of("models") == names_of("models") == structure and len(looks) == 1


@pytest.fixture
def installation(tmp_path, monkeypatch) -> Path:
    """A dist-info folder beside its package, first on the path."""
    folder = tmp_path / "first" / "transformers-1.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 1\n")
    (folder / "RECORD").write_text("transformers/models/__init__.py,sha256=1,1\n")
    package(folder.parent)
    monkeypatch.setattr(sys, "path", [str(folder.parent), *sys.path])
    return folder


def package(folder: Path, name: str = "transformers") -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").touch()


@pytest.mark.parametrize("change", ["RECORD", "place", "editable", "clone", "homeless"])
def test_another_installation_has_another_cache(change, installation, tmp_path, monkeypatch):
    first = transformers_import._cache_of_names()
    assert first is not None and first == transformers_import._cache_of_names()
    if change == "place":
        installation.parent.rename(tmp_path / "other")
        monkeypatch.setattr(sys, "path", [str(tmp_path / "other"), *sys.path])
    elif change == "clone":
        package(tmp_path / "clone")
        monkeypatch.setattr(sys, "path", [str(tmp_path / "clone"), *sys.path])
    elif change == "homeless":
        monkeypatch.setenv("JAXTUNE_CACHE", "~no-such-user/jaxtune")
    else:
        (installation / "RECORD").write_text(
            "transformers/models/__init__.py,sha256=2,1\n" if change == "RECORD" else ""
        )
    second = transformers_import._cache_of_names()
    assert second not in (None, first) if change in ("RECORD", "place") else second is None


_OLD_TRANSFORMERS = """
import importlib.metadata
import importlib.util
from transformers import others

FOUND = importlib.metadata.packages_distributions()
count: int = len([name for name in ("json",) if importlib.util.find_spec(name)])
assert importlib.metadata.version("numpy") and importlib.import_module("json").dumps


def module(name):
    return importlib


def define_import_structure(module_path, prefix=None):
    return {}
"""
_OTHERS = "from importlib.metadata import packages_distributions"
_ASKS = """
import importlib, sys
from importlib import metadata
from jaxtune.models.files import transformers_import

real, read = metadata.packages_distributions, []
sys.addaudithook(lambda event, facts: read.append(facts[0]) if event == "open" and "RECORD" in str(facts[0]) else None)
with transformers_import.names_kept():
    from transformers.utils import import_utils
from transformers import others
FOUND = import_utils.FOUND
assert metadata.packages_distributions is others.packages_distributions is real
assert import_utils.importlib is import_utils.module("json") is importlib
for name in ("numpy", "huggingface_hub", "jinja2", "flash_attn"):
    names = name.replace("_", "-"), name
    print(any(each in FOUND[name] for each in names), sum("transformers-1.dist" not in str(file) for file in read) > 5)
print(*("flash-attn-4" in FOUND[name] for name in ("numpy", "flash_attn")))
assert all(sorted(FOUND[name]) == sorted(names) for name, names in real().items()) and {**FOUND}.keys() == real().keys()
print("no such package" in FOUND, len(FOUND) == len(real()), list(FOUND) == list(real()))
"""


def test_no_distribution_is_searched_for_packages_of_its_name(installation):
    """transformers asks at its import; before 5.23 for each file of all distributions whether it exists. Who else asks
    meanwhile gets Python's answer.
    """
    folder = installation.parent / "transformers"
    (folder / "utils").mkdir()
    (folder / "utils" / "__init__.py").touch()
    (folder / "utils" / "import_utils.py").write_text(_OLD_TRANSFORMERS)
    (folder / "others.py").write_text(_OTHERS)
    package(installation.parent, "flash_attn")
    for name in ("flash-attn", "flash-attn-4"):
        distribution = installation.parent / f"{name.replace('-', '_')}-2.dist-info"
        distribution.mkdir()
        (distribution / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2\n")
        (distribution / "RECORD").write_text("flash_attn/__init__.py,sha256=1,1\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder.parent), str(ROOT)])}
    command = [sys.executable, "-c", _ASKS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["True False"] * 4 + ["False True", "False True True"]


def test_a_package_has_the_version_that_the_whole_list_gives():
    listed = metadata.packages_distributions()
    at_need = transformers_import._Distributions(lambda: listed)
    for package, distributions in listed.items():
        if package.isidentifier() and importlib.util.find_spec(package) is not None:
            assert list(at_need[package]) == distributions
            names = package.replace("_", "-"), package
            chosen, first = (
                next((name for name in names if name in of), of[0]) for of in (at_need[package], distributions)
            )
            assert metadata.version(chosen) == metadata.version(first), package


def backend_of(kind: str, side: str, length: int | None) -> tokenizers.Tokenizer:
    vocabulary = {token: number for number, token in enumerate(["<unk>", "a", "b", "ab", " "])}
    model = {
        "BPE": lambda: models.BPE(vocab=vocabulary, merges=[("a", "b")], unk_token="<unk>"),
        "WordLevel": lambda: models.WordLevel(vocab=vocabulary, unk_token="<unk>"),
        "Unigram": lambda: models.Unigram([(token, -1.0) for token in vocabulary], unk_id=0),
    }[kind]()
    backend = tokenizers.Tokenizer(model)
    if length is not None:
        backend.enable_truncation(length)
        backend.enable_padding(direction=side, length=length)
    return backend


@given(
    st.sampled_from(["BPE", "WordLevel", "Unigram"]),
    st.sampled_from(["left", "right"]),
    st.none() | st.integers(1, 4),
    st.lists(st.sampled_from(["<|x|>", "<pad>"]), unique=True),
    st.text("ab \n<|x>", max_size=9),
)
def test_a_tokenizer_that_takes_a_backend_is_the_one_that_copies_it(kind, side, length, added, text):
    from transformers import PreTrainedTokenizerFast

    both = []
    for context in (contextlib.nullcontext, transformers_import.uncopied):
        backend = backend_of(kind, side, length)
        backend.add_special_tokens(added)
        with context():
            both.append(PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>"))
            takes = both[-1].backend_tokenizer is backend
        assert takes is (context is transformers_import.uncopied)
    copied, taken = both
    assert taken.backend_tokenizer.to_str() == copied.backend_tokenizer.to_str() and repr(taken) == repr(copied)
    assert taken(text).input_ids == copied(text).input_ids and taken.decode([1, 3]) == copied.decode([1, 3])


def test_others_copy_as_always(monkeypatch):
    """Other threads, other objects, whoever comes after an error, and another transformers."""
    from transformers import PreTrainedTokenizerFast

    backend, takes = backend_of("BPE", "left", None), []

    def make() -> None:
        takes.append(PreTrainedTokenizerFast(tokenizer_object=backend).backend_tokenizer is backend)

    with pytest.raises(KeyError), transformers_import.uncopied():
        with transformers_import.uncopied():  # as another thread's
            make()
        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        module = sys.modules[transformers_import._COPIES]
        values = [[1], {"a": [2]}]
        copies = module.copy.deepcopy(values)
        assert copies == values and copies[0] is not values[0]
        raise KeyError
    make()
    monkeypatch.setattr(transformers_import, "_COPIES", "transformers.of_another_version")
    with transformers_import.uncopied():
        make()
    assert takes == [True, False, False, False]
