"""What garbage collections of a command skip."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jaxtune

SCRIPT = """
import gc, weakref
from jaxtune.system import heap, timing

class Thing:
    pass

def cycle():
    thing = Thing()
    thing.thing = thing
    return weakref.ref(thing)

timing.imported()
print(gc.isenabled(), gc.get_freeze_count() < 2000)
heap.rest_while_importing()
stays = cycle()
print(gc.isenabled())
timing.imported()
goes = cycle()
print(gc.isenabled(), gc.get_freeze_count() > 5000, gc.collect() >= 1, stays() is not None, goes() is None)
frozen = gc.get_freeze_count()
things = [Thing() for _ in range(3000)]
with heap.frozen_heap():
    print(gc.get_freeze_count() >= frozen + 3000)
print(gc.get_freeze_count() == 0)
gc.freeze()
more = [Thing() for _ in range(3000)]
with heap.frozen_heap():
    print(not gc.is_tracked(1), len(gc.get_objects()) >= 3000)
print(gc.get_freeze_count() > 5000)
gc.disable()
heap.rest_while_importing()
timing.imported()
print(gc.isenabled())
"""


def test_what_was_imported_is_not_collected_again_and_a_run_freezes_the_rest():
    """And what a caller froze or disabled stays so."""
    environment = {"PYTHONPATH": str(Path(jaxtune.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, timeout=60)
    assert done.stdout.split("\n") == [
        "True True",
        "False",
        "True True True True True",
        "True",
        "True",
        "True True",
        "True",
        "False",
        "",
    ], done.stdout + done.stderr
