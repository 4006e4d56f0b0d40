"""What garbage collections of a command skip."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import jaxtune
from tests import patience

_BEGIN = """
import gc, weakref
from jaxtune.system import heap, timing

class Thing:
    pass

def cycle():
    thing = Thing()
    thing.thing = thing
    return weakref.ref(thing)

def thing():
    thing = Thing()
    thing.thing = thing
    return thing

def is_frozen(thing):
    return not any(each is thing for each in gc.get_objects())

def rest(during=lambda: None):
    heap.rest_while_importing()
    during()
    timing.imported()
"""


def printed(script: str) -> list[str]:
    environment = {"PYTHONPATH": str(Path(jaxtune.__file__).parents[1])}
    command = [sys.executable, "-c", _BEGIN + script]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=patience.SECONDS)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


_IMPORTED = """
timing.imported()
print(gc.isenabled(), gc.get_freeze_count() < 2000)
heap.rest_while_importing()
stays = cycle()
more = [[] for _ in range(100_000)]
print(stays() is not None)
timing.imported()
goes = cycle()
print(gc.isenabled(), gc.get_freeze_count() > 5000, gc.collect() >= 1, stays() is not None, goes() is None)
goes = cycle()
more = [[] for _ in range(100_000)]
print(goes() is None)
frozen = gc.get_freeze_count()
things = [Thing() for _ in range(3000)]
with heap.frozen_heap():
    print(gc.get_freeze_count() >= frozen + 3000)
print(gc.get_freeze_count() == 0)
"""


def test_what_was_imported_is_not_collected_again_and_a_run_freezes_the_others():
    assert printed(_IMPORTED) == ["True True", "True", "True True True True True", "True", "True", "True"]


@pytest.mark.parametrize(
    "before",
    ["", "rest()", "rest()\nwith heap.frozen_heap(): pass", "with heap.frozen_heap(): pass"],
    ids=["at first", "after imports", "after imports and a run", "after a run"],
)
def test_what_a_caller_froze_stays_frozen(before):
    script = f"""
{before}
of_user = [thing() for _ in range(10)]
gc.freeze()
later = [thing() for _ in range(10)]
for _ in range(2):
    with heap.frozen_heap():
        print(*map(is_frozen, (of_user[0], later[0])))
    print(is_frozen(of_user[0]))
"""
    assert printed(script) == ["True False", "True"] * 2


@pytest.mark.parametrize("before", ["", "rest()", "with heap.frozen_heap(): pass"])
def test_a_run_looks_only_at_what_is_younger_than_the_last_look(before):
    """A look freezes nothing, and holds until objects have grown old since or another run begins."""
    script = f"""
{before}
dead, dies = cycle(), thing()
gc.disable()
heap.settle()
print(dead() is None, is_frozen(dies))
late, old, dies = cycle(), weakref.ref(dies), None
heap.settle()
print(late() is not None)
with heap.frozen_heap():
    print(late() is None, old() is not None)
for grown in (lambda: gc.collect(1), lambda: gc.collect(2), heap.unsettle):
    dies = thing()
    gc.collect()
    heap.settle()
    old, dies = weakref.ref(dies), None
    grown()
    with heap.frozen_heap():
        print(old() is None)
"""
    assert printed(script) == ["True False", "True", "True True", "True", "True", "True"]


def test_no_look_is_taken_at_the_heap_of_a_caller_who_freezes():
    script = """
gc.disable()
of_user = [thing() for _ in range(10_000)]
gc.freeze()
dead = cycle()
heap.settle()
print(dead() is not None)
"""
    assert printed(script) == ["True"]


def test_what_a_module_sets_while_it_is_imported_stays():
    """Nor does a process collect that never did."""
    script = """
heap.collect_seldom()
rest(gc.disable)
print(gc.isenabled(), gc.get_threshold()[0])
gc.enable()
rest(lambda: gc.set_threshold(123))
print(gc.isenabled(), gc.get_threshold()[0])
rest(heap.collect_seldom)
print(gc.isenabled(), gc.get_threshold()[0])
gc.disable()
rest()
print(gc.isenabled())
gc.enable()
gc.set_threshold(0)
rest()
print(gc.get_threshold()[0])
"""
    assert printed(script) == ["False 20000", "True 123", "True 20000", "False", "0"]
