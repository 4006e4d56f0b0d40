from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "models"))  # tiny.py, random_weights.py, checks.py


def pytest_configure():
    pytest.importorskip("torch", reason="run these with `make parity`")
