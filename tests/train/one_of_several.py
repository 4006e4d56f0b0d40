"""One process of a run of several, in which something happens to it: the command, with a fault of its own.

Usage: one_of_several.py FAULT STEP ARGUMENT...: of `jaxtune train`. When step number STEP of this process is handed to
the device, "kill" sends it SIGKILL and "term" SIGTERM, and "kill in a pass" SIGKILL while the device computes it;
"full" has it see a disk without room from the start, and
"full cache" only where room is reserved in the token cache; "outlive" has it miss one that is killed sooner. When the
rows of that step are loaded, "no rows" raises, and "stall" waits for ever and sends it SIGTERM. "callback" gives the
run a callback, "bad callback" one that raises when it gets the metrics of that step; "bad rows" has no held-out rows.
"no room": no device has the block of the STEPth program that is launched first; 0: of none.
"""

from __future__ import annotations

import collections
import errno
import os
import signal
import sys
import threading

import jax

from jaxtune import cli
from jaxtune.models.programs import room
from jaxtune.system import joining
from jaxtune.train import trainer
from jaxtune.train.callbacks import Callback
from jaxtune.train.engine import programs
from jaxtune.train.folder import checkpoint


def main() -> int:
    fault, step, *arguments = sys.argv[1:]
    if fault in ("kill", "outlive"):
        joining.HEARTBEAT_SECONDS = 20
    if fault == "full":
        usage = collections.namedtuple("usage", "total used free")
        checkpoint.shutil.disk_usage = lambda folder: usage(1, 1, 0)
    if fault == "full cache":

        def no_room(*values):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        os.posix_fallocate = no_room
    if fault in ("kill", "kill in a pass", "term"):
        real, seen = programs.Engine.accumulate, 0

        def accumulate(*values):
            nonlocal seen
            seen += 1
            if seen == int(step) and fault == "kill in a pass":
                # Python's lock is free while the device computes.
                threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGKILL)).start()
                jax.block_until_ready(real(*values).tree)
                raise AssertionError("it has computed already")
            if seen == int(step):
                os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGTERM)
            return real(*values)

        programs.Engine.accumulate = accumulate
    if fault in ("no rows", "stall"):
        load, loaded = programs.Engine.load_step, 0

        def load_step(*values):
            nonlocal loaded
            loaded += 1
            if loaded == int(step) and fault == "no rows":
                raise ValueError("this process has no rows")
            if loaded == int(step):
                threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
                threading.Event().wait()
            return load(*values)

        programs.Engine.load_step = load_step
    if fault in ("callback", "bad callback"):
        made = trainer.Trainer.__init__

        class Own(Callback):
            def stepped(self, number, metrics):
                if fault == "bad callback" and number == int(step):
                    raise ValueError("this callback fails")

        def init(*values, **options):
            made(*values, **options | {"callbacks": [Own()]})

        trainer.Trainer.__init__ = init
    if fault == "no room":
        tried = 0

        def hold(devices, sizes):
            nonlocal tried
            tried += 1
            if tried == int(step):
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")

        room.hold, room._SMALL, room._few = hold, 2**40, lambda devices, need: None
        room._stats = lambda device: {"bytes_limit": 2**40, "bytes_in_use": 2**39}
    if fault == "bad rows":
        evaluate = programs.Engine.evaluate

        def fails():
            raise ValueError("this process has no held-out rows")

        def no_rows(*values):
            return evaluate(*values[:-1], lambda work: values[-1](fails))

        programs.Engine.evaluate = no_rows
    return cli.console(["train", *arguments])


if __name__ == "__main__":
    sys.exit(main())
