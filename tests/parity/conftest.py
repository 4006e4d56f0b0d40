from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

os.environ["TRITON_INTERPRET"] = "1"  # there is no GPU; triton reads it when it is imported

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "models")]  # reference.py; tiny.py, random_weights.py, checks.py


def pytest_configure():
    pytest.importorskip("torch", reason="run these with `make parity`")
