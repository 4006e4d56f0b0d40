"""Whatever changes what a program computes, from wherever, gives a new program in a later start, and its numbers."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.interpreters import mlir

import jaxtune
from jaxtune.models import norm, rope
from jaxtune.models.programs import kept as kept_programs
from jaxtune.models.programs.digests import Digests
from jaxtune.models.programs.kept import Request, programs_of
from jaxtune.pallas.gated.reference import ACTIVATIONS
from jaxtune.pallas.linear_cross_entropy import api as linear_cross_entropy
from jaxtune.system.private_jax import mlir as private_mlir
from jaxtune.system.program_cache import in_use
from jaxtune.train.config import OptimConfig
from jaxtune.train.data.packing.packing import pack
from jaxtune.train.optimizer import muon
from jaxtune.train.optimizer.optim import make_optimizer
from jaxtune.train.program.step import StepProgram
from tests import patience
from tests.train.tiny_runs import LENGTH, documents, lora_model

WHERE = jax.sharding.SingleDeviceSharding(jax.devices()[0])


@functools.cache
def step_and_arrays() -> tuple[Callable, tuple]:
    """A whole step."""
    graph, trainable, frozen = nnx.split(lora_model(), nnx.Param, ...)
    program = StepProgram(graph, make_optimizer(OptimConfig(name="muon"), lambda _: 1e-2), lambda _: 1e-2)
    batch = jax.tree.map(lambda a: jnp.asarray(a[:2]), pack(documents(8), LENGTH)[0])

    def step(state, sums, frozen, batch):
        return program.update(state, program.accumulate(sums, state, frozen, batch, jnp.int32(0)))

    return step, (program.init(trainable, 0), program.zero_sums(trainable), frozen, batch)


def request() -> Request:
    """As another process makes it: nothing is traced already."""
    jax.clear_caches()
    step, arrays = step_and_arrays()
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=WHERE), arrays)
    return Request(step, shapes, WHERE, None, {})


def key() -> str | None:
    asked = request()
    return asked.key(asked.traced(), Digests())


def as_another_process() -> tuple[list[bytes], int]:
    """(What the step gives, how often it was lowered.)"""
    lowered, lowers = [], Request.lowered
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_programs, "cache_of_programs", in_use)
        patch.setattr(Request, "lowered", lambda request, traced: lowered.append(1) or lowers(request, traced))
        (program,) = programs_of([request()])
    results = program(*step_and_arrays()[1])
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(results)], len(lowered)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """All numbers so far; first those without a change, whose program is kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_programs, "_FORMAT", str(tmp_path_factory.mktemp("kept")))
        numbers, lowered = as_another_process()
        assert lowered == 1
        yield [numbers]


def activated(function: Callable) -> Callable:
    """The model's activation is replaced."""
    return lambda patch, _: patch.setitem(ACTIVATIONS, "silu", function)


def leaky(slope: float) -> Callable:
    return lambda x, factor=1: factor * jnp.where(x > 0, x, slope * x)


def unrotated(x, table, interleaved=False):
    return x


FLAGS = os.environ.get("XLA_FLAGS", "")
LEAKY, TABLE = leaky(0.125), np.linspace(0.5, 1.5, 7).astype(np.float32)
ON_DEVICE = jnp.asarray(TABLE)


class Doubled(norm.RMSNorm):
    def stream_and_normed(self, x):
        return x, 2 * x


@jax.custom_jvp
def with_own_gradient(x):
    return jax.nn.silu(x)


def gradient(factor: float) -> Callable:
    def change(patch, _):
        patch.setattr(with_own_gradient, "jvp", lambda x, t: (jax.nn.silu(x[0]), factor * t[0]))
        patch.setitem(ACTIVATIONS, "silu", with_own_gradient)

    return change


def other_slope(patch, _) -> None:
    (cell,) = LEAKY.__closure__
    patch.setattr(cell, "cell_contents", 0.0625)
    patch.setitem(ACTIVATIONS, "silu", LEAKY)


def other_factor(patch, _) -> None:
    patch.setattr(LEAKY, "__defaults__", (2,))
    patch.setitem(ACTIVATIONS, "silu", LEAKY)


def smoothed(patch, _) -> None:
    defaults = inspect.unwrap(linear_cross_entropy.linear_cross_entropy).__kwdefaults__
    patch.setitem(defaults, "label_smoothing", 0.25)


def lowered_otherwise(patch, _) -> None:
    """A package registers another lowering of a primitive of JAX."""
    rule = mlir.lower_fun(lambda x, **_: jnp.tanh(x), multiple_results=False)
    entry = private_mlir._lowerings[jax.lax.logistic_p]
    patch.setitem(private_mlir._lowerings, jax.lax.logistic_p, dataclasses.replace(entry, rule=rule))


def installed(patch, folder: Path) -> None:
    """A function of a package that pip installed."""
    (folder / "kernels_of_others.py").write_text("import jax\ndef rule(x):\n    return jax.nn.relu(x) / 2\n")
    (folder / "kernels_of_others-1.0.dist-info").mkdir()
    patch.syspath_prepend(folder)
    patch.setitem(ACTIVATIONS, "silu", importlib.import_module("kernels_of_others").rule)


