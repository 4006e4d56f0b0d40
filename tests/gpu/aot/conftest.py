from __future__ import annotations

import os

import pytest

os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # there is no driver
for _name in ("JAX_DISABLE_MOST_OPTIMIZATIONS", "JAX_XLA_PROFILE_VERSION"):
    os.environ.pop(_name, None)  # as runs compile
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # programs for an absent device cannot be read back


def pytest_configure():
    pytest.importorskip("jax_plugins.xla_cuda13", reason="run these with `make aot`")
    from tests.gpu.aot.kept import keep_what_is_said  # not before the settings above

    keep_what_is_said()
