"""Programs of GGUF files are compiled in threads, before they are needed, and each once."""

from __future__ import annotations

import collections
import threading

import jax
import pytest
from llama_cpp_models import made

pytest.importorskip("gguf")

from jaxtune.export import api
from jaxtune.models.files.quant import quantize


@pytest.mark.full
@pytest.mark.parametrize(("name", "format"), [("llama", None), ("llama", "nf4"), ("qwen2", "fp8"), ("qwen3_moe", None)])
@pytest.mark.parametrize("outtype", ["q8_0", "q4_k_m"])
def test_the_thread_that_writes_compiles_no_program(name, format, outtype, tmp_path, tokenizer):
    """Else it would wait for each, or compile once more what a thread compiles already."""
    sizes = dict(hidden_size=320, intermediate_size=512) if outtype == "q8_0" else dict(intermediate_size=768)
    model = made(name, "bfloat16", **sizes)
    model = model if format is None else quantize(model, format)
    jax.clear_caches()
    found, others = collections.Counter(), {*threading.enumerate()} - {threading.current_thread()}

    def heard(event: str, duration_secs: float, **said: str | int) -> None:
        if "backend_compile" in event and threading.current_thread() not in others:
            found[said["fun_name"], threading.current_thread().name.startswith("jaxtune-compile")] += 1

    jax.monitoring.register_event_duration_secs_listener(heard)
    try:
        api.export_model(model, tmp_path / "out", "gguf", tokenizer=tokenizer, outtype=outtype)
    finally:
        jax.monitoring.unregister_event_duration_listener(heard)
    programs = {name for name, _ in found}
    assert {"jit(_cut)", "jit(_encoded)", "jit(_checked)"} <= programs
    assert ("jit(_decode)" in programs) == (format is not None)
    assert ("jit(interleaved)" in programs) == (name == "llama")
    assert {program for program, ahead in found if not ahead} <= {"jit(dynamic_slice)"}  # gate and up of experts
