"""Digests of programs with Mosaic's kernels for a GPU that is not there."""

from __future__ import annotations

import jax
import pytest

from jaxtune.models.programs.digests import Digests
from jaxtune.pallas import lanes
from tests.gpu.aot.test_compile_h200 import programs


def digest() -> bytes:
    """Of a step whose layer has experts in MXFP4."""
    jax.clear_caches()
    programs.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.stages.Traced, "lower", lambda traced: traced)
        accumulate, *_ = programs("keep", 1, experts=True)
    programs.cache_clear()
    return Digests().of(accumulate.jaxpr)


def test_functions_that_emit_instructions_are_in_a_digest(monkeypatch):
    """They run when the kernel is lowered. As Mosaic is imported and three steps are traced, it takes seconds."""
    before = digest()
    assert digest() == before
    for name in ("_entries", "_shuffled_entries"):
        monkeypatch.setattr(lanes, name, lambda *arguments: lanes.ir_words(*arguments))
    assert digest() != before
