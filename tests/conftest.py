"""Settings that every test shares. They must be in the environment before jax is imported."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest

REPOSITORY = Path(__file__).resolve().parent.parent

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    # Eight virtual devices, so that meshes can be tested without any accelerator.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
if "xla_cpu_collective_call_terminate_timeout_seconds" not in os.environ["XLA_FLAGS"]:
    # XLA ends the process when a virtual device lets the others wait for 40 s, which on a busy machine it may.
    os.environ["XLA_FLAGS"] += " --xla_cpu_collective_call_terminate_timeout_seconds=1200"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(REPOSITORY / ".pytest_cache" / "jax"))
# Small programs too: thousands of them take a minute to compile, and the workers of a run share what one has compiled.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test reaches for the network

# The same examples on every run: a test that fails here fails everywhere.
hypothesis.settings.register_profile("jaxtune", derandomize=True, database=None, deadline=None, max_examples=30)
hypothesis.settings.register_profile("deep", deadline=None, max_examples=3000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "jaxtune"))


@pytest.fixture(scope="session", autouse=True)
def programs_are_kept_as_the_command_keeps_them():
    """From the first test on, whichever it is: else the first one that runs the command would begin another cache."""
    from jaxtune.train.program_cache import use_program_cache

    use_program_cache()


@pytest.fixture(scope="session")
def test_data() -> Path:
    """The folder of real models, tokenizers and datasets that nobody here made."""
    folder = os.environ.get("JAXTUNE_TEST_DATA")
    if not folder:
        pytest.skip("JAXTUNE_TEST_DATA is not set: it names the unpacked folder of real test data")
    path = Path(folder)
    if not path.is_dir():
        pytest.fail(f"JAXTUNE_TEST_DATA={folder} is not a folder")
    return path
