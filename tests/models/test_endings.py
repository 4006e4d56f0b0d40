"""A program that ends while a device still computes has its own exit code; Python would abort it otherwise."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
from drawn import DRAWS
from tiny_models import tiny_model

from jaxtune import Sampler
from jaxtune.system import lifetimes

HERE = Path(__file__).parent
CODES = {"return": 0, "exit": 3, "error": 1, "interrupt": -2}
OTHERS = [("held", "error"), ("dropped", "return"), ("pending", "exit")]
OTHERS += [("several_devices", "return"), ("copied", "return")]


def ended(work: str, way: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of ending.py"""
    path = os.pathsep.join([str(HERE), str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(HERE / "ending.py"), work, way]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env={**os.environ, "PYTHONPATH": path})
    return done.returncode, done.stdout, done.stderr


@pytest.mark.full
@pytest.mark.parametrize(("work", "way"), [("generate", "return"), ("pending", "interrupt"), *OTHERS])
def test_a_program_ends_with_its_code(work, way):
    for _ in range(20 if DRAWS and work == "generate" else 1):
        code, out, errors = ended(work, way)
        assert (code, out) == (CODES[way], "made\n"), errors
        assert "terminate called" not in errors


IMPORT, OTHER = "from jaxtune.system import lifetimes", "weakref.finalize(other, print, 'other')"


@pytest.mark.parametrize("lines", [(IMPORT,), (IMPORT, OTHER), (OTHER, IMPORT)])
def test_ends_come_whoever_has_the_first_finalizer(lines):
    """weakref's work at exit, after which finalizers do nothing, is registered with the first of a process."""
    classes = "import weakref\nclass Owner: pass\nowner, other = Owner(), Owner()"
    program = "\n".join([classes, *lines, "lifetimes.end_with(owner, print, 'ended')"])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and done.stdout.split()[0] == "ended", done


def test_a_closed_sampler_has_nothing_left_to_do():
    model = tiny_model()
    with Sampler(model, 2, 64) as sampler:
        number = sampler.submit([1, 2, 3], 30, eos_token_ids=[])
        for _ in range(2):
            sampler.step()
        assert sampler._rounds.dispatched
    [last] = sampler.step()
    assert (last.request, last.finish_reason, sampler.pending) == (number, "cancelled", 0)
    assert not sampler._rounds.dispatched and sampler._caches.states is None
    with pytest.raises(ValueError, match="submit after close: make a new Sampler"):
        sampler.submit([1])
    sampler.close()


def test_a_sampler_that_is_dropped_is_waited_for():
    sampler = Sampler(tiny_model(), 2, 64)
    sampler.submit([1, 2, 3], 30, eos_token_ids=[])
    for _ in range(2):
        sampler.step()
    rounds = sampler._rounds.dispatched
    assert rounds
    del sampler
    gc.collect()
    assert not rounds


def test_what_began_last_ends_first_and_once():
    class Owner:
        pass

    said: list[str] = []
    owners = [Owner() for _ in range(4)]
    first, second, third, failing = (
        lifetimes.end_with(owner, end, *given)
        for owner, end, given in zip(
            owners, [said.append] * 3 + [lambda: 1 / 0], [["a"], ["b"], ["c"], []], strict=True
        )
    )
    second()
    owners[2] = Owner()
    assert said == ["b", "c"]
    assert not second.alive and not third.alive and first.alive and failing.alive
    lifetimes._end_all()
    assert said == ["b", "c", "a"] and not failing.alive
