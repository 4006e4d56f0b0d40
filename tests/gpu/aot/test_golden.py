"""The programs of real configurations have the kernels, the memory and the transfers that were recorded."""

from __future__ import annotations

import collections
import math
import re

import pytest

from jaxtune.train.config import MeshConfig
from tests.golden import programs, records

RECORD = records.read("programs")["cases"]
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "8B, bf16" else pytest.mark.full) for name in programs.CASES]
)
def test_a_program_is_the_recorded_one(name):
    changes = list(records.differences(programs.record(name), RECORD[name], records.BYTES))
    assert not changes, "\n".join(changes)


def test_every_configuration_is_recorded():
    assert RECORD.keys() == programs.CASES.keys()


@pytest.mark.full
@pytest.mark.parametrize("name", ["8B, NF4 in 24 GB", "8B, all trained by 8-bit AdamW", "Qwen3-30B-A3B, bf16"])
def test_each_of_two_devices_runs_what_one_runs(name):
    """Twice the rows on two devices: the same kernels and copies, and but the gradients exchanged, once."""
    got, alone = programs.record(name, MeshConfig(data=2)), RECORD[name]

    for program in ("accumulate", "update"):
        assert _libraries(got[program]["kernels"]) == _libraries(alone[program]["kernels"])
        assert got[program]["host_bytes"] == alone[program]["host_bytes"]
        assert got[program]["copies"] == alone[program]["copies"]
    exchanged = [kernel for kernel in got["accumulate"]["kernels"] for each in COLLECTIVES if each in kernel]
    assert exchanged and all("all-reduce" in kernel for kernel in exchanged)
    assert not any(each in kernel for kernel in got["update"]["kernels"] for each in COLLECTIVES)
    # What is exchanged at a time, as given and, where it is not exchanged in place, as received; a device alone writes
    # gradients where their sums are.
    wide = max((_float32_bytes(kernel) for kernel in exchanged), default=0)
    assert got["accumulate"]["temporary_bytes"] <= alone["accumulate"]["temporary_bytes"] * (1 + records.BYTES) + wide
    assert got["update"]["temporary_bytes"] <= alone["update"]["temporary_bytes"] + 1024


@pytest.mark.full
@pytest.mark.parametrize("name", ["8B, bf16", "8B, all trained by 8-bit AdamW"])
def test_two_devices_gather_a_layer_under_another(name):
    """Weights divided over two devices: each holds half of them, runs the kernels that one runs, and gathers and
    scatters a layer in one collective each, with products above it. Not so what no layer runs before or after: the
    first layer's, the embedding's and the head's."""
    compiled, _ = programs.compiled(name, MeshConfig(fsdp=2))
    found = collections.defaultdict(list)
    for kind, arrays, under in programs.collectives(compiled["accumulate"].as_text()):
        if arrays > 2:  # of a layer
            found[kind].append(under)
    trains = "all trained" in name
    # Forward: the first layer, then the second under it; backward: the first under the second, which is there.
    under = {kind: [count for count in counts if count >= 5] for kind, counts in found.items()}
    assert (len(found["all-gather"]), len(under["all-gather"])) == (3, 2)
    assert len(under.get("reduce-scatter", ())) == (1 if trains else 0)  # the second layer's, under the first
    weights = 2 * (2 * 128256 * 4096 + 2 * 218_112_000)  # in bf16
    held = compiled["accumulate"].memory_analysis().argument_size_in_bytes
    assert held < (1.02 if trains else 0.51) * weights  # with sums of gradients, where they are as many
    got = _libraries(programs.kernels(compiled["accumulate"].as_text()))
    assert got == _libraries(RECORD[name]["accumulate"]["kernels"])
    if trains:  # moments are updated where they lie
        assert {kind for kind, *_ in programs.collectives(compiled["update"].as_text())} == {"all-reduce"}


def _libraries(kernels):
    """Counts of what is called by name: our kernels, cuBLAS, cuDNN. XLA names its own fusions as it likes."""
    return {name: count for name, count in kernels.items() if "$" in name or "mosaic" in name}


def _float32_bytes(kernel: str) -> int:
    """Of the arrays in the name of a kernel: "all-reduce-start ((f32[8,4]),f32[8,4])" has 256."""
    return sum(4 * math.prod(map(int, sizes.split(","))) for sizes in re.findall(r"f32\[([\d,]+)\]", kernel))
