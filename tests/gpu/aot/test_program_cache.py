"""Cached programs with Mosaic kernels."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import os, sys
from jaxtune.system.program_cache import use_program_cache

use_program_cache()
assert not any(name.startswith("jax.experimental.mosaic") for name in sys.modules), "a start need not import Mosaic"
named = os.environ.pop("MOSAIC_GPU_RUNTIME_LIB_PATH")
from jax.experimental.mosaic.gpu import core

print(named == str(core.RUNTIME_PATH) == os.environ["MOSAIC_GPU_RUNTIME_LIB_PATH"])
"""


def test_their_library_is_named_before_mosaic_is_imported():
    """Else a GPU compiles the kernels of each program that it reads again."""
    environment = {name: value for name, value in os.environ.items() if name != "MOSAIC_GPU_RUNTIME_LIB_PATH"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["True"]