def called_back(factor: float) -> Callable:
    def times(x):
        return x * jax.pure_callback(lambda: np.float32(factor), jax.ShapeDtypeStruct((), jnp.float32))

    return activated(times)


CHANGES = {
    "an entry of a table": activated(ACTIVATIONS["gelu"]),
    "a partial": activated(functools.partial(jax.nn.leaky_relu, negative_slope=0.25)),
    "a partial's argument": activated(functools.partial(jax.nn.leaky_relu, negative_slope=0.5)),
    "a function of JAX": lambda patch, _: patch.setattr(jax.lax, "rsqrt", jax.lax.sqrt),
    "a function of jaxtune": lambda patch, _: patch.setattr(muon, "orthogonal", muon._matrices),
    "a method": lambda patch, _: patch.setattr(norm.RMSNorm, "stream_and_normed", Doubled.stream_and_normed),
    "a keyword's default": smoothed,
    "a class attribute": lambda patch, _: patch.setattr(norm.RMSNorm, "compute", "float16"),
    "a constant": lambda patch, _: patch.setattr(muon, "_COEFFICIENTS", (1.5, -0.5, 0.0)),
    "a constant of sizes": lambda patch, _: patch.setattr(muon, "_ITERATIONS", 3),
    "a mock": activated(mock.MagicMock(wraps=jnp.tanh)),
    "an installed package": installed,
    "a lambda": activated(lambda x: x * 3),
    "a setting": lambda patch, _: patch.setenv(
        "XLA_FLAGS", os.environ.get("XLA_FLAGS", "") + " --xla_cpu_enable_fast_math=false"
    ),
    # of a stranger
    "a function's code": lambda patch, _: patch.setattr(
        rope.rotate, "__code__", (lambda x, table, interleaved=False: x).__code__
    ),
    "a closure": activated(LEAKY),
    "what it closes over": other_slope,
    "its default": other_factor,
    "an array": activated(lambda x: x * TABLE[3:4]),
    "an array on a device": activated(lambda x: x * ON_DEVICE[2]),
    "a derivative": gradient(0.5),
    "the rule of a derivative": gradient(0.25),
    "what lowers a primitive": lowered_otherwise,
    "a callback": called_back(1.25),
    "what it calls": called_back(2.5),
}


def test_every_change_gives_another_key(tmp_path):
    keys = [key()]
    for change in CHANGES.values():
        with pytest.MonkeyPatch.context() as patch:
            change(patch, tmp_path)
            keys.append(key())
    assert keys[0] == key() is not None
    assert [name for name, each in zip(CHANGES, keys[1:], strict=True) if each is None] == [
        "a callback",
        "what it calls",
    ]
    told = [each for each in keys if each is not None]
    assert len(set(told)) == len(told)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_gives_its_numbers(found, change, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        CHANGES[change](patch, tmp_path)
        numbers, lowered = as_another_process()
        assert lowered == 1
    if change != "a setting":
        assert numbers not in found
        found.append(numbers)
    assert as_another_process() == (found[0], 0)


def test_a_constant_is_in_a_program_by_its_value():
    """Also one that is changed in its place."""
    keys = []
    with pytest.MonkeyPatch.context() as patch:
        activated(lambda x: x * TABLE[:1])(patch, None)
        for _ in range(2):
            keys += [key(), key()]
            TABLE[0] += 1
    assert keys[0] == keys[1] != keys[2] == keys[3]


PLUGIN = """
import os
if "CHANGED" in os.environ:
    from jaxtune.pallas.gated import reference
    reference.ACTIVATIONS["silu"] = reference.ACTIVATIONS["gelu"]
"""


def test_a_plugin_changes_what_a_command_trains(tmp_path):
    """Three starts take seconds: nothing less shows what a command sees that it never imports itself."""
    (tmp_path / "sitecustomize.py").write_text(PLUGIN)
    paths = str(tmp_path), str(Path(jaxtune.__file__).parents[1])
    cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs"), "PYTHONPATH": os.pathsep.join(paths)}
    settings = "steps=1 evaluation.at_start=false evaluation.at_end=false evaluation.exact_match_rows=0 data.eval=null"
    settings += " data.max_rows=32 rows_per_step=2 data.length=64 export.merged=false"

    def loss(number: int, **environment: str) -> float:
        words = ["train", "quickstart", *settings.split(), f"output={tmp_path / str(number)}"]
        command = [sys.executable, "-m", "jaxtune", *words]
        environment = os.environ | cache | environment
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=patience.SECONDS)
        assert done.returncode == 0, done.stderr
        lines = (tmp_path / str(number) / "metrics.jsonl").read_text().splitlines()
        (loss,) = [line["loss"] for line in map(json.loads, lines) if "loss" in line]
        return loss

    changed = loss(1, CHANGED="1", JAX_ENABLE_COMPILATION_CACHE="false")
    assert loss(2) != changed == loss(3, CHANGED="1")
